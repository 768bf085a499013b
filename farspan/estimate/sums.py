"""Sums of gradients and gathers of weights over a stage's batch axes: seconds, bytes, and what they take of processors.

On CPUs messages take turns with arithmetic on the same cores: what goes through a host's memory or its sockets is time
in which nothing is computed, while the line itself works beside the backward pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from farspan.domain.plan import Stage
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs


class SyncTimes(NamedTuple):
    """Seconds a step over the batch axes: sums, gathers of weights, sums over other axes; the share of one message,
    and of what is sent last; the way that straight messages share; seconds that all this keeps processors from
    computing; bytes that leave each site."""

    reduce: float
    gather: float
    rest: float
    each: float
    last: float
    trip: float
    busy: float
    sent: dict[str, float]

    def exposed(self, seconds: float, cover: float) -> float:
        """What of a series of sums does not hide behind so many seconds of arithmetic: at least what is sent last."""
        return max(self.trip + (seconds - self.trip) * self.last, seconds - cover) if seconds else 0.0


def sync(costs: Costs, stage: Stage, microbatches: int) -> SyncTimes:
    """All that a stage's batch axes exchange in a step; nothing overlaps yet."""
    mesh, network, engine = stage.mesh, costs.network, costs.engine
    ways = mesh.size("tensor")
    parameters = costs.parameters(stage)
    bits = stage.grad_sync.bits
    width = bits / 8
    size, gathered = parameters * width, parameters * engine.weight_bytes[costs.train.precision]
    filled, messages, tensors = buckets(costs, stage)
    reduce = gather = rest = 0.0
    topology = stage.grad_sync.topology
    if stage.zero == 0:
        reduce = max(
            network.all_reduce_s(g, size, messages=messages, concurrent=ways, topology=topology, bits=bits)
            for g in mesh.transposed
        )
    else:
        groups, summed = mesh.groups("data"), network.reduce_scatter_s
        if not engine.scatters:
            summed = network.all_reduce_s
        apart = messages if engine.gathers_combined else tensors
        # Where the parameters are divided one unit is gathered while the one before it computes.
        at_once = None
        if stage.zero == 3 and engine.gathers_combined:
            apart, at_once = stage.units[1] - stage.units[0], 1
        reduce = max(summed(g, filled, messages=messages, concurrent=ways) for g in groups)
        gather = max(
            network.all_gather_s(g, gathered, messages=apart, concurrent=ways, at_once=at_once) for g in groups
        )
        part, together = size / max(1, mesh.size("data")), len(mesh.groups("site"))
        rest = max(
            network.direct_s(g, part, messages=messages, concurrent=together, ahead=True) if engine.direct
            else network.all_reduce_s(g, part, messages=messages, concurrent=together)
            for g in mesh.groups("site")
        )  # fmt: skip
    if ways > 1:
        rest += _partial_weights(costs, stage, width)
    each, gone = 1 / max(1.0, messages), _sent(costs, stage, microbatches)
    busy = _busy(costs, stage, microbatches, messages) if engine.move_cost else 0.0
    trip = _trip(costs, stage)
    return SyncTimes(reduce, gather, rest, each, max(each, _tables(costs, stage)), trip, busy, gone)


def _trip(costs: Costs, stage: Stage) -> float:
    """The way, there and back where nothing is posted ahead, of sums that go straight between sites; those of a ring
    take theirs message by message."""
    network, by = costs.network, stage.grad_sync
    if not costs.engine.direct or (stage.zero == 0 and by.topology == "flat" and by.bits == 32):
        return 0.0
    groups = stage.mesh.transposed if stage.zero == 0 else stage.mesh.groups("site")
    share = 0.5 if costs.engine.receives_ahead else 1.0
    return share * max((network.rtt_s(a, b) for group in groups for a in group for b in group), default=0.0)


class Buckets(NamedTuple):
    """What a stage's buckets hold: bytes, in so many messages; and tensors, which are one message each without them."""

    filled: float
    messages: int
    tensors: int


def buckets(costs: Costs, stage: Stage) -> Buckets:
    """An engine that sends straight fills them with whole gradients, in however many bits these travel."""
    by = stage.grad_sync
    filled = costs.parameters(stage) * (4.0 if costs.engine.direct else by.bits / 8)
    tensors = sum(count * len(op.weights) for unit, count in costs.graph.kinds(*stage.units) for op in unit)
    return Buckets(filled, tensors if by.bucket_bytes is None else math.ceil(filled / by.bucket_bytes), tensors)


def _tables(costs: Costs, stage: Stage) -> float:
    """The share of the embedding's tables in a stage's parameters: their gradients are complete only when its
    backward pass ends."""
    graph = costs.graph
    return graph.parameters(0, 1) / graph.parameters(*stage.units) if stage.units[0] == 0 else 0.0


def _partial_weights(costs: Costs, stage: Stage, width: float) -> float:
    """Sums over the tensor axis of the gradients of operators that divide the batch over it."""
    size = sum(
        count * costs.graph.size(weight.dims) * width
        for unit, count in costs.graph.kinds(*stage.units)
        for op in unit
        for weight in op.weights
        if stage.splits.get(op.name) == "b"
    )
    groups = stage.mesh.groups("tensor")
    return max(costs.network.all_reduce_s(g, size, concurrent=len(groups)) for g in groups) if size else 0.0


# -- processors --------------------------------------------------------------------------------------------------------


