"""The communication of a plan's workers in a step, as one list: purpose, kind, groups, bytes,
count.

Seconds, bytes by site or host, and processors' time are folds over it (`farspan.estimate`). Tests
compare its bytes with those that a lab's line carries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from farspan.domain.engine import Engine
from farspan.domain.graph import Operator, OpGraph
from farspan.domain.plan import Plan, Replica, Stage
from farspan.domain.train import Precision
from farspan.semantics.reshard import HeldRange, Send, by_site, plan_reshard
from farspan.semantics.tensor_sharding import (
    PARTIAL,
    RESIDUAL,
    Collective,
    between,
    norms_over,
    returns_to_residual,
    strategy,
    sums_gradient,
)

Purpose = Literal[
    "gradients", "weights", "operators", "activations", "tied table", "replicas", "matrices"
]
#: What each purpose is called in messages and pictures.
PURPOSE_NAMES: dict[Purpose, str] = {
    "gradients": "gradients",
    "weights": "weights",
    "operators": "activations inside operators",
    "activations": "activations between stages",
    "tied table": "gradients of the tied embedding",
    "replicas": "the replicas' parameters",
    "matrices": "parts of matrices for their update",
}
#: A collective's name, or everyone's own part to everyone.
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "exchange"]
#: Around a ring; straight to everyone; or inside each site first, then straight between one rank of
#: each.
Way = Literal["ring", "straight", "sites"]
Place = Callable[[int], Hashable]
Group = tuple[int, ...]


class Communication(NamedTuple):
    """The same exchange in several groups of ranks, side by side."""

    purpose: Purpose
    kind: Kind
    way: Way
    groups: tuple[Group, ...]
    #: Bytes of a group's whole tensor; of an exchange, those that each rank sends to each other
    #: one.
    size: float
    #: Times a step.
    times: float = 1
    #: Messages that its bytes travel in, each time; and how many of them may be under way, where
    #: that is limited.
    messages: float = 1
    at_once: int | None = None
    #: Communications of other groups that share its lines.
    concurrent: int = 1
    #: The arithmetic that it may hide behind.
    beside: Literal["nothing", "forward", "backward"] = "nothing"
    #: Receives are posted before the data comes, where the engine can.
    ahead: bool = False
    #: Bytes that are summed inside each site, of the way over sites.
    inside: float = 0.0


class WireFlow(NamedTuple):
    """Bytes that one rank sends to another."""

    source: int
    target: int
    size: float


class Change(NamedTuple):
    """A collective between two operators of a unit, over the tensor axis: bytes, in one
    of its passes."""

    kind: Collective
    size: float
    backward: bool


def ring_steps(kind: Kind, ranks: int) -> int:
    """Return the steps of a ring of `ranks`."""
    return (ranks - 1) * (2 if kind == "all_reduce" else 1)


# -- the batch axes
#   ------------------------------------------------------------------------------------------------


class Buckets(NamedTuple):
    """The content of a stage's buckets: bytes and messages; and tensors, which are one message each
    without buckets."""

    filled: float
    messages: int
    tensors: int


def buckets(graph: OpGraph, stage: Stage, engine: Engine, parameters: float) -> Buckets:
    """Return an engine that sends straight fills them with whole gradients, in however many bits
    these travel."""
    by = stage.grad_sync
    filled = parameters * (4.0 if engine.direct else by.bits / 8)
    tensors = sum(
        count * sum(not weight.frozen for weight in op.weights)
        for unit, count in graph.kinds(*stage.units)
        for op in unit
    )
    return Buckets(
        filled, tensors if by.bucket_bytes is None else math.ceil(filled / by.bucket_bytes), tensors
    )


def batch_axes(
    graph: OpGraph,
    stage: Stage,
    engine: Engine,
    precision: Precision,
    parameters: float,
    microbatches: int,
    at: Place,
) -> tuple[Communication, ...]:
    """Return sums of gradients and gathers of weights, as often as ZeRO's level asks for them
    (arXiv 1910.02054), of a stage with `parameters` on each device; `at(rank)` is a
    rank's site."""
    if stage.zero == 0:
        summed_gradients = _summed(graph, stage, engine, parameters, at)
    else:
        summed_gradients = (
            *_divided(graph, stage, engine, precision, parameters, microbatches),
            _between_sites(
                stage, engine, parameters, buckets(graph, stage, engine, parameters).messages
            ),
        )
    partial = _partial_weights(graph, stage)
    return (*summed_gradients, partial) if partial else summed_gradients


