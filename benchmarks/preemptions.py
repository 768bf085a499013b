"""Expected against measured time of a run whose workers are killed at drawn times.

    python benchmarks/preemptions.py [--work-s 120] [--mean-s 15] [--seed 1]

Two workers on this machine. A run with a few kills gives the restart. Then a long run is disturbed:
after exponential times, one worker gets SIGKILL. Its seconds, first step to last, are compared with
`Interruptions.expected_s` of its steps. A step's time is the mean of that run between kills, so
other programs on the machine matter little. Both are written to results/preemptions.json; the exit
code is 1 beyond 15 %.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from farspan.domain.run import source_commit
from farspan.domain.run_events import Finished, Step
from farspan.domain.struct_files import save
from farspan.domain.train import TrainSpec
from farspan.estimate.interruptions import Interruptions
from tests import tiny
from tests.app.supervised import Watched, made

RESULTS = Path(__file__).parent / "results" / "preemptions.json"
#: Seconds between saves, and steps of the run that calibrates.
EVERY_S = 3.0
TIMED_STEPS = 800
#: Kills of the run that times restarts, and seconds of steps that it makes: several times as many
#: as the kills are apart.
CALIBRATIONS = 3
CALIBRATING_S = 60.0
CALIBRATING_MEAN_S = 6.0
TOLERANCE = 0.15


class Preempted(msgspec.Struct, frozen=True, kw_only=True):
    commit: str | None
    seed: int
    steps: int
    interruptions: Interruptions
    kills: int
    undisturbed_s: float
    expected_s: float
    measured_s: float


def training(steps: int) -> TrainSpec:
    return TrainSpec(
        steps=steps,
        batch=8,
        seq_len=16,
        precision="fp32",
        validate_every=steps,
        checkpoint_every_s=EVERY_S,
    )


def watch(path: Path, steps: int, mean_s: float, seed: int, most: int = 10**9) -> Watched:
    """Train a run to its end, and kill a drawn worker after drawn times of `mean_s` in the mean.

    Kills between two starts find no worker: they interrupt the restart no further.
    """
    watched = Watched(made(path, tiny.plan(training(steps), rows=(4, 4), micro_rows=4)))
    done = threading.Event()
    first_step = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        draw = random.Random(seed)
        first_step.wait()
        while kills < most and not done.wait(draw.expovariate(1 / mean_s)):
            with contextlib.suppress(AssertionError, ProcessLookupError, ValueError):
                watched.signal(draw.randrange(2), signal.SIGKILL)
                kills += 1

    watched._at_step = lambda watched, step: first_step.set()
    killing = threading.Thread(target=kill, daemon=True)
    if mean_s:
        killing.start()
    ending = watched.train()
    done.set()
    first_step.set()
    if mean_s:
        killing.join()
    if not isinstance(ending, Finished):
        raise SystemExit(f"the run ended early: {ending}")
    return watched


def step_events(watched: Watched) -> list[Step]:
    return [event for event in watched.events if isinstance(event, Step)]


def split_times(watched: Watched) -> tuple[list[float], list[float]]:
    """Return the seconds between steps: from the last before a kill to the next, where steps went
    back, and between all others."""
    restarts = list[float]()
    steps = list[float]()
    for before, after in itertools.pairwise(step_events(watched)):
        gaps = restarts if after.step <= before.step or after.at - before.at > 1 else steps
        gaps.append(after.at - before.at)
    return restarts, steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-s", type=float, default=120.0)
    parser.add_argument("--mean-s", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        _, gaps = split_times(watch(Path(folder, "timed"), TIMED_STEPS, 0.0, 0))
        steps = round(CALIBRATING_S / statistics.fmean(gaps))
        calibrating = Path(folder, "calibrating")
        timed = watch(calibrating, steps, CALIBRATING_MEAN_S, 0, CALIBRATIONS)
        restarts, gaps = split_times(timed)
        restart_s = statistics.fmean(restarts)
        steps = round(given.work_s / statistics.fmean(gaps))
        print(f"restart {restart_s:.1f} s ({time.monotonic() - began:.0f} s)", flush=True)
        disturbed = watch(Path(folder, "run"), steps, given.mean_s, given.seed)
    events = step_events(disturbed)
    again, gaps = split_times(disturbed)
    step_s = statistics.fmean(gaps)
    print(f"restarts of the long run: {statistics.fmean(again or [0.0]):.1f} s in the mean")
    # The worker that is left writes the last step.
    case = Interruptions(
        per_s=1 / given.mean_s, save_s=0.0, restart_s=restart_s, every_s=EVERY_S, again=0.0
    )
    result = Preempted(
        commit=source_commit(),
        seed=given.seed,
        steps=steps,
        interruptions=case,
        kills=len(disturbed.faulted),
        undisturbed_s=steps * step_s,
        expected_s=case.expected_s(steps * step_s),
        measured_s=events[-1].at - events[0].at,
    )
    save(result, RESULTS)
    ratio = result.measured_s / result.expected_s
    print(
        f"{result.kills} kills: {result.measured_s:.1f} s, expected {result.expected_s:.1f} s, "
        f"undisturbed {result.undisturbed_s:.1f} s: {ratio:.3f}"
    )
    raise SystemExit(abs(ratio - 1) > TOLERANCE)


if __name__ == "__main__":
    main()
