"""Live progress on a real terminal emulation (rich's own recording console) and as plain lines."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from farspan.cli.paint import fold_line
from farspan.cli.progress import LINE_INTERVAL_S, TrainingDisplay
from farspan.domain.model import train_flops_per_token
from farspan.domain.plan import Plan
from farspan.domain.run_events import Finished, Rescheduled, Saved, Step, Validated, Warned
from farspan.report.run_progress import RECENT_STEPS
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
    plan = make_plan(400)
    clock = Clock()
    console = piped()
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
    assert span / LINE_INTERVAL_S - 1 <= len(ticks) <= span / LINE_INTERVAL_S + 1
    assert lines[-1].startswith("step 400 · completed all 400 steps after")
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(("peak_flops", "shown"), [(None, "MFU n/a"), (1e12, None)])
def test_facts_by_hand(peak_flops, shown):
    plan = make_plan(100)
    clock = Clock()
    console = piped()
    with TrainingDisplay(plan, console, clock) as progress:
        progress.show(started(START, 0, plan, peak_flops=peak_flops))
        for number in range(1, 12):
            progress.show(one_step(START, number, step_s=0.5 if number != 11 else 60.0, loss=4.0))
            clock.now += LINE_INTERVAL_S
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
    plan = make_plan(1000)
    clock = Clock()
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
        self._step = step
        self._progress = progress

    def __getattr__(self, name: str) -> object:
        self._progress.show(one_step(START, 3))
        return getattr(self._step, name)


def test_steps_may_arrive_while_the_display_is_drawn():
    progress = TrainingDisplay(make_plan(100), piped(), Clock())
    for look in (progress._line_facts, progress._so_far.left_s):
        progress._so_far.recent.clear()
        progress.show(one_step(START, 1))
        progress._so_far.recent.appendleft(Overtaken(one_step(START, 2), progress))
        assert look()


def test_display_of_a_resumed_run_names_the_step_resumed_from():
    plan = make_plan(1000)
    console = piped()
    with TrainingDisplay(plan, console, Clock()) as progress:
        progress.show(started(START, 400, plan))
        progress.show(one_step(START, 401))
    assert lines_of(console)[0] == "resumed after step 400"
    assert lines_of(console)[1].startswith("step 401/1,000")


@pytest.mark.parametrize("width", [30, 60, 80, 120, 200])
def test_the_live_display_is_one_line_of_the_terminal_whose_facts_are_whole(width):
    plan = make_plan(1400)
    clock = Clock()
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
    assert all(len(screen) == 1 and len(screen[0]) <= width for screen in screens)
    (last,) = screens[-1]
    shown = last.strip("━╸╺ ").split(" · ")
    assert shown[0] == "step 601/1,400 43%"
    whole = (
        r"loss \d\.\d{3}",
        "ETA 1 min",
        r"val \d\.\d{3}",
        r"2\d\.\d k tok/s",
        r"saved \d+ s ago",
        r"1\.08 GB",
        "MFU n/a",
    )
    for fact, pattern in zip(shown[1:], whole, strict=False):
        assert re.fullmatch(pattern, fact)
    least = {30: 1, 60: 3, 80: 5, 120: 7, 200: 8}[width]
    assert len(shown) >= least
    assert "━" in last


def test_a_terminal_keeps_what_happened_and_drops_the_display():
    plan = make_plan(100)
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with TrainingDisplay(plan, console, clock) as progress:
        for event in train_events(plan, first=0, last=100, at=START, reason="done"):
            clock.now = event.at
            progress.show(event)
    kept = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert re.findall(r"step (\d+) · validation loss", kept)[-1] == "100"
    assert 4 <= kept.count("validation loss") <= 9
    assert "step 100 · completed all 100 steps" in kept


@pytest.mark.parametrize("count", [12, 400])
def test_validations_do_not_fill_a_terminal(count):
    plan = make_plan(count)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    progress = TrainingDisplay(plan, console, Clock())
    for step in range(1, count + 1):
        progress.show(one_step(START + step, step))
        event = Validated(
            at=START + step,
            step=step,
            loss=5.0,
            bits_per_byte=1.5,
            tokens=17_408,
            of=83_210,
            standard_error=0.031,
            seconds=1.0,
            best=True,
            sample_loss=5.1 if step == count else None,
            sample_tokens=17_408 if step == count else None,
        )
        progress.show(event)
    lines = [line for line in lines_of(console) if line]
    assert 6 <= len(lines) <= 9 and all(len(line) <= 80 for line in lines)
    assert lines[-1] == f"step {count} · validation loss 5.000 ± 0.031 · best so far"


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


def test_end_of_a_resumed_run_counts_the_time_of_earlier_starts():
    console = piped()
    display = TrainingDisplay(make_plan(10), console, Clock())
    display.show(msgspec.structs.replace(started(START), step=3, used_s=100.0))
    display.show(Finished(at=0.0, step=5, reason="deadline", seconds=20.0))
    last = lines_of(console)[-1]
    assert last == "step 5 · used up its time budget after 20 s, 2 min 00 s in all"


def timed(steps: int, most: int | None) -> Plan:
    plan = make_plan(steps)
    train = msgspec.structs.replace(plan.train, deadline_s=100.0, most_steps=most or msgspec.UNSET)
    return msgspec.structs.replace(plan, train=train)


@pytest.mark.parametrize(
    ("most", "places"),
    [
        (None, ["step 1/1,000", "step 2/1,000", "step 3/1,000"]),
        (9000, ["step 1 (10%)", "step 2 (20%)", "step 3 (30%)"]),
    ],
)
def test_progress_of_a_time_budget_goes_forward_whatever_fits_at_the_speed_of_now(most, places):
    plan = timed(1000, most)
    clock = Clock()
    console = piped()
    shares = []
    with TrainingDisplay(plan, console, clock) as progress:
        progress.show(started(START, 0, plan))
        for number, steps in ((1, 1000), (2, 400), (3, 410)):
            clock.now += LINE_INTERVAL_S
            event = one_step(clock.now, number, step_s=0.1)
            progress.show(msgspec.structs.replace(event, at=clock.now, steps=steps))
            shares.append(progress._so_far.share)
        # The steps that are left would take longer than the time that is left.
        assert progress._so_far.left_s() == pytest.approx(70.0)
    assert shares == [pytest.approx(0.1), pytest.approx(0.2), pytest.approx(0.3)]
    assert [line.split(" · ")[0] for line in lines_of(console)] == places


def test_time_to_go_of_a_time_budget_is_that_of_its_steps_where_they_end_earlier():
    plan = timed(100, None)
    progress = None
    progress = TrainingDisplay(plan, piped(), Clock())
    progress.show(started(START, 0, plan))
    progress.show(one_step(START + 1, 50, step_s=0.1))
    assert progress._so_far.left_s() == pytest.approx(5.0)
    assert progress._so_far.share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (
            29,
            "step 4 · at this speed only 29 of 132 steps fit the time budget; the learning-rate "
            "schedule has been shortened",
        ),
        (
            300,
            "step 4 · at this speed 300 steps fit the time budget, not 132; the learning-rate "
            "schedule has been lengthened",
        ),
    ],
)
def test_another_number_of_steps_is_shown_as_it_happens_and_is_no_warning(steps, text):
    console = piped()
    TrainingDisplay(make_plan(132), console, Clock()).show(
        Rescheduled(at=START, step=4, steps=steps, planned=132)
    )
    assert lines_of(console) == [text]


def test_lines_are_folded_between_facts_and_never_inside_a_quantity():
    line = (
        "llama-like, 3 layers x 192, 2.9 M parameters · 1.73 M tokens x 0.39 epochs = 334 steps of "
        "2,048 tokens · predicted 1 min 00 s, 543 MB, validation loss 4.59 (4.29 to 4.89)"
    )
    for columns in range(24, 170):
        lines = fold_line(line, columns).split("\n")
        assert max(map(len, lines)) <= columns
        assert " ".join(" ".join(lines).replace(" · ", " ").split()) == line.replace(" · ", " ")
        for quantity in ("3 layers", "2.9 M", "1.73 M", "1 min 00 s", "543 MB", "2,048 tokens"):
            assert any(quantity in part for part in lines)
    assert fold_line("x" * 200, 80) == "x" * 200


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
    assert "val 4.500 on 17.4 k of 83.2 k tokens" in progress._line_facts()


#: Shows a run with a time budget as `farspan train` does, on the terminal that it is given.
ON_A_TERMINAL = """
import time
import msgspec
from farspan.app.updates import Ended, Training
from farspan.cli.console import Console
from farspan.cli.show_updates import Show
from farspan.domain.run_events import Rescheduled, Warned
from tests.report.fake_run import make_plan, train_events

