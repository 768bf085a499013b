"""What a plan sends over the network in a step: by purpose, how many bytes between which hosts, and how long it takes.

Counted from the plan as `estimate.stage` and `estimate.price` count it; seconds here are of the exchange alone, before
anything of it hides behind arithmetic.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from farspan.domain.graph import Operator
from farspan.domain.plan import GradSync, Plan, Replica, Stage
from farspan.estimate.memory import local_parameters
from farspan.estimate.network import Network
from farspan.estimate.price import edges, tied_bytes
from farspan.estimate.stage import Costs
from farspan.estimate.sums import buckets
from farspan.semantics.tensor_sharding import RESIDUAL, between, returns_to_residual, strategy

Purpose = Literal["gradients", "weights", "operators", "activations", "tied table", "replicas"]
Pair = tuple[str, str]


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One purpose's messages of a step. `by_hosts` holds bytes, both ways together, between hosts that are not one."""

    purpose: Purpose
    by_hosts: dict[Pair, float]
    seconds: float
    #: Of them, what remains if every message were empty: round trips.
    latency_s: float


class _Ledger:
    """Adds up exchanges by purpose; groups of one purpose exchange side by side, so the slowest of a call counts."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._order = {host.name: i for i, host in enumerate(network.cluster.hosts)}
        self._found: dict[Purpose, tuple[dict[Pair, float], list[float]]] = {}

    def add(self, purpose: Purpose, seconds: float, latency_s: float) -> None:
        times = self._found.setdefault(purpose, ({}, [0.0, 0.0]))[1]
        times[0] += seconds
        times[1] += latency_s

    def bytes(self, purpose: Purpose, a: str, b: str, size: float) -> None:
        if a != b and size:
            pair = (a, b) if self._order[a] < self._order[b] else (b, a)
            hosts = self._found.setdefault(purpose, ({}, [0.0, 0.0]))[0]
            hosts[pair] = hosts.get(pair, 0.0) + size

    def ring(self, purpose: Purpose, group: Sequence[int], each: float) -> None:
        """`each` bytes on every hop of a ring."""
        names = [self._network.hosts[rank] for rank in group]
        for a, b in zip(names, (*names[1:], names[0]), strict=True):
            self.bytes(purpose, a, b, each)

    def straight(self, purpose: Purpose, group: Sequence[int], part: float) -> None:
        """`part` bytes from each rank to each other."""
        names = [self._network.hosts[rank] for rank in group]
        for a, b in itertools.permutations(names, 2):
            self.bytes(purpose, a, b, part)

    def exchanges(self) -> tuple[Exchange, ...]:
        exchanges = (
            Exchange(purpose=purpose, by_hosts=hosts, seconds=times[0], latency_s=times[1])
            for purpose, (hosts, times) in self._found.items()
        )
        return tuple(
            sorted(
                (exchange for exchange in exchanges if exchange.seconds or exchange.by_hosts),
                key=lambda exchange: -exchange.seconds,
            )
        )


def traffic(plan: Plan, costs: Costs) -> tuple[Exchange, ...]:
    """All exchanges of a step of the whole plan, the longest first."""
    ledger = _Ledger(costs.network)
    for replica in plan.replicas:
        for index, stage in enumerate(replica.stages):
            _batch_axes(replica, stage, costs, ledger)
            if stage.mesh.size("tensor") > 1:
                _tensor_axis(replica, index, costs, ledger)
        _edges(replica, costs, ledger)
        _tied(replica, costs, ledger)
    _replicas(plan, costs, ledger)
    return ledger.exchanges()


def between_sites(exchanges: Sequence[Exchange], network: Network) -> dict[Pair, dict[Purpose, float]]:
    """Bytes a step between every two sites that exchange any, by purpose."""
    by_pair: dict[Pair, dict[Purpose, float]] = {}
    for exchange in exchanges:
        for (a, b), size in exchange.by_hosts.items():
            pair = (network.site(a), network.site(b))
            if pair[0] != pair[1]:
                sums = by_pair.setdefault(pair, {})
                sums[exchange.purpose] = sums.get(exchange.purpose, 0.0) + size
    return by_pair


def _batch_axes(replica: Replica, stage: Stage, costs: Costs, ledger: _Ledger) -> None:
    """Sums of gradients and gathers of weights, as often as ZeRO's level asks for them."""
    mesh, network, parts = stage.mesh, costs.network, replica.microbatches
    ways, sync = mesh.size("tensor"), stage.grad_sync
    parameters = local_parameters(costs.graph, stage.units, stage.splits, ways)
    size = parameters * sync.bits / 8
    whole, messages, tensors = buckets(costs, stage)
    if stage.zero == 0:
        for group in mesh.transposed:
            _sum_bytes(ledger, network, group, size, sync)
        _slowest(ledger, "gradients", mesh.transposed, lambda group, s: network.all_reduce_s(
            group, s, messages=messages, concurrent=ways, topology=sync.topology, bits=sync.bits), size)  # fmt: skip
        return
    groups = list(mesh.groups("data"))
    sums = parts if stage.zero == 3 or (stage.zero == 2 and parts > 1) else 1
    gathers = 2 * parts if stage.zero == 3 else 1
    apart = messages if costs.engine.gathers_combined else tensors
    gathered = parameters * costs.engine.weight_bytes[costs.train.precision]
    for group in groups:
        share = (len(group) - 1) / len(group)
        if costs.engine.scatters_straight:
            ledger.straight("gradients", group, sums * whole / len(group))
        else:
            ledger.ring("gradients", group, sums * share * whole * (1 if costs.engine.scatters else 2))
        ledger.ring("weights", group, gathers * share * gathered)
    summed = network.reduce_scatter_s if costs.engine.scatters else network.all_reduce_s
    _slowest(ledger, "gradients", groups, lambda g, s: summed(g, s, messages=messages, concurrent=ways), whole, sums)
    _slowest(ledger, "weights", groups, lambda g, s: network.all_gather_s(
        g, s, messages=apart, concurrent=ways), gathered, gathers)  # fmt: skip
    part, sites = size / mesh.size("data"), list(mesh.groups("site"))
    for group in sites:
        if costs.engine.direct:
            ledger.straight("gradients", group, part)
        else:
            ledger.ring("gradients", group, 2 * part * (len(group) - 1) / len(group))
    between = functools.partial(network.direct_s, ahead=True) if costs.engine.direct else network.all_reduce_s
    _slowest(ledger, "gradients", sites, lambda g, s: between(g, s, messages=messages, concurrent=len(groups[0])), part)


