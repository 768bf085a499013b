"""Who owns what of parameters and optimizer state: flat buckets, each divided over the data axis by ZeRO's level.

Of n workers the k-th owns the k-th part of every bucket (ZeRO, arXiv 1910.02054).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

#: Without a size of buckets: all that small models have in one.
ONE_BUCKET = 2**62
#: Elements that a parameter, and what a worker owns of a bucket, begins at a multiple of: 128 bytes in bf16, of which
#: kernels load 16 at a time only from where they are aligned to that.
ALIGNED = 64


@dataclass(frozen=True)
class Division:
    """How a worker's state is divided: over `ways` workers, of which it is number `index`, by ZeRO's level."""

    zero: int = 0
    ways: int = 1
    index: int = 0
    bucket_bytes: int | None = ONE_BUCKET
    #: Parameters whose gradients are summands over the tensor axis, those of which it has a slice each, and the table
    #: that two stages share.
    partial: frozenset[str] = frozenset()
    sliced: frozenset[str] = frozenset()
    tied: str | None = None


class Bucket(NamedTuple):
    """A flat range of parameters: `size` elements, filled up to a multiple of ALIGNED for each of `ways` owners, of
    which the first `decayed` shrink by weight decay. `own` is this worker's part, `gaps` are what is no parameter's."""

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


def divide(names: Sequence[str], shapes: Sequence[torch.Size], division: Division) -> list[Bucket]:
    """Buckets of about `bucket_bytes` of fp32 gradient in the parameters' order; of a unit of the model each where the
    parameters themselves are divided. What is summed differently lies apart, in buckets that fill side by side."""
    members: list[list[int]] = []
    filling: dict[tuple[object, ...], list[int]] = {}
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        unit = tuple(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        key = (
            name == division.tied,
            name in division.partial,
            name in division.sliced,
            unit if division.zero == 3 else None,
        )
        size = 4 * (sum(shapes[j].numel() for j in filling.get(key, ())) + shape.numel())
        full = division.bucket_bytes is None or (division.zero != 3 and size > division.bucket_bytes)
        if key not in filling or full:
            filling[key] = []
            members.append(filling[key])
        filling[key].append(i)
    return [_bucket(group, names, shapes, division) for group in members]


def _bucket(group: list[int], names: Sequence[str], shapes: Sequence[torch.Size], division: Division) -> Bucket:
    order = sorted(group, key=lambda i: len(shapes[i]) < 2)
    name = names[group[0]]
    ways = division.ways if division.zero and name != division.tied else 1
    starts, gaps, end, decayed = list[int](), list[slice](), 0, 0
    for i in order:
        starts.append(_aligned(end))
        gaps.append(slice(end, starts[-1]))
        end = starts[-1] + shapes[i].numel()
        decayed = _aligned(end) if len(shapes[i]) >= 2 else decayed
    size = _aligned(end, ways * ALIGNED)
    gaps.append(slice(end, size))
    own = slice(division.index * size // ways, (division.index + 1) * size // ways) if ways > 1 else slice(0, size)
    return Bucket(
        members=tuple(order), starts=tuple(starts), gaps=tuple(gap for gap in gaps if gap.stop > gap.start), size=size,
        ways=ways, own=own, decayed=decayed, partial=name in division.partial, sliced=name in division.sliced,
        tied=name == division.tied,
    )  # fmt: skip


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
