"""A run's validations: which windows of the validation split are read, what their losses say of
all of it, whether one is the best so far, and what is reported.

Windows are drawn without replacement in one seeded order, the same for every run over the split:
the first so many of it are a sample of the whole split, however many they are. Validations in
between read the same first ones each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from farspan.corpus.entropy import EXACT_TOKENS, entropies_of
from farspan.domain.codec import content_hash
from farspan.domain.plan import Replica, row_quantum
from farspan.domain.results import Validated
from farspan.runtime.checkpoint.layout import TrainerState
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.time_budget import TimeBudget
from farspan.runtime.training.data import Indices, permute
from farspan.runtime.training.parts import Worker

#: The last validation of a run reads at most about so many tokens: the standard error of a mean of
#: as many is thousandths of a nat.
MOST_TOKENS = 1 << 20
#: Not the run's seed: runs over one split read the same windows, and can be compared.
SEED = 0
#: A validation is clearly worse than the best where its loss is higher by so many standard errors
#: of the mean. Both read the same windows, so what separates them varies about a tenth as much as
#: the mean itself: twice that.
CLEARLY = 0.2


class LossSums(NamedTuple):
    """Of some windows: how many there are, their targets, and the sums of their losses l (nats) and
    targets t, of l l, l t and t t."""

    windows: int = 0
    tokens: int = 0
    loss: float = 0.0
    ll: float = 0.0
    lt: float = 0.0
    tt: float = 0.0

    def plus(self, other: LossSums) -> LossSums:
        return LossSums(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def mean(self) -> float:
        """Nats a token."""
        return self.loss / max(1, self.tokens)

    def standard_error(self, of: float) -> float | None:
        """Of the mean, as an estimate of that of all `of` windows: of a ratio, from a sample
        without replacement (Cochran 1977, equation 6.13). 0 where all were read, None where fewer
        than two of more were."""
        if self.windows >= of:
            return 0.0
        if self.windows < 2:
            return None
        residual = max(0.0, self.ll - 2 * self.mean * self.lt + self.mean**2 * self.tt)
        variance = residual * self.windows / (self.windows - 1)
        return math.sqrt(variance * (1 - self.windows / of)) / self.tokens


class Measured(NamedTuple):
    """A validation's losses: of all windows that it read, and of the sample by which all are
    judged; None of those in between, which read no more. `known` where that sample was read
    before."""

    sums: LossSums
    sample: LossSums
    last: bool
    known: bool
    seconds: float


class Validation:
    """Reads windows of the validation split and judges their losses; all workers of a run call
    `measure` and `read` together."""

    def __init__(
        self,
        worker: Worker,
        state: TrainerState,
        to_device: Callable[[tuple[np.ndarray, np.ndarray]], Batch],
        monotonic: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._state = state
        self._to_device = to_device
        self._monotonic = monotonic
        self._plan = worker.plan
        self._val = worker.val
        #: The step whose state was validated last, -1 where it is to be read again; and what the
        #: validations in between read of it.
        self.step = -1
        self._sample = LossSums()
        plan = worker.plan
        val = worker.val
        each = plan.train.seq_len
        count = val.count
        tokens = plan.train.validate_tokens
        #: Windows that a validation in between reads, and that the last one reads at most.
        self.first = count if not tokens else min(count, -(-tokens // each))
        self.most = (
            count if len(val.tokens) <= MOST_TOKENS else max(self.first, MOST_TOKENS // each)
        )
        self._order = permute(np.arange(self.most, dtype=np.uint64), count, SEED, 0)
        topology = worker.executor.topology
        self._sizes = [
            _rows(r, topology.stage_index if r is topology.replica else 0) for r in plan.replicas
        ]
        #: Windows that all workers together read at once.
        self.round = sum(map(sum, self._sizes))
        self._entropies: dict[int, tuple[float, float]] = {}

    def windows(self, first: int, stop: int) -> Indices:
        """The windows number `first` to `stop` of the seeded order."""
        return self._order[first:stop]

    def tokens(self, count: int) -> int:
        """Targets of the first so many windows."""
        return int(self._val.valid(self.windows(0, count)).sum())

    def read(self, first: int, stop: int) -> LossSums:
        """The losses of these windows, each read once by one worker."""
        chosen = self.windows(first, stop)
        mine = list(self._mine(chosen))
        losses = self._worker.executor.evaluate(
            self._to_device(self._val.read(windows)) for windows in mine
        )
        targets = [float(count) for windows in mine for count in self._val.valid(windows)]
        pairs = list(zip(losses, targets, strict=True)) if losses else []
        sums = self._worker.group.sum(
            sum(losses), sum(loss * loss for loss in losses), sum(a * b for a, b in pairs)
        )
        valid = self._val.valid(chosen)
        return LossSums(len(chosen), int(valid.sum()), *sums, float((valid * valid).sum()))

    def _mine(self, chosen: Indices) -> Iterator[Indices]:
        """The windows of each microbatch that this worker reads: as many microbatches on every
        worker of a replica, all replicas taking turns, each window once."""
        topology = self._worker.executor.topology
        sizes = self._sizes
        mine = sizes[topology.replica_index]
        before = sum(map(sum, sizes[: topology.replica_index]))
        first = before + sum(mine[: topology.batch])
        # The window after the last has no targets: it fills up.
        filled = np.append(chosen, np.full(self.round, self._val.count, np.uint64))
        for start in range(0, len(chosen), self.round):
            yield filled[start + first : start + first + mine[topology.batch]]

    # -- what a run does with them
    #   --------------------------------------------------------------------------------------------

    def measure(self, step: int, budget: TimeBudget, *, last: bool) -> Measured | None:
        """Return the loss on the same windows each time, from where the last validation reads on;
        None where nothing of it is new."""
        began = self._monotonic()
        known = step == self.step
        sample = sums = self._sample if known else self.read_timed(0, self.first, budget)
        if last:
            sums = self._read_on(sample, budget)
        if known and sums == sample:
            return None
        return Measured(sums, sample, last, known, self._monotonic() - began)

    def read_timed(self, first: int, stop: int, budget: TimeBudget) -> LossSums:
        """Read windows `first` to `stop`, and let the time budget know how long that took."""
        began = self._monotonic()
        sums = self.read(first, stop)
        budget.validated(sums.tokens, self._monotonic() - began)
        return sums

    def _read_on(self, sums: LossSums, budget: TimeBudget) -> LossSums:
        """The losses of all windows that the last validation has time for, those of `sums` among
        them: rank 0 says how many more are read at a time."""
        left = self.most - sums.windows
        while left > 0:
            mine = 0
            least = min(left, self.round)
            if self._worker.group.rank == 0:
                mine = budget.more_windows(self._plan.train.seq_len, least, left)
            (more,) = map(int, self._worker.group.sum(mine))
            if more == 0:
                break
            sums = sums.plus(self.read_timed(sums.windows, sums.windows + more, budget))
            left -= more
        return sums

    def judge(self, step: int, measured: Measured) -> bool:
        """Whether no validation's sample had so small a loss; counted where it is clearly worse,
        with those since the best before it."""
        self.step = step
        self._sample = measured.sample
        if measured.known:
            return False
        loss = measured.sample.mean
        state = self._state
        if state.best_loss is None or loss < state.best_loss:
            state.best_loss = loss
            state.stale = 0
            return True
        noise = CLEARLY * (measured.sample.standard_error(math.inf) or 0.0)
        state.stale = state.stale + 1 if loss > state.best_loss + noise else 0
        return False

    def report(self, step: int, measured: Measured, best: bool) -> Validated:
        """Return the event of a validation; of the last one with its loss on the sample that others
        read."""
        worker = self._worker
        sums = measured.sums
        val = worker.manifest.val
        sample = measured.sample if measured.last else None
        unigram = None
        bigram = None
        if worker.group.rank == 0:
            unigram, bigram = self._entropies_of(sums.windows)
        return Validated(
            at=worker.clock(),
            step=step,
            loss=sums.mean,
            tokens=sums.tokens,
            seconds=measured.seconds,
            best=best,
            bits_per_byte=sums.mean / math.log(2) * val.tokens / val.text_bytes,
            # Targets of the whole split.
            of=max(0, len(self._val.tokens) - 1),
            standard_error=sums.standard_error(self._val.count),
            # Runs with one name have read the same windows.
            read=content_hash(worker.manifest.hash, self._plan.train.seq_len, SEED, sums.windows),
            unigram_nats=unigram,
            bigram_nats=bigram,
            sample_loss=None if sample is None else sample.mean,
            sample_tokens=None if sample is None else sample.tokens,
        )

    def _entropies_of(self, count: int) -> tuple[float, float]:
        """(unigram, bigram) cross-entropy of the targets of the first `count` windows under the
        training split's counts, nats a token."""
        manifest = self._worker.manifest
        if count == self._val.count and manifest.val.tokens <= EXACT_TOKENS:
            return manifest.unigram_nats, manifest.bigram_nats
        if count not in self._entropies:
            inputs, targets = self._val.read(self.windows(0, count))
            mask = targets >= 0
            train = self._worker.train.tokens
            entropies = entropies_of(train, inputs[mask], targets[mask], manifest.vocab_size)
            self._entropies[count] = entropies
        return self._entropies[count]


def _rows(replica: Replica, index: int) -> list[int]:
    """Windows of a microbatch that each batch coordinate of a stage reads: without rows, the fewest
    that it can."""
    stage = replica.stages[index]
    least = row_quantum(stage.mesh, stage.splits)
    return [max(least, replica.part(index, c, 0)) for c in range(len(stage.rows))]