def _slowest(
    ledger: _Ledger, purpose: Purpose, groups: Sequence[Sequence[int]], took: Callable[[Sequence[int], float], float],
    size: float, times: float = 1,
) -> None:  # fmt: skip
    whole, empty = (max(took(group, s) for group in groups) for s in (size, 0.0))
    ledger.add(purpose, times * whole, times * empty)


def _sum_bytes(ledger: _Ledger, network: Network, group: Sequence[int], size: float, sync: GradSync) -> None:
    """Bytes of an all-reduce: over one ring, straight to everyone, or inside each site and straight between them."""
    sites = network.by_site(group)
    if sync.topology == "hierarchical" and len(sites) > 1:
        inside = size * 32 / sync.bits if network.engine.direct else size
        for ranks in sites.values():
            ledger.ring("gradients", ranks, 2 * inside * (len(ranks) - 1) / len(ranks))
        ledger.straight("gradients", [ranks[0] for ranks in sites.values()], size)
    elif sync.bits < 32 and network.engine.direct:
        ledger.straight("gradients", group, size)
    else:
        ledger.ring("gradients", group, 2 * size * (len(group) - 1) / len(group))


def _tensor_axis(replica: Replica, index: int, costs: Costs, ledger: _Ledger) -> None:
    """The collectives between operators that the tensor axis divides, of every microbatch."""
    stage = replica.stages[index]
    for coordinate, group in enumerate(stage.mesh.batch):
        if not stage.rows[coordinate]:
            continue
        sizes = Counter(max(1, replica.part(index, coordinate, i)) for i in range(replica.microbatches))
        for (unit, count), (rows, parts) in itertools.product(costs.graph.kinds(*stage.units), sizes.items()):
            times = count * parts
            for name, size in _layout_changes(costs, unit, stage.splits, rows):
                share = {"all_reduce": 2.0, "all_to_all": 1 / len(group)}.get(name, 1.0)
                ledger.ring("operators", group, times * share * size * (len(group) - 1) / len(group))
                if coordinate == 0:
                    took = getattr(costs.network, f"{name}_s")
                    seconds = took(group, size, concurrent=len(stage.mesh.batch))
                    ledger.add("operators", times * seconds, times * took(group, 0.0))