def _summed(
    graph: OpGraph, stage: Stage, engine: Engine, parameters: float, at: Place
) -> tuple[Communication, ...]:
    """Whole sums of gradients: by a ring, straight in few bits, or by site."""
    by, groups = stage.grad_sync, stage.mesh.transposed
    size = parameters * by.bits / 8
    way: Way = "straight" if by.bits < 32 and engine.direct else "ring"
    if by.topology == "hierarchical" and any(
        len({at(rank) for rank in group}) > 1 for group in groups
    ):
        way = "sites"
    return (
        Communication(
            "gradients",
            "exchange" if way == "straight" else "all_reduce",
            way,
            groups,
            size,
            messages=buckets(graph, stage, engine, parameters).messages,
            concurrent=stage.mesh.size("tensor"),
            beside="backward",
            ahead=True,
            inside=size * 32 / by.bits if engine.direct else size,
        ),
    )


def _divided(
    graph: OpGraph,
    stage: Stage,
    engine: Engine,
    precision: Precision,
    parameters: float,
    microbatches: int,
) -> tuple[Communication, ...]:
    """Return sums that are scattered over the data axis, and gathers of weights over it."""
    groups, ways = stage.mesh.groups("data"), stage.mesh.size("tensor")
    filled, messages, tensors = buckets(graph, stage, engine, parameters)
    sums = Communication(
        "gradients",
        "reduce_scatter",
        "ring",
        groups,
        filled,
        times=microbatches if stage.zero >= 2 else 1,
        messages=messages,
        concurrent=ways,
        beside="backward",
    )
    if not engine.scatters:
        sums = sums._replace(kind="all_reduce")
    elif engine.scatters_straight:
        sums = sums._replace(way="straight")
    gathers = Communication(
        "weights",
        "all_gather",
        "ring",
        groups,
        parameters * engine.weight_bytes[precision],
        messages=messages if engine.gathers_combined else tensors,
        concurrent=ways,
    )
    if stage.zero < 3:
        return sums, gathers
    if engine.gathers_combined:
        # Where the parameters are divided one unit is gathered while the one before it computes.
        gathers = gathers._replace(messages=stage.units[1] - stage.units[0], at_once=1)
    gathers = gathers._replace(times=microbatches)
    return sums, gathers._replace(beside="forward"), gathers._replace(beside="backward")


def _between_sites(
    stage: Stage, engine: Engine, parameters: float, messages: float
) -> Communication:
    """Return sums over the sites of what each rank of the data axis has summed inside its own."""
    groups = stage.mesh.groups("site")
    part = parameters * stage.grad_sync.bits / 8 / stage.mesh.size("data")
    return Communication(
        "gradients",
        "exchange" if engine.direct else "all_reduce",
        "straight" if engine.direct else "ring",
        groups,
        part,
        messages=messages,
        concurrent=len(groups),
        beside="backward",
        ahead=True,
    )


def matrix_parts(stage: Stage, shared: float) -> tuple[Communication, ...]:
    """Return the parts of matrices that the ranks of a tensor axis gather for an update, and the
    parts of the update that they exchange, in fp32."""
    if not shared:
        return ()
    return (
        Communication(
            "matrices",
            "all_gather",
            "ring",
            stage.mesh.batch,
            4 * shared,
            times=2,
            concurrent=len(stage.mesh.batch),
        ),
    )


