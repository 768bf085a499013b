"""Which tokens each sample holds: a pure function of (seed, sample index), so that any plan reads the same run.

A split of N tokens is cut into windows of S inputs; window w predicts tokens w S + 1 ... w S + S, so every token but
the very first is a target exactly once an epoch. Samples 0, 1, 2, ... walk through all windows in a seeded order,
epoch after epoch; step t of a run reads samples [t batch, (t + 1) batch), and a plan only says which rank reads which.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint64]


def _mix(x: Indices, key: int) -> Indices:
    """splitmix64's finaliser (Steele et al. 2014), keyed: a bijection of 64-bit words."""
    z = x + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index: Indices, size: int, seed: int, epoch: int) -> Indices:
    """A seeded permutation of range(size), evaluated only where asked, in no memory.

    A Feistel network of six rounds over the next even power of two, walked until it lands inside range(size)
    (Black and Rogaway 2002, method "cycle walking").
    """
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half_bits) - np.uint64(1)
    keys = [int(_mix(np.array([seed], np.uint64), epoch * 6 + i + 0x9E3779B97F4A7C15)[0]) for i in range(6)]
    out = index.astype(np.uint64, copy=True)
    pending = np.ones(out.shape, dtype=bool)
    while pending.any():
        left, right = out[pending] >> half_bits, out[pending] & low
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & low)
        out[pending] = (left << half_bits) | right
        pending &= out >= size
    return out


@dataclass(frozen=True)
class Windows:
    """The windows of one token file: `tokens` (N,) any integer dtype, `seq_len` inputs each."""

    tokens: npt.NDArray[np.integer]
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
        starts = window.astype(np.int64) * self.seq_len
        for row, (start, valid) in enumerate(zip(starts, self.valid(window), strict=True)):
            inputs[row, :valid] = self.tokens[start : start + valid]
            targets[row, :valid] = self.tokens[start + 1 : start + 1 + valid]
        return inputs, targets


@dataclass(frozen=True)
class Order:
    """Sample index -> window, for every epoch."""

    windows: int
    seed: int

    def window(self, sample: npt.NDArray[np.int64]) -> Indices:
        out = np.empty(len(sample), dtype=np.uint64)
        epochs = sample // self.windows
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            out[mask] = permute((sample[mask] % self.windows).astype(np.uint64), self.windows, self.seed, int(epoch))
        return out
