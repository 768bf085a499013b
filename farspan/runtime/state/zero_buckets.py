"""Who owns what of parameters and optimizer state: flat buckets, each divided over the data axis by
ZeRO's level.

Of n workers the k-th owns the k-th part of every bucket (ZeRO, arXiv 1910.02054). Matrices that are
updated whole lie in buckets of their own, where no boundary of a part cuts one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from farspan.semantics.muon_matrices import in_buckets, owners

#: Without a size of buckets: all that small models have in one.
ONE_BUCKET = 2**62
#: Elements that a parameter, and what a worker owns of a bucket, begins at a multiple of: 128 bytes
#: in bf16, of which kernels load 16 at a time only from where they are aligned to that.
ALIGNED = 64


@dataclass(frozen=True)
class ZeroDivision:
    """How a worker's state is divided: over `ways` workers, this one number `index`, by ZeRO's
    level."""

    zero: int = 0
    ways: int = 1
    index: int = 0
    bucket_bytes: int | None = ONE_BUCKET
    #: Parameters with gradients that are summands over the tensor axis, those that it has a slice
    #: of each, and the table that two stages share.
    partial: frozenset[str] = frozenset()
    sliced: frozenset[str] = frozenset()
    tied: str | None = None
    #: Parameters that are updated whole.
    matrices: frozenset[str] = frozenset()


class Bucket(NamedTuple):
    """A flat range of parameters: `size` elements, filled up to a multiple of ALIGNED for each of
    `ways` owners; the first `decayed` shrink by weight decay. `own` is this worker's part, `gaps`
    are what is no parameter's."""

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


def divide_buckets(
    parameter_names: Sequence[str], shapes: Sequence[torch.Size], division: ZeroDivision
) -> list[Bucket]:
    """Divide the parameters into buckets of about `bucket_bytes` of fp32 gradient in their order;
    of a unit of the model each where the parameters themselves are divided. What is summed or
    updated differently lies apart, in buckets that fill side by side."""
    alike = defaultdict[object, list[int]](list)
    for i, name in enumerate(parameter_names):
        alike[_bucket_key(name, division)].append(i)
    limit = division.bucket_bytes
    if division.zero == 3 and limit is not None:
        limit = ONE_BUCKET
    groups = list[list[int]]()
    for members in alike.values():
        by_owner = division.zero and parameter_names[members[0]] in division.matrices
        least = division.ways if by_owner else 1
        sizes = [shapes[i].numel() for i in members]
        for group in in_buckets(sizes, limit, least):
            groups.append([members[j] for j in group])
    buckets = []
    for group in sorted(groups):
        name = parameter_names[group[0]]
        buckets.append(_make_bucket(group, name, shapes, division))
    return buckets


def _bucket_key(name: str, division: ZeroDivision) -> tuple[object, ...]:
    """Return the properties that the parameters of one bucket have in common."""
    unit = None
    if division.zero == 3:
        unit = tuple(name.split(".")[: 2 if name.startswith("blocks.") else 1])
    return (
        name == division.tied,
        name in division.partial,
        name in division.sliced,
        name in division.matrices,
        unit,
    )


def _make_bucket(
    group: list[int], name: str, shapes: Sequence[torch.Size], division: ZeroDivision
) -> Bucket:
    tied = name == division.tied
    matrices = name in division.matrices
    ways = division.ways if division.zero and not tied else 1
    if matrices:
        order, starts, size = _place_by_owner(group, shapes, ways)
        decayed = size
    else:
        # Weight decay shrinks what has two or more dims: these come first.
        order = sorted(group, key=lambda i: len(shapes[i]) < 2)
        starts, end, decayed = _place_in_row(order, shapes)
        size = _align(end, ways * ALIGNED)
    gaps = list[slice]()
    end = 0
    for i, start in zip(order, starts, strict=True):
        if start > end:
            gaps.append(slice(end, start))
        end = start + shapes[i].numel()
    if size > end:
        gaps.append(slice(end, size))
    own_size = size // ways
    own_start = division.index % ways * own_size
    own = slice(own_start, own_start + own_size)
    return Bucket(
        tuple(order),
        tuple(starts),
        tuple(gaps),
        size,
        decayed,
        ways,
        own,
        partial=name in division.partial,
        sliced=name in division.sliced,
        tied=tied,
        matrices=matrices,
    )


def _place_in_row(
    order: Sequence[int], shapes: Sequence[torch.Size], first: int = 0
) -> tuple[list[int], int, int]:
    """Return where parameters begin that lie one after another from `first` on, where the last and
    where the last matrix ends."""
    starts = list[int]()
    end = first
    decayed = first
    for i in order:
        start = _align(end)
        starts.append(start)
        end = start + shapes[i].numel()
        if len(shapes[i]) >= 2:
            decayed = _align(end)
    return starts, end, decayed


def _place_by_owner(
    group: list[int], shapes: Sequence[torch.Size], ways: int
) -> tuple[list[int], list[int], int]:
    """Return the order of matrices that lie in the part of one owner each, where they begin, and
    the size of all parts: each is as large as the largest."""
    parts: list[list[int]] = [[] for _ in range(ways)]
    sizes = [shapes[i].numel() for i in group]
    for i, k in zip(group, owners(sizes, ways), strict=True):
        parts[k].append(i)
    each = max(_align(_place_in_row(part, shapes)[1]) for part in parts)
    order = list[int]()
    starts = list[int]()
    for k, part in enumerate(parts):
        order += part
        starts += _place_in_row(part, shapes, k * each)[0]
    return order, starts, ways * each


def _align(count: int, unit: int = ALIGNED) -> int:
    """Return the next multiple of `unit`."""
    return math.ceil(count / unit) * unit


def owned_length(bucket: Bucket) -> int:
    """Return the elements that a worker owns of a bucket."""
    return int(bucket.own.stop - bucket.own.start)


def weight_decay_segment(bucket: Bucket, decayed: bool) -> slice | None:
    """Return the part of a bucket's owned elements that weight decay shrinks, or that it does
    not."""
    owned = owned_length(bucket)
    middle = min(max(bucket.decayed - bucket.own.start, 0), owned)
    part = slice(0, middle) if decayed else slice(middle, owned)
    return part if part.stop > part.start else None
