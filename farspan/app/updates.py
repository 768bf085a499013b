"""Updates that a function of the API reports while it works: one callback takes all, by type.

Updates are `Note`, `Waiting`, `Ranked`, `Tried`, `Chosen`, `Training` and `Faulted` of this file,
`Planned` of `plans`, the events of a run (`domain.run_events`), the `Work` on an index, and
`Ended`, after which no live display is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from farspan.domain.units import counted

if TYPE_CHECKING:  # A search reports notes alone, and is to answer at once.
    from farspan.domain.forecast import Forecast
    from farspan.domain.plan import Plan
    from farspan.domain.problems import Problem
    from farspan.domain.trial import Trial
    from farspan.planning.candidate import Candidate
    from farspan.planning.ranking import Ranking
    from farspan.planning.select_by_trials import Selection

Progress = Callable[[object], None]


class Note(msgspec.Struct, frozen=True):
    """A line for people."""

    text: str

    def __str__(self) -> str:
        return self.text


class Waiting(Note, frozen=True):
    """A line for people about what a run waits for."""


class Ranked(msgspec.Struct, frozen=True):
    """Every technique, priced, before one is chosen."""

    ranking: Ranking

    def __str__(self) -> str:
        return f"priced {self.ranking!r}"


class Tried(msgspec.Struct, frozen=True):
    """A plan was run for a few steps."""

    candidate: Candidate
    trial: Trial

    def __str__(self) -> str:
        from farspan.planning.selection_outcome import trial_line

        return trial_line(self.candidate, self.trial)


class Chosen(msgspec.Struct, frozen=True):
    """A plan was chosen by trials, or by predictions that no trial would change."""

    selection: Selection

    def __str__(self) -> str:
        from farspan.planning.selection_outcome import explain_selection

        return explain_selection(self.selection)


class Training(msgspec.Struct, frozen=True):
    """Workers start; the events of their run follow."""

    plan: Plan
    forecast: Forecast | None = None

    def __str__(self) -> str:
        devices = counted(len(self.plan.devices), "device")
        steps = counted(self.plan.train.steps, "step")
        return f"training: {self.plan.technique} on {devices}, {steps}"


class Faulted(msgspec.Struct, frozen=True):
    """Workers of a run were lost, and it starts again by itself: why, when that was seen (seconds
    since the epoch), the last step that was reported, and the message for people."""

    problem: Problem
    at: float
    step: int
    text: str

    def __str__(self) -> str:
        return self.text


class Ended(msgspec.Struct, frozen=True):
    """What was going on has ended, well or not."""

    def __str__(self) -> str:
        return "ended"


def ignore_update(update: object) -> None:
    """Take an update and do nothing."""


def note_reporter(progress: Progress) -> Callable[[str], None]:
    """Return a function that reports a line as a `Note`: what the layers below call."""
    return lambda text: progress(Note(text))
