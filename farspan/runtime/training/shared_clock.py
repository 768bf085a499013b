"""A run's time as all its workers follow it: rank 0 looks at its clock and says, all hear the same.

Without a time budget nothing here changes anything: the plan's steps are made, and the learning
rate follows them.
"""

from __future__ import annotations

from collections.abc import Callable

from farspan.domain.plan import Plan
from farspan.runtime.time_budget import RunPaces, RunWork, TimeBudget


class SharedClock:
    """Of one worker. `elapsed` gives the seconds of the run so far, over all its starts."""

    def __init__(self, plan: Plan, work: RunWork, elapsed: Callable[[], float]) -> None:
        self._plan, self._work, self._elapsed = plan, work, elapsed
        self.budget: TimeBudget | None = None
        self.told = False
        self.go_on_from(0, 0.0, None, told=False)

    def go_on_from(self, step: int, share: float, paces: RunPaces | None, *, told: bool) -> None:
        """Take what a checkpoint of `step` knows; `told`: a person knows that the steps are not the
        plan's."""
        train = self._plan.train
        if train.deadline_s is not None:
            self.budget = TimeBudget(
                train.deadline_s, train.steps, self._work, paces, train.step_limit
            )
        #: Share of the time for steps that was used, and at which step.
        self.share, self._share_at, self.told = share, step, told
        #: Steps in all as rank 0 said last, which it may hear a step later; and whether it has yet
        #: to report them.
        self._said: int | None = None
        self._reports = False

    @property
    def paces(self) -> RunPaces | None:
        return None if self.budget is None else self.budget.paces

    @property
    def late(self) -> bool:
        """Whether the time budget is used up."""
        return self.budget is not None and self._elapsed() >= self.budget.deadline_s

    # -- what takes how long
    #   -------------------------------------------------------------------------------------------

    def stepped(self, step: int) -> bool:
        """A step has ended. Whether it is not known yet how long a validation takes: the same on
        all workers."""
        if self.budget is None:
            return False
        self.budget.stepped(step, self._elapsed())
        return self.budget.paces.token_s is None

    def goes_on(self) -> None:
        """What was no step has ended."""
        if self.budget is not None:
            self.budget.goes_on(self._elapsed())

    def validated(self, tokens: int, seconds: float) -> None:
        if self.budget is not None:
            self.budget.validated(tokens, seconds)

    def saved(self, seconds: float) -> None:
        if self.budget is not None:
            self.budget.saved(seconds)

    # -- what rank 0 says, and all hear
    #   --------------------------------------------------------------------------------

    def say(self, step: int, steps: int, save: bool) -> tuple[int, float, bool]:
        """On rank 0: steps in all, `steps` so far; the share of the time for them that is used; and
        whether to save."""
        said, elapsed_s = steps if self._said is None else self._said, self._elapsed()
        if self.budget is None:
            return said, 0.0, save
        self._said = self.budget.steps(step, elapsed_s, said)
        save = save and self.budget.spares_a_save(elapsed_s)
        if step < self._said and not self.told and self.budget.tells(elapsed_s, self._said):
            # How long a save takes is then known, and no resumption reports it again.
            self.told = self._reports = save = True
        return self._said, self.budget.share(elapsed_s), save

    def hear(self, step: int, share: float, save: bool) -> bool:
        """Take what rank 0 has said. Whether the steps in all are to be reported, on rank 0 and
        once a run, when all save."""
        # Never less: the learning rate would rise.
        self.share, self._share_at = max(self.share, share), step
        reports = self._reports and save
        self._reports = self._reports and not save
        return reports

    def followed(self, step: int, steps: int) -> float:
        """How far a run of `steps` is at an update by its time: from what rank 0 said last, evenly
        to 1 at the last."""
        if self.share == 0.0:  # Nothing was said yet, or there is no time budget.
            return 0.0
        left, gone = steps - 1 - self._share_at, step - self._share_at
        # The last step is at 1, and so are those after it for which there was time after all.
        self.share = self.share + (1 - self.share) * gone / left if gone < left else 1.0
        self._share_at = step
        return self.share

    def more_windows(self, window_tokens: int, least: int, left: int) -> int:
        """On rank 0, how many more windows the last validation reads next; 0 ends it."""
        return (
            left
            if self.budget is None
            else self.budget.more_windows(window_tokens, least, left, self._elapsed())
        )
