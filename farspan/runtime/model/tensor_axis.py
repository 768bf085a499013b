"""Operators divided over a tensor axis, as `Stage.splits` of a plan gives: what each rank holds of
every parameter, and the collectives between two operators.

Strategies and layouts are those of `semantics.tensor_sharding`: an activation is COPY, PARTIAL, or
split over a dim. Each rank of the axis gets the same tokens. What the price counts is what is sent
here, and nothing else but scalars.

Shapes: B rows, S positions, V vocabulary, D d_model; "..." any.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from farspan import models
from farspan.domain.graph import Operator, OpGraph, Weight
from farspan.domain.model import ModelSpec
from farspan.runtime.model.kernels import VocabularyShard
from farspan.semantics.tensor_sharding import (
    COPY,
    PARTIAL,
    RESIDUAL,
    returns_to_residual,
    sections,
    strategy,
    sums_gradient,
)

#: In addition to operators and RESIDUAL, the ends of a stage: tokens and targets, which each rank
#: has, and the loss of all.
TOKENS = "tokens"
TOTAL = "total"
TABLE = "tok.weight"


@dataclass(frozen=True)
class TensorAxis:
    """A rank's place on a tensor axis: `group` holds its ranks in the order of their coordinates.
    `splits` names the dim of each divided operator, and under RESIDUAL that of the residual stream;
    "b" are rows, "" or none copies."""

    group: dist.ProcessGroup | None
    size: int
    coordinate: int
    splits: Mapping[str, str]


class TensorSlice(NamedTuple):
    """The part of a whole tensor that a rank holds: these ranges [start, stop) of one dim, one
    after another."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def copy_from(self, whole: Tensor) -> Tensor:
        """Return a copy of this part of a tensor (...), which does not keep the rest of it in
        memory."""
        dim = self.dim
        return torch.cat([whole.narrow(dim, low, high - low) for low, high in self.ranges], dim)


class DimSplit(NamedTuple):
    """How a dim is divided: each of its sections, given by their shares of its length, evenly over
    the coordinates."""

    dim: int
    sections: tuple[int, ...] = (1,)

    def section_lengths(self, length: int) -> list[int]:
        unit = length // sum(self.sections)
        return [unit * share for share in self.sections]

    def coordinate_slice(self, length: int, ways: int, coordinate: int) -> TensorSlice:
        """Return a coordinate's part of a dim. Raises ValueError where it does not divide
        evenly."""
        ranges = []
        start = 0
        for section in self.section_lengths(length):
            if section % ways:
                raise ValueError(f"{section} cannot be divided evenly over a tensor axis of {ways}")
            each = section // ways
            first = start + coordinate * each
            ranges.append((first, first + each))
            start += section
        return TensorSlice(self.dim, tuple(ranges))

    def divide_tensor(self, x: Tensor, ways: int) -> list[Tensor]:
        """Return every coordinate's part of x (...), contiguous."""
        length = x.shape[self.dim]
        return [
            self.coordinate_slice(length, ways, coordinate).copy_from(x)
            for coordinate in range(ways)
        ]

    def join_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole of every coordinate's part."""
        lengths = self.section_lengths(parts[0].shape[self.dim])
        by_section = zip(*(part.split(lengths, self.dim) for part in parts), strict=True)
        return torch.cat(list(itertools.chain.from_iterable(by_section)), self.dim)


# -- activations
#   ------------------------------------------------------------------------------------------------


class OperatorEdge(NamedTuple):
    """What lies between two operators: the layouts on both sides, and that of the reader's
    gradient."""

    writes: str
    reads: str
    gradient: str
    sections: tuple[int, ...] = (1,)

    @property
    def returned(self) -> str:
        """The layout of the gradient that the writer wants: of a summand each rank needs the
        whole."""
        return COPY if self.writes == PARTIAL else self.writes

    @property
    def idle(self) -> bool:
        """Nothing is to be done, neither for what is written nor for its gradient."""
        return (self.writes, self.returned) == (self.reads, self.gradient)

    def dim_split(self, split: str) -> DimSplit:
        return DimSplit(0) if split == "b" else DimSplit(-1, self.sections)


