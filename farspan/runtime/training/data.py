"""Which tokens each sample holds: a pure function of (seed, sample index), so that any plan reads
the same run.

A split of N tokens is cut into windows of S inputs; window w predicts tokens w S + 1 ... w S + S,
so every token but the very first is a target exactly once an epoch. Samples 0, 1, 2, ... walk
through all windows in a seeded order, epoch after epoch; step t of a run reads samples [t batch, (t
+ 1) batch), and a plan only says which rank reads which. Where documents are reshuffled, the tokens
of each later epoch are those of the split with its documents in another order; its windows are then
numbered on from those of the epochs before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from farspan.corpus.tokens import Tokens

Indices = npt.NDArray[np.uint64]


def _mix(x: Indices, key: int) -> Indices:
    """splitmix64's finaliser (Steele et al. 2014), keyed: a bijection of 64-bit words."""
    z = x + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index: Indices, size: int, seed: int, epoch: int) -> Indices:
    """A seeded permutation of range(size), evaluated only where asked, in no memory.

    A Feistel network of six rounds over the next even power of two, walked until it lands inside
    range(size) (Black and Rogaway 2002, method "cycle walking").
    """
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half_bits) - np.uint64(1)
    keys = [
        int(_mix(np.array([seed], np.uint64), epoch * 6 + i + 0x9E3779B97F4A7C15)[0])
        for i in range(6)
    ]
    out = index.astype(np.uint64, copy=True)
    pending = np.ones(out.shape, dtype=bool)
    while pending.any():
        left = out[pending] >> half_bits
        right = out[pending] & low
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & low)
        out[pending] = (left << half_bits) | right
        pending &= out >= size
    return out


@dataclass(frozen=True)
class Windows:
    """The windows of one token file: `tokens` (N,) any integer dtype, `seq_len` inputs each."""

    tokens: Tokens
    seq_len: int

    @property
    def count(self) -> int:
        return max(0, -(-(len(self.tokens) - 1) // self.seq_len))

    def valid(self, window: Indices) -> npt.NDArray[np.int64]:
        """How many targets each window has: `seq_len`, fewer in the last, none beyond it."""
        start = window.astype(np.int64) * self.seq_len
        return np.clip(len(self.tokens) - 1 - start, 0, self.seq_len)

    def read(self, window: Indices) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Inputs and targets (rows, seq_len); targets that do not exist are -1, their inputs 0."""
        inputs = np.zeros((len(window), self.seq_len), dtype=np.int64)
        targets = np.full((len(window), self.seq_len), -1, dtype=np.int64)
        for row, (place, valid) in enumerate(
            zip(window.tolist(), self.valid(window).tolist(), strict=True)
        ):
            if valid:
                span = self._span(place, valid + 1)
                inputs[row, :valid] = span[:-1]
                targets[row, :valid] = span[1:]
        return inputs, targets

    def _span(self, window: int, count: int) -> npt.NDArray[np.integer]:
        """The first `count` tokens of a window and what follows it."""
        return self.tokens[window * self.seq_len : window * self.seq_len + count]


@dataclass(frozen=True)
class ReshuffledWindows(Windows):
    """The windows of epoch after epoch, numbered on: of each later one the documents, which begin
    and end at `offsets`, follow one another in a seeded order."""

    offsets: npt.NDArray[np.int64]
    seed: int
    #: By epoch its documents in their order and where each begins; only those read last are kept.
    _orders: dict[int, tuple[Indices, npt.NDArray[np.int64]]] = field(
        default_factory=dict, compare=False
    )

    def valid(self, window: Indices) -> npt.NDArray[np.int64]:
        return super().valid(window % np.uint64(self.count))

    def _span(self, window: int, count: int) -> npt.NDArray[np.integer]:
        epoch, window = divmod(window, self.count)
        if epoch == 0:
            return super()._span(window, count)
        documents, starts = self._order(epoch)
        start = window * self.seq_len
        parts = list[npt.NDArray[np.integer]]()
        at = int(np.searchsorted(starts, start, side="right")) - 1
        while count:
            first = int(self.offsets[documents[at]]) + start - int(starts[at])
            part = self.tokens[
                first : min(first + count, int(self.offsets[documents[at] + np.uint64(1)]))
            ]
            parts.append(part)
            start = start + len(part)
            count = count - len(part)
            at = at + 1
        return np.concatenate(parts)

    def _order(self, epoch: int) -> tuple[Indices, npt.NDArray[np.int64]]:
        if epoch not in self._orders:
            count = len(self.offsets) - 1
            # Another seed than that of the windows.
            documents = permute(np.arange(count, dtype=np.uint64), count, self.seed + 1, epoch)
            lengths = np.diff(self.offsets)[documents]
            while len(self._orders) > 1:  # A step may end one epoch and begin the next.
                self._orders.pop(min(self._orders))
            self._orders[epoch] = documents, np.cumsum(lengths) - lengths
        return self._orders[epoch]


@dataclass(frozen=True)
class Order:
    """Sample index -> window, for every epoch; numbered on from epoch to epoch where documents are
    reshuffled."""

    windows: int
    seed: int
    reshuffled: bool = False

    def window(self, sample: npt.NDArray[np.int64]) -> Indices:
        out = np.empty(len(sample), dtype=np.uint64)
        epochs = sample // self.windows
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            out[mask] = permute(
                (sample[mask] % self.windows).astype(np.uint64), self.windows, self.seed, int(epoch)
            )
            if self.reshuffled:
                out[mask] += np.uint64(epoch * self.windows)
        return out


#: Keys of what else is drawn by sample than the order of windows.
MASKED = 1 << 32
REPLACED = 2 << 32
DROPPED = 3 << 32


def mask(
    inputs: npt.NDArray[np.int64],
    sample: npt.NDArray[np.int64],
    share: float,
    vocabulary: int,
    seed: int,
) -> npt.NDArray[np.int64]:
    """Inputs (rows, seq_len) of these samples with a share of their tokens replaced by others of
    the vocabulary."""
    places = sample[:, None].astype(np.uint64) * np.uint64(inputs.shape[1]) + np.arange(
        inputs.shape[1], dtype=np.uint64
    )
    chosen = (_mix(places, seed + MASKED) >> np.uint64(11)) < np.uint64(share * 2**53)
    others = _mix(places, seed + REPLACED) % np.uint64(vocabulary)
    return np.where(chosen, others.astype(np.int64), inputs)


def dropout_seeds(sample: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int32]:
    """Of each sample the seed of what is dropped when it is read."""
    return _mix(sample.astype(np.uint64), seed + DROPPED).astype(np.uint32).view(np.int32)
