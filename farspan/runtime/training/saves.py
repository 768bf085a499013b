"""When checkpoints are written and waited for in a training, what is said of them, and when a run
ends without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from farspan.domain.results import Event, Saved
from farspan.runtime.checkpoint.checkpoint import Unsaved
from farspan.runtime.checkpoint.checkpointer import Checkpointer, Written
from farspan.runtime.checkpoint.manifest import TrainerState
from farspan.runtime.comm.collective import Group
from farspan.runtime.time_budget import TimeBudget


class Saves:
    """All workers of a run call these together, but for `tell`. Without `background` a checkpoint
    is written before training goes on."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        group: Group,
        budget: TimeBudget,
        emit: Callable[[Event], None],
        warn: Callable[[str], None],
        clock: Callable[[], float],
        *,
        background: bool,
    ) -> None:
        self._checkpointer, self._group, self._budget = checkpointer, group, budget
        self._emit, self._warn, self._clock, self._background = emit, warn, clock, background
        #: The step whose state was written last or is being written, -1 where it is to be written
        #: again.
        self.step = -1

    def save(
        self,
        state: TrainerState,
        *,
        due: bool = False,
        last: bool = False,
        wait: bool = False,
    ) -> bool:
        """Begin to write a checkpoint, unless it was the last one; wait for it where training does
        not go on. Returns whether it is there, or on its way. Raises Refusal (disk-full) where the
        run cannot go on without."""
        if state.step != self.step:
            self._settle(state.steps)
            try:
                self._checkpointer.begin(state, self._group, due=due)
            except Unsaved as error:
                self._warn(
                    self._checkpointer.excuse(
                        str(error), state.step, state.steps, due=due, last=last
                    )
                )
                return False
            self.step = state.step
        return (
            True
            if self._background and not (last or wait)
            else self._settle(state.steps, last=last)
        )

    def best(self, state: TrainerState, path: Path) -> None:
        """Write the model alone, and wait for it. Raises Unsaved."""
        self._settle(state.steps)
        self._checkpointer.begin(state, self._group, best=path)
        self._checkpointer.settle(self._group)

    def _settle(self, steps: int, *, last: bool = False) -> bool:
        """Wait for the checkpoint that is being written, if any; whether it is in its place."""
        step, due = self._checkpointer.pending
        try:
            self._told(self._checkpointer.settle(self._group))
        except Unsaved as error:
            self.step = -1
            self._warn(self._checkpointer.excuse(str(error), step, steps, due=due, last=last))
            return False
        return True

    def tell(self) -> None:
        """Rank 0 says that a checkpoint is in its place, as soon as it is."""
        self._told(self._checkpointer.poll())

    def _told(self, written: Written | None) -> None:
        if written is None:
            return
        self._budget.saved(written.seconds)
        self._emit(
            Saved(
                at=self._clock(),
                step=written.step,
                path=str(written.path),
                size_bytes=written.size,
                seconds=written.seconds,
            )
        )
