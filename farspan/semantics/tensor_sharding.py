"""What a tensor axis does to an operator: the layout it reads and writes, and the collectives
between two layouts.

Layouts of an activation over the axis: COPY (each rank has all of it), PARTIAL (each has a
summand), or the letter of the dim that is split. The strategies are those of Megatron-LM (arXiv
1909.08053) and of Alpa's table 3 (arXiv 2201.12023), read off the einsum: an output dim is a column
split, a contracted dim leaves a partial sum, and the batch dim leaves the weights' gradients
partial.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from farspan.domain.graph import Operator, OpGraph

COPY, PARTIAL = "", "+"
#: The entry of `Stage.splits` that says how the residual stream lies over the tensor axis between
#: units.
RESIDUAL = "residual"
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


class Strategy(msgspec.Struct, frozen=True):
    """How one operator uses the axis: what it reads, what it writes, and how the gradient of its
    input comes out."""

    split: str
    reads: str
    writes: str
    gradient: str


def strategies(op: Operator, sizes: dict[str, int], ways: int, rows: int) -> tuple[Strategy, ...]:
    """Every way to use an axis of `ways` devices: copies, batch rows, and each dim that divides
    evenly."""
    possible = [strategy(op, "")]
    if rows % ways == 0:
        possible.append(strategy(op, "b"))
    return (*possible, *(strategy(op, dim) for dim in op.divisible if sizes[dim] % ways == 0))


def strategy(op: Operator, split: str) -> Strategy:
    """Return the strategy that splits this dim. Raises ValueError where the operator lacks it."""
    if split == "":
        return Strategy("", COPY, COPY, COPY)
    if split != "b" and split not in op.divisible:
        raise ValueError(f"{op.name} cannot be split over {split!r}: {op.einsum}")
    reads = split if split in op.inputs[0] else COPY
    writes = split if split in op.output else PARTIAL
    # Devices that read the whole input and compute a part of the output each know a part of the
    # input's gradient.
    return Strategy(split, reads, writes, PARTIAL if reads == COPY else split)


def between(
    writes: str, reads: str, gradient: str
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Return collectives over the tensor between two operators: in the forward pass, and in the
    backward pass."""
    if writes == PARTIAL:
        forward: tuple[Collective, ...] = ("all_reduce",) if reads == COPY else ("reduce_scatter",)
        backward: tuple[Collective, ...] = () if reads == COPY else ("all_gather",)
        return forward, (
            *(("all_reduce",) if reads == COPY and gradient == PARTIAL else ()),
            *backward,
        )
    if writes == COPY:
        if reads == COPY:
            return (), ("all_reduce",) if gradient == PARTIAL else ()
        return (), ("all_gather",)
    if reads == writes:
        return (), ()
    if reads == COPY:
        return ("all_gather",), ("reduce_scatter",) if gradient == PARTIAL else ()
    return ("all_to_all",), ("all_to_all",)


def weight_share(op: Operator, dims: str, split: str, ways: int) -> float:
    """Share of a weight that each device holds."""
    return 1 / ways if split and split in dims else 1.0


def sums_gradient(op: Operator, dims: str, split: str) -> bool:
    """Return whether each device knows a summand of the gradient of a weight of these dims: where
    its rows are divided, or its output over a dim that the weight lacks."""
    return split == "b" or (split != "" and split in op.output and split not in dims)


def norms_over(op: Operator, split: str) -> int:
    """Return the number of an operator's norms over a dim that is divided. Each device sums the
    squares of its part, and needs the sums over all devices, in both passes."""
    if op.kind != "pointwise" or not split:
        return 0
    return sum(split in weight.dims for weight in op.weights)


def work_share(split: str, ways: int) -> float:
    """Share of an operator's arithmetic that each device does."""
    return 1 / ways if split else 1.0


class OperatorDivision(NamedTuple):
    """Shares of an operator that one device of a tensor axis computes, reads, writes and holds.

    A dim that is split divides what has it, and nothing else: a column split reads all of its
    input, and a contracted dim leaves a summand as large as the whole output on every device.
    """

    arithmetic: float = 1.0
    read: float = 1.0
    written: float = 1.0
    weights: float = 1.0
    #: Of the sum with the residual stream, which lies as `RESIDUAL` says, not as the operator does.
    residual: float = 1.0


UNDIVIDED = OperatorDivision()


def divided(op: Operator, split: str, ways: int, residual: str = COPY) -> OperatorDivision:
    """Return the part that one device of `ways` does of an operator split over a dim, where the
    residual stream is split over `residual`."""
    plan, each = strategy(op, split), 1 / ways
    return OperatorDivision(
        arithmetic=work_share(split, ways),
        read=1.0 if plan.reads == COPY else each,
        written=1.0 if plan.writes in (COPY, PARTIAL) else each,
        weights=min(
            (weight_share(op, weight.dims, split, ways) for weight in op.weights), default=1.0
        ),
        residual=1.0 if residual == COPY else each,
    )


def returns_to_residual(op: Operator) -> bool:
    """Whether an operator's output is added to the residual stream, or starts it."""
    if not isinstance(op.adds_to_residual, msgspec.UnsetType):
        return op.adds_to_residual
    return op.output == "bsd" and op.kind in ("matmul", "lookup")


def sections(graph: OpGraph, dims: str) -> tuple[int, ...]:
    """Return the sections of a tensor of these dims along the dim that an operator divides: q, k
    and v; gate and value."""
    if "c" in dims:
        return graph.sizes["r"], graph.sizes["e"], graph.sizes["e"]
    return (1,) * graph.sizes["w"] if "w" in dims else (1,)
