"""Seconds of processor and of wall-clock time that starting farspan takes.

    python benchmarks/startup.py

Medians over RUNS interleaved runs, beside a Python that does nothing. Importing has a budget of
0.3 s of processor time; the last command also plans.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from statistics import median

RUNS = 11
FARSPAN = [sys.executable, "-m", "farspan"]
COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "import farspan": [sys.executable, "-c", "import farspan"],
    "farspan --help": [*FARSPAN, "--help"],
    "farspan plan --help": [*FARSPAN, "plan", "--help"],
    "farspan plan": [*FARSPAN, "plan", "--model", "gpt2m", "--cluster", "fabric/gat-amst"],
}


def time_command(words: list[str]) -> tuple[float, float]:
    """Processor and wall-clock seconds of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True, timeout=300)
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, wall_s


def main() -> None:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, words in COMMANDS.items():
            times[name].append(time_command(words))
    print(f"{'':20} {'processor':>10} {'wall':>8}   median of {RUNS}")
    for name, pairs in times.items():
        cpu_s = median(cpu for cpu, _ in pairs)
        wall_s = median(wall for _, wall in pairs)
        print(f"{name:20} {cpu_s:8.3f} s {wall_s:6.3f} s")


if __name__ == "__main__":
    main()