def _layout_changes(
    costs: Costs, unit: Sequence[Operator], splits: dict[str, str], rows: int
) -> list[tuple[str, float]]:
    """(collective, bytes) of one unit's forward and backward pass over so many rows."""
    residual = splits.get(RESIDUAL, "")
    writes = residual
    changes: list[tuple[str, float]] = []

    def change(reads: str, gradient: str, dims: str) -> None:
        if "d" in dims or dims[:2] == "bs":
            size = costs.graph.size(dims, b=rows, s=costs.train.seq_len) * costs.width
            changes.extend((name, size) for both in between(writes, reads, gradient) for name in both)

    for op in unit:
        plan = strategy(op, splits.get(op.name, ""))
        change(plan.reads, plan.gradient, op.inputs[0])
        writes = plan.writes
        if returns_to_residual(op):
            change(residual, residual, "bsd")
            writes = residual
    return changes


def _edges(replica: Replica, costs: Costs, ledger: _Ledger) -> None:
    """Activations down and their gradients up between neighbouring stages, spread over the hosts that send in pairs."""
    down, up = edges(replica, costs)
    rows = -(-replica.batch // replica.microbatches)
    for i, edge in enumerate(replica.edges):
        size = 2 * replica.microbatches * costs.graph.size("bsd", b=rows, s=costs.train.seq_len) * edge.bits / 8
        hosts = [
            list(dict.fromkeys(costs.network.hosts[rank] for rank in replica.stages[k].mesh.ranks)) for k in (i, i + 1)
        ]
        pairs = list(zip(hosts[0][::-1], hosts[1], strict=False))
        for a, b in pairs:
            ledger.bytes("activations", a, b, size / len(pairs))
        busy = replica.microbatches * (down[i].busy + up[i].busy)
        delay = down[i].delay + up[i].delay
        ledger.add("activations", busy + delay, delay)


def _tied(replica: Replica, costs: Costs, ledger: _Ledger) -> None:
    """The gradient of a table that both ends of a pipeline hold, one way, and its sum or the updated rows back."""
    if not costs.graph.tied or len(replica.stages) == 1:
        return
    a, b = replica.stages[0].mesh.ranks[0], replica.stages[-1].mesh.ranks[-1]
    whole, rows = tied_bytes(replica, costs)
    ledger.bytes("tied table", costs.network.hosts[a], costs.network.hosts[b], whole + rows)
    if costs.engine.ties_collective:
        took = costs.network.all_reduce_s
        ledger.add("tied table", took((a, b), whole), took((a, b), 0.0))
    else:
        wire = costs.network.wire(b, a, collective=False)
        seconds = [costs.network.send_s(wire, size) + wire.delay_s for size in (whole, rows, 0.0)]
        ledger.add("tied table", seconds[0] + seconds[1], 2 * seconds[2])


def _replicas(plan: Plan, costs: Costs, ledger: _Ledger) -> None:
    """What replicas exchange when they meet, spread over the steps between meetings."""
    if plan.sync is None or len(plan.replicas) < 2:
        return
    leaders = [replica.stages[0].mesh.ranks[0] for replica in plan.replicas]
    size, every = costs.graph.parameters() * plan.sync.bits / 8, plan.sync.every
    if costs.engine.direct:
        ledger.straight("replicas", leaders, size / every)
    else:
        ledger.ring("replicas", leaders, 2 * size * (len(leaders) - 1) / len(leaders) / every)
    took = costs.network.direct_s if costs.engine.direct else costs.network.all_reduce_s
    ledger.add("replicas", took(leaders, size) / every, took(leaders, 0.0) / every)
