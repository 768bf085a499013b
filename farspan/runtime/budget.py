"""How many steps a run makes when its time is short: all of the plan, or as many as the steps' real pace lets fit.

The plan's number comes from a trial of a few seconds. A run that follows it alone would stop at its deadline with the
learning rate still high; one that knows the number in time lets the rate decay to its end.
"""

from __future__ import annotations

#: A pace is relied on once it was kept for this share of the deadline, so a run is re-planned a few times at most.
RELIABLE = 0.1
#: A new number of steps fills this share of the time that is left. It stands while the run is expected to end between
#: EARLY of the deadline and the deadline itself.
FILL, EARLY = 0.95, 0.8


class TimeBudget:
    """Looks at the clock after each step, and now and then changes how many steps the run has in all."""

    def __init__(self, deadline_s: float, planned: int) -> None:
        self.deadline_s, self.planned = deadline_s, planned
        #: The step and the time since which the pace is taken: after the first step, which also compiles.
        self._since: tuple[int, float] | None = None

    def steps(self, step: int, elapsed_s: float, steps: int) -> int:
        """Steps of the whole run, `steps` so far, now that `step` of them took `elapsed_s`; never above the plan's."""
        if elapsed_s >= self.deadline_s:
            return step
        first, since_s = self._since = self._since or (step, elapsed_s)
        if elapsed_s - since_s < RELIABLE * self.deadline_s:
            return steps
        step_s = (elapsed_s - since_s) / (step - first)
        ends_s = elapsed_s + (steps - step) * step_s
        if ends_s <= self.deadline_s and (steps == self.planned or ends_s >= EARLY * self.deadline_s):
            return steps
        self._since = step, elapsed_s
        return min(self.planned, step + int(FILL * (self.deadline_s - elapsed_s) / step_s))
