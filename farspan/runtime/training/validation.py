"""Which windows of the validation split are read, and what their losses say of all of it.

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
from farspan.domain.corpus import CorpusManifest
from farspan.domain.plan import Plan, Replica, row_quantum
from farspan.runtime.comm.collective import Group
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.training.data import Indices, Windows, permute

#: The last validation of a run reads at most about so many tokens: the standard error of a mean of
#: as many is thousandths of a nat.
MOST_TOKENS = 1 << 20
#: Not the run's seed: runs over one split read the same windows, and can be compared.
SEED = 0


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


class Validation:
    """Reads windows of the validation split; all workers of a run call these together."""

    def __init__(
        self,
        plan: Plan,
        group: Group,
        executor: Executor,
        val: Windows,
        to_device: Callable[[tuple[np.ndarray, np.ndarray]], Batch],
    ) -> None:
        self._plan, self._group, self._executor, self._val, self._to_device = (
            plan,
            group,
            executor,
            val,
            to_device,
        )
        each, count = plan.train.seq_len, val.count
        tokens = plan.train.validate_tokens
        #: Windows that a validation in between reads, and that the last one reads at most.
        self.first = count if not tokens else min(count, -(-tokens // each))
        self.most = (
            count if len(val.tokens) <= MOST_TOKENS else max(self.first, MOST_TOKENS // each)
        )
        self._order = permute(np.arange(self.most, dtype=np.uint64), count, SEED, 0)
        topology = executor.topology
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

    @property
    def of(self) -> int:
        """Targets of the whole split."""
        return max(0, len(self._val.tokens) - 1)

    def read(self, first: int, stop: int) -> LossSums:
        """The losses of these windows, each read once by one worker."""
        chosen = self.windows(first, stop)
        mine = list(self._mine(chosen))
        losses = self._executor.evaluate(
            self._to_device(self._val.read(windows)) for windows in mine
        )
        targets = [float(count) for windows in mine for count in self._val.valid(windows)]
        pairs = list(zip(losses, targets, strict=True)) if losses else []
        sums = self._group.sum(
            sum(losses), sum(loss * loss for loss in losses), sum(a * b for a, b in pairs)
        )
        valid = self._val.valid(chosen)
        return LossSums(len(chosen), int(valid.sum()), *sums, float((valid * valid).sum()))

    def _mine(self, chosen: Indices) -> Iterator[Indices]:
        """The windows of each microbatch that this worker reads: as many microbatches on every
        worker of a replica, all replicas taking turns, each window once."""
        topology, sizes = self._executor.topology, self._sizes
        mine, before = sizes[topology.replica_index], sum(map(sum, sizes[: topology.replica_index]))
        first = before + sum(mine[: topology.batch])
        # The window after the last has no targets: it fills up.
        filled = np.append(chosen, np.full(self.round, self._val.count, np.uint64))
        for start in range(0, len(chosen), self.round):
            yield filled[start + first : start + first + mine[topology.batch]]

    def name(self, count: int, corpus: str) -> str:
        """What the tokens of the first `count` windows are known by; runs with one name have read
        the same."""
        return content_hash(corpus, self._plan.train.seq_len, SEED, count)

    def entropies(
        self, count: int, manifest: CorpusManifest, train: Windows
    ) -> tuple[float, float]:
        """(unigram, bigram) cross-entropy of the targets of the first `count` windows under the
        training split's counts, nats a token."""
        if count == self._val.count and manifest.val.tokens <= EXACT_TOKENS:
            return manifest.unigram_nats, manifest.bigram_nats
        if count not in self._entropies:
            inputs, targets = self._val.read(self.windows(0, count))
            mask = targets >= 0
            entropies = entropies_of(train.tokens, inputs[mask], targets[mask], manifest.vocab_size)
            self._entropies[count] = entropies
        return self._entropies[count]


def _rows(replica: Replica, index: int) -> list[int]:
    """Windows of a microbatch that each batch coordinate of a stage reads: without rows, the fewest
    that it can."""
    stage = replica.stages[index]
    least = row_quantum(stage.mesh, stage.splits)
    return [max(least, replica.part(index, c, 0)) for c in range(len(stage.rows))]
