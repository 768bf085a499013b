"""The tokens of each sample: a pure function of (seed, sample index), so that any plan reads
the same run.

A split of N tokens is cut into windows of S inputs; window w predicts tokens w S + 1 ... w S + S,
so every token but the very first is a target exactly once an epoch. Samples 0, 1, 2, ... walk
through all windows in a seeded order, epoch after epoch; step t of a run reads samples [t batch, (t
+ 1) batch), and a plan only determines which rank reads which. Where documents are reshuffled, the
tokens of each later epoch are those of the split with its documents in another order; its windows
are then numbered on from those of the epochs before.

Each source of a mixture has windows and an order of its own. Every MIXTURE_BLOCK samples hold the
sources by their shares, in a seeded order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from farspan.corpus.token_files import Tokens, read_rows
from farspan.domain.train import TrainSpec

Indices = npt.NDArray[np.uint64]


def _mix_bits(x: Indices, key: int) -> Indices:
    """splitmix64's finaliser (Steele et al. 2014), keyed: a bijection of 64-bit words."""
    z = x + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shuffle_index(index: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Evaluate a seeded permutation of range(size) at some indices only, in no memory.

    A Feistel network of six rounds over the next even power of two, walked until it lands inside
    range(size) (Black and Rogaway 2002, method "cycle walking").
    """
    last_index = max(size - 1, 1)
    half_bits = np.uint64((last_index.bit_length() + 1) // 2)
    low_mask = (np.uint64(1) << half_bits) - np.uint64(1)
    seeds = np.array([seed], np.uint64)
    first_key = epoch * 6 + 0x9E3779B97F4A7C15
    keys = [int(_mix_bits(seeds, first_key + i)[0]) for i in range(6)]
    out = index.astype(np.uint64, copy=True)
    pending = np.ones(out.shape, dtype=bool)
    while pending.any():
        high = out[pending] >> half_bits
        low = out[pending] & low_mask
        for key in keys:
            mixed = high ^ (_mix_bits(low, key) & low_mask)
            high = low
            low = mixed
        out[pending] = (high << half_bits) | low
        pending &= out >= size
    return out


@dataclass(frozen=True)
class PackedWindows:
    """The windows of one token file: `tokens` (N,) any integer dtype, `seq_len` inputs each.

    With `first` and `size` only of that many tokens from there on.
    """

    tokens: Tokens
    seq_len: int
    first: int = 0
    size: int | None = None

    @property
    def num_targets(self) -> int:
        size = len(self.tokens) if self.size is None else self.size
        return max(0, size - 1)

    @property
    def count(self) -> int:
        return -(-self.num_targets // self.seq_len)

    @property
    def padding(self) -> int:
        """The number of a window without targets."""
        return self.count

    def valid(self, window: Indices) -> npt.NDArray[np.int64]:
        """Count the targets of each window: `seq_len`, fewer in the last, none beyond it."""
        start = window.astype(np.int64) * self.seq_len
        return np.clip(self.num_targets - start, 0, self.seq_len)

    def read(self, window: Indices) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Read inputs and targets (rows, seq_len); missing targets are -1, their inputs 0."""
        S = self.seq_len
        inputs = np.zeros((len(window), S), dtype=np.int64)
        targets = np.full_like(inputs, -1)
        counts = self.valid(window)
        # Whole windows of the file as it lies, in one operation.
        whole = (counts == S) & self._in_file_order(window)
        if whole.any():
            starts = self.first + window[whole].astype(np.int64) * S
            spans = read_rows(self.tokens, starts, S + 1)
            inputs[whole] = spans[:, :-1]
            targets[whole] = spans[:, 1:]
        for row in np.flatnonzero(~whole & (counts > 0)).tolist():
            valid = int(counts[row])
            span = self._read_span(int(window[row]), valid + 1)
            inputs[row, :valid] = span[:-1]
            targets[row, :valid] = span[1:]
        return inputs, targets

    def _in_file_order(self, window: Indices) -> npt.NDArray[np.bool_]:
        """Return which windows are spans of the file."""
        return np.ones(len(window), dtype=bool)

    def _read_span(self, window: int, count: int) -> npt.NDArray[np.integer]:
        """Return the first `count` tokens of a window and what follows it."""
        start = self.first + window * self.seq_len
        return self.tokens[start : start + count]


@dataclass(frozen=True, kw_only=True)
class ReshuffledWindows(PackedWindows):
    """The windows of epoch after epoch, numbered on: of each later one the documents, which begin
    and end at `offsets` of the file, follow one another in a seeded order."""

    offsets: npt.NDArray[np.int64]
    seed: int
    #: By epoch its documents in their order and where each begins; only those read last are kept.
    _orders: dict[int, tuple[Indices, npt.NDArray[np.int64]]] = field(
        default_factory=dict, compare=False
    )

    def valid(self, window: Indices) -> npt.NDArray[np.int64]:
        return super().valid(window % np.uint64(self.count))

    def _in_file_order(self, window: Indices) -> npt.NDArray[np.bool_]:
        return window < self.count

    def _read_span(self, window: int, count: int) -> npt.NDArray[np.integer]:
        epoch, window = divmod(window, self.count)
        if epoch == 0:
            return super()._read_span(window, count)
        documents, starts = self._document_order(epoch)
        start = window * self.seq_len
        parts = list[npt.NDArray[np.integer]]()
        at = int(np.searchsorted(starts, start, side="right")) - 1
        while count:
            document = int(documents[at])
            document_end = int(self.offsets[document + 1])
            first = int(self.offsets[document]) + start - int(starts[at])
            part = self.tokens[first : min(first + count, document_end)]
            parts.append(part)
            start += len(part)
            count -= len(part)
            at += 1
        return np.concatenate(parts)

    def _document_order(self, epoch: int) -> tuple[Indices, npt.NDArray[np.int64]]:
        orders = self._orders
        if epoch not in orders:
            count = len(self.offsets) - 1
            numbers = np.arange(count, dtype=np.uint64)
            # Another seed than that of the windows.
            documents = shuffle_index(numbers, count, self.seed + 1, epoch)
            lengths = np.diff(self.offsets)[documents]
            while len(orders) > 1:  # A step may end one epoch and begin the next.
                orders.pop(min(orders))
            orders[epoch] = documents, np.cumsum(lengths) - lengths
        return orders[epoch]


@dataclass(frozen=True)
class SampleOrder:
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
            places = (sample[mask] % self.windows).astype(np.uint64)
            out[mask] = shuffle_index(places, self.windows, self.seed, int(epoch))
            if self.reshuffled:
                out[mask] += np.uint64(epoch * self.windows)
        return out


#: A window of a mixture has the number of its source from this bit on.
PART_BIT = 48
#: Samples of a mixture in which the shares hold: those in whole percent hold exactly.
MIXTURE_BLOCK = 1000


def split_number(window: Indices) -> tuple[npt.NDArray[np.int64], Indices]:
    """Return the source of each window of a mixture, and the window's number there."""
    part = (window >> np.uint64(PART_BIT)).astype(np.int64)
    return part, window & np.uint64((1 << PART_BIT) - 1)


def join_number(part: int, window: Indices) -> Indices:
    """Return the numbers in a mixture of the windows of its source `part`."""
    return window | np.uint64(part << PART_BIT)


@dataclass(frozen=True)
class MixedWindows:
    """The windows of a mixture: those of each source, none over the border of two."""

    parts: tuple[PackedWindows, ...]

    @property
    def tokens(self) -> Tokens:
        """The tokens of all sources, one after another."""
        return self.parts[0].tokens

    @property
    def num_targets(self) -> int:
        return sum(part.num_targets for part in self.parts)

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def padding(self) -> int:
        """The number of a window without targets."""
        return self.parts[0].padding

    def valid(self, window: Indices) -> npt.NDArray[np.int64]:
        """Count the targets of each window."""
        part_of, number = split_number(window)
        valid = np.zeros(len(window), np.int64)
        for part, windows in enumerate(self.parts):
            is_own = part_of == part
            valid[is_own] = windows.valid(number[is_own])
        return valid

    def read(self, window: Indices) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Read inputs and targets (rows, seq_len); missing targets are -1, their inputs 0."""
        part_of, number = split_number(window)
        inputs = np.zeros((len(window), self.parts[0].seq_len), np.int64)
        targets = np.full_like(inputs, -1)
        for part, windows in enumerate(self.parts):
            is_own = part_of == part
            if is_own.any():
                inputs[is_own], targets[is_own] = windows.read(number[is_own])
        return inputs, targets


Windows = PackedWindows | MixedWindows


@dataclass(frozen=True)
class MixedOrder:
    """Sample index -> window of a mixture. The samples of a source walk through its windows, epoch
    after epoch."""

    orders: tuple[SampleOrder, ...]
    #: Samples of a block by source.
    counts: tuple[int, ...]
    seed: int

    def window(self, sample: npt.NDArray[np.int64]) -> Indices:
        ends = np.cumsum(self.counts)
        blocks = sample // MIXTURE_BLOCK
        slots = np.empty(len(sample), np.int64)
        for block in np.unique(blocks):
            in_block = blocks == block
            places = (sample[in_block] % MIXTURE_BLOCK).astype(np.uint64)
            # Another seed than those of windows and documents.
            slots[in_block] = shuffle_index(places, MIXTURE_BLOCK, self.seed + 2, int(block))
        part_of = np.searchsorted(ends, slots, side="right")
        out = np.empty(len(sample), np.uint64)
        for part, order in enumerate(self.orders):
            is_own = part_of == part
            first_slot = int(ends[part]) - self.counts[part]
            # The number of the sample among those of its source.
            own = blocks[is_own] * self.counts[part] + slots[is_own] - first_slot
            out[is_own] = join_number(part, order.window(own))
        return out


def count_by_share(shares: Sequence[float], total: int) -> tuple[int, ...]:
    """Divide `total` by shares that sum to 1, rounded by largest remainder; what has a share gets 1
    at least."""
    exact = [share * total for share in shares]
    counts = [max(int(count), 1 if count > 0 else 0) for count in exact]
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    remainders = [count - whole for count, whole in zip(exact, counts, strict=True)]
    largest_first = sorted(range(len(shares)), key=lambda part: -remainders[part])
    for part in itertools.islice(itertools.cycle(largest_first), total - sum(counts)):
        counts[part] += 1
    return tuple(counts)


def order_samples(windows: Windows, train: TrainSpec) -> SampleOrder | MixedOrder:
    """Return the order of all samples of a run over these windows of its training split."""
    reshuffled = train.regular.reshuffle
    if isinstance(windows, PackedWindows):
        return SampleOrder(windows.count, train.seed, reshuffled)
    assert train.shares
    orders = [SampleOrder(part.count, train.seed, reshuffled) for part in windows.parts]
    counts = count_by_share(train.shares, MIXTURE_BLOCK)
    return MixedOrder(tuple(orders), counts, train.seed)


#: Stands for a share of 0 in an order: what has none comes after all else.
UNSHARED = 1e-12


def interleave(counts: Sequence[int], shares: Sequence[float], seed: int) -> Indices:
    """Return all windows of a mixture, those of each source in a seeded order, so that any first
    part holds the sources by their shares, as long as they last. What has no share comes last."""
    numbers = list[Indices]()
    places = list[npt.NDArray[np.float64]]()
    for part, (count, share) in enumerate(zip(counts, shares, strict=True)):
        own = shuffle_index(np.arange(count, dtype=np.uint64), count, seed, 0)
        numbers.append(join_number(part, own))
        ranks = np.arange(count, dtype=np.float64) + 0.5
        places.append(ranks / (share or UNSHARED))
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(numbers)[order]


#: Keys of what else is drawn by sample than the order of windows.
MASKED = 1 << 32
REPLACED = 2 << 32
DROPOUT_STREAM = 3 << 32


def mask(
    inputs: npt.NDArray[np.int64],
    sample: npt.NDArray[np.int64],
    share: float,
    vocabulary: int,
    seed: int,
) -> npt.NDArray[np.int64]:
    """Replace a share of the tokens of these samples' inputs (rows, seq_len) by others of
    the vocabulary."""
    seq_len = inputs.shape[1]
    first_places = sample[:, None].astype(np.uint64) * np.uint64(seq_len)
    places = (first_places + np.arange(seq_len, dtype=np.uint64)).astype(np.uint64, copy=False)
    # 53 random bits for each place.
    draws = _mix_bits(places, seed + MASKED) >> np.uint64(11)
    others = _mix_bits(places, seed + REPLACED) % np.uint64(vocabulary)
    masked = draws < np.uint64(share * 2**53)
    return np.where(masked, others.astype(np.int64), inputs)


def dropout_seeds(sample: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int32]:
    """Draw for each sample the seed of its dropout."""
    bits = _mix_bits(sample.astype(np.uint64), seed + DROPOUT_STREAM)
    return bits.astype(np.uint32).view(np.int32)
