"""Live progress on a real terminal emulation (rich's own recording console) and as plain lines."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from farspan.cli.progress import LINE_S, TrainingDisplay
from farspan.domain.model import train_flops_per_token
from farspan.domain.results import Finished, Saved, Step, Validated, Warned
from farspan.report.so_far import RECENT_STEPS
from tests.report.fake_run import MODEL, START, make_plan, one_step, started, train_events


class Clock:
    """Time that goes on only when told to."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def piped() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def lines_of(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


def test_plain_lines_come_by_time_and_at_every_validation_save_warning_and_end():
    plan, clock, console = make_plan(400), Clock(), piped()
    events = train_events(plan, first=0, last=400, at=START, reason="done")
    events.insert(
        50,
        Warned(at=START + 5, message="[bold]half of the corpus[/bold] " + "is one document " * 9),
    )
    with TrainingDisplay(plan, console, clock) as progress:
        for event in events:
            clock.now = event.at
            progress.show(event)
    lines = lines_of(console)
    validations = [event for event in events if isinstance(event, Validated)]
    assert len([line for line in lines if "validation loss" in line]) == len(validations)
    assert len([line for line in lines if "saved" in line]) == len(
        [e for e in events if isinstance(e, Saved)]
    )
    assert (
        sum(line.startswith("warning: [bold]half of the corpus[/bold] is one") for line in lines)
        == 1
    )
    ticks = [line for line in lines if "ETA" in line]
    span = events[-1].at - START
    assert span / LINE_S - 1 <= len(ticks) <= span / LINE_S + 1
    assert lines[-1].startswith("step 400 · finished every step after")
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(("peak_flops", "shown"), [(None, "MFU n/a"), (1e12, None)])
def test_facts_by_hand(peak_flops, shown):
    plan, clock, console = make_plan(100), Clock(), piped()
    with TrainingDisplay(plan, console, clock) as progress:
        progress.show(started(START, 0, plan, peak_flops=peak_flops))
        for number in range(1, 12):
            progress.show(one_step(START, number, step_s=0.5 if number != 11 else 60.0, loss=4.0))
            clock.now += LINE_S
        progress.show(
            Validated(
                at=START, step=11, loss=4.5, bits_per_byte=1.5, tokens=9, seconds=11.0, best=True
            )
        )
        assert progress._so_far.left_s() == pytest.approx(89 * (0.5 + 1.0))
    flops = train_flops_per_token(MODEL, 256)
    shown = shown or f"MFU {flops * 4096 / 1e12:.1%}"
    assert (
        lines_of(console)[10]
        == f"step 11/100 · loss 4.000 · 4,096 tokens/s · {shown} · 1 GB · ETA 44 s"
    )
    assert (
        lines_of(console)[11] == "step 11 · validation loss 4.500 · 1.500 bits a byte · best so far"
    )


def test_time_left_is_hardly_changed_by_a_few_slow_steps():
    plan, clock = make_plan(1000), Clock()
    progress = TrainingDisplay(plan, piped(), clock)
    progress.show(started(START, 0, plan))
    for number in range(1, 101):
        progress.show(one_step(START, number, step_s=0.1 if number % 10 else 5.0))
    assert progress._so_far.left_s() == pytest.approx(90.0)
    for number in range(101, 101 + RECENT_STEPS):
        progress.show(one_step(START, number, step_s=0.2))
    assert progress._so_far.left_s() == pytest.approx((1000 - 100 - RECENT_STEPS) * 0.2)


class Overtaken:
    """A step while which is looked at the next one arrives, as it may while the display draws in
    its own thread."""

    def __init__(self, step: Step, progress: TrainingDisplay) -> None:
        self._step, self._progress = step, progress

    def __getattr__(self, name: str) -> object:
        self._progress.show(one_step(START, 3))
        return getattr(self._step, name)


def test_steps_may_arrive_while_the_display_is_drawn():
    progress = TrainingDisplay(make_plan(100), piped(), Clock())
    for look in (progress._facts, progress._so_far.left_s):
        progress._so_far.recent.clear()
        progress.show(one_step(START, 1))
        progress._so_far.recent.appendleft(Overtaken(one_step(START, 2), progress))
        assert look()


