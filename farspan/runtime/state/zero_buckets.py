"""Who owns what of parameters and optimizer state: flat buckets, each divided over the data axis by
ZeRO's level.

Of n workers the k-th owns the k-th part of every bucket (ZeRO, arXiv 1910.02054). Matrices that are
updated whole lie in buckets of their own, where no boundary of a part cuts one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from farspan.semantics.matrices import in_buckets, owners

#: Without a size of buckets: all that small models have in one.
ONE_BUCKET = 2**62
#: Elements that a parameter, and what a worker owns of a bucket, begins at a multiple of: 128 bytes
#: in bf16, of which kernels load 16 at a time only from where they are aligned to that.
ALIGNED = 64


@dataclass(frozen=True)
class Division:
    """How a worker's state is divided: over `ways` workers, of which it is number `index`, by
    ZeRO's level."""

    zero: int = 0
    ways: int = 1
    index: int = 0
    bucket_bytes: int | None = ONE_BUCKET
    #: Parameters whose gradients are summands over the tensor axis, those of which it has a slice
    #: each, and the table that two stages share.
    partial: frozenset[str] = frozenset()
    sliced: frozenset[str] = frozenset()
    tied: str | None = None
    #: Parameters that are updated whole.
    matrices: frozenset[str] = frozenset()


class Bucket(NamedTuple):
    """A flat range of parameters: `size` elements, filled up to a multiple of ALIGNED for each of
    `ways` owners, of which the first `decayed` shrink by weight decay. `own` is this worker's part,
    `gaps` are what is no parameter's."""

    members: tuple[int, ...]
    starts: tuple[int, ...]
    gaps: tuple[slice, ...]
    size: int
    decayed: int
    ways: int
    own: slice
    partial: bool
    sliced: bool
    tied: bool
    matrices: bool


def divide(names: Sequence[str], shapes: Sequence[torch.Size], division: Division) -> list[Bucket]:
    """Buckets of about `bucket_bytes` of fp32 gradient in the parameters' order; of a unit of the
    model each where the parameters themselves are divided. What is summed or updated differently
    lies apart, in buckets that fill side by side."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, name in enumerate(names):
        alike.setdefault(_key(name, division), []).append(i)
    limit = (
        division.bucket_bytes if division.zero != 3 or division.bucket_bytes is None else ONE_BUCKET
    )
    groups = list[list[int]]()
    for members in alike.values():
        least = division.ways if division.zero and names[members[0]] in division.matrices else 1
        sizes = [shapes[i].numel() for i in members]
        groups += [[members[j] for j in group] for group in in_buckets(sizes, limit, least)]
    return [_bucket(group, names, shapes, division) for group in sorted(groups)]


def _key(name: str, division: Division) -> tuple[object, ...]:
    """What parameters of one bucket have in common."""
    unit = tuple(name.split(".")[: 2 if name.startswith("blocks.") else 1])
    return (
        name == division.tied,
        name in division.partial,
        name in division.sliced,
        name in division.matrices,
        unit if division.zero == 3 else None,
    )


def _bucket(
    group: list[int], names: Sequence[str], shapes: Sequence[torch.Size], division: Division
) -> Bucket:
    name = names[group[0]]
    ways = division.ways if division.zero and name != division.tied else 1
    if name in division.matrices:
        order, starts, size = _whole(group, shapes, ways)
        decayed = size
    else:
        order = sorted(group, key=lambda i: len(shapes[i]) < 2)
        starts, end, decayed = _row(order, shapes)
        size = _aligned(end, ways * ALIGNED)
    own = (
        slice(division.index * size // ways, (division.index + 1) * size // ways)
        if ways > 1
        else slice(0, size)
    )
    ends = [0, *(start + shapes[i].numel() for i, start in zip(order, starts, strict=True))]
    gaps = [
        slice(end, start) for end, start in zip(ends, [*starts, size], strict=True) if start > end
    ]
    return Bucket(
        members=tuple(order),
        starts=tuple(starts),
        gaps=tuple(gaps),
        size=size,
        ways=ways,
        own=own,
        decayed=decayed,
        partial=name in division.partial,
        sliced=name in division.sliced,
        tied=name == division.tied,
        matrices=name in division.matrices,
    )


def _row(
    order: Sequence[int], shapes: Sequence[torch.Size], first: int = 0
) -> tuple[list[int], int, int]:
    """Where parameters begin that lie one after another from `first` on, where the last and where
    the last matrix ends."""
    starts = list[int]()
    end = first
    decayed = first
    for i in order:
        starts.append(_aligned(end))
        end = starts[-1] + shapes[i].numel()
        decayed = _aligned(end) if len(shapes[i]) >= 2 else decayed
    return starts, end, decayed


def _whole(
    group: list[int], shapes: Sequence[torch.Size], ways: int
) -> tuple[list[int], list[int], int]:
    """The order of matrices of which each lies in the part of one owner, where they begin, and the
    size of all parts: each is as large as the largest."""
    owner = owners([shapes[i].numel() for i in group], ways)
    parts = [[i for i, k in zip(group, owner, strict=True) if k == part] for part in range(ways)]
    each = max(_aligned(_row(part, shapes)[1]) for part in parts)
    starts = [start for k, part in enumerate(parts) for start in _row(part, shapes, k * each)[0]]
    return [i for part in parts for i in part], starts, ways * each


def _aligned(count: int, unit: int = ALIGNED) -> int:
    """The next multiple of `unit`."""
    return math.ceil(count / unit) * unit


def length(bucket: Bucket) -> int:
    """Elements that a worker owns of a bucket."""
    return int(bucket.own.stop - bucket.own.start)


def segment(bucket: Bucket, decayed: bool) -> slice | None:
    """The part of a bucket's owned elements that weight decay shrinks, or that it does not."""
    middle = min(max(bucket.decayed, bucket.own.start), bucket.own.stop) - bucket.own.start
    part = slice(0, middle) if decayed else slice(middle, length(bucket))
    return part if part.stop > part.start else None
