"""What a stage's batch axes exchange in a step: seconds, bytes, and what they take of processors.
All are folds over its communications (`semantics.communications`).

On CPUs messages take turns with arithmetic on the same cores: what goes through a host's memory or
its sockets is time in which nothing is computed, while the line itself overlaps with the backward
pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from farspan.domain.plan import Stage
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.semantics.communications import Communication, flows, ring_steps


class SyncTimes(NamedTuple):
    """Seconds a step over the batch axes: sums, gathers of weights, sums over other axes; the share
    of one message, and of what is sent last; the way that straight messages share; seconds that all
    this keeps processors from computing; bytes that leave each site."""

    reduce: float
    gather: float
    rest: float
    each: float
    last: float
    round_trip_s: float
    busy: float
    sent: dict[str, float]

    def exposed(self, seconds: float, cover: float) -> float:
        """Return the part of a series of sums that `seconds` of arithmetic do not hide: at
        least what is sent last."""
        return (
            max(self.round_trip_s + (seconds - self.round_trip_s) * self.last, seconds - cover)
            if seconds
            else 0.0
        )


def gradient_sync_times(costs: Costs, stage: Stage, microbatches: int) -> SyncTimes:
    """All that a stage's batch axes exchange in a step; nothing overlaps yet."""
    network, exchanges = costs.network, costs.batch_axes(stage, microbatches)
    sums, *others = exchanges
    gathers = next(
        (communication for communication in others if communication.purpose == "weights"), None
    )
    rest = sum(
        network.seconds(communication)
        for communication in others
        if communication.purpose == "gradients"
    )
    each = 1 / max(1.0, sums.messages)
    return SyncTimes(
        network.seconds(sums),
        network.seconds(gathers) if gathers else 0.0,
        rest,
        each,
        max(each, _tables(costs, stage)),
        _direct_round_trip_s(network, exchanges),
        _busy(costs, stage, exchanges) if costs.engine.move_cost else 0.0,
        leaving(network, exchanges),
    )


def _direct_round_trip_s(network: Network, exchanges: Iterable[Communication]) -> float:
    """Return the way, there and back where nothing is posted ahead, of sums that go straight
    between sites; those of a ring take theirs message by message."""
    if not network.engine.direct:
        return 0.0
    groups = (
        group
        for communication in exchanges
        if communication.ahead and communication.way != "ring"
        for group in communication.groups
    )
    ends = ({network.hosts[rank]: rank for rank in group}.values() for group in groups)
    share = 0.5 if network.engine.receives_ahead else 1.0
    return share * max(
        (network.rtt_s(*pair) for ranks in ends for pair in combinations(ranks, 2)), default=0.0
    )


def _tables(costs: Costs, stage: Stage) -> float:
    """Return the share of the embedding's tables in a stage's parameters: their gradients are
    complete only when its backward pass ends."""
    graph = costs.graph
    if stage.units[0] != 0:
        return 0.0
    return graph.trained_parameters(0, 1) / graph.trained_parameters(*stage.units)


# -- processors
#   ------------------------------------------------------------------------------------------------


def _busy(costs: Costs, stage: Stage, exchanges: Sequence[Communication]) -> float:
    """Seconds of the busiest site: what goes between its devices, through its sockets, and through
    its codecs. Where weights are gathered after the update nobody has anything else to do."""
    mesh, network = stage.mesh, costs.network
    beside = [communication for communication in exchanges if communication.beside != "nothing"]
    turns = [
        communication
        for communication in beside
        if communication.groups == (mesh.groups("data") if stage.zero else mesh.transposed)
    ]
    inside = sum(
        communication.times * _inside_s(network, communication, 4.0 * costs.parameters(stage))
        for communication in turns
    )
    sockets = max(
        (
            carried_s(network, mesh.ranks, name, 2 * size)
            for name, size in leaving(network, beside).items()
        ),
        default=0.0,
    )
    in_memory = (
        inside
        + _coding(costs, stage, exchanges[0].messages)
        + _scattered(costs, stage, exchanges[0].times)
    )
    woken = (
        sum(communication.times for communication in turns) * exchanges[0].messages
        if len(mesh.batch) > 1
        else 0
    )
    return costs.engine.move_cost * in_memory + sockets + costs.engine.message_busy_s * woken


def _inside_s(network: Network, communication: Communication, size: float) -> float:
    """Return the seconds of a sum or a gather between devices of one host."""
    kind = "all_reduce" if communication.kind == "exchange" else communication.kind
    parts = [
        ranks
        for group in communication.groups
        for ranks in (network.by_site(group).values() if communication.way == "sites" else (group,))
    ]
    return max(network.inside_s(ranks, size, ring_steps(kind, len(ranks))) for ranks in parts)


def carried_s(network: Network, ranks: Sequence[int], site: str, size: float) -> float:
    """Return the seconds that bytes through the sockets of a site, in and out, keep its hosts among
    `ranks` from computing; 0 where others than processors compute."""
    hosts = {network.hosts[rank] for rank in ranks if network.sites[rank] == site}
    return network.engine.move_cost * network.byte_s(site) * size / max(1, len(hosts))


def _scattered(costs: Costs, stage: Stage, rounds: float) -> float:
    """Return the cost of a part that each rank of a data axis sums for itself, as passes through
    memory: it is copied, the others' are added to it, and it goes where the update reads it."""
    ways = stage.mesh.size("data")
    if stage.zero == 0 or ways == 1:
        return 0.0
    part = rounds * 4.0 * costs.parameters(stage) / ways
    return max(costs.stream_s(rank, part * (2 + 3 * (ways - 1) + 2)) for rank in stage.mesh.ranks)


def _coding(costs: Costs, stage: Stage, messages: float) -> float:
    """Return the cost of encoding, decoding and adding what goes straight between sites, as passes
    through memory (Engine)."""
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


# -- bytes
#   ------------------------------------------------------------------------------------------------


def leaving(network: Network, exchanges: Iterable[Communication]) -> dict[str, float]:
    """Bytes of a step that leave each site."""
    return network.leaving(
        flow
        for communication in exchanges
        for flow in flows(communication, network.sites.__getitem__)
    )
