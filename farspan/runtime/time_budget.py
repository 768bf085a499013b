"""How many steps a run makes when its time is short, and how much of its time is used.

The plan's number of steps comes from a trial of a few seconds. A run that follows it alone would
stop at its deadline with the learning rate still high. So rank 0 looks at its clock between steps:
it says how many steps fit, and what share of the time for steps is gone, which the learning rate
follows. The deadline is of the whole run: time is kept back for the last checkpoint, the last
validation and the sample text.
"""

from __future__ import annotations

import msgspec

#: A step's weight in the pace, and how often the pace it counts for at most: one slow step is no
#: trend. Choices, not fits.
WEIGHT, OUTLIER = 0.1, 3.0
#: A new number of steps stands until the run would end by this share of the deadline earlier or
#: later. In the last LATE of the deadline the number follows each step.
CALM, LATE = 0.02, 0.1
#: Another number of steps is reported once a pace was kept for the first share of the deadline, and
#: differs by the second.
RELIABLE, TOLD = 0.1, 0.05
#: Shares of the deadline that the last validation and the sample text may take.
VALIDATION, SAMPLES = 0.1, 0.02
#: Kept back is what takes more than this share of the deadline; and so much of a step may be beyond
#: it.
NOTHING = 1e-3
#: Until it is measured: bytes a second to a disk, and a token's forward pass as a share of its part
#: of a step, of whose arithmetic it is a third.
DISK_BYTES_PER_S, FORWARD = 2e8, 0.5
#: The best weights are a third of a checkpoint.
BEST = 1 / 3
#: Tokens that sample text takes the time of: two texts of 80 tokens, each a pass over about 50 in a
#: batch of one.
SAMPLED_TOKENS = 8_000
#: Of the time that is left the last validation takes this share at a time, so that a slower pace is
#: noticed in time.
CHUNK = 0.4


