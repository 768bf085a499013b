"""A run folder that is deleted, emptied, moved or replaced while its run is trained: the run ends
and says so, and nothing makes the folder again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.app import training
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Step, read_events
from farspan.launch.run_lock import Lease
from tests import tiny
from tests.app.supervised import made
from tests.examples import slow_after
from tests.launch.test_killed import processes
from tests.launch.test_launchers import TRAIN
from tests.waiting import LIMIT_S, wait_for

#: Longer than any test waits, and with a save at every moment.
ENDLESS = replace(TRAIN, steps=1_000_000, validate_every=1_000_000, checkpoint_every_s=0.01)


def delete(path: Path) -> None:
    """As `rm -rf`, which begins again where a worker has added a file meanwhile."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def empty(path: Path) -> None:
    for child in [path / "plan.json", *path.iterdir()]:
        delete(child) if child.is_dir() else child.unlink(missing_ok=True)


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replace_by_copy(path: Path) -> None:
    """With nothing in between, as quickly as a script does."""
    shutil.copytree(path, path.with_name("copy"), ignore=shutil.ignore_patterns("checkpoints"))
    path.rename(path.with_name("moved"))
    path.with_name("copy").rename(path)


def ended(run: RunFolder, harm: Callable[[Path], None]) -> Problem:
    """The problem that the run ends with when `harm` is done after some steps."""
    harmed = list[Path]()

    def harm_once(update: object) -> None:
        if isinstance(update, Step) and update.step >= 20 and not harmed:
            harmed.append(run.path)
            harm(run.path)

    with pytest.raises(Refusal) as refused:
        training.train_run(run, harm_once)
    assert harmed and not processes(str(run.path), "farspan.runtime.worker")
    return refused.value.problem


@pytest.mark.parametrize("harm", slow_after(1, [delete, empty, move]))
def test_run_whose_folder_is_gone_ends_with_that_and_makes_no_folder(tmp_path, harm):
    run = made(tmp_path / "run", tiny.plan(ENDLESS))
    problem = ended(run, harm)
    assert (problem.code, problem.where) == ("path-missing", str(run.path)), problem
    assert "deleted or moved" in problem.what and f"farspan resume {run.path}" in problem.remedy
    assert not run.path.exists() or (harm is empty and not run.checkpoints.exists())


@pytest.mark.slow
def test_run_whose_folder_is_replaced_ends_and_writes_nothing_into_the_other(tmp_path):
    run = made(tmp_path / "run", tiny.plan(ENDLESS))
    problem = ended(run, replace_by_copy)
    assert problem.code == "path-missing" and "was replaced" in problem.what, problem
    assert not run.checkpoints.exists()


@pytest.mark.slow
@pytest.mark.parametrize("harm", [delete, move])
def test_worker_without_a_launcher_ends_by_itself_and_makes_no_folder(tmp_path, harm):
    run = made(tmp_path / "run", tiny.plan(ENDLESS))
    with Lease(run) as lease:
        number = lease.begin_epoch().number
    place = {"RANK": "0", "WORLD_SIZE": "1", "FARSPAN_EPOCH": f'{{"number":{number}}}'}
    worker = subprocess.Popen(
        [sys.executable, "-m", "farspan.runtime.worker", str(run.plan), str(run.path)],
        env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:

        def trains() -> bool:
            return run.events.exists() and any(
                isinstance(event, Step) for event in read_events(run.events)
            )

        wait_for(trains, "the first step", worker)
        harm(run.path)
        _, said = worker.communicate(timeout=LIMIT_S)
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == 10 and "error[path-missing]" in said
    assert not run.path.exists()
