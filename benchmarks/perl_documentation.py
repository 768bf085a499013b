"""Perl's documentation as a corpus for benchmarks/retrieval.py: a file for each section, with its
heading as title.

    python -m benchmarks.perl_documentation FOLDER

Debian's package perl-doc has it below /usr/share/perl. Of 5,855 sections 402 have a question as
heading.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path("/usr/share/perl")
#: Sections that say nothing of a subject, and the words that others have at least.
LEFT_OUT = ("AUTHOR", "AUTHORS", "COPYRIGHT", "LICENSE", "SEE ALSO")
WORDS = 8


def write(folder: Path) -> int:
    """Write the sections; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for pod in sorted({path.resolve() for path in ROOT.glob("5*/**/*.pod")}):
        parts = re.split(r"^=head[1-4] +(.*)$", pod.read_text(errors="replace"), flags=re.M)
        for number, (heading, body) in enumerate(zip(parts[1::2], parts[2::2], strict=True)):
            title = plain(heading).strip()
            text = plain(without_commands(body)).strip()
            if len(text.split()) >= WORDS and title not in LEFT_OUT:
                text = re.sub(r"\n{3,}", "\n\n", text)
                (folder / f"{pod.stem}-{number:03}.md").write_text(f"# {title}\n\n{text}\n")
                written += 1
    return written


def without_commands(pod: str) -> str:
    """Items as lines, and no other command."""
    pod = re.sub(r"^=item +(\S.*)$", r"\1", pod, flags=re.M)
    return re.sub(r"^=(over|back|cut|begin|end|for|encoding|pod|item ?\*?).*$", "", pod, flags=re.M)


def plain(pod: str) -> str:
    """Text without the codes of its letters, which stand up to three deep."""
    pod = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", pod, flags=re.S)
    for _ in range(3):
        pod = re.sub(r"[BCIFLSX]<(?:([^<>|]*)\|)?([^<>]*)>", lambda code: code[1] or code[2], pod)
    return pod.replace("E<lt>", "<").replace("E<gt>", ">")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    print(f"{write(given.folder):,} sections in {given.folder}")
