"""The verdict on a disturbed run, beside the same run undisturbed."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from farspan.domain.run import RunFolder
from farspan.domain.run_events import Started, Step, read_events
from farspan.report.history import follow_events
from tests.faults.scenarios import Scenario

#: Relative difference of losses under another plan, at most.
OTHER_PLAN_TOLERANCE = 1e-5
Verdict = Literal["finished", "ended", "wrong"]


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of a run by step, those that its last model came from, and its plans."""

    losses: dict[int, float]
    #: Hashes of the plans of all its starts.
    plans: tuple[str, ...]
    #: From the first step to the last, with all that came between.
    seconds: float = 0.0


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was made, and what followed. Times are seconds; None where no workers started
    for it."""

    fault: str
    #: Seconds since the epoch.
    at: float
    #: The step that had been made.
    step: int
    seen_s: float | None = None
    next_step_s: float | None = None
    steps_again: int = 0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How the command of a disturbed run ended."""

    struck: tuple[Struck, ...]
    #: Exit codes of the command, one for each time that it was given.
    exits: tuple[int, ...]
    #: The code of the last refusal; None where the run is complete.
    code: str | None
    #: Why the command was ended from outside; empty where it ended by itself.
    hung: str = ""
    #: Of a run that ended with its cause: what it ended with once the cause was gone.
    code_after: str | None = None
    trained: Trained | None = None
    seconds: float


def read_trained(run: RunFolder) -> Trained:
    events = list(read_events(run.events))
    steps = follow_events(events).steps
    times = [event.at for event in events if isinstance(event, Step)]
    return Trained(
        losses={timed.step.step: timed.step.loss for timed in steps},
        plans=tuple(dict.fromkeys(event.plan for event in events if isinstance(event, Started))),
        seconds=times[-1] - times[0] if times else 0.0,
    )


def compare_losses(scenario: Scenario, trained: Trained, calm: Trained) -> str:
    """Return what is wrong with a run's losses; empty where nothing is."""
    expected = set(range(1, scenario.steps + 1))
    if trained.losses.keys() != expected or calm.losses.keys() != expected:
        missing = sorted(expected - trained.losses.keys())
        return (
            f"{len(trained.losses)} of {scenario.steps} steps have a loss; without: {missing[:5]}"
        )
    if not all(map(math.isfinite, trained.losses.values())):
        return "a loss is not finite"
    worst = max(expected, key=lambda step: relative_difference(trained, calm, step))
    difference = relative_difference(trained, calm, worst)
    if trained.plans == calm.plans:
        return f"step {worst}: the loss differs by {difference:.1e}" if difference else ""
    # Replicas that synchronize now and then are another computation under another plan.
    if scenario.technique != "diloco" and difference > OTHER_PLAN_TOLERANCE:
        return f"step {worst}: the loss differs by {difference:.1e} under another plan"
    return ""


def relative_difference(trained: Trained, calm: Trained, step: int) -> float:
    return abs(trained.losses[step] / calm.losses[step] - 1)


def judge(scenario: Scenario, ending: Ending, calm: Trained) -> tuple[Verdict, str]:
    """Return the verdict on a disturbed run, with what is wrong with it."""
    if ending.hung:
        return "wrong", ending.hung
    if not ending.struck and ending.code is None:
        return "wrong", "the fault has not struck"
    if ending.code is not None and ending.code not in scenario.right_ends:
        return "wrong", f"it ended with {ending.code}, exit codes {ending.exits}"
    if ending.code is not None and ending.code_after is not None:
        return "wrong", f"without the fault it ended with {ending.code_after}"
    if ending.trained is None:
        return "wrong", "it has no losses"
    flaw = compare_losses(scenario, ending.trained, calm)
    if flaw:
        return "wrong", flaw
    return ("finished" if ending.code is None else "ended"), ""