plan = make_plan(1400)
train = msgspec.structs.replace(plan.train, deadline_s=200.0, most_steps=9000)
plan = msgspec.structs.replace(plan, train=train)
with Show(Console(json=False)) as show:
    show._console.write_facts("13.9 M parameters and " * 9 + " · predicted 1 min 05 s, 1.08 GB")
    show(Training(plan=plan, forecast=None))
    for event in train_events(plan, first=0, last=1400, at=time.time() - 140, reason="deadline"):
        show(event)
        if getattr(event, "step", 0) % 100 == 1:
            show._live._live.refresh()
    show(Warned(at=0.0, message="rank 1 has read 13.9 M tokens, not the " * 4))
    show(Rescheduled(at=0.0, step=4, steps=29, planned=132))
    show(Ended())
"""


@pytest.mark.parametrize("columns", [80, 60])
def test_a_terminal_of_80_columns_shows_one_line_of_progress_and_whole_numbers(columns):
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    child = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL],
        stdin=writer,
        stdout=writer,
        stderr=writer,
        env=environment,
        cwd=root,
    )
    os.close(writer)
    output = b""
    with suppress(OSError):  # The terminal is gone when the program is.
        while piece := os.read(reader, 65536):
            output += piece
    os.close(reader)
    assert child.wait() == 0, output.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert max(map(len, lines)) <= columns
    frames = [line for line in lines if line[0] in "━╸╺"]
    assert frames and all(re.search(r"step [\d,]+ \d+% · loss \d+\.\d{3}", line) for line in frames)
    # No line ends between a number and its unit.
    kept = [line for line in lines if line not in frames]
    assert not [line for line in kept if re.search(r"\d$", line) and "loss" not in line]
    assert not [line for line in lines if re.match(r" *(M|GB|s|min|k|tokens)\b", line)]
    assert len([line for line in lines if "validation loss" in line]) <= 9
    assert "29 of 132 steps" in " ".join(" ".join(lines).split())