def _busy(costs: Costs, stage: Stage, microbatches: int, messages: float) -> float:
    """Seconds of the busiest site: what goes between its devices, through its sockets, and through its codecs. Where
    weights are gathered after the update nobody has anything else to do."""
    mesh, network, whole = stage.mesh, costs.network, 4.0 * costs.parameters(stage)
    by_sites = stage.grad_sync.topology == "hierarchical"
    inside, rounds = 0.0, 1
    if stage.zero == 0:
        for group in mesh.transposed:
            parts = network.by_site(group).values() if by_sites else (group,)
            inside = max(inside, *(network.inside_s(ranks, whole, 2 * (len(ranks) - 1)) for ranks in parts))
    else:
        rounds = (microbatches if stage.zero >= 2 else 1) + (2 * microbatches if stage.zero == 3 else 0)
        inside = rounds * max(network.inside_s(group, whole, len(group) - 1) for group in mesh.groups("data"))
    gone = _sent(costs, stage, microbatches, gathers=stage.zero == 3)
    sockets = max((carried_s(network, mesh.ranks, name, 2 * size) for name, size in gone.items()), default=0.0)
    in_memory = inside + _coding(costs, stage, messages) + _scattered(costs, stage, microbatches)
    woken = rounds * messages if len(mesh.batch) > 1 else 0
    return costs.engine.move_cost * in_memory + sockets + costs.engine.message_busy_s * woken


def carried_s(network: Network, ranks: Sequence[int], site: str, size: float) -> float:
    """Seconds that so many bytes through the sockets of a site, in and out, keep its hosts among `ranks` from
    computing; 0 where others than processors compute."""
    hosts = {network.hosts[rank] for rank in ranks if network.sites[rank] == site}
    return network.engine.move_cost * network.byte_s(site) * size / max(1, len(hosts))


def _scattered(costs: Costs, stage: Stage, microbatches: int) -> float:
    """What a part takes that each rank of a data axis sums for itself, as passes through memory: it is copied, the
    others' are added to it, and it goes where the update reads it."""
    ways = stage.mesh.size("data")
    if stage.zero == 0 or ways == 1:
        return 0.0
    rounds = microbatches if stage.zero >= 2 else 1
    part = rounds * 4.0 * costs.parameters(stage) / ways
    return max(costs.stream_s(rank, part * (2 + 3 * (ways - 1) + 2)) for rank in stage.mesh.ranks)


def _coding(costs: Costs, stage: Stage, messages: float) -> float:
    """Encoding, decoding and adding what goes straight between sites, as passes through memory (Engine)."""
    mesh, bits = stage.mesh, stage.grad_sync.bits
    shares = [0.0]  # Of the parameters, those that a device codes.
    if stage.zero:
        shares += [1 / mesh.size("data") for group in mesh.groups("site") if len(group) > 1]
    else:
        for group in mesh.transposed:
            sites = costs.network.by_site(group)
            if stage.grad_sync.topology == "hierarchical" and len(sites) > 1:
                shares.append(1 / max(1.0, min(messages, *map(len, sites.values()))))
            elif bits < 32 and len(group) > 1:
                shares.append(1.0)
    moved = max(shares) * costs.parameters(stage) * 4 * costs.engine.coding_passes.get(bits, 0.0)
    return max(costs.stream_s(rank, moved) for rank in mesh.ranks)


# -- bytes -------------------------------------------------------------------------------------------------------------


def _sent(costs: Costs, stage: Stage, microbatches: int, *, gathers: bool = True) -> dict[str, float]:
    """Bytes that leave each site in a step: a hop of a ring carries all parts but one, of a sum twice; what goes
    straight crosses for every pair."""
    mesh, engine, network, sent = stage.mesh, costs.engine, costs.network, dict[str, float]()
    across = costs.parameters(stage) * stage.grad_sync.bits / 8
    whole = 4.0 * costs.parameters(stage) if engine.direct else across
    straight: list[tuple[Sequence[int], float]] = []
    rings: list[tuple[Sequence[int], float]] = []
    if stage.zero == 0:
        by_sites = stage.grad_sync.topology == "hierarchical"
        group: Sequence[int]
        for group in mesh.transposed:
            if by_sites:
                group = tuple({network.sites[rank]: rank for rank in group}.values())
            if by_sites or (stage.grad_sync.bits < 32 and engine.direct):
                straight.append((group, across))
            else:
                rings.append((group, 2 * whole))
    else:
        sums = (microbatches if stage.zero >= 2 else 1) * whole
        times = (2 * microbatches if stage.zero == 3 else 1) if gathers else 0
        gathered = times * costs.parameters(stage) * engine.weight_bytes[costs.train.precision]
        data, sites = mesh.groups("data"), mesh.groups("site")
        rings += [(group, gathered) for group in data]
        if engine.scatters_straight:
            straight += [(group, sums / len(group)) for group in data]
        else:
            rings += [(group, sums * (1 if engine.scatters else 2)) for group in data]
        if engine.direct:
            straight += [(group, across / mesh.size("data")) for group in sites]
        else:
            rings += [(group, 2 * across / mesh.size("data")) for group in sites]
    for group, parts in rings:
        for site, hops in leaving(network, group).items():
            sent[site] = sent.get(site, 0.0) + hops * parts * (len(group) - 1) / len(group)
    for group, part in straight:
        names = [network.sites[rank] for rank in group]
        for name in names:
            sent[name] = sent.get(name, 0.0) + part * sum(other != name for other in names)
    return sent


def leaving(network: Network, group: Sequence[int]) -> dict[str, int]:
    """Hops of a ring over the group that leave each site."""
    ring = zip(group, (*group[1:], group[0]), strict=True)
    return dict(Counter(network.sites[a] for a, b in ring if network.sites[a] != network.sites[b]))
