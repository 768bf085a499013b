"""What a checkpoint consists of: manifest.json has the trainer's state, and which slice of which
global tensor lies in which file.

Tensors are named `model/NAME` (fp32 masters), `exp_avg/NAME` and `exp_avg_sq/NAME` (moments; Muon
has the first alone), and `average/NAME` where an average of the weights is kept. Of replicas that
meet now and then `model` is the one that they met at, `momentum/NAME` is the outer optimizer's, and
each replica has its own `replica-0/master/NAME`, `replica-0/exp_avg/NAME` and
`replica-0/exp_avg_sq/NAME`.

A worker owns a range of the elements of its own part of a parameter, in row-major order. Such a
range is no box: it may begin and end inside a row. It is cut into at most 2 * dims - 1 boxes, and
these where its part jumps in the parameter: each box is a slice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from farspan.domain.codec import content_hash
from farspan.runtime.model.tensor_axis import TensorSlice
from farspan.runtime.time_budget import BudgetState

MANIFEST = "manifest.json"
#: Bytes of a file that one checksum covers: a reader of a part of a tensor reads no more than it
#: needs and verifies it.
BLOCK = 2**18
#: Slices of one tensor at most.
MOST_SLICES = 2**12
#: What a number of a manifest can be: more is damage.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]


class Corrupt(Exception):
    """A checkpoint that must not be used; the message says why."""


class TrainerState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The state that a trainer changes as it goes: with the tensors and the plan, all that the next
    step depends on. A checkpoint keeps it as it is."""

    step: Count
    #: The plan that made it, and what any plan must share that goes on from it
    #: (`semantics.identity.training_key`).
    plan: str
    training: str
    #: Wall-clock seconds of the run, over all its starts, when it was saved.
    elapsed_s: Finite
    best_loss: Finite | None = None
    #: Validations in a row without a better loss.
    stale: Count = 0
    loss_scale: Positive = 1.0
    #: Steps in a row without an overflow, which decide when the loss scale doubles.
    quiet: Count = 0
    #: Steps whose update an overflow has cost: the optimizer has counted so many fewer.
    skipped: Count = 0
    #: Steps of the whole run, which its time budget may have changed; 0 is the plan's.
    steps: Count = 0
    #: What the run knows of its speed, and the share of its time that the learning rate follows.
    budget: BudgetState = msgspec.field(default_factory=BudgetState)
    #: The start of the run that wrote it (`domain.epoch`); 0 of workers without a launcher.
    epoch: Count = 0
    #: Steps, from 0 on, whose batch was left out, as its gradient was not finite.
    left_out: tuple[Count, ...] = ()


class StoredSlice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A box of a global tensor in a file: where it begins, its shape, and the checksum of each
    BLOCK of its bytes."""

    file: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]{1,40}\.safetensors\Z")]
    at: Shape
    shape: Shape
    #: The first 16 digits of each block's SHA-256.
    sha256: tuple[str, ...]


class GlobalTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor of fp32 as the slices that it is stored in."""

    shape: Shape
    slices: Annotated[tuple[StoredSlice, ...], msgspec.Meta(min_length=1, max_length=MOST_SLICES)]

    def flaw(self) -> str:
        """Why the slices do not make up the tensor; empty where they do."""
        if any(
            len(part.at) != len(self.shape) or len(part.shape) != len(self.shape)
            for part in self.slices
        ):
            return "slices of another number of dims"
        low = np.array([part.at for part in self.slices], np.int64).reshape(len(self.slices), -1)
        high = low + np.array([part.shape for part in self.slices], np.int64).reshape(low.shape)
        if (high > np.array(self.shape, np.int64)).any():
            return "a slice that reaches beyond it"
        if sum(math.prod(part.shape) for part in self.slices) != math.prod(self.shape):
            return "slices that are not all of it"
        shared = np.ones((len(low), len(low)), bool)
        for dim in range(low.shape[1]):
            shared &= (low[:, None, dim] < high[None, :, dim]) & (
                low[None, :, dim] < high[:, None, dim]
            )
        return "slices that overlap" if shared.sum() > len(low) else ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    progress: TrainerState
    tensors: dict[str, GlobalTensor]
    #: `checksum_of` the rest.
    checksum: str
    version: Literal[2] = 2

    @property
    def replicas(self) -> int:
        """Replicas with a state of their own; 0 of a synchronous run."""
        numbers = {name.split("/")[0] for name in self.tensors if name.startswith("replica-")}
        return len(numbers)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises Corrupt unless these tensors are here, whole and of these shapes."""
        for name, shape in shapes.items():
            stored = self.tensors.get(name)
            if stored is None or stored.shape != shape:
                has = "nothing" if stored is None else f"shape {list(stored.shape)}"
                raise Corrupt(f"it has {has} for {name} where the plan has shape {list(shape)}")
            if flaw := stored.flaw():
                raise Corrupt(f"{name} has {flaw}")


def key_of(name: str, at: tuple[int, ...]) -> str:
    """What a slice of a tensor is called in its file."""
    return f"{name}@{','.join(map(str, at))}"


def checksum_of(progress: object, tensors: object) -> str:
    """The checksum of a manifest, from its parts or from what JSON has of them."""
    return content_hash(msgspec.to_builtins(progress), msgspec.to_builtins(tensors))


# -- slices
#   ------------------------------------------------------------------------------------------------

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
        low = at[dim]
        held = 0
        for begin, end in ranges:
            # The part's elements [held, held + length) along `dim` are the global tensor's [begin,
            # end).
            length = end - begin
            a = max(low, held)
            b = min(low + run_shape[dim], held + length)
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
    first = -(-start // inner)
    last = stop // inner
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