def _partial_weights(graph: OpGraph, stage: Stage) -> Communication | None:
    """Return sums over the tensor axis of the gradients of weights that each rank knows a summand
    of."""
    size = sum(
        count * graph.size(weight.dims) * stage.grad_sync.bits / 8
        for unit, count in graph.kinds(*stage.units)
        for op in unit
        for weight in op.weights
        if sums_gradient(op, weight.dims, stage.splits.get(op.name, ""))
    )
    groups = stage.mesh.batch
    if not size or len(groups[0]) == 1:
        return None
    return Communication(
        "gradients", "all_reduce", "ring", groups, size, concurrent=len(groups), beside="backward"
    )


# -- the tensor axis
#   ------------------------------------------------------------------------------------------------


def layout_changes(
    graph: OpGraph,
    unit: Sequence[Operator],
    splits: Mapping[str, str],
    rows: int,
    seq_len: int,
    width: int,
) -> Iterator[Change]:
    """Yield the exchanges of a tensor axis in the passes of one unit over `rows` sequences, of
    numbers of `width` bytes."""
    residual = splits.get(RESIDUAL, "")
    writes = residual

    def change(reads: str, gradient: str, dims: str) -> Iterator[Change]:
        if dims == "bs":  # Every device reads the tokens that it needs, and they have no gradient.
            return
        size = graph.size(dims, b=rows, s=seq_len) * width
        for backward, collectives in enumerate(between(writes, reads, gradient)):
            yield from (Change(name, size, bool(backward)) for name in collectives)

    for op in unit:
        plan = strategy(op, splits.get(op.name, ""))
        yield from change(plan.reads, plan.gradient, op.inputs[0])
        writes = plan.writes
        if norms := norms_over(op, plan.split):
            sums = norm_sums_bytes(graph, norms, rows, seq_len, width)
            yield Change("all_reduce", sums, False)
            yield Change("all_reduce", sums, True)
        if returns_to_residual(op):
            yield from change(residual, residual, "bsd")
            writes = residual
        elif op.kind == "loss" and plan.writes == PARTIAL:
            # Each device has a part of the vocabulary: greatest logit, sum, and the target's
            # (Megatron-LM).
            yield from (
                Change("all_reduce", 4.0 * graph.size(op.output, b=rows, s=seq_len), False)
                for _ in range(3)
            )


def norm_sums_bytes(graph: OpGraph, norms: int, rows: int, seq_len: int, width: int) -> float:
    """Return the bytes of the sums of squares of norms over a divided dim: a number for each
    position, in fp32 where activations have fewer bytes."""
    return float(max(4, width) * norms * graph.size("bs", b=rows, s=seq_len))


# -- between stages
#   ------------------------------------------------------------------------------------------------


