"""How a run ended, or changed its length, in a person's words."""

from __future__ import annotations

from farspan.domain.train import TrainSpec
from farspan.domain.units import counted

#: By `Finished.reason`; "unfinished" is a run without an end.
ENDINGS = {
    "done": "completed all steps",
    "deadline": "used up its time budget",
    "early-stop": "stopped early: validation no longer improved",
    "interrupted": "interrupted",
    "preempted": "preempted",
    "failed": "failed",
    "unfinished": "still running, or killed",
}


def ending(reason: str, step: int) -> str:
    """Describe how a run ended after `step` steps: `completed all 132 steps`."""
    if reason != "done":
        return ENDINGS.get(reason, reason)
    return "completed its only step" if step == 1 else f"completed all {counted(step, 'step')}"


def ended_at(reason: str, step: int, train: TrainSpec) -> str:
    """Add the step to `ending`: `used up its time budget · 148 steps`."""
    text = ending(reason, step)
    if reason == "done":
        return text
    if train.most_steps:
        return f"{text} · {counted(step, 'step')}"
    return f"{text} · step {step_of(step, train)}"


def step_of(step: int, train: TrainSpec) -> str:
    """Format `148 of 334`, or `148` where the run's time alone decides how many it makes."""
    return f"{step:,}" if train.most_steps else f"{step:,} of {train.steps:,}"
