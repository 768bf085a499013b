"""Boxes of global tensors: what a worker owns of a parameter, cut into the slices that a checkpoint
is made of.

A worker owns a range of the elements of its own part of a parameter, in row-major order. Such a
range is no box: it may begin and end inside a row. It is cut into at most 2 * dims - 1 boxes, and
these where its part jumps in the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from farspan.runtime.model.tensor_axis import TensorSlice

Ints = tuple[int, ...]


class Box(NamedTuple):
    """A box of a global tensor: where it begins, its shape, and where its elements are in the owned
    range.

    These lie in `run`, a stretch [start, stop) of the owned range that has `run_shape`; of its dim
    `dim` the box is `cut` [start, stop).
    """

    at: Ints
    shape: Ints
    run: tuple[int, int]
    run_shape: Ints
    dim: int
    cut: tuple[int, int]

    def of(self, owned: Tensor) -> Tensor:
        """The view of the box in an owned range (elements,)."""
        run = owned[self.run[0] : self.run[1]].view(self.run_shape)
        return (
            run.narrow(self.dim, self.cut[0], self.cut[1] - self.cut[0]) if self.run_shape else run
        )


def boxes(part: TensorSlice | None, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes of elements [start, stop) of a worker's part (of this shape) of a global tensor."""
    dim = 0 if part is None else part.dim
    ranges = part.ranges if part is not None else ((0, shape[0]),) if shape else ((0, 1),)
    for at, run_shape, first in _runs(tuple(shape), start, stop):
        run = first - start, first - start + math.prod(run_shape)
        if not run_shape:
            yield Box((), (), run, (), 0, (0, 1))
            continue
        low, held = at[dim], 0
        for begin, end in ranges:
            # The part's elements [held, held + length) along `dim` are the global tensor's [begin,
            # end).
            length = end - begin
            a, b = max(low, held), min(low + run_shape[dim], held + length)
            if a < b:
                place = (*at[:dim], begin + a - held, *at[dim + 1 :])
                size = (*run_shape[:dim], b - a, *run_shape[dim + 1 :])
                yield Box(place, size, run, run_shape, dim, (a - low, b - low))
            held += length


def _runs(shape: Ints, start: int, stop: int) -> Iterator[tuple[Ints, Ints, int]]:
    """Elements [start, stop) of a tensor in row-major order as boxes that follow one another: (at,
    shape, first)."""
    if start >= stop:
        return
    if not shape:
        yield (), (), start
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # Inside one row.
        yield from _row(shape, last, start, stop)
        return
    yield from _row(shape, first - 1, start, first * inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * inner
    yield from _row(shape, last, last * inner, stop)


def _row(shape: Ints, row: int, start: int, stop: int) -> Iterator[tuple[Ints, Ints, int]]:
    before = row * math.prod(shape[1:])
    for at, size, first in _runs(shape[1:], start - before, stop - before):
        yield (row, *at), (1, *size), before + first


def overlap(a_at: Ints, a_shape: Ints, b_at: Ints, b_shape: Ints) -> tuple[Ints, Ints] | None:
    """What two boxes of one tensor share, as (at, shape); None where they share nothing."""
    at = tuple(map(max, a_at, b_at))
    ends = (min(a + n, b + m) for a, n, b, m in zip(a_at, a_shape, b_at, b_shape, strict=True))
    shape = tuple(end - low for end, low in zip(ends, at, strict=True))
    return (at, shape) if all(size > 0 for size in shape) else None


def within(tensor: Tensor, at: Ints, box_at: Ints, shape: Ints) -> Tensor:
    """The view of a box in a tensor that begins at `at` of the global one."""
    for dim, (low, start, size) in enumerate(zip(at, box_at, shape, strict=True)):
        tensor = tensor.narrow(dim, start - low, size)
    return tensor
