"""The training loop in this process, under a clock that the test turns: time budgets, fp16's loss
scale, resumption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from msgspec.structs import replace

from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event, Rescheduled, Saved, Step, Warned
from farspan.domain.train import Optimizer, Schedule, TrainSpec
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.comm.worker_group import Group
from farspan.runtime.state.train_state import TrainState
from farspan.runtime.training import trainer
from farspan.runtime.training.trainer import Trainer
from farspan.runtime.worker import build
from tests import tiny
from tests.runtime import stored_tensors

TRAIN = TrainSpec(
    steps=60,
    batch=2,
    seq_len=16,
    precision="fp32",
    optimizer=Optimizer(lr=1e-2),
    schedule=Schedule(warmup_steps=3, floor=0.1),
    validate_every=1000,
    seed=3,
)


@dataclass
class Start:
    """One start of a run, restored from its newest checkpoint. Each step takes `pace(step)` seconds
    of its clock."""

    run: RunFolder
    pace: Callable[[int], float] = lambda step: 1.0
    until: int = 10**9
    now: float = 0.0
    events: list[Event] = field(default_factory=list)
    background: bool = False

    def train(self) -> tuple[str, Trainer]:
        worker = build(self.run.load_plan(), self.run, Group(0, 1, torch.device("cpu")), self.emit)
        worker.stop = lambda: bool(self.steps) and self.steps[-1].step >= self.until
        made = Trainer(worker, lambda: self.now, background=self.background)
        made.restore()
        return made.run(), made

    def emit(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Step):
            self.now += self.pace(event.step)

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]


@pytest.fixture(autouse=True)
def _one_thread():
    """On a busy machine two threads spend these tiny steps waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path):
    def run(name: str, **changes) -> RunFolder:
        return tiny.run_folder(tmp_path / name, tiny.plan(replace(TRAIN, **changes)))

    return run


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return stored_tensors.weights(stored_tensors.newest(run))


def test_a_machine_slower_than_its_trial_still_ends_its_decay_within_the_budget(make):
    start = Start(make("run", deadline_s=66.0), pace=lambda step: 2.0)  # 1.1 s a step were planned.
    reason, made = start.train()
    assert reason == "deadline"
    assert 0.9 * 66 <= start.now <= 66
    assert start.steps[-1].lr == pytest.approx(0.1 * TRAIN.optimizer.lr)
    assert made.state.step == made.state.steps == start.steps[-1].step < 60
    (change,) = [event for event in start.events if isinstance(event, Rescheduled)]
    assert (change.steps, change.planned) == (made.state.steps, TRAIN.steps)
    assert not [event for event in start.events if isinstance(event, Warned)]
    again = Start(start.run)
    assert again.train()[0] == "deadline" and not again.steps


def test_a_machine_as_fast_as_its_trial_keeps_the_plan(make):
    with_budget = Start(make("with", deadline_s=66.0))
    without = Start(make("without"))
    assert with_budget.train()[0] == without.train()[0] == "done"
    assert [step.lr for step in with_budget.steps] == [step.lr for step in without.steps]


