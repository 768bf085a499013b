"""A run's validations: what each reads, whether its loss is the best so far, and what is
reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from farspan.domain.results import Validated
from farspan.runtime.checkpoint.layout import TrainerState
from farspan.runtime.time_budget import TimeBudget
from farspan.runtime.training.parts import Worker
from farspan.runtime.training.validation import LossSums, Validation

#: A validation is clearly worse than the best where its loss is higher by so many standard errors
#: of the mean. Both read the same windows, so what separates them varies about a tenth as much as
#: the mean itself: twice that.
CLEARLY = 0.2


class Measured(NamedTuple):
    """A validation's losses: of all windows that it read, and of the sample by which all are
    judged; None of those in between, which read no more. `known` where that sample was read
    before."""

    sums: LossSums
    sample: LossSums
    last: bool
    known: bool
    seconds: float


class Validations:
    """All workers of a run call `measure` and `read` together."""

    def __init__(
        self,
        worker: Worker,
        validation: Validation,
        state: TrainerState,
        budget: TimeBudget,
        monotonic: Callable[[], float],
    ) -> None:
        self._worker, self._validation, self._budget, self._monotonic = (
            worker,
            validation,
            budget,
            monotonic,
        )
        self._state = state
        #: The step whose state was validated last, -1 where it is to be read again.
        self.step = -1
        self._sample = LossSums()

    def measure(self, step: int, *, last: bool) -> Measured | None:
        """The loss on the same windows each time, from where the last validation reads on; None
        where nothing of it is new."""
        began, known = self._monotonic(), step == self.step
        sample = sums = self._sample if known else self.read(0, self._validation.first)
        if last:
            sums = self._read_on(sample)
        if known and sums == sample:
            return None
        return Measured(sums, sample, last, known, self._monotonic() - began)

    def judge(self, step: int, measured: Measured) -> bool:
        """Whether no validation's sample had so small a loss; counted where it is clearly worse,
        with those since the best before it."""
        self.step, self._sample = step, measured.sample
        if measured.known:
            return False
        loss, state = measured.sample.mean, self._state
        if state.best_loss is None or loss < state.best_loss:
            state.best_loss = loss
            state.stale = 0
            return True
        noise = CLEARLY * (measured.sample.standard_error(math.inf) or 0.0)
        state.stale = state.stale + 1 if loss > state.best_loss + noise else 0
        return False

    def told(self, step: int, measured: Measured, best: bool) -> Validated:
        """What is reported of a validation; of the last one also its loss on the sample that others
        read."""
        worker, read, nats = self._worker, self._validation, (None, None)
        val, sums, sample = (
            worker.manifest.val,
            measured.sums,
            measured.sample if measured.last else None,
        )
        if worker.group.rank == 0:
            nats = read.entropies(sums.windows, worker.manifest, worker.train)
        return Validated(
            at=worker.clock(),
            step=step,
            loss=sums.mean,
            tokens=sums.tokens,
            seconds=measured.seconds,
            best=best,
            bits_per_byte=sums.mean / math.log(2) * val.tokens / val.text_bytes,
            of=read.of,
            standard_error=sums.standard_error(worker.val.count),
            read=read.name(sums.windows, worker.manifest.hash),
            unigram_nats=nats[0],
            bigram_nats=nats[1],
            sample_loss=None if sample is None else sample.mean,
            sample_tokens=None if sample is None else sample.tokens,
        )

    def read(self, first: int, stop: int) -> LossSums:
        """The losses of the validation's windows `first` to `stop`."""
        began = self._monotonic()
        sums = self._validation.read(first, stop)
        self._budget.validated(sums.tokens, self._monotonic() - began)
        return sums

    def _read_on(self, sums: LossSums) -> LossSums:
        """The losses of all windows that the last validation has time for, those of `sums` among
        them: rank 0 says how many more are read at a time."""
        left = self._validation.most - sums.windows
        while left > 0:
            mine, least = 0, min(left, self._validation.round)
            if self._worker.group.rank == 0:
                mine = self._budget.more_windows(self._worker.plan.train.seq_len, least, left)
            (more,) = map(int, self._worker.group.sum(mine))
            if more == 0:
                break
            sums = sums.plus(self.read(sums.windows, sums.windows + more))
            left -= more
        return sums
