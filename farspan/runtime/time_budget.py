"""A run's time budget: how many steps fit, and how much of its time is used.

The plan's number of steps comes from a trial of a few seconds. A run that follows it alone would
stop at its deadline with the learning rate still high. So rank 0 looks at its clock between steps:
it proposes how many steps fit, and what share of the time for steps is used, which the learning
rate follows on all workers. The deadline is of the whole run: time is kept back for the last
checkpoint, the last validation and the sample text. Without a deadline the plan's steps are made,
and the learning rate follows them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farspan.domain.train import TrainSpec

#: A step's weight in the pace, and how often the pace it counts for at most: one slow step is no
#: trend. Choices, not fits.
WEIGHT = 0.1
OUTLIER = 3.0
#: A new number of steps stands until the run would end by this share of the deadline earlier or
#: later. In the last LATE of the deadline the number follows each step.
CALM = 0.02
LATE_SHARE = 0.1
#: Another number of steps is reported once a pace was kept for the first share of the deadline, and
#: differs by the second.
RELIABLE = 0.1
REPORTED_CHANGE = 0.05
#: Shares of the deadline that the last validation and the sample text may take.
VALIDATION = 0.1
SAMPLES = 0.02
#: Kept back is what takes more than this share of the deadline; and so much of a step may be beyond
#: it.
NOTHING = 1e-3
#: Until it is measured: bytes a second to a disk, and a token's forward pass as a share of its part
#: of a step, of whose arithmetic it is a third.
DISK_BYTES_PER_S = 2e8
FORWARD = 0.5
#: The best weights are a third of a checkpoint.
BEST_WEIGHTS_SHARE = 1 / 3
#: Tokens that sample text takes the time of: two texts of 80 tokens, each a pass over about 50 in a
#: batch of one.
SAMPLED_TOKENS = 8_000
#: Of the time that is left the last validation takes this share at a time, so that a slower pace is
#: noticed in time.
VALIDATION_CHUNK = 0.4


class BudgetState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint keeps of a time budget. Seconds are None until they are measured."""

    #: When the first step of the run ended, which also compiles.
    began_s: float | None = None
    step_s: float | None = None
    #: A validation's token, and a checkpoint.
    token_s: float | None = None
    save_s: float | None = None
    #: The share of the time for steps that the learning rate has followed so far.
    share: float = 0.0
    #: Whether it was reported that the steps are not the plan's.
    told: bool = False


class RunWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has to do in addition to its steps."""

    step_tokens: int
    validate_every: int = 10**9
    #: Tokens of a validation in between, and of the last one at most.
    validation_tokens: int = 0
    last_tokens: int = 0
    checkpoint_bytes: int = 0
    checkpoint_every_s: float = 1e9


class TimeBudget:
    """One worker's view of the run's time. `elapsed` gives the seconds of the run so far, over all
    its starts. Without a deadline nothing here changes the run."""

    def __init__(self, train: TrainSpec, work: RunWork, elapsed: Callable[[], float]) -> None:
        self._deadline_s = train.deadline_s or 0.0
        self._planned = train.steps
        self._limit = train.step_limit
        self._work = work
        self._elapsed = elapsed
        self._limited = train.deadline_s is not None
        self.resume(0, BudgetState())

    def resume(self, step: int, state: BudgetState) -> None:
        """Continue after `step` with the state that a checkpoint has."""
        self.state = state
        #: The step at which `state.share` was used.
        self._share_at = step
        #: Steps in all as rank 0 proposed last, which workers may receive a step later; and whether
        #: it has yet to report them.
        self._proposed: int | None = None
        self._reports = False
        #: The step that ended last in this start, and when.
        self._since: tuple[int, float] | None = None
        #: The newest of what the state has means of: what the end of the run goes by.
        self._newest_token_s: float | None = None
        self._newest_save_s: float | None = None

    @property
    def late(self) -> bool:
        """Whether the time is used up."""
        return self._limited and self._elapsed() >= self._deadline_s

    # -- what is measured
    #   --------------------------------------------------------------------------------------------

    def measure_step(self, step: int) -> bool:
        """Measure the steps up to `step`; the first of a start does not count, as it compiles.
        Returns whether it is not known yet how long a validation takes: the same on all workers."""
        if not self._limited:
            return False
        elapsed_s = self._elapsed()
        state = self.state
        if state.began_s is None:
            state.began_s = elapsed_s
        if self._since is not None:
            first, since_s = self._since
            taken_s = (elapsed_s - since_s) / (step - first)
            before_s = state.step_s
            if before_s is not None:
                weight = 1 - (1 - WEIGHT) ** (step - first)
                taken_s = before_s + weight * (min(taken_s, OUTLIER * before_s) - before_s)
            state.step_s = max(0.0, taken_s)
        self._since = (step, elapsed_s)
        return state.token_s is None

    def restart_step_clock(self) -> None:
        """Leave a validation or a checkpoint, which has just ended, out of the next step's time."""
        if self._since is not None:
            step, _ = self._since
            self._since = (step, self._elapsed())

    def measure_validation(self, tokens: int, seconds: float) -> None:
        """Measure a validation of `tokens` targets."""
        if tokens:
            token_s = seconds / tokens
            self._newest_token_s = token_s
            self.state.token_s = _running_mean(self.state.token_s, token_s)

    def measure_save(self, seconds: float) -> None:
        """Measure a checkpoint."""
        self._newest_save_s = seconds
        self.state.save_s = _running_mean(self.state.save_s, seconds)

    # -- what rank 0 proposes, and all follow
    #   --------------------------------------------------------------------------------------------

    def propose_steps(self, step: int, steps: int, save: bool) -> tuple[int, float, bool]:
        """On rank 0, after `step` of so far `steps` in all: return the steps in all, the share of
        the time for them that is used, and whether to save."""
        elapsed_s = self._elapsed()
        proposed = steps if self._proposed is None else self._proposed
        if not self._limited:
            return proposed, 0.0, save
        self._proposed = self._fit_steps(step, elapsed_s, proposed)
        # The last checkpoint is not about to be written anyway.
        save = save and self._steps_end_s - elapsed_s > 2 * self._save_s
        if step < self._proposed and not self.state.told and self._differs_from_plan(elapsed_s):
            # How long a save takes is then known, and no resumption reports it again.
            self.state.told = self._reports = save = True
        return self._proposed, self._used_share(elapsed_s), save

    def take_proposal(self, step: int, share: float, save: bool) -> bool:
        """Take what rank 0 has proposed. Returns whether the steps in all are to be reported: on
        rank 0, once a run, when all save."""
        # Never less: the learning rate would rise.
        self.state.share = max(self.state.share, share)
        self._share_at = step
        reports = self._reports and save
        self._reports = self._reports and not save
        return reports

    def lr_progress(self, step: int, steps: int) -> float:
        """Return how far a run of `steps` is at an update by its time: from what rank 0 proposed
        last, evenly to 1 at the last step."""
        share = self.state.share
        if share == 0.0:  # Nothing was proposed yet, or there is no time budget.
            return 0.0
        remaining = steps - 1 - self._share_at
        done = step - self._share_at
        # The last step is at 1, and so are those after it for which there was time after all.
        self.state.share = share + (1 - share) * done / remaining if done < remaining else 1.0
        self._share_at = step
        return self.state.share

    def more_windows(self, window_tokens: int, least: int, unread: int) -> int:
        """On rank 0, return how many of `unread` windows the last validation reads next: `least` at
        once, or 0 to end it. Means of a time when the machine was slower would end it too early,
        and so would one slow measurement: the less of both counts."""
        if not self._limited:
            return unread
        token_s = self._token_s
        save_s = self._save_s
        if self._newest_token_s is not None:
            token_s = min(token_s, self._newest_token_s)
        if self._newest_save_s is not None:
            save_s = min(save_s, self._newest_save_s)
        left_s = self._deadline_s - self._closing_s(token_s, save_s) - self._elapsed()
        each_s = token_s * window_tokens
        if left_s < least * each_s or left_s <= 0:
            return 0
        if each_s == 0:
            return unread
        chunk = int(VALIDATION_CHUNK * left_s / each_s)
        return min(unread, max(least, chunk))

    # -- what follows from the measurements
    #   --------------------------------------------------------------------------------------------

    @property
    def _token_s(self) -> float:
        """Seconds of a token in a validation."""
        if self.state.token_s is not None:
            return self.state.token_s
        step_s = self.state.step_s or 0.0
        return FORWARD * step_s / self._work.step_tokens

    @property
    def _save_s(self) -> float:
        """Seconds of a checkpoint."""
        if self.state.save_s is not None:
            return self.state.save_s
        return self._work.checkpoint_bytes / DISK_BYTES_PER_S

    @property
    def _steps_end_s(self) -> float:
        """When the steps must have ended, so that all that comes after them ends with the
        deadline."""
        token_s = self._token_s
        save_s = self._save_s
        smallest_s = self._work.validation_tokens * token_s
        validation_s = min(self._work.last_tokens * token_s, VALIDATION * self._deadline_s)
        after_s = save_s + max(smallest_s, validation_s) + self._closing_s(token_s, save_s)
        if after_s <= NOTHING * self._deadline_s:
            return self._deadline_s
        return self._deadline_s - after_s

    def _closing_s(self, token_s: float, save_s: float) -> float:
        """Seconds after the last validation: best weights, and sample text."""
        samples_s = min(SAMPLED_TOKENS * token_s, SAMPLES * self._deadline_s)
        return BEST_WEIGHTS_SHARE * save_s + samples_s

    def _used_share(self, elapsed_s: float) -> float:
        """Return the share of the time for steps that is used: 0 after the first step, 1 at the
        end."""
        began_s = elapsed_s if self.state.began_s is None else self.state.began_s
        whole_s = self._steps_end_s - began_s
        if whole_s <= 0:
            return 1.0
        used = (elapsed_s - began_s) / whole_s
        return min(1.0, max(0.0, used))

    def _fit_steps(self, step: int, elapsed_s: float, steps: int) -> int:
        """Return the steps of the whole run, `steps` so far, after `step` of them; never above the
        limit."""
        left_s = self._steps_end_s - elapsed_s
        if left_s <= 0:
            return step
        if self.state.step_s is None:
            return steps
        work = self._work
        # A step with its share of validations and checkpoints.
        each_s = self.state.step_s + self._token_s * work.validation_tokens / work.validate_every
        each_s *= 1 + self._save_s / work.checkpoint_every_s
        fitting = self._limit
        if (self._limit - step) * each_s > left_s:
            fitting = step + int(left_s / each_s + NOTHING)
        late = min(left_s, (steps - step) * each_s) < LATE_SHARE * self._deadline_s
        shift_s = abs(fitting - steps) * each_s
        return fitting if late or shift_s > CALM * self._deadline_s else steps

    def _differs_from_plan(self, elapsed_s: float) -> bool:
        """Whether a person should know of the proposed steps instead of the plan's."""
        state = self.state
        steps = self._proposed or 0
        if state.step_s is None or state.began_s is None:
            return False
        if elapsed_s - state.began_s < RELIABLE * self._deadline_s:
            return False
        return abs(steps - self._planned) > REPORTED_CHANGE * self._planned


def _running_mean(before: float | None, now: float) -> float:
    """Average a rare measurement with the mean of all before it."""
    return now if before is None else (before + now) / 2