class Convert(torch.autograd.Function):
    """x (...) from the layout that one operator writes to the one that the next reads; its gradient
    the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: OperatorEdge, axis: TensorAxis) -> Tensor:
        ctx.edge = edge
        ctx.axis = axis
        return _convert(x, edge.writes, edge.reads, edge, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        edge = ctx.edge
        gradient = _convert(gradients[0], edge.gradient, edge.returned, edge, ctx.axis)
        return gradient, None, None


class Uncounted(torch.autograd.Function):
    """A copy whose gradient another rank counts. It gets none, but not before that one does:
    gradients must be complete in the same order on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def _convert(x: Tensor, source: str, target: str, edge: OperatorEdge, axis: TensorAxis) -> Tensor:
    """Return x in another layout, by at most one collective."""
    if source == target:
        return x
    if source == COPY:
        cut = edge.dim_split(target)
        own_slice = cut.coordinate_slice(x.shape[cut.dim], axis.size, axis.coordinate)
        return own_slice.copy_from(x)
    x = x.contiguous()
    if target == COPY:
        if source == PARTIAL:
            total = x.clone()
            dist.all_reduce(total, group=axis.group)
            return total
        parts = [torch.empty_like(x) for _ in range(axis.size)]
        dist.all_gather(parts, x, group=axis.group)
        return edge.dim_split(source).join_parts(parts)
    parts = edge.dim_split(target).divide_tensor(x, axis.size)
    if source == PARTIAL:
        own = torch.empty_like(parts[axis.coordinate])
        dist.reduce_scatter(own, parts, group=axis.group)
        return own
    received = [torch.empty_like(part) for part in parts]
    dist.all_to_all(received, parts, group=axis.group)
    return edge.dim_split(source).join_parts(received)


def operator_edges(
    graph: OpGraph, units: tuple[int, int], splits: Mapping[str, str]
) -> dict[tuple[str, str], OperatorEdge]:
    """Return the edges between operators that need a conversion, by writer and reader. The first
    operator of a unit reads the residual stream, which those that `returns_to_residual` write."""
    residual = splits.get(RESIDUAL, COPY)
    pairs = {}
    for unit, _ in graph.kinds(*units):
        before = RESIDUAL
        writes = residual
        for op in unit:
            plan = strategy(op, splits.get(op.name, ""))
            reads = plan.reads
            activation = op.inputs[0]
            if activation == "bs":
                pairs[TOKENS, op.name] = OperatorEdge(COPY, reads, reads)
            else:
                parts = sections(graph, activation)
                pairs[before, op.name] = OperatorEdge(writes, reads, plan.gradient, parts)
            before = op.name
            writes = plan.writes
            if returns_to_residual(op):
                pairs[op.name, RESIDUAL] = OperatorEdge(writes, residual, residual)
                before = RESIDUAL
                writes = residual
            if op.kind == "loss":
                # Each rank's rows are a summand of the loss; a part of the vocabulary has been
                # summed by the kernel.
                rows = "b" if plan.split == "b" else COPY
                pairs[TOKENS, op.name] = OperatorEdge(COPY, rows, rows)
                loss = PARTIAL if rows else COPY
                pairs[op.name, TOTAL] = OperatorEdge(loss, COPY, COPY)
    return {pair: edge for pair, edge in pairs.items() if not edge.idle}


# -- parameters
#   ------------------------------------------------------------------------------------------------


def _parameter_uses(
    graph: OpGraph, units: tuple[int, int], splits: Mapping[str, str]
) -> Iterator[tuple[str, Weight, Operator, str]]:
    """Yield every parameter that operators of these units use, by its global name, with its
    operator and how that is split."""
    for number in range(*units):
        prefix = f"blocks.{number - 1}." if 1 <= number <= graph.layers else ""
        for op in graph.unit(number):
            for weight in op.weights:
                yield prefix + weight.name, weight, op, splits.get(op.name, "")


def _splits_table_twice(graph: OpGraph, units: tuple[int, int], splits: Mapping[str, str]) -> bool:
    """Return whether a tied table is in one stage with embedding and head that are split unlike
    each other."""
    uses = _parameter_uses(graph, units, splits)
    return len({split for name, _, _, split in uses if name == TABLE}) > 1


def parameter_slices(
    spec: ModelSpec, units: tuple[int, int], splits: Mapping[str, str], ways: int, coordinate: int
) -> dict[str, TensorSlice]:
    """Return the slices of parameters that a coordinate of the axis holds of units [first, last),
    by global name; all other parameters are whole, and so is a table that embedding and head use
    unlike each other."""
    graph = models.graph(spec)
    slices = dict[str, TensorSlice]()
    if ways == 1:
        return slices
    for name, weight, _, split in _parameter_uses(graph, units, splits):
        dims = weight.dims
        if split and split in dims:
            # "d" is never divided: it is the rows of a matrix that writes it, else the columns.
            cut = DimSplit(1 if dims[0] == "d" else 0, sections(graph, dims))
            length = graph.size(dims.replace("d", ""))
            slices[name] = cut.coordinate_slice(length, ways, coordinate)
    if _splits_table_twice(graph, units, splits):
        slices.pop(TABLE, None)
    return slices


