"""What workers recorded of single steps: spans by rank and step, as marks of a timeline, as sums,
as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from farspan.domain.run_events import COMPUTE_SPANS, Span, Step, Traced
from farspan.report.history import RunHistory
from farspan.report.plan_picture import Mark

#: What a span of a kind is counted as: the three parts of an Estimate's step.
SPAN_PARTS = {
    **dict.fromkeys(COMPUTE_SPANS, "compute"),
    "collective": "communication",
    "receive": "waiting",
}
#: `down` brings activations from the stage before, `up` gradients from the next one.
Direction = Literal["down", "up"]


class Traces:
    """The spans of a run. `steps` are those that every traced rank has, oldest first."""

    def __init__(self, run: RunHistory) -> None:
        self._spans: dict[int, dict[int, Traced]] = {}
        self._steps: dict[int, dict[int, Step]] = {}
        plan = run.history.plan
        for rank, history in run.histories.items():
            if history.traced:
                steps = [timed.step for timed in history.steps if timed.start.plan == plan]
                self._spans[rank] = {traced.step: traced for traced in history.traced}
                self._steps[rank] = {step.step: step for step in steps}
        self.ranks = list(self._spans)
        shared = [set(self._spans[rank]) & set(self._steps[rank]) for rank in self.ranks]
        self.steps: list[int] = sorted(set.intersection(*shared)) if shared else []

    def of(self, rank: int, step: int) -> tuple[Traced, Step]:
        """Return a rank's record of a step."""
        return self._spans[rank][step], self._steps[rank][step]

    def step_marks(self, rank: int, step: int) -> tuple[Mark, ...]:
        """Return a rank's step in seconds from its own beginning of it."""
        traced, timing = self.of(rank, step)
        began = timing.at - timing.step_s
        marks = []
        for span in sorted(traced.spans, key=lambda span: span.start):
            kind = "sums" if span.kind == "collective" else span.kind
            number = 0 if span.microbatch is None else span.microbatch + 1
            start = max(0.0, span.start - began)
            end = max(0.0, span.end - began)
            marks.append(Mark(kind=kind, number=number, start=start, end=end))
        return tuple(marks)

    def step_parts(self, rank: int, step: int) -> dict[str, float]:
        """Seconds of a rank's step by part; `rest` is what no span covers."""
        traced, timing = self.of(rank, step)
        seconds = dict.fromkeys(("compute", "communication", "waiting"), 0.0)
        for span in traced.spans:
            seconds[SPAN_PARTS[span.kind]] += span.end - span.start
        seconds["rest"] = max(0.0, timing.step_s - sum(seconds.values()))
        return seconds

    def pass_ends(self, ranks: Sequence[int], step: int, kind: str) -> dict[int, float]:
        """Return when the last of these ranks, which share a clock, ended the pass of each
        microbatch."""
        ends: dict[int, float] = {}
        for rank in ranks:
            traced, _ = self.of(rank, step)
            for span in traced.spans:
                if span.kind == kind and span.microbatch is not None:
                    end = ends.get(span.microbatch, 0.0)
                    ends[span.microbatch] = max(end, span.end)
        return ends

    def last_receives(
        self, ranks: Sequence[int], step: int, direction: Direction, first: bool
    ) -> dict[int, Span]:
        """Return the last to end of these ranks' receives of each microbatch; `first` is a
        pipeline's first stage, which gets none from before."""
        received: dict[int, Span] = {}
        for rank in ranks:
            seen: set[int] = set()
            traced, _ = self.of(rank, step)
            for span in sorted(traced.spans, key=lambda span: span.start):
                microbatch = span.microbatch
                if span.kind != "receive" or microbatch is None:
                    continue
                # Of two messages of one microbatch the first comes down and the second up.
                is_up = first or microbatch in seen
                seen.add(microbatch)
                if is_up != (direction == "up"):
                    continue
                latest = received.setdefault(microbatch, span)
                if span.end > latest.end:
                    received[microbatch] = span
        return received
