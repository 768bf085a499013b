"""Throughput of a run that a fault strikes every two minutes, against the same run undisturbed.

    python -m benchmarks.fault_rate [--minutes 30] [--every-s 120] [--seed 1]

Four workers in four sites of a lab, by data parallelism and by DiLoCo. A short run gives the time
of a step, and so the steps of --minutes. These are trained undisturbed, then with faults that the
seed draws: killed, stopped and preempted workers, a killed supervisor, and cuts. Throughput is
steps over the seconds from the first step to the last. Rows are appended to
results/fault_rate.jsonl. The exit code is 1 where throughput is below 85 %, or losses differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.chaos import read_versions
from farspan.domain.run import source_commit
from tests.faults.judging import Struck
from tests.faults.places import missing
from tests.faults.running import run_scenario, train_undisturbed
from tests.faults.scenarios import PASSING_S, Fault, Kind, Scenario

RESULTS = Path(__file__).parent / "results" / "fault_rate.jsonl"
KINDS: tuple[Kind, ...] = ("kill", "stop", "term", "supervisor", "cut", "cut-one-way")
#: A run may take so much longer than undisturbed, and still meet faults.
MAX_SLOWDOWN = 4.0
LEAST_THROUGHPUT = 0.85
CALIBRATION_STEPS = 100


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    technique: str
    seed: int
    every_s: float
    steps: int
    undisturbed_s: float
    disturbed_s: float
    #: What is wrong with the losses or the end; empty where nothing is.
    flaw: str
    struck: tuple[Struck, ...]
    commit: str | None
    date: str
    versions: dict[str, str]

    @property
    def throughput(self) -> float:
        """Of the disturbed run, as a share of the undisturbed one's."""
        return self.undisturbed_s / self.disturbed_s if self.disturbed_s else 0.0


def draw_faults(seed: int, every_s: float, until_s: float) -> tuple[Fault, ...]:
    """Draw a fault for every interval; kinds take turns in a drawn order."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, len(KINDS))
    faults = []
    for number in range(int(until_s / every_s)):
        kind = kinds[number % len(kinds)]
        passes = kind in ("stop", "cut", "cut-one-way")
        fault = Fault(
            kind=kind,
            phase="time",
            target=rng.randrange(12),
            delay_s=every_s * (number + 1),
            lasts_s=rng.choice(PASSING_S) if passes else None,
        )
        faults.append(fault)
    return tuple(faults)


def measure(technique: str, seed: int, minutes: float, every_s: float, folder: Path) -> Rate:
    scenario = Scenario(
        number=0,
        launcher="local",
        sites=4,
        technique=technique,
        on_fault="wait",
        faults=(),
        steps=CALIBRATION_STEPS,
        save_every="5s",
    )
    calibration, _ = train_undisturbed(scenario, folder)
    step_s = calibration.seconds / (CALIBRATION_STEPS - 1)
    scenario = replace(scenario, steps=round(60 * minutes / step_s))
    print(f"{technique}: {step_s:.3f} s a step, {scenario.steps} steps", flush=True)
    calm, _ = train_undisturbed(scenario, folder)
    print(f"undisturbed: {calm.seconds:.0f} s", flush=True)
    faults = draw_faults(seed, every_s, MAX_SLOWDOWN * 60 * minutes)
    outcome = run_scenario(replace(scenario, faults=faults), folder)
    trained = outcome.ending.trained
    return Rate(
        technique=technique,
        seed=seed,
        every_s=every_s,
        steps=scenario.steps,
        undisturbed_s=calm.seconds,
        disturbed_s=0.0 if trained is None else trained.seconds,
        flaw=outcome.flaw,
        struck=outcome.ending.struck,
        commit=source_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=read_versions(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--technique", choices=("data", "diloco"), action="append")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if reason := missing("local"):
        sys.exit(reason)
    failed = False
    for technique in given.technique or ("data", "diloco"):
        with tempfile.TemporaryDirectory() as folder:
            rate = measure(technique, given.seed, given.minutes, given.every_s, Path(folder))
        with open(given.out, "ab") as file:
            file.write(msgspec.json.encode(rate) + b"\n")
        for struck in rate.struck:
            seen, following = struck.seen_s, struck.next_step_s
            print(
                f"  {struck.fault}: seen {seen}, next step {following}, {struck.steps_again} again"
            )
        print(
            f"{technique}: {len(rate.struck)} faults in {rate.disturbed_s:.0f} s; "
            f"{rate.throughput:.1%} of the undisturbed throughput; {rate.flaw or 'losses equal'}",
            flush=True,
        )
        failed |= rate.throughput < LEAST_THROUGHPUT or bool(rate.flaw)
    sys.exit(failed)


if __name__ == "__main__":
    main()
