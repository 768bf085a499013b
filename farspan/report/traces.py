"""What workers recorded of single steps: spans by rank and step, as marks of a timeline, as sums,
as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from farspan.domain.results import COMPUTE, Span, Step, Traced
from farspan.report.history import RunHistory
from farspan.report.plan_picture import Mark

#: What a span of a kind is counted as: the three parts of an Estimate's step.
PARTS = {**dict.fromkeys(COMPUTE, "compute"), "collective": "communication", "receive": "waiting"}
#: `down` brings activations from the stage before, `up` gradients from the next one.
Way = Literal["down", "up"]


class Traces:
    """The spans of a run. `steps` are those that every rank has which has any, oldest first."""

    def __init__(self, run: RunHistory) -> None:
        self._spans = {
            rank: {traced.step: traced for traced in history.traced}
            for rank, history in run.histories.items()
        }
        self._told = {
            rank: {
                timed.step.step: timed.step
                for timed in history.steps
                if timed.start.plan == run.history.plan
            }
            for rank, history in run.histories.items()
        }
        self.ranks = [rank for rank, traced in self._spans.items() if traced]
        shared = [set(self._spans[rank]) & set(self._told[rank]) for rank in self.ranks]
        self.steps: list[int] = sorted(set.intersection(*shared)) if shared else []

    def of(self, rank: int, step: int) -> tuple[Traced, Step]:
        """Return what a rank recorded of a step."""
        return self._spans[rank][step], self._told[rank][step]

    def marks(self, rank: int, step: int) -> tuple[Mark, ...]:
        """Return a rank's step in seconds from its own beginning of it."""
        traced, timing = self.of(rank, step)
        began = timing.at - timing.step_s
        return tuple(
            Mark(
                kind="sums" if span.kind == "collective" else span.kind,
                number=0 if span.microbatch is None else span.microbatch + 1,
                start=max(0.0, span.start - began),
                end=max(0.0, span.end - began),
            )
            for span in sorted(traced.spans, key=lambda span: span.start)
        )

    def parts(self, rank: int, step: int) -> dict[str, float]:
        """Seconds of a rank's step by part; `rest` is what no span covers."""
        traced, timing = self.of(rank, step)
        seconds = dict.fromkeys(("compute", "communication", "waiting"), 0.0)
        for span in traced.spans:
            seconds[PARTS[span.kind]] += span.end - span.start
        return {**seconds, "rest": max(0.0, timing.step_s - sum(seconds.values()))}

    def passes(self, ranks: Sequence[int], step: int, kind: str) -> dict[int, float]:
        """When the last of these ranks, which share a clock, ended the pass of each microbatch."""
        ends: dict[int, float] = {}
        for rank in ranks:
            for span in self.of(rank, step)[0].spans:
                if span.kind == kind and span.microbatch is not None:
                    ends[span.microbatch] = max(ends.get(span.microbatch, 0.0), span.end)
        return ends

    def receives(self, ranks: Sequence[int], step: int, way: Way, first: bool) -> dict[int, Span]:
        """Return the last to end of these ranks' receives of each microbatch; `first` is a
        pipeline's first stage, which gets none from before."""
        received: dict[int, Span] = {}
        for rank in ranks:
            came: set[int] = set()
            for span in sorted(self.of(rank, step)[0].spans, key=lambda span: span.start):
                if span.kind != "receive" or span.microbatch is None:
                    continue
                # Of two messages of one microbatch the first comes down and the second up.
                this: Way = "up" if first or span.microbatch in came else "down"
                came.add(span.microbatch)
                if this == way and (
                    span.microbatch not in received or span.end > received[span.microbatch].end
                ):
                    received[span.microbatch] = span
        return received
