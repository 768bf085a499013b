"""The parts of a checkpoint: manifest.json has the trainer's state, and lists by global tensor the
slices and their files.

Tensors are named `model/NAME` (fp32 masters), `exp_avg/NAME` and `exp_avg_sq/NAME` (moments; Muon
has the first alone), and `average/NAME` where an average of the weights is kept. Of replicas
with an outer step `model` is the synced parameters, `momentum/NAME` is the outer optimizer's, and
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
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from farspan.domain.struct_files import content_hash
from farspan.runtime.time_budget import BudgetState

if TYPE_CHECKING:  # A process that verifies a checkpoint loads no PyTorch.
    from torch import Tensor

    from farspan.runtime.model.tensor_axis import TensorSlice

MANIFEST = "manifest.json"
#: Bytes of a file that one checksum covers: a reader of a part of a tensor reads no more than it
#: needs and verifies it.
CHECKSUM_BLOCK_BYTES = 2**18
#: Slices of one tensor at most.
MOST_SLICES = 2**12
#: The range of a number of a manifest: more is damage.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=8)]


class Corrupt(Exception):
    """A checkpoint that must not be used, with the reason as its message."""


class TrainerState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The state that a trainer changes as it goes: with the tensors and the plan, all that the next
    step depends on. A checkpoint keeps it as it is."""

    step: Count
    #: The plan that made it, and what any plan must share that resumes from it
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
    #: Steps whose update an overflow has cost: the optimizer has not counted them.
    skipped: Count = 0
    #: Steps of the whole run, which its time budget may have changed; 0 is the plan's.
    steps: Count = 0
    #: What the run knows of its speed, and the share of its time that the learning rate follows.
    budget: BudgetState = msgspec.field(default_factory=BudgetState)
    #: The start of the run that wrote it (`domain.epoch_fence`); 0 of workers without a launcher.
    epoch: Count = 0
    #: Steps, from 0 on, whose batch was left out, as its gradient was not finite.
    left_out: tuple[Count, ...] = ()
    #: Whether the validation of this step is still to be made.
    validation_due: bool = False


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
        """Return why the slices do not make up the tensor; empty if they do."""
        num_slices = len(self.slices)
        dims = len(self.shape)
        starts = [part.at for part in self.slices]
        shapes = [part.shape for part in self.slices]
        if any(len(extent) != dims for extent in (*starts, *shapes)):
            return "slices of another number of dims"
        low = np.array(starts, np.int64).reshape(num_slices, dims)
        high = low + np.array(shapes, np.int64).reshape(num_slices, dims)
        if (high > np.array(self.shape, np.int64)).any():
            return "a slice that reaches beyond it"
        if sum(map(math.prod, shapes)) != math.prod(self.shape):
            return "slices that are not all of it"
        # Two boxes overlap if they do in every dim: below[i, j] is whether i begins before j ends.
        shared = np.ones((num_slices, num_slices), bool)
        for dim in range(dims):
            below = low[:, None, dim] < high[None, :, dim]
            shared &= below & below.T
        return "slices that overlap" if shared.sum() > num_slices else ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    progress: TrainerState
    tensors: dict[str, GlobalTensor]
    #: `checksum_of` the rest.
    checksum: str
    version: Literal[2] = 2

    @property
    def replicas(self) -> int:
        """Number of replicas with a state of their own; 0 of a synchronous run."""
        numbers = {name.split("/")[0] for name in self.tensors if name.startswith("replica-")}
        return len(numbers)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that these tensors are here, whole and of these shapes. Raises Corrupt."""
        for name, shape in shapes.items():
            stored = self.tensors.get(name)
            if stored is None or stored.shape != shape:
                actual = "nothing" if stored is None else f"shape {list(stored.shape)}"
                raise Corrupt(f"it has {actual} for {name} where the plan has shape {list(shape)}")
            if flaw := stored.flaw():
                raise Corrupt(f"{name} has {flaw}")


def key_of(name: str, at: tuple[int, ...]) -> str:
    """Return the name of a slice of a tensor in its file."""
    return f"{name}@{','.join(map(str, at))}"


def checksum_of(progress: object, tensors: object) -> str:
    """Return the checksum of a manifest, from its parts or from the JSON of them."""
    return content_hash(msgspec.to_builtins(progress), msgspec.to_builtins(tensors))


# -- slices
#   ------------------------------------------------------------------------------------------------

Ints = tuple[int, ...]


class ElementBox(NamedTuple):
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
        """Return the view of the box in an owned range (elements,)."""
        start, stop = self.run
        run = owned[start:stop].view(self.run_shape)
        if not self.run_shape:
            return run
        low, high = self.cut
        return run.narrow(self.dim, low, high - low)


def boxes(
    part: TensorSlice | None, shape: Sequence[int], start: int, stop: int
) -> Iterator[ElementBox]:
    """Yield the boxes of elements [start, stop) of a worker's part of a global tensor; the part has
    this shape."""
    dim = 0
    ranges: Sequence[tuple[int, int]] = ((0, shape[0] if shape else 1),)
    if part is not None:
        dim = part.dim
        ranges = part.ranges
    for at, run_shape, first in _split_rows(tuple(shape), start, stop):
        offset = first - start
        run = offset, offset + math.prod(run_shape)
        if not run_shape:
            yield ElementBox((), (), run, (), 0, (0, 1))
            continue
        low = at[dim]
        high = low + run_shape[dim]
        part_begin = 0
        for begin, end in ranges:
            # The part's elements [part_begin, part_end) along `dim` are the global tensor's [begin,
            # end).
            part_end = part_begin + end - begin
            a = max(low, part_begin)
            b = min(high, part_end)
            if a < b:
                place = list(at)
                place[dim] = begin + a - part_begin
                size = list(run_shape)
                size[dim] = b - a
                cut = a - low, b - low
                yield ElementBox(tuple(place), tuple(size), run, run_shape, dim, cut)
            part_begin = part_end


def _split_rows(shape: Ints, start: int, stop: int) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield elements [start, stop) of a tensor in row-major order as boxes that follow one another:
    (at, shape, first)."""
    if start >= stop:
        return
    if not shape:
        yield (), (), start
        return
    inner = math.prod(shape[1:])
    first = -(-start // inner)
    last = stop // inner
    if first > last:  # Inside one row.
        yield from _split_inside_row(shape, last, start, stop)
        return
    yield from _split_inside_row(shape, first - 1, start, first * inner)
    if first < last:
        at = (first, *[0] * (len(shape) - 1))
        yield at, (last - first, *shape[1:]), first * inner
    yield from _split_inside_row(shape, last, last * inner, stop)


def _split_inside_row(
    shape: Ints, row: int, start: int, stop: int
) -> Iterator[tuple[Ints, Ints, int]]:
    row_shape = shape[1:]
    before = row * math.prod(row_shape)
    for at, size, first in _split_rows(row_shape, start - before, stop - before):
        yield (row, *at), (1, *size), before + first


def intersect_boxes(
    a_at: Ints, a_shape: Ints, b_at: Ints, b_shape: Ints
) -> tuple[Ints, Ints] | None:
    """Intersect two boxes of one tensor: (at, shape), or None if they are disjoint."""
    at = list[int]()
    shape = list[int]()
    for a, n, b, m in zip(a_at, a_shape, b_at, b_shape, strict=True):
        low = max(a, b)
        size = min(a + n, b + m) - low
        if size <= 0:
            return None
        at.append(low)
        shape.append(size)
    return tuple(at), tuple(shape)


def view_box(tensor: Tensor, at: Ints, box_at: Ints, shape: Ints) -> Tensor:
    """Return the view of a box in a tensor that begins at `at` of the global one."""
    for dim, (low, start, size) in enumerate(zip(at, box_at, shape, strict=True)):
        tensor = tensor.narrow(dim, start - low, size)
    return tensor