def rows_held(replica: Replica, stage: int) -> list[HeldRange]:
    """Return the rows of a microbatch that each worker of a stage has: those of its batch
    coordinate, or the tensor axis' share of them where the residual stream is divided over it by
    rows."""
    owned_ranges: list[HeldRange] = []
    mesh, start = replica.stages[stage].mesh, 0
    for c, ranks in enumerate(mesh.batch):
        rows = replica.microbatch_rows(stage, c, 0)
        ways = len(ranks) if replica.stages[stage].splits.get(RESIDUAL) == "b" else 1
        for t, rank in enumerate(ranks):
            low, high = (t * rows // ways, (t + 1) * rows // ways) if ways > 1 else (0, rows)
            owned_ranges.append(HeldRange(rank, start + low, start + high))
        start += rows
    return owned_ranges


class Sends(NamedTuple):
    """What goes from one stage to another: each byte once over a long line, then inside the sites
    that it came to."""

    across: tuple[WireFlow, ...]
    inside: tuple[WireFlow, ...]


def stage_sends(
    replica: Replica, edge: int, backward: bool, row: float, plain: float, at: Place
) -> Sends:
    """Return a microbatch on its way over an edge: `row` bytes a sequence between the stages,
    `plain` ones inside a site."""
    ends = (edge + 1, edge) if backward else (edge, edge + 1)
    owned_ranges, wanted = (rows_held(replica, stage) for stage in ends)
    return _sends(owned_ranges, wanted, row, plain, at)


def table_sends(graph: OpGraph, source: Stage, target: Stage, row: float, at: Place) -> Sends:
    """Return a table that two stages hold on its way from one to the other: `row` bytes each of its
    rows."""
    owned_ranges, wanted = (_table_held(graph, stage) for stage in (source, target))
    return _sends(owned_ranges, wanted, row, row, at)


def _table_held(graph: OpGraph, stage: Stage) -> list[HeldRange]:
    """Return the rows of a tied table that each worker of a stage has."""
    op = "tok" if stage.units[0] == 0 else "head"
    rows, ways = graph.sizes["v"], stage.mesh.size("tensor") if stage.splits.get(op) == "v" else 1
    return [
        HeldRange(rank, t % ways * rows // ways, (t % ways + 1) * rows // ways)
        for ranks in stage.mesh.batch
        for t, rank in enumerate(ranks)
    ]


def _sends(
    owned_ranges: list[HeldRange], wanted: list[HeldRange], each: float, plain: float, at: Place
) -> Sends:
    across, inside = plan_reshard(owned_ranges, wanted, at)
    return Sends(_sized(across, each), _sized(inside, plain))


def _sized(sends: Iterable[Send], each: float) -> tuple[WireFlow, ...]:
    """With the bytes of all that goes between the same two ranks."""
    sizes: dict[tuple[int, int], float] = {}
    for send in sends:
        pair = send.source, send.target
        sizes[pair] = sizes.get(pair, 0.0) + each * (send.stop - send.start)
    return tuple(WireFlow(*pair, size) for pair, size in sizes.items())


# -- replicas
#   ------------------------------------------------------------------------------------------------


def meeting(plan: Plan, parameters: float, engine: Engine) -> Communication | None:
    """Return the exchange of replicas that synchronize once in `sync.every` steps; None where they
    never do."""
    if plan.sync is None or len(plan.replicas) < 2:
        return None
    leaders = tuple(replica.stages[0].mesh.ranks[0] for replica in plan.replicas)
    kind: tuple[Kind, Way] = ("exchange", "straight") if engine.direct else ("all_reduce", "ring")
    size = parameters * plan.sync.bits / 8
    return Communication("replicas", *kind, (leaders,), size, times=1 / plan.sync.every)


# -- bytes
#   ------------------------------------------------------------------------------------------------


def flows(series: Communication, at: Place) -> Iterator[WireFlow]:
    """Every pair of ranks that send each other something, with the bytes of a whole step."""
    for group in series.groups:
        if series.way == "straight":
            part = series.size / len(group) if series.kind == "reduce_scatter" else series.size
            yield from _straight(group, series.times * part)
        elif series.way == "sites" and len(sites := by_site(group, at)) > 1:
            for ranks in sites.values():
                yield from _ring(
                    ranks, series.times * series.inside * ring_share("all_reduce", len(ranks))
                )
            yield from _straight([ranks[0] for ranks in sites.values()], series.times * series.size)
        else:
            yield from _ring(
                group, series.times * series.size * ring_share(series.kind, len(group))
            )


def ring_share(kind: Kind, ranks: int) -> float:
    """Return the share of a tensor that goes over each hop of a ring of `ranks`."""
    return ring_steps(kind, ranks) / ranks / (ranks if kind == "all_to_all" else 1)


def _ring(group: Sequence[int], each: float) -> Iterator[WireFlow]:
    if len(group) > 1:
        for source, target in zip(group, (*group[1:], group[0]), strict=True):
            yield WireFlow(source, target, each)


def _straight(group: Sequence[int], part: float) -> Iterator[WireFlow]:
    for source, target in itertools.permutations(group, 2):
        yield WireFlow(source, target, part)
