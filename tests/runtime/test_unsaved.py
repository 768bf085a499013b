"""A checkpoint that cannot be written: the run warns, tries again later, and ends where that goes
on for too long."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event, Saved, Step, Validated, Warned, read_events
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.training.events import EventLog
from tests import tiny
from tests.examples import slow_after
from tests.runtime import jobs
from tests.runtime.fleet import Fleet
from tests.runtime.plans import HAND_PICKED
from tests.runtime.test_resume import state
from tests.runtime.test_trainer import TRAIN, Start
from tests.runtime.verify import Case

pytestmark = pytest.mark.usefixtures("one_thread")


class Broken(Start):
    """A start in which checkpoints cannot be written after some steps, for a file stands where
    their folder belongs. Each step takes a second, and a checkpoint is due every five."""

    def __init__(self, run: RunFolder, broken: Callable[[int], bool]) -> None:
        super().__init__(run)
        self.broken = broken
        self.aside = run.path / "aside"

    def emit(self, event: Event) -> None:
        if isinstance(event, Step):
            self.turn(self.broken(event.step))
        super().emit(event)

    def turn(self, broken: bool) -> None:
        folder = self.run.checkpoints
        if broken and not folder.is_file():
            folder.mkdir(exist_ok=True)
            folder.rename(self.aside)
            folder.write_text("")
        elif not broken and folder.is_file():
            folder.unlink()
            self.aside.rename(folder)

    def refused(self) -> Refusal:
        """Train to the refusal, with the checkpoints in their place afterwards."""
        with pytest.raises(Refusal) as refusal:
            self.train()
        self.turn(False)
        return refusal.value

    @property
    def saved(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, Saved)]

    @property
    def warned(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return tiny.run_folder(
        tmp_path / "run", tiny.plan(replace(TRAIN, steps=33, checkpoint_every_s=5.0))
    )


def test_a_save_that_fails_warns_and_is_tried_again_at_the_next_interval(
    run: RunFolder, tmp_path: Path
):
    start = Broken(run, lambda step: 8 <= step < 17)
    assert start.train()[0] == "done"
    assert start.saved == [5, 20, 25, 30, 33]
    assert [text.partition(":")[0] for text in start.warned] == ["step 10", "step 15"]
    for text in start.warned:
        assert "File exists" in text or "Not a directory" in text
        assert "the newest checkpoint is of step 5, and the next is tried in 5.0 s" in text
    plain = Start(tiny.run_folder(tmp_path / "plain", run.load_plan()))
    plain.train()
    ours = state(run.path)
    theirs = state(plain.run.path)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )


def test_two_failures_again_and_again_do_not_end_a_run(run: RunFolder):
    start = Broken(run, lambda step: (step // 5) % 3 != 0)
    assert start.train()[0] == "done"
    assert len(start.warned) == 4 and start.saved[-1] == 33


def test_three_intervals_without_a_save_end_the_run(run: RunFolder):
    start = Broken(run, lambda step: step >= 8)
    problem = start.refused().problem
    assert (problem.code, problem.exit_code) == ("disk-full", 17)
    assert "3 intervals of 5.0 s" in problem.what and str(run.path) in problem.remedy
    assert "20 of 33 steps are trained, the newest checkpoint is of step 5" in problem.fact
    assert len(start.warned) == 2 and start.steps[-1].step == 20
    again = Start(run)
    assert again.train()[0] == "done" and again.steps[0].step == 6


def test_refusal_of_a_failed_save_states_that_there_is_no_checkpoint(run: RunFolder):
    start = Broken(run, lambda step: True)
    assert "15 of 33 steps are trained, there is no checkpoint" in start.refused().problem.fact


@pytest.mark.parametrize("until", [31, 10**9])
def test_without_its_last_checkpoint_a_run_is_not_done(run: RunFolder, until: int):
    start = Broken(run, lambda step: step >= 31)
    start.until = until
    problem = start.refused().problem
    assert problem.code == "disk-full" and "last" in problem.what
    trained = min(until, 33)
    assert f"{trained} of 33 steps are trained, the newest checkpoint is of step 30" in problem.fact
    again = Start(run)
    assert again.train()[0] == "done" and again.steps[0].step == 31


def test_best_weights_that_cannot_be_written_are_replaced_by_the_next_better_ones(tmp_path: Path):
    plan = tiny.plan(replace(TRAIN, steps=33, checkpoint_every_s=1000.0, validate_every=5))
    start = Broken(tiny.run_folder(tmp_path / "run", plan), lambda step: 10 <= step < 17)
    start.train()
    losses = {event.step: event.loss for event in start.events if isinstance(event, Validated)}
    assert [text.partition(":")[0] for text in start.warned] == ["step 10", "step 15"]
    assert all("best weights" in text for text in start.warned)
    assert min(losses, key=losses.__getitem__) == 33, "the loss falls"
    best = checkpoint_folder.verify(start.run.best)
    assert (best.step, best.best_loss) == (33, losses[33])


def test_the_best_loss_of_a_run_is_that_of_the_weights_that_are_there(tmp_path: Path):
    plan = tiny.plan(replace(TRAIN, steps=33, checkpoint_every_s=1000.0, validate_every=5))
    start = Broken(tiny.run_folder(tmp_path / "run", plan), lambda step: 20 <= step < 22)
    start.until = 22
    assert start.train()[0] == "interrupted"
    best = checkpoint_folder.verify(start.run.best)
    newest = next(checkpoint_folder.newest_first(start.run.checkpoints))
    assert best.step == 15 and checkpoint_folder.verify(newest).best_loss == best.best_loss


@pytest.mark.parametrize(
    "name", slow_after(1, ["replicas unlike, overlapped", "zero 3", "replicas unlike"])
)
def test_a_save_that_fails_half_way_leaves_no_worker_and_no_message_behind(
    fleet: Fleet, folder: Path, name: str
):
    """Rank 0 cannot write all of its part, twice; the others can. What is saved then is what it
    would be."""
    train = replace(HAND_PICKED[name].train, steps=12, checkpoint_every_s=1e-6, validate_every=100)
    plan = replace(HAND_PICKED[name], train=train)
    disturbed = Case(folder, plan)
    plain = Case(folder, plan)
    found = fleet.run(
        jobs.train_where_files_may_not_be_large, disturbed.world, plan, disturbed.path, 2000, 2
    )
    wanted = fleet.run(jobs.train, plain.world, plan, plain.path)
    assert len(found[0].warned) == 2 and all("too large" in text for text in found[0].warned), (
        found[0].warned
    )
    assert found[0].saved and {one.reason for one in found} == {"done"}
    assert [one.losses for one in found] == [one.losses for one in wanted]
    ours = state(disturbed.path)
    theirs = state(plain.path)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full, for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_events_that_a_full_disk_does_not_take_follow_later_and_whole(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    events = [Warned(at=float(number), message="x" * number) for number in range(1, 30)]
    with EventLog(path) as log:
        log.write(events[0])
        with files_of_at_most(path.stat().st_size + 10):
            for event in events[1:20]:
                log.write(event)
            assert list(read_events(path)) == events[:1]
        for event in events[20:]:
            log.write(event)
        assert list(read_events(path)) == events


def test_events_that_are_never_taken_end_a_run_that_went_well_and_hide_no_other_error(
    tmp_path: Path,
):
    for number, error in enumerate((OSError, KeyError)):
        path = tmp_path / f"{number}.jsonl"
        with files_of_at_most(10), pytest.raises(error), EventLog(path) as log:
            log.write(Warned(at=1.0, message="lost"))
            if error is KeyError:
                raise KeyError


def mountable() -> bool:
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("rows", [("6",), ("3", "3")])
def test_workers_outlive_a_full_disk_and_end_where_it_stays_full(
    tmp_path: Path, rows: tuple[str, ...]
):
    if not mountable():
        pytest.skip("waits for a system that lets this user have mounts of its own (unshare -rm)")
    words = [sys.executable, "-m", "tests.runtime.full_disk", str(tmp_path), *rows]
    mount = 'mount -t tmpfs -o size=24m none "$1" && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path), *words],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