def test_display_of_a_resumed_run_names_the_step_resumed_from():
    plan, console = make_plan(1000), piped()
    with TrainingDisplay(plan, console, Clock()) as progress:
        progress.show(started(START, 400, plan))
        progress.show(one_step(START, 401))
    assert lines_of(console)[0] == "resumed after step 400"
    assert lines_of(console)[1].startswith("step 401/1,000")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_live_display_fits_the_terminal(width):
    plan, clock = make_plan(1400), Clock()
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=24, color_system=None
    )
    events = train_events(plan, first=0, last=700, at=START, reason=None)
    screens = []
    progress = TrainingDisplay(plan, console, clock)
    for event in events:
        clock.now = event.at + 3.0
        progress.show(event)
        if isinstance(event, Step) and event.step % 100 == 1:
            probe = Console(file=io.StringIO(), width=width, color_system=None)
            probe.print(progress._render())
            screens.append(probe.file.getvalue().splitlines())
    assert all(len(line) <= width for screen in screens for line in screen)
    last = "\n".join(screens[-1])
    assert re.search(r"━.* 601/1,400 · 43% · ETA 1 min \d\d s", last)
    assert re.search(
        r"loss \d\.\d{3} · val \d\.\d{3} · 2\d,\d{3} tokens/s · MFU n/a · 1.08 GB",
        " ".join(last.split()),
    )
    assert re.search(r"saved step 400, \d+ s ago", last)


def test_a_terminal_keeps_what_happened_and_drops_the_display():
    plan, clock = make_plan(100), Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with TrainingDisplay(plan, console, clock) as progress:
        for event in train_events(plan, first=0, last=100, at=START, reason="done"):
            clock.now = event.at
            progress.show(event)
    kept = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert kept.count("validation loss") == 15
    assert "step 100 · finished every step" in kept


def test_before_anything_happened_there_is_something_to_see():
    probe = Console(file=io.StringIO(), width=80)
    progress = TrainingDisplay(make_plan(10), probe, Clock())
    probe.print(progress._render())
    progress.show(started(START))
    probe.print(progress._render())
    assert lines_of(probe) == ["starting workers", "first step"]


def test_display_reports_the_end_of_a_run_for_every_reason():
    for reason in ("done", "deadline", "early-stop", "interrupted", "failed", "some new reason"):
        console = piped()
        TrainingDisplay(make_plan(10), console, Clock()).show(
            Finished(at=0.0, step=5, reason=reason, seconds=1.0)
        )
        assert (
            lines_of(console)[0].startswith("step 5 · ") and "after 1.0 s" in lines_of(console)[0]
        )


def test_steps_in_all_and_time_to_go_are_those_that_the_time_budget_has_now():
    plan, clock, console = make_plan(1000), Clock(), piped()
    with TrainingDisplay(plan, console, clock) as progress:
        progress.show(started(START, 0, plan))
        for number, steps in ((1, 1000), (2, 400), (3, 410)):
            clock.now += LINE_S
            progress.show(msgspec.structs.replace(one_step(START, number, step_s=0.1), steps=steps))
        assert progress._so_far.left_s() == pytest.approx(40.7)
    assert [line.split(" · ")[0] for line in lines_of(console)] == [
        "step 1/1,000",
        "step 2/400",
        "step 3/410",
    ]


def test_display_of_a_validation_includes_its_number_of_tokens():
    console = piped()
    progress = TrainingDisplay(make_plan(10), console, Clock())
    progress.show(one_step(START, 4))
    progress.show(
        Validated(
            at=START,
            step=5,
            loss=4.5,
            bits_per_byte=1.5,
            tokens=17_408,
            of=83_210,
            standard_error=0.031,
            seconds=1.0,
            best=False,
        )
    )
    last = lines_of(console)[-1]
    assert last == (
        "step 5 · validation loss 4.500 ± 0.031 (standard error) on 17,408 of 83,210 tokens · "
        "1.500 bits a byte"
    )
    assert "val 4.500 on 17.4 k of 83.2 k tokens" in progress._facts()
