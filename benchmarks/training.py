"""Training speed on CPU beside the peers: the same model, data and batch, interleaved in one run.

    python benchmarks/training.py [--rounds 12] [--steps 6] [--only NAME ...]

Contestants: farspan (its real worker, in the environment its launcher gives), a plain nanoGPT-style
loop, and Hugging Face `Trainer` (with bf16, and with its defaults, fp32); `nanogpt-bf16-malloc` is
the plain loop given the allocator settings that farspan's launcher gives, to show how much of the
gain they are. GPT-2-like, 6 layers x 384, context 256, batch 8, vocabulary 8,192, all cores. Each
contestant is one process that waits while the others take their turn; a round times `--steps`
optimizer steps of each. Reported: median and best tokens/s over all rounds, and the median over
rounds of farspan's ratio to each peer. The GEMM limit is the step's matrix products, at the rates
of the same run. Writes benchmarks/results/training.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from farspan.domain.run import cache_folder
from farspan.launch.processes import worker_environment

RESULTS = Path(__file__).parent / "results"
CHILD = Path(__file__).parent / "_contestants.py"
NAMES = (
    "farspan-bf16",
    "farspan-fp32",
    "nanogpt-bf16",
    "nanogpt-bf16-malloc",
    "nanogpt-fp32",
    "trainer-bf16",
    "trainer-default",
    "gemm",
)
TOKENS_A_STEP = 8 * 256
#: (peer, least ratio of farspan-bf16 to it)
TARGETS = (("nanogpt-bf16", 1.25), ("trainer-bf16", 1.3), ("trainer-default", 2.0))


class Contestant:
    """A process that times steps when asked to, and sleeps otherwise."""

    def __init__(self, name: str, corpus: Path, threads: int) -> None:
        tuned = name.startswith(("farspan", "gemm")) or name.endswith("malloc")
        environment = {**os.environ, **(worker_environment(threads) if tuned else {})}
        environment |= {"OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
        # Trainer prints to standard output; its timings must not be lost among that.
        self._out, writing = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), name, str(corpus), str(threads), str(writing)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[writing],
        )
        os.close(writing)
        self._lines = os.fdopen(self._out)

    def run(self, steps: int) -> float:
        """Seconds that `steps` optimizer steps took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n".encode())
        self._process.stdin.flush()
        line = self._lines.readline()
        if not line:
            assert self._process.stderr is not None
            sys.exit(self._process.stderr.read().decode()[-2000:])
        return float(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def prepared() -> Path:
    """Return the built-in corpus with a vocabulary of 8,192."""
    from farspan.corpus.prepare import prepare_corpus
    from farspan.domain.config import DataConfig, TokenizerConfig

    folder, _ = prepare_corpus(
        DataConfig(source="pydocs"),
        TokenizerConfig(vocab=8192),
        cache_folder() / "corpora",
        workers=2,
        write_line=print,
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    given = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    corpus = prepared()
    contestants = {name: Contestant(name, corpus, threads) for name in given.only}
    times: dict[str, list[float]] = {name: [] for name in given.only}
    for contestant in contestants.values():
        contestant.run(3)
    for number in range(given.rounds):
        for name, contestant in contestants.items():
            times[name].append(contestant.run(given.steps) / given.steps)
        print(
            f"round {number + 1}: "
            + "  ".join(f"{n} {TOKENS_A_STEP / t[-1]:,.0f}" for n, t in times.items())
        )
    for contestant in contestants.values():
        contestant.end()
    report(times, threads, given.steps)


def report(times: dict[str, list[float]], threads: int, steps: int) -> None:
    print(
        f"\n{'':18}{'median':>9}{'best':>9}{'farspan-bf16 / it':>20}   tokens/s, {threads} threads"
    )
    rows = {}
    for name, seconds in times.items():
        median = TOKENS_A_STEP / statistics.median(seconds)
        best = TOKENS_A_STEP / min(seconds)
        ours = times.get("farspan-bf16", seconds)
        ratio = statistics.median(theirs / mine for theirs, mine in zip(seconds, ours, strict=True))
        rows[name] = {"median": median, "best": best, "farspan_ratio": ratio, "step_s": seconds}
        print(f"{name:18}{median:9,.0f}{best:9,.0f}{ratio:20.2f}")
    for peer, least in TARGETS:
        if peer in rows and "farspan-bf16" in rows:
            ratio = rows[peer]["farspan_ratio"]
            print(
                f"at least {least}x {peer}: {ratio:.2f} {'reached' if ratio >= least else 'MISSED'}"
            )
    if "gemm" in rows and "farspan-bf16" in rows:
        print(f"share of the GEMM limit: {rows['gemm']['farspan_ratio']:.0%}")
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "threads": threads,
        "steps_a_round": steps,
        "rows": rows,
    }
    path = RESULTS / "training.json"
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(found, file, indent=1)
    Path(file.name).replace(path)


if __name__ == "__main__":
    main()