def test_a_machine_faster_than_its_trial_makes_more_steps_at_a_longer_decay(make):
    linear = Schedule(kind="linear", warmup_steps=1, floor=0.0)
    changes = {"deadline_s": 66.0, "steps": 20, "most_steps": 1000, "schedule": linear}
    start = Start(make("run", **changes), pace=lambda step: 1.0)
    reason, made = start.train()
    assert reason == "deadline" and 55 < made.state.step <= 66
    rates = [step.lr / TRAIN.optimizer.lr for step in start.steps]
    assert rates[1:] == sorted(rates[1:], reverse=True) and 0 < rates[-1] < 0.02
    assert abs(rates[made.state.step // 2] - 0.5) < 0.06
    (change,) = [event for event in start.events if isinstance(event, Rescheduled)]
    assert change.planned == 20 and change.steps == pytest.approx(made.state.step, abs=3)
    # Steps that were given end it, also before its time is up.
    short = Start(make("short", **changes | {"most_steps": 40}), pace=lambda step: 1.0)
    reason, made = short.train()
    assert (reason, made.state.step) == ("done", 40) and 0 < short.steps[-1].lr
    assert Start(short.run).train()[0] == "done"


@pytest.mark.parametrize(
    ("until", "changes"),
    [(12, {}), (40, {"steps": 20, "most_steps": 1000})],
)
def test_a_replanned_run_resumes_bitwise_also_where_it_was_killed(make, until, changes):
    step_s = 1.0 if changes else 2.0

    def pace(step: int) -> float:
        return step_s

    whole = Start(make("whole", deadline_s=66.0, **changes), pace)
    whole.train()
    first = Start(make("run", deadline_s=66.0, **changes), pace, until=until)
    assert first.train()[0] == "interrupted"
    replanned = next(i for i, event in enumerate(first.events) if isinstance(event, Rescheduled))
    assert isinstance(
        first.events[replanned + 1], Saved
    )  # A kill after this point loses no decision.
    second = Start(first.run, pace)
    assert second.train()[0] == "deadline"
    assert [(s.step, s.loss, s.lr) for s in first.steps + second.steps] == [
        (s.step, s.loss, s.lr) for s in whole.steps
    ]
    ours = weights(first.run)
    theirs = weights(whole.run)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_others_parts_of_a_checkpoint_are_not_waited_for_under_the_lock_of_its_files(
    make, monkeypatch
):
    """A worker that waits for a lost one must still be told so; one that writes ends when the files
    are whole."""
    seen = set()

    def watched(name: str):
        function = getattr(checkpoint_folder, name)

        def watching(*given):
            seen.add((name, held()))
            return function(*given)

        monkeypatch.setattr(checkpoint_folder, name, watching)

    for name in ("write_part", "missing_parts", "commit"):
        watched(name)
    start = Start(make("run", steps=2))
    worker = build(start.run.load_plan(), start.run, Group(0, 1, torch.device("cpu")), start.emit)
    made = Trainer(worker, lambda: 0.0)
    held = worker.group.writing.locked
    made.restore()
    assert made.run() == "done"
    assert seen == {("write_part", True), ("missing_parts", False), ("commit", True)}


def test_fp16_doubles_its_scale_at_the_same_steps_however_often_it_was_resumed(make, monkeypatch):
    monkeypatch.setattr(trainer, "QUIET_STEPS", 8)
    monkeypatch.setattr(trainer, "FIRST_LOSS_SCALE", 4.0)
    whole = Start(make("whole", precision="fp16", steps=20))
    scale = whole.train()[1].state.loss_scale
    assert scale == 16.0  # Doubled after 8 and 16 steps.
    run = make("run", precision="fp16", steps=20)
    starts = [Start(run, until=until) for until in (5, 11, 10**9)]
    scales = [start.train()[1].state.loss_scale for start in starts]
    assert scales == [4.0, 8.0, scale]
    assert [s.loss for start in starts for s in start.steps] == [s.loss for s in whole.steps]
    ours = weights(run)
    theirs = weights(whole.run)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_fp16_steps_that_overflow_are_no_updates_of_the_optimizer(make, monkeypatch):
    """AdamW corrects its moments' bias by how many updates they have seen, also after a
    resumption."""
    monkeypatch.setattr(trainer, "FIRST_LOSS_SCALE", 2.0**30)
    counted = []
    update = TrainState.update

    def counting(state, optimizer, scalars):
        counted.append(scalars.updates)
        update(state, optimizer, scalars)

    monkeypatch.setattr(TrainState, "update", counting)
    run = make("run", precision="fp16", steps=40)
    first = Start(run, until=25)
    second = Start(run)
    _, made = first.train()
    second.train()
    assert 3 <= made.state.skipped < 25
    assert counted == list(range(1, 40 - made.state.skipped + 1))
