"""Trains in a folder that is a small disk of its own, and fills it: `python -m
tests.runtime.full_disk FOLDER ROWS...`.

`test_unsaved` calls it where such a disk can be mounted.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Saved, Started, Step, Warned, read_events
from farspan.domain.train import Optimizer
from farspan.runtime.checkpoint import checkpoint_folder
from tests import tiny
from tests.runtime.test_worker import TRAIN

#: Too little for a checkpoint, and enough for events.
LITTLE = 2**19


def fill(ballast: Path, leave: int) -> None:
    """Write until so many bytes of the disk are left."""
    with open(ballast, "ab", buffering=0) as file:
        while (free := shutil.disk_usage(ballast.parent).free) > leave:
            file.write(bytes(min(free - leave, 2**20)))


def a_disk_that_has_space_again_is_saved_to(run: RunFolder, ballast: Path) -> None:
    """After a warning, and without an end of the run."""
    warned = None
    with tiny.workers(run) as workers:
        for event in workers:
            if isinstance(event, Saved) and not ballast.exists() and warned is None:
                fill(ballast, LITTLE)
            elif isinstance(event, Warned) and "no checkpoint" in event.message:
                warned = event.message
                assert not list(run.checkpoints.glob(".*")), "what was written of it is gone"
                ballast.unlink(missing_ok=True)
            elif isinstance(event, Saved) and warned is not None:
                workers.interrupt()
    assert warned is not None and "free" in warned and "is tried in" in warned, warned
    assert event.reason == "interrupted", event
    assert checkpoint_folder.verify(newest(run)).step == event.step


def a_disk_that_stays_full_ends_the_run(run: RunFolder, ballast: Path) -> int:
    """To the last byte, so that nothing can be written down either: the exit code alone says it.
    The step after which the disk was full."""
    full = None
    with pytest.raises(Refusal) as refusal, tiny.workers(run) as workers:
        for event in workers:
            if isinstance(event, Saved) and full is None:
                full = event.step
                fill(ballast, 0)
    problem = refusal.value.problem
    assert (problem.code, problem.exit_code) == ("disk-full", 17), problem
    assert "farspan resume" in problem.remedy, problem
    assert full is not None and checkpoint_folder.verify(newest(run)).step >= full
    return full


def newest(run: RunFolder) -> Path:
    return next(checkpoint_folder.newest_first(run.checkpoints))


def main() -> None:
    folder = Path(sys.argv[1])
    rows = tuple(map(int, sys.argv[2:]))
    # Learns next to nothing, so that no worker's loss is ever far from the others'.
    train = replace(
        TRAIN,
        steps=10**6,
        batch=sum(rows),
        validate_every=10**6,
        checkpoint_every_s=1.0,
        optimizer=Optimizer(lr=1e-6),
    )
    run = tiny.run_folder(folder / "run", tiny.plan(train, rows=rows))
    ballast = folder / "ballast"
    a_disk_that_has_space_again_is_saved_to(run, ballast)
    before = checkpoint_folder.verify(newest(run)).step
    saved = a_disk_that_stays_full_ends_the_run(run, ballast)
    ballast.unlink()
    with tiny.workers(run) as workers:
        for event in workers:
            if isinstance(event, Started):
                assert event.step >= saved > before
            if isinstance(event, Step):
                workers.interrupt()
                break
        *_, last = workers
    assert isinstance(last, Finished) and last.reason == "interrupted"
    assert list(read_events(run.events))[-1] == last, "every line is whole"
    logs = "".join(log.read_text() for log in run.logs.glob("*.log"))
    assert "Error in sys.excepthook" not in logs and "Exception ignored" not in logs, logs


if __name__ == "__main__":
    main()
