"""What trackers get of a run's events: each step once, or again where a tracker can forget it."""

from __future__ import annotations

from collections.abc import Mapping

from farspan.domain.run_events import Event, Sampled, Started, Step, Validated
from farspan.report.trackers import Point


class PointFilter:
    """Makes points of a run's events, from the first event on, and leaves out those that a tracker
    has.

    A start after a checkpoint repeats steps. A tracker that `rewinds` gets them again; the others
    keep the values of the first time, as their curves would go back.
    """

    def __init__(self, last_steps: Mapping[str, int], *, rewinds: bool, num_sent: int = 0) -> None:
        #: The last step that the tracker has of each kind of points.
        self.last_steps = dict(last_steps)
        self._rewinds = rewinds
        #: Events that the tracker has followed before, and those that were taken.
        self._num_sent = num_sent
        self.num_taken = 0
        #: Tokens that the run has read up to each step, by its number.
        self._tokens = [0]

    def find_rewind(self, event: Event) -> int | None:
        """Return the step of a start that a tracker is to go back to, if there is one."""
        if not self._rewinds or not isinstance(event, Started):
            return None
        if self.num_taken < self._num_sent:
            return None
        if max(self.last_steps.values(), default=-1) <= event.step:
            return None
        for kind, last in self.last_steps.items():
            self.last_steps[kind] = min(last, event.step)
        return event.step

    def take(self, event: Event) -> Point | None:
        """Return the point of an event; None where it has none, or the tracker has it."""
        self.num_taken += 1
        if isinstance(event, Step):
            self._count_tokens(event)
        point = self._point_of(event)
        if point is None or point.step <= self.last_steps.get(point.kind, -1):
            return None
        self.last_steps[point.kind] = point.step
        return point

    def _count_tokens(self, event: Step) -> None:
        # The steps before a start that another machine has the events of are not known.
        before = self._tokens[min(event.step, len(self._tokens)) - 1]
        del self._tokens[event.step :]
        self._tokens.append(before + event.tokens)

    def _point_of(self, event: Event) -> Point | None:
        match event:
            case Step():
                values = {
                    "train/loss": event.loss,
                    "train/lr": event.lr,
                    "train/tokens": float(self._tokens[-1]),
                    "train/tokens_per_s": event.tokens / event.step_s,
                    "memory/bytes": float(event.memory_bytes),
                }
                if event.grad_norm is not None:
                    values["train/grad_norm"] = event.grad_norm
                return Point(kind="train", step=event.step, at=event.at, values=values)
            case Validated():
                values = {"val/loss": event.loss, "val/bits_per_byte": event.bits_per_byte}
                return Point(kind="val", step=event.step, at=event.at, values=values)
            case Sampled():
                kind = f"samples/{event.prompt or 'no prompt'}"
                texts = {kind: f"{event.prompt}{event.text}"}
                return Point(kind=kind, step=event.step, at=event.at, texts=texts)
        return None
