"""What a plan sends over the network in a step: by purpose, how many bytes between which hosts, and
how long it takes.

Counted from the plan as `estimate.stage` and `estimate.estimate_plan` count it; seconds here are
of the exchange alone, before anything of it hides behind arithmetic.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import msgspec

from farspan.domain.plan import Plan, Replica, Stage
from farspan.estimate.between_stages import edges, table, tied_bytes
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.semantics.communications import (
    Communication,
    Purpose,
    Sends,
    flows,
    layout_changes,
    meeting,
)

Pair = tuple[str, str]


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One purpose's messages of a step. `by_hosts` holds bytes, both ways together, between hosts
    that are not one."""

    purpose: Purpose
    by_hosts: dict[Pair, float]
    seconds: float
    #: Of them, what remains if every message were empty: round trips.
    latency_s: float


class _Ledger:
    """Adds up exchanges by purpose; groups of one purpose exchange side by side, so the slowest of
    a call counts."""

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

    def communication(self, series: Communication, *, timed: bool = True) -> None:
        """Add its bytes between hosts and, unless others of its kind run at the same time, its
        seconds."""
        network = self._network
        for source, target, size in flows(series, network.sites.__getitem__):
            self.bytes(series.purpose, network.hosts[source], network.hosts[target], size)
        if timed:
            empty = series._replace(size=0.0, inside=0.0)
            self.add(
                series.purpose,
                series.times * network.seconds(series),
                series.times * network.seconds(empty),
            )

    def sends(self, purpose: Purpose, sends: Sends, times: int) -> None:
        """Add the bytes between hosts of messages that are sent `times` times."""
        for source, target, size in (*sends.across, *sends.inside):
            self.bytes(
                purpose, self._network.hosts[source], self._network.hosts[target], times * size
            )

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


def between_sites(
    exchanges: Sequence[Exchange], network: Network
) -> dict[Pair, dict[Purpose, float]]:
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
    """Return sums of gradients and gathers of weights."""
    for series in costs.batch_axes(stage, replica.microbatches):
        ledger.communication(series)


def _tensor_axis(replica: Replica, index: int, costs: Costs, ledger: _Ledger) -> None:
    """Return the collectives between operators that the tensor axis divides, of every
    microbatch."""
    stage, graph = replica.stages[index], costs.graph
    for coordinate, group in enumerate(stage.mesh.batch):
        if not stage.rows[coordinate]:
            continue
        sizes = Counter(
            max(1, replica.microbatch_rows(index, coordinate, i))
            for i in range(replica.microbatches)
        )
        for (unit, count), (rows, parts) in itertools.product(
            graph.kinds(*stage.units), sizes.items()
        ):
            for kind, size, _ in layout_changes(
                graph, unit, stage.splits, rows, costs.train.seq_len, costs.width
            ):
                series = Communication(
                    "operators",
                    kind,
                    "ring",
                    (group,),
                    size,
                    count * parts,
                    concurrent=len(stage.mesh.batch),
                )
                ledger.communication(series, timed=coordinate == 0)


def _edges(replica: Replica, costs: Costs, ledger: _Ledger) -> None:
    """Activations down and their gradients up between neighbouring stages."""
    down, up = edges(replica, costs)
    for i in range(len(replica.edges)):
        for backward in (False, True):
            ledger.sends(
                "activations", costs.stage_sends(replica, i, backward), replica.microbatches
            )
        busy = replica.microbatches * (down[i].busy + up[i].busy)
        delay = down[i].delay + up[i].delay
        ledger.add("activations", busy + delay, delay)


def _tied(replica: Replica, costs: Costs, ledger: _Ledger) -> None:
    """Return the gradient of a table that both ends of a pipeline hold, one way, and its sum or the
    updated rows back."""
    if not costs.graph.tied or len(replica.stages) == 1:
        return
    both = table(replica, costs)
    for sends in both:
        ledger.sends("tied table", sends, 1)
    if costs.engine.ties_collective:
        took, ends = (
            costs.network.all_reduce_s,
            (replica.stages[0].mesh.ranks[0], replica.stages[-1].mesh.ranks[-1]),
        )
        ledger.add("tied table", took(ends, tied_bytes(replica, costs)[0]), took(ends, 0.0))
    else:
        for sends in both:
            wires = costs.network.flows_s(sends.across, 1)
            ledger.add("tied table", sum(wires), wires.delay)


def _replicas(plan: Plan, costs: Costs, ledger: _Ledger) -> None:
    """Add the exchange of replicas at their synchronization, spread over the steps between two."""
    if met := meeting(plan, costs.graph.parameters(), costs.engine):
        ledger.communication(met)