class RunPaces(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run has learned of its own speed, in seconds; None is not measured yet."""

    #: When its first step had ended, which also compiles.
    began_s: float | None = None
    step_s: float | None = None
    #: A validation's token, and a checkpoint.
    token_s: float | None = None
    save_s: float | None = None


class RunWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has to do beside its steps."""

    step_tokens: int
    validate_every: int = 10**9
    #: Tokens of a validation in between, and of the last one at most.
    validation_tokens: int = 0
    last_tokens: int = 0
    checkpoint_bytes: int = 0
    checkpoint_every_s: float = 1e9


class TimeBudget:
    """Looks at the clock after each step; all times are seconds since the run began, over all its
    starts."""

    def __init__(
        self,
        deadline_s: float,
        planned: int,
        work: RunWork | None = None,
        paces: RunPaces | None = None,
        limit: int | None = None,
    ) -> None:
        """`planned` steps were expected to fit; `limit` are made at most (None: those)."""
        self.deadline_s, self.planned, self.limit = deadline_s, planned, limit or planned
        self.work, self.paces = work or RunWork(step_tokens=1), paces or RunPaces()
        #: The step that ended last in this start, and since when the next one goes on.
        self._since: tuple[int, float] | None = None
        #: The newest of what `paces` has means of: what the end of the run goes by.
        self._newest_token_s: float | None = None
        self._newest_save_s: float | None = None

    # -- what is learned
    #   --------------------------------------------------------------------------------------------

    def stepped(self, step: int, elapsed_s: float) -> None:
        """`step` steps are made. The first of a start does not count: it compiles."""
        paces = self.paces
        if paces.began_s is None:
            paces = msgspec.structs.replace(paces, began_s=elapsed_s)
        if self._since is not None:
            first, since_s = self._since
            taken_s, before_s = (elapsed_s - since_s) / (step - first), paces.step_s
            if before_s is not None:
                weight = 1 - (1 - WEIGHT) ** (step - first)
                taken_s = before_s + weight * (min(taken_s, OUTLIER * before_s) - before_s)
            paces = msgspec.structs.replace(paces, step_s=max(0.0, taken_s))
        self.paces, self._since = paces, (step, elapsed_s)

    def goes_on(self, elapsed_s: float) -> None:
        """What was no step has ended: a validation, or a checkpoint."""
        if self._since is not None:
            self._since = self._since[0], elapsed_s

    def validated(self, tokens: int, seconds: float) -> None:
        """A validation has read so many tokens."""
        if tokens:
            self._newest_token_s = seconds / tokens
            self.paces = msgspec.structs.replace(
                self.paces, token_s=_mean(self.paces.token_s, seconds / tokens)
            )

    def saved(self, seconds: float) -> None:
        """A checkpoint was written."""
        self._newest_save_s = seconds
        self.paces = msgspec.structs.replace(self.paces, save_s=_mean(self.paces.save_s, seconds))

    # -- what follows
    #   --------------------------------------------------------------------------------------------

    @property
    def token_s(self) -> float:
        """Seconds of a token in a validation."""
        if self.paces.token_s is not None:
            return self.paces.token_s
        return FORWARD * (self.paces.step_s or 0.0) / self.work.step_tokens

    @property
    def save_s(self) -> float:
        """Seconds of a checkpoint."""
        return (
            self.work.checkpoint_bytes / DISK_BYTES_PER_S
            if self.paces.save_s is None
            else self.paces.save_s
        )

    @property
    def steps_end_s(self) -> float:
        """When the steps must have ended, so that all that comes after them ends with the
        deadline."""
        smallest_s = self.work.validation_tokens * self.token_s
        validation_s = min(self.work.last_tokens * self.token_s, VALIDATION * self.deadline_s)
        closing_s = self._closing_s(self.token_s, self.save_s)
        after_s = self.save_s + max(smallest_s, validation_s) + closing_s
        return self.deadline_s - after_s if after_s > NOTHING * self.deadline_s else self.deadline_s

    def _closing_s(self, token_s: float, save_s: float) -> float:
        """Seconds after the last validation: best weights, and sample text."""
        return BEST * save_s + min(SAMPLED_TOKENS * token_s, SAMPLES * self.deadline_s)

    def share(self, elapsed_s: float) -> float:
        """Of the time for steps, how much is used: 0 after the first step, 1 at the end."""
        began_s = elapsed_s if self.paces.began_s is None else self.paces.began_s
        whole_s = self.steps_end_s - began_s
        return min(1.0, max(0.0, (elapsed_s - began_s) / whole_s)) if whole_s > 0 else 1.0

    def steps(self, step: int, elapsed_s: float, steps: int) -> int:
        """Steps of the whole run, `steps` so far, now that `step` are made; never above the
        limit."""
        left_s = self.steps_end_s - elapsed_s
        if left_s <= 0:
            return step
        if self.paces.step_s is None:
            return steps
        work = self.work
        each_s = self.paces.step_s + self.token_s * work.validation_tokens / work.validate_every
        each_s *= 1 + self.save_s / work.checkpoint_every_s
        whole_fits = (self.limit - step) * each_s <= left_s
        new = self.limit if whole_fits else step + int(left_s / each_s + NOTHING)
        late = min(left_s, (steps - step) * each_s) < LATE * self.deadline_s
        return new if late or abs(new - steps) * each_s > CALM * self.deadline_s else steps

    def tells(self, elapsed_s: float, steps: int) -> bool:
        """Whether a person should know of so many steps instead of the plan's."""
        kept_s = elapsed_s - (elapsed_s if self.paces.began_s is None else self.paces.began_s)
        sure = self.paces.step_s is not None and kept_s >= RELIABLE * self.deadline_s
        return sure and abs(steps - self.planned) > TOLD * self.planned

    def spares_a_save(self, elapsed_s: float) -> bool:
        """Whether a checkpoint now is worth its time: the last one is not about to be written
        anyway."""
        return self.steps_end_s - elapsed_s > 2 * self.save_s

    def more_windows(self, window_tokens: int, least: int, left: int, elapsed_s: float) -> int:
        """How many of the `left` windows the last validation reads next: `least` at once, or 0 to
        end it. Means of a time when the machine was slower would end it too early, and so would one
        slow measurement: the less of both counts."""
        token_s, save_s = self.token_s, self.save_s
        if self._newest_token_s is not None:
            token_s = min(token_s, self._newest_token_s)
        if self._newest_save_s is not None:
            save_s = min(save_s, self._newest_save_s)
        left_s = self.deadline_s - self._closing_s(token_s, save_s) - elapsed_s
        each_s = token_s * window_tokens
        if left_s < least * each_s or left_s <= 0:
            return 0
        return left if each_s == 0 else min(left, max(least, int(CHUNK * left_s / each_s)))


def _mean(before: float | None, now: float) -> float:
    """What is rarely measured counts as much as all before it."""
    return now if before is None else (before + now) / 2