def partial_parameters(
    spec: ModelSpec, units: tuple[int, int], splits: Mapping[str, str], ways: int
) -> frozenset[str]:
    """Return the parameters that each rank has a summand of the gradient of: those that
    `sums_gradient` names, and a table that embedding and head use unlike each other."""
    graph = models.graph(spec)
    if ways == 1:
        return frozenset()
    partial = {
        name
        for name, weight, op, split in _parameter_uses(graph, units, splits)
        if sums_gradient(op, weight.dims, split)
    }
    if _splits_table_twice(graph, units, splits):
        partial.add(TABLE)
    return frozenset(partial)


def _demand_even(graph: OpGraph, splits: Mapping[str, str], ways: int) -> None:
    """Raise ValueError where a dim, such as the groups of heads, does not divide over the axis."""
    for name, dim in splits.items():
        size = graph.sizes.get(dim, 0)
        if size % ways:
            raise ValueError(
                f"{name}: {size} cannot be divided evenly over a tensor axis of {ways}"
            )


# -- a stage
#   ------------------------------------------------------------------------------------------------


class Layouts:
    """What an axis does to the operators of one stage; nothing where there is none."""

    def __init__(self, spec: ModelSpec, units: tuple[int, int], axis: TensorAxis | None) -> None:
        if axis is None or axis.size == 1:
            axis = TensorAxis(None, 1, 0, {})
        self.axis = axis
        self.vocabulary = spec.vocab_size
        self.slices = dict[str, TensorSlice]()
        self.partial = frozenset[str]()
        self._edges = dict[tuple[str, str], OperatorEdge]()
        self._splits_table_twice = False
        if axis.size > 1:
            graph = models.graph(spec)
            splits = axis.splits
            _demand_even(graph, splits, axis.size)
            self.slices = parameter_slices(spec, units, splits, axis.size, axis.coordinate)
            self.partial = partial_parameters(spec, units, splits, axis.size)
            self._edges = operator_edges(graph, units, splits)
            self._splits_table_twice = _splits_table_twice(graph, units, splits)

    def operator_split(self, op: str) -> str:
        return self.axis.splits.get(op, "")

    def operator_ways(self, op: str) -> int:
        """Return the parts that an operator's own dims come in."""
        return 1 if self.operator_split(op) in ("", "b") else self.axis.size

    def table_shards(self, table: str) -> int:
        """Return the parts that a table's rows come in."""
        return self.axis.size if table in self.slices else 1

    def convert_between(self, x: Tensor, writer: str, reader: str) -> Tensor:
        """Convert a tensor (...) from the layout of `writer` to that of `reader`."""
        edge = self._edges.get((writer, reader))
        return x if edge is None else Convert.apply(x, edge, self.axis)

    def sum_over_axis(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x (...), which each rank uses for its own part."""
        return Convert.apply(x, OperatorEdge(PARTIAL, COPY, PARTIAL), self.axis)

    def count_once(self, x: Tensor) -> Tensor:
        """Return x (...) on the first rank and zeros on the others, to be added to summands: of
        their sum each rank gets the whole gradient, and so does x."""
        return x if self.axis.coordinate == 0 else x - x.detach()

    def vocabulary_shard(self, op: str) -> VocabularyShard | None:
        """Return the part of the vocabulary of an operator that is split over it."""
        if self.operator_split(op) != "v":
            return None
        axis = self.axis
        return VocabularyShard(axis.group, self.vocabulary // axis.size * axis.coordinate)

    def operator_table(self, weight_VD: Tensor, op: str) -> Tensor:
        """Return the part of a table that an operator uses. Of one that both ends use unlike each
        other, each rank gets a summand of the gradient: a copy's counts once."""
        if not self._splits_table_twice or self.operator_split(op) == "b":
            return weight_VD
        shard = self.vocabulary_shard(op)
        if shard is not None:
            return weight_VD.narrow(0, shard.first, self.vocabulary // self.axis.size)
        return weight_VD if self.axis.coordinate == 0 else Uncounted.apply(weight_VD)
