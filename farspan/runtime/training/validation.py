"""A run's validations: the windows of the validation split that are read, the loss of all of it
that theirs estimate, the best so far, and the reports.

Windows are drawn without replacement in one seeded order, the same for every run over the split:
any first part of it is a sample of the whole split. Validations in between read the same first ones
each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farspan.corpus.entropy import EXACT_TOKENS, ngram_entropies_of
from farspan.domain.corpus import CorpusManifest
from farspan.domain.cost import SourceLoss
from farspan.domain.plan import row_quantum
from farspan.domain.run_events import Validated
from farspan.domain.struct_files import content_hash
from farspan.domain.train import TrainSpec
from farspan.runtime.checkpoint.manifest import TrainerState
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.time_budget import TimeBudget
from farspan.runtime.training.sample_order import (
    Indices,
    MixedWindows,
    interleave,
    shuffle_index,
    split_number,
)
from farspan.runtime.training.worker_parts import Worker

#: The last validation of a run reads at most about this many tokens: the standard error of their
#: mean is thousandths of a nat.
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
        windows = self.windows + other.windows
        tokens = self.tokens + other.tokens
        loss = self.loss + other.loss
        ll = self.ll + other.ll
        lt = self.lt + other.lt
        tt = self.tt + other.tt
        return LossSums(windows, tokens, loss, ll, lt, tt)

    @property
    def mean(self) -> float:
        """Nats a token."""
        return self.loss / max(1, self.tokens)

    def standard_error(self, of: float) -> float | None:
        """Of the mean, as an estimate of that of all `of` windows: of a ratio, from a sample
        without replacement (Cochran 1977, equation 6.13). 0 where all were read, None where fewer
        than two of more were."""
        windows = self.windows
        if windows >= of:
            return 0.0
        if windows < 2:
            return None
        mean = self.mean
        residual = max(0.0, self.ll - 2 * mean * self.lt + mean**2 * self.tt)
        variance = residual * windows / (windows - 1)
        unread = 1 - windows / of
        return math.sqrt(variance * unread) / self.tokens


class ValidationSums(NamedTuple):
    """Of windows of one source or of several: the sums of each source, how many windows each has in
    all, and what each counts in the mean; 0 for what is replayed."""

    parts: tuple[LossSums, ...]
    counts: tuple[int, ...]
    shares: tuple[float, ...]

    @property
    def windows(self) -> int:
        return sum(part.windows for part in self.parts)

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def weights(self) -> list[float]:
        """What each source counts; they sum to 1. Only sources count that were read."""
        shares = [
            share if part.tokens else 0.0
            for part, share in zip(self.parts, self.shares, strict=True)
        ]
        total = sum(shares)
        return [share / total if total else 0.0 for share in shares]

    @property
    def mean(self) -> float:
        """Nats a token."""
        weighted = zip(self.weights, self.parts, strict=True)
        return sum(weight * part.mean for weight, part in weighted)

    def plus(self, other: ValidationSums) -> ValidationSums:
        parts = [own.plus(its) for own, its in zip(self.parts, other.parts, strict=True)]
        return ValidationSums(tuple(parts), self.counts, self.shares)

    def standard_error(self, of: float) -> float | None:
        """Of the mean, as that of `LossSums`; `of` is infinite, or the number of all windows."""
        variance = 0.0
        for weight, part, count in zip(self.weights, self.parts, self.counts, strict=True):
            if not weight:
                continue
            error = part.standard_error(of if math.isinf(of) else count)
            if error is None:
                return None
            variance += (weight * error) ** 2
        return math.sqrt(variance)


class MeasuredLoss(NamedTuple):
    """A validation's losses: of all windows that it read, and of the sample by which all are
    judged; None of those in between, which read no more. `known` where that sample was read
    before."""

    sums: ValidationSums
    sample: ValidationSums
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
        plan = worker.plan
        val = worker.val
        self._plan = plan
        self._val = val
        #: The step whose state was validated last, -1 where it is to be read again; and what the
        #: validations in between read of it.
        self.step = -1
        self._sample = ValidationSums((), (), ())
        seq_len = plan.train.seq_len
        count = val.count
        #: Windows that a validation in between reads, and that the last one reads at most.
        self.first = count
        if tokens := plan.train.validate_tokens:
            self.first = min(count, -(-tokens // seq_len))
        self.most = count
        if len(val.tokens) > MOST_TOKENS:
            self.most = max(self.first, MOST_TOKENS // seq_len)
        #: What each source of a mixture counts in the loss.
        self._shares = _judged_shares(worker.manifest, plan.train)
        if isinstance(val, MixedWindows):
            assert plan.train.shares
            self._counts = tuple(part.count for part in val.parts)
            self._order = interleave(self._counts, plan.train.shares, SEED)[: self.most]
        else:
            self._counts = (count,)
            self._order = shuffle_index(np.arange(self.most, dtype=np.uint64), count, SEED, 0)
        topology = worker.executor.topology
        #: By replica, the windows of a microbatch that each batch coordinate reads.
        self._sizes = list[list[int]]()
        for replica in plan.replicas:
            index = topology.stage_index if replica is topology.replica else 0
            stage = replica.stages[index]
            # A coordinate without rows reads the fewest that it can.
            least = row_quantum(stage.mesh, stage.splits)
            rows = [
                max(least, replica.microbatch_rows(index, c, 0)) for c in range(len(stage.rows))
            ]
            self._sizes.append(rows)
        #: Windows that all workers together read at once.
        self.round = sum(map(sum, self._sizes))
        self._entropies: dict[int, tuple[float, float]] = {}

    def windows(self, first: int, stop: int) -> Indices:
        """Return the windows number `first` to `stop` of the seeded order."""
        return self._order[first:stop]

    def tokens(self, count: int) -> int:
        """Count the targets of the first `count` windows."""
        return int(self._val.valid(self.windows(0, count)).sum())

    def read(self, first: int, stop: int) -> ValidationSums:
        """Evaluate the losses of these windows, each read once by one worker."""
        chosen = self.windows(first, stop)
        val = self._val
        own = list(self._own_windows(chosen))
        batches = (self._to_device(val.read(windows)) for windows in own)
        losses = self._worker.executor.evaluate_batches(batches)
        # Workers that do not compute the loss have none.
        own_windows = np.concatenate(own) if losses else np.empty(0, np.uint64)
        own_parts = self._part_of(own_windows)
        own_targets = val.valid(own_windows)
        parts = range(len(self._shares))
        values = list[float]()
        for part in parts:
            rows = np.flatnonzero(own_parts == part).tolist()
            part_losses = [losses[row] for row in rows]
            targets = own_targets[rows].tolist()
            lt = sum(loss * count for loss, count in zip(part_losses, targets, strict=True))
            values += [sum(part_losses), sum(loss * loss for loss in part_losses), lt]
        values = list(self._worker.group.all_reduce_sum(*values))

        chosen_parts = self._part_of(chosen)
        sums = []
        for part in parts:
            valid = val.valid(chosen[chosen_parts == part])
            loss, ll, lt = values[3 * part : 3 * part + 3]
            tt = float((valid * valid).sum())
            sums.append(LossSums(len(valid), int(valid.sum()), loss, ll, lt, tt))
        return ValidationSums(tuple(sums), self._counts, self._shares)

    def _part_of(self, windows: Indices) -> NDArray[np.int64]:
        """Return the source of each window, 0 of a single one."""
        if isinstance(self._val, MixedWindows):
            return split_number(windows)[0]
        return np.zeros(len(windows), np.int64)

    def _own_windows(self, chosen: Indices) -> Iterator[Indices]:
        """Yield the windows of each microbatch that this worker reads: the same number on every
        worker of a replica, the replicas one after another, each window once."""
        topology = self._worker.executor.topology
        replica = topology.replica_index
        sizes = self._sizes[replica]
        before = sum(map(sum, self._sizes[:replica])) + sum(sizes[: topology.batch])
        # The window after the last has no targets: it fills up.
        padding = np.full(self.round, self._val.padding, np.uint64)
        filled = np.append(chosen, padding)
        for start in range(before, before + len(chosen), self.round):
            yield filled[start : start + sizes[topology.batch]]

    # -- what a run does with them
    #   --------------------------------------------------------------------------------------------

    def measure(self, step: int, budget: TimeBudget, *, last: bool) -> MeasuredLoss | None:
        """Return the loss on the same windows each time, from where the last validation reads on;
        None where nothing of it is new."""
        began = self._monotonic()
        known = step == self.step
        sample = self._sample if known else self.read_timed(0, self.first, budget)
        sums = sample
        if last:
            sums = self._read_on(sample, budget)
        if known and sums == sample:
            return None
        return MeasuredLoss(sums, sample, last, known, self._monotonic() - began)

    def read_timed(self, first: int, stop: int, budget: TimeBudget) -> ValidationSums:
        """Read windows `first` to `stop`, and let the time budget know how long that took."""
        began = self._monotonic()
        sums = self.read(first, stop)
        budget.measure_validation(sums.tokens, self._monotonic() - began)
        return sums

    def _read_on(self, sums: ValidationSums, budget: TimeBudget) -> ValidationSums:
        """Read the losses of all windows that the last validation has time for, including those of
        `sums`: rank 0 decides how many more are read at a time."""
        group = self._worker.group
        while (remaining := self.most - sums.windows) > 0:
            count = 0.0
            if group.rank == 0:
                least = min(remaining, self.round)
                count = budget.more_windows(self._plan.train.seq_len, least, remaining)
            more = int(group.all_reduce_sum(count)[0])
            if more == 0:
                break
            read = self.read_timed(sums.windows, sums.windows + more, budget)
            sums = sums.plus(read)
        return sums

    def update_best(self, step: int, measured: MeasuredLoss) -> bool:
        """Return whether a validation's sample has the smallest loss so far; a validation that is
        clearly worse than the best adds to the stale ones, any other ends their row."""
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
        standard_error = measured.sample.standard_error(math.inf) or 0.0
        noise = CLEARLY * standard_error
        state.stale = state.stale + 1 if loss > state.best_loss + noise else 0
        return False

    def report(self, step: int, measured: MeasuredLoss, best: bool) -> Validated:
        """Return the event of a validation; of the last one with its loss on the sample that others
        read."""
        manifest = self._worker.manifest
        val = manifest.val
        sums = measured.sums
        mean = sums.mean
        unigram = None
        bigram = None
        if self._worker.group.rank == 0:
            unigram, bigram = self._entropies_of(sums)
        sample_loss = None
        sample_tokens = None
        if measured.last:
            sample_loss = measured.sample.mean
            sample_tokens = measured.sample.tokens
        # Runs with one name have read the same windows.
        key = [manifest.hash, self._plan.train.seq_len, SEED, sums.windows]
        by_source: dict[str, SourceLoss] | msgspec.UnsetType = msgspec.UNSET
        bits_per_byte = mean / math.log(2) * val.tokens / val.text_bytes
        if manifest.parts:
            key.append(self._plan.train.shares)
            by_source = _describe_sources(manifest, sums)
            by_part = zip(sums.weights, by_source.values(), strict=True)
            bits_per_byte = sum(weight * source.bits_per_byte for weight, source in by_part)
        name = content_hash(*key)
        standard_error = sums.standard_error(self._val.count)
        all_targets = self._val.num_targets
        return Validated(
            at=self._worker.clock(),
            step=step,
            loss=mean,
            tokens=sums.tokens,
            seconds=measured.seconds,
            best=best,
            bits_per_byte=bits_per_byte,
            of=all_targets,
            standard_error=standard_error,
            read=name,
            unigram_nats=unigram,
            bigram_nats=bigram,
            sample_loss=sample_loss,
            sample_tokens=sample_tokens,
            sources=by_source,
        )

    def _entropies_of(self, sums: ValidationSums) -> tuple[float, float]:
        """(unigram, bigram) cross-entropy of the targets that `sums` are of under the training
        split's counts, nats a token; of a mixture weighed as its loss."""
        manifest = self._worker.manifest
        count = sums.windows
        is_whole = not manifest.parts and count == self._val.count
        if is_whole and manifest.val.tokens <= EXACT_TOKENS:
            return manifest.unigram_nats, manifest.bigram_nats
        if count not in self._entropies:
            windows = self.windows(0, count)
            inputs, targets = self._val.read(windows)
            part_of = self._part_of(windows)
            train = self._worker.train.tokens
            unigram = 0.0
            bigram = 0.0
            for part, weight in enumerate(sums.weights):
                mask = (targets >= 0) & (part_of == part)[:, None]
                if weight:
                    nats = ngram_entropies_of(
                        train, inputs[mask], targets[mask], manifest.vocab_size
                    )
                    unigram += weight * nats[0]
                    bigram += weight * nats[1]
            self._entropies[count] = unigram, bigram
        return self._entropies[count]


def _judged_shares(manifest: CorpusManifest, train: TrainSpec) -> tuple[float, ...]:
    """Return the weight of each source in the loss: its share of the training; 0 for what is
    replayed."""
    if not manifest.parts:
        return (1.0,)
    assert train.shares
    judged = zip(manifest.parts, train.shares, strict=True)
    return tuple(0.0 if part.replay else share for part, share in judged)


def _describe_sources(manifest: CorpusManifest, sums: ValidationSums) -> dict[str, SourceLoss]:
    """Return the loss of each source by its name."""
    assert manifest.parts
    described = {}
    for part, own, count in zip(manifest.parts, sums.parts, sums.counts, strict=True):
        bits_per_byte = own.mean / math.log(2) * part.val.tokens / part.val.text_bytes
        described[part.name] = SourceLoss(
            loss=own.mean,
            bits_per_byte=bits_per_byte,
            tokens=own.tokens,
            standard_error=own.standard_error(count),
        )
    return described
