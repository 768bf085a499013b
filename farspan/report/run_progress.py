"""How far a run is, from its events so far: steps, loss, speed, checkpoints and the time to go."""

from __future__ import annotations

from collections import deque
from statistics import median

from farspan.domain.run_events import Event, Finished, Recovered, Saved, Started, Step, Validated
from farspan.domain.train import TrainSpec

#: Speeds and times to go are medians over these last steps.
RECENT_STEPS = 50


class SoFar:
    """Takes events one at a time, oldest first. A start after a checkpoint resumes there, at a
    speed of its own.

    One thread takes events. Others may look meanwhile: they copy the recent steps before they go
    through them.
    """

    def __init__(self, train: TrainSpec) -> None:
        """`train` is the plan's; a time budget may change its number of steps."""
        self.train = train
        self.recent: deque[Step] = deque(maxlen=RECENT_STEPS)
        self.started: Started | None = None
        self.validated: Validated | None = None
        #: Checkpoints that this start may have gone on from or has written, by step.
        self._saves = list[Saved]()
        self.recovered: Recovered | None = None
        self.finished: Finished | None = None
        #: The last step that was made, and the steps of the whole run as its time budget has it
        #: now.
        self.step = 0
        self.steps = train.steps
        #: When the last event was, in seconds since the epoch.
        self.at = 0.0
        #: Steps of this start, and the seconds that its validations took; saves go on beside steps.
        self._made = 0
        self._pauses_s = 0.0

    def take(self, event: Event) -> None:
        self.at = event.at
        self.finished = event if isinstance(event, Finished) else None
        match event:
            case Started():
                self.started = event
                self.step = event.step
                self._made = 0
                self._pauses_s = 0.0
                self.recent.clear()
                # A later one is gone: its disk was lost, or it was damaged.
                self._saves = [saved for saved in self._saves if saved.step <= event.step]
            case Recovered():
                self.recovered = event
            case Step():
                # Counted first: who looks divides by it as soon as there is a step.
                self._made += 1
                self.step = event.step
                self.steps = event.steps or self.steps
                self.recent.append(event)
            case Validated():
                self.validated = event
                self._pauses_s = self._pauses_s + event.seconds
            case Saved():
                self._saves.append(event)

    @property
    def saved(self) -> Saved | None:
        """The newest checkpoint; a start from an earlier step has none that is later."""
        return self._saves[-1] if self._saves else None

    @property
    def tokens_per_s(self) -> float:
        """The median of the recent steps; there must be one."""
        return median(step.tokens / step.step_s for step in tuple(self.recent))

    @property
    def total(self) -> int | None:
        """Steps of the whole run, which do not change while it runs; None where its time alone
        decides them."""
        return None if self.train.most_steps else self.train.steps

    @property
    def place(self) -> str:
        """`601/1,400`, or `601` where nobody knows the total."""
        return f"{self.step:,}" if self.total is None else f"{self.step:,}/{self.total:,}"

    @property
    def elapsed_s(self) -> float:
        """Seconds of work so far, as a time budget counts them."""
        if self.started is None:
            return 0.0
        return self.started.used_s + max(0.0, self.at - self.started.at)

    @property
    def share(self) -> float:
        """How far the run is, 0 to 1: by its steps, or by its time where that is further. The
        steps that its time allows go up and down with the machine's speed; this does not."""
        by_steps = self.step / self.train.step_limit
        if self.finished is not None and self.finished.reason == "deadline":
            return 1.0
        if self.train.deadline_s is None:
            return by_steps
        return min(1.0, max(by_steps, self.elapsed_s / self.train.deadline_s))

    def left_s(self) -> float:
        """Seconds until the last step: each takes the median of recent ones and its share of
        validations. A time budget ends the run earlier."""
        recent = tuple(self.recent)
        each_s = median(step.step_s for step in recent)
        each_s += self._pauses_s / self._made
        left_s = (self.train.step_limit - recent[-1].step) * each_s
        if self.train.deadline_s is not None:
            left_s = min(left_s, self.train.deadline_s - self.elapsed_s)
        return max(0.0, left_s)
