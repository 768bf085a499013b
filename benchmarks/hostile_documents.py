"""Seconds of a core that reading a document takes which some parser is slow on.

    python benchmarks/hostile_documents.py [--before CHECKOUT] [--megabytes 1]

Every input is a file of that size. It is read and cut in parts in a process of its own, which is
ended after LIMIT_S of computation; the least of RUNS counts, without the start of Python. With
--before the same is measured of another checkout, alternating. Exits with 1 if an input that takes
over SLOW_S there takes over FAST_S here, or if fewer than ENOUGH of them do.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = 2
LIMIT_S = 3
#: What is slow before, and what is fast enough now.
SLOW_S = 2.0
FAST_S = 1.0
ENOUGH = 20

#: Endings of files, and what is repeated in them between some begin and some end.
REPEATED = [
    *((".html", "", piece, "") for piece in ("<a ", "<a", "</a", "<!--", "<!-", "<![CDATA[", "<?")),
    *((".html", "", piece, "") for piece in ('<a href="', "<script", "<script>", "<title>")),
    *((".html", "", piece, "") for piece in ("<pre>", "<nav>", "<svg>", "<h1>a", "<div>", "&a")),
    *((".html", "<pre>", piece, "x") for piece in (" ", "\t", "\n ")),
    *((".html", "<p>", piece, "") for piece in ("<", "<b", "</b")),
    *((".html", begin, "<b", "") for begin in ("<title>", "<h1>", "<!--", "<svg>", "<textarea>")),
    *((".md", "", piece, "x") for piece in ("# ####", "# ", "# #", "#", "- ", "* + ", "> ")),
    *((".md", "# a", piece, "x") for piece in (" ", "\t", "#", " #", "# ####")),
    *((".md", "---\na: b\n", piece, "x") for piece in ("# ", "# #", "title: \n", "---a\n", "\n")),
    *((".md", "---\ntitle: a", piece, "x\n---\n") for piece in (" ", "\t", "\na:")),
    *((".md", "a\n", piece, "x") for piece in ("# ", "# #", "```\n", "<!-- \n", "a\n---\n")),
    *((".rst", "# a", piece, "x") for piece in (" ", "\t", "#", " #")),
    *((".rst", "a\n====", piece, "x") for piece in (" ", "=", "\n===")),
    *((".txt", "", piece, "") for piece in (" ", "\n", "a", "\f", "a\n")),
    *((".jsonl", '{"text": "', piece, "") for piece in ('\\"', " ", "a")),
    *((".jsonl", "", piece, "") for piece in ("[", "{", '"', '{"a":')),
]

#: Texts of these kinds are read by parts: what is to be looked at whole is shorter than one.
CUT_BELOW = (".md", ".rst")
CUT_BELOW_BYTES = 200_000

CHILD = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from farspan.corpus.documents import cut_document
from farspan.corpus.sources import open_source
list(open_source(sys.argv[3]).documents())  # Loads what it needs.
began = time.process_time()
for document in open_source(sys.argv[2]).documents():
    for part in cut_document(document):
        pass
print(time.process_time() - began)
"""


def write_input(folder: Path, number: int, size: int) -> Path:
    ending, begin, piece, end = REPEATED[number]
    file = folder / f"{number:03}{ending}"
    if ending in CUT_BELOW:
        size = min(size, CUT_BELOW_BYTES)
    times = (size - len(begin) - len(end)) // len(piece)
    file.write_text(begin + piece * times + end, newline="")
    return file


def seconds_to_read(checkout: Path, file: Path) -> float:
    """Seconds of a core, LIMIT_S where they are not enough."""
    small = file.with_name(f"small{file.suffix}")
    small.write_text('{"text": "a"}')

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))

    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    words = [sys.executable, "-c", CHILD, str(checkout), str(file), str(small)]
    done = subprocess.run(words, capture_output=True, preexec_fn=limit, env=environment)
    return float(done.stdout or LIMIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, to be measured too")
    parser.add_argument("--megabytes", type=float, default=1.0)
    options = parser.parse_args()
    size = int(options.megabytes * 1e6)
    checkouts = [ROOT, *([options.before.resolve()] if options.before else [])]
    slow_before = too_slow = 0
    with tempfile.TemporaryDirectory(prefix="farspan-hostile-") as folder:
        for number, (ending, begin, piece, _) in enumerate(REPEATED):
            file = write_input(Path(folder), number, size)
            least = [seconds_to_read(checkout, file) for checkout in checkouts]
            for _ in range(RUNS - 1):
                for place, checkout in enumerate(checkouts):
                    # What takes all of its time once takes it again.
                    if least[place] < LIMIT_S:
                        least[place] = min(least[place], seconds_to_read(checkout, file))
            is_slow = len(least) < 2 or least[1] > SLOW_S
            slow_before += len(least) > 1 and is_slow
            too_slow += is_slow and least[0] > FAST_S
            times = "  ".join(
                f"{'over ' if value >= LIMIT_S else ''}{value:.2f} s" for value in least
            )
            print(f"{ending:6} {begin!r:18} {piece!r:12} {times}", flush=True)
            file.unlink()
    if options.before:
        print(f"{slow_before} inputs took over {SLOW_S} s before")
    print(f"{too_slow} of them take over {FAST_S} s" if options.before else f"{too_slow} slow")
    return int(too_slow > 0 or (options.before is not None and slow_before < ENOUGH))


if __name__ == "__main__":
    sys.exit(main())
