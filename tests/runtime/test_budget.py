"""Time budgets against simulated clocks: paces that drift and jump, costs of validations and saves;
no overrun, and a learning rate that only falls."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from farspan.domain.train import Schedule
from farspan.runtime.time_budget import RunWork, TimeBudget
from farspan.semantics.lr_schedule import learning_rate
from tests.runtime.test_trainer import TRAIN, replace

#: What is promised: the deadline holds within this.
SHARE = 0.02
SECONDS = 2.0
WINDOW = 64


@dataclass
class Machine:
    """Takes a step, a validation or a checkpoint some seconds of its clock, as the trainer would
    ask for them."""

    deadline_s: float
    planned: int
    step_s: float
    #: A validation's token costs this share of a step's, a checkpoint so many seconds.
    forward: float
    save_s: float
    val_tokens: int
    first_s: float = 0.0
    noise: float = 0.0
    spikes: float = 0.0
    #: From these shares of the deadline on, all takes so many times as long.
    turns: tuple[tuple[float, float], ...] = ()
    #: Workers of one replica hear what rank 0 says so many steps later; replicas meet after so
    #: many.
    later: int = 0
    every: int = 1
    seed: int = 0
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup_steps=10))
    #: Steps that are made at most; None: the planned ones.
    limit: int | None = None

    def __post_init__(self) -> None:
        self.now, self.rng, self.rates, self.told, self.steps_seen = (
            0.0,
            random.Random(self.seed),
            [],
            [],
            [],
        )
        train = replace(
            TRAIN,
            steps=self.planned,
            deadline_s=self.deadline_s,
            schedule=self.schedule,
            batch=4,
            most_steps=self.limit or msgspec.UNSET,
        )
        self.limit = train.step_limit
        self.between = max(1, -(-self.planned // 12))
        self.work = RunWork(
            step_tokens=1024,
            validate_every=self.between,
            validation_tokens=16 * WINDOW,
            last_tokens=self.val_tokens,
            checkpoint_bytes=10**6,
            checkpoint_every_s=self.deadline_s / 5,
        )
        self.budget = TimeBudget(train, self.work, lambda: self.now)
        self.longest_s = self.spiked_s = 0.0

    def spend(self, seconds: float) -> float:
        """Some seconds, at the pace of now."""
        factor = next(
            (
                f
                for since, f in sorted(self.turns, reverse=True)
                if since * self.deadline_s <= self.now
            ),
            1.0,
        )
        seconds *= factor * self.rng.lognormvariate(0, self.noise)
        if self.rng.random() < self.spikes:
            self.spiked_s += 9 * seconds
            seconds *= 10
        self.now += seconds
        self.longest_s = max(self.longest_s, seconds)
        return seconds

    def read(self, tokens: int) -> None:
        self.budget.measure_validation(
            tokens, self.spend(self.forward * self.step_s / 1024 * tokens)
        )

    def save(self) -> None:
        self.budget.measure_save(self.spend(self.save_s))

    def train(self) -> int:
        """The steps that were made when all had ended."""
        step = 0
        steps = self.planned
        saved_at = 0.0
        heard = []
        self.now = self.first_s
        while step < steps:
            share = self.budget.lr_progress(step, steps)
            self.rates.append(
                learning_rate(
                    self.schedule,
                    1.0,
                    step,
                    self.planned,
                    share,
                    limit=self.limit,
                    total=steps,
                )
            )
            self.spend(self.step_s)
            step += 1
            self.steps_seen.append(steps)
            together = step % self.every == 0 or step >= steps
            unknown = self.budget.measure_step(step) if together or step == 1 else False
            if not together:
                continue
            if unknown and step > 1:
                self.read(4 * WINDOW)
                self.budget.restart_step_clock()
            if step % self.between < min(self.every, self.between) and step < steps:
                self.read(self.work.validation_tokens)
                self.budget.restart_step_clock()
            due = self.now - saved_at >= self.work.checkpoint_every_s
            heard.append(self.budget.propose_steps(step, steps, due))
            if heard[-1][2]:
                saved_at = self.now
            if len(heard) <= self.later and step < steps:
                continue
            new, share, save = heard.pop(0)
            steps = max(step, new)
            if self.budget.take_proposal(step, share, save):
                self.told.append(steps)
            if save and step < steps:
                self.save()
                self.budget.restart_step_clock()
        self.end()
        return step

    def end(self) -> None:
        self.spiked_s = 0.0  # From here on nothing is left that could make up for it.
        self.save()
        self.read(self.work.validation_tokens)
        left = self.val_tokens // WINDOW - 16
        while left > 0 and (more := self.budget.more_windows(WINDOW, min(left, 4), left)):
            self.read(more * WINDOW)
            left -= more
        self.spend(self.save_s / 3)
        for _ in range(160):
            if self.budget.late:
                break
            self.spend(self.forward * self.step_s / 1024 * 50)

    def falls(self) -> bool:
        """Whether the learning rate never rises once it has fallen."""
        top = self.rates.index(max(self.rates))
        return self.rates[: top + 1] == sorted(self.rates[: top + 1]) and self.rates[
            top:
        ] == sorted(self.rates[top:], reverse=True)


KINDS = st.sampled_from(
    [
        Schedule(warmup_steps=10),
        Schedule(warmup_steps=0),
        Schedule(kind="wsd", warmup_steps=5),
        Schedule(kind="linear", warmup_steps=5),
        Schedule(kind="linear", warmup_steps=5, floor=0.0),
        Schedule(kind="constant", warmup_steps=3),
        Schedule(warmup_steps=200),
    ]
)


@given(
    deadline_s=st.sampled_from([12.0, 25.0, 240.0, 3600.0]),
    fit=st.floats(0.2, 5.0),
    planned=st.integers(200, 3000),
    forward=st.floats(0.2, 0.6),
    save=st.floats(0.0, 0.02),
    validations=st.floats(0.01, 2.0),
    first=st.floats(0.0, 0.3),
    noise=st.floats(0.0, 0.4),
    spikes=st.sampled_from([0.0, 0.02]),
    turns=st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(1 / 3, 3.0)), max_size=3),
    late=st.sampled_from([(0, 1), (1, 1), (0, 10)]),
    seed=st.integers(0, 10**6),
    schedule=KINDS,
    limit=st.sampled_from([None, 1.0, 1.5, 100.0]),
)
def test_run_at_any_speed_ends_at_its_deadline_with_a_falling_learning_rate(
    deadline_s,
    fit,
    planned,
    forward,
    save,
    validations,
    first,
    noise,
    spikes,
    turns,
    late,
    seed,
    schedule,
    limit,
):
    """`fit` planned runs fill the deadline at the first pace; steps, validations and saves are
    short."""
    run = Machine(
        deadline_s=deadline_s,
        planned=planned,
        step_s=deadline_s / fit / planned,
        forward=forward,
        save_s=save * deadline_s,
        val_tokens=max(16 * WINDOW, int(validations * planned * 1024 / 4)),
        first_s=first * deadline_s,
        noise=noise,
        spikes=spikes,
        turns=tuple(turns),
        later=late[0],
        every=late[1],
        seed=seed,
        schedule=schedule,
        limit=None if limit is None else int(limit * planned),
    )
    made = run.train()
    # What is begun is ended: one step of slow ones, validation or save.
    alone_s = max(0.0, late[1] * run.longest_s - SHARE * deadline_s)
    assert run.now <= (1 + SHARE) * deadline_s + SECONDS + alone_s + run.spiked_s
    assert run.falls() and min(run.rates) > 0
    assert len(run.told) <= 1
    assert made <= run.limit
    assert made == run.limit or run.now >= 0.8 * deadline_s - 2 * late[1] * run.longest_s


@given(st.integers(100, 5000), st.floats(0.05, 10.0), st.floats(0.0, 0.45), st.integers(0, 1))
def test_a_steady_pace_fills_its_deadline(planned, step_s, first, later):
    """Early, too, by no more than is promised, nor than one step."""
    run = Machine(
        deadline_s=1000.0,
        planned=planned,
        step_s=step_s,
        forward=0.33,
        save_s=1.0,
        val_tokens=50_000,
        later=later,
        first_s=first * 1000.0,
    )
    made = run.train()
    assert run.now <= 1000.0 * (1 + SHARE) + SECONDS
    assert made == planned or run.now >= 1000.0 * (1 - SHARE) - SECONDS - step_s
    if made < planned and step_s < 5.0:
        assert 0.1 <= run.rates[-1] <= 0.105  # Heard a step later, the end may come a step early.


def test_a_machine_as_fast_as_its_trial_follows_the_plan():
    run = Machine(
        deadline_s=1000.0, planned=900, step_s=1.0, forward=0.3, save_s=0.5, val_tokens=20_000
    )
    assert run.train() == 900
    assert (
        run.rates == [learning_rate(run.schedule, 1.0, step, 900) for step in range(900)]
        and not run.told
    )


def test_single_slow_step_does_not_change_the_schedule_replanned_with_one_line():
    run = Machine(
        deadline_s=1000.0, planned=900, step_s=2.0, forward=0.3, save_s=0.5, val_tokens=20_000
    )
    spend = run.spend
    count = 0

    def once_slow(seconds: float) -> float:
        nonlocal count
        count += seconds == run.step_s
        return spend(20 * seconds if count == 250 and seconds == run.step_s else seconds)

    run.spend = once_slow
    made = run.train()
    assert len(run.told) == 1 and run.told[0] < 900
    later = run.steps_seen[120:]
    assert max(later) - min(later) < 0.15 * made


def test_a_pace_that_recovers_gives_the_steps_back():
    run = Machine(
        deadline_s=1000.0,
        planned=900,
        step_s=1.0,
        forward=0.3,
        save_s=0.1,
        val_tokens=20_000,
        turns=((0.0, 3.0), (0.2, 1.0)),
    )
    made = run.train()
    assert min(run.steps_seen) < 400 and made > 700
    assert run.now <= 1000.0 * (1 + SHARE) + SECONDS


def test_run_planned_by_a_trial_on_a_busy_machine_fills_its_time():
    """The trial was four times as slow as the machine is."""
    run = Machine(
        deadline_s=1000.0,
        planned=225,
        limit=10_000,
        step_s=1.0,
        forward=0.3,
        save_s=0.5,
        val_tokens=20_000,
        schedule=Schedule(kind="linear", warmup_steps=10, floor=0.0),
    )
    made = run.train()
    assert 800 < made < 1000 and 1000.0 * (1 - SHARE) - SECONDS <= run.now
    assert run.falls() and run.told and run.told[0] > 225
    # Half way through the time half of the rate is left: the schedule is that of the longer run.
    assert abs(run.rates[made // 2] - 0.5) < 0.05 and run.rates[-1] < 0.01


def test_given_steps_are_a_limit_of_a_run_with_a_time_budget():
    run = Machine(
        deadline_s=1000.0,
        planned=225,
        limit=400,
        step_s=1.0,
        forward=0.3,
        save_s=0.5,
        val_tokens=20_000,
    )
    assert run.train() == 400 and run.falls()
    assert abs(run.rates[-1] - 0.1) < 1e-9


def test_no_step_of_a_run_that_ends_by_its_time_is_wasted_at_a_rate_of_nearly_nothing():
    for seed in range(20):
        run = Machine(
            deadline_s=100.0,
            planned=300,
            limit=10_000,
            step_s=0.5,
            forward=0.3,
            save_s=0.2,
            val_tokens=20_000,
            noise=0.3,
            seed=seed,
            later=seed % 2,
            schedule=Schedule(kind="linear", warmup_steps=10, floor=0.0),
        )
        made = run.train()
        assert sum(rate < 0.1 / made for rate in run.rates) <= 1 + run.later


def test_last_validation_reads_all_where_the_machine_has_become_faster():
    """What was measured while it was busy says nothing of the end."""
    now = [92.0]
    train = replace(TRAIN, steps=50, deadline_s=100.0)
    budget = TimeBudget(train, RunWork(step_tokens=1024), lambda: now[0])
    budget.measure_save(60.0)
    budget.measure_validation(1000, 10.0)
    budget.measure_save(0.2)
    budget.measure_validation(1000, 0.01)
    assert budget.more_windows(WINDOW, least=4, unread=100) == 100
    # One slow save, or one slow validation, does not end it either.
    budget.measure_save(60.0)
    budget.measure_validation(1000, 10.0)
    now[0] = 60.0
    assert budget.more_windows(WINDOW, least=4, unread=100) > 0
    # Where the time is up it ends.
    now[0] = 99.9
    assert budget.more_windows(WINDOW, least=4, unread=100) == 0
