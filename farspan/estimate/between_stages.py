"""What goes between the stages of a pipeline: activations and their gradients, and a table that
both ends hold.

Each message goes over its own wire, as `plan_reshard` lists them; lines are shared where they
are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from farspan.domain.plan import Replica
from farspan.estimate.gradient_sync import carried_s
from farspan.estimate.schedule import Hop
from farspan.estimate.stage import Costs
from farspan.semantics.communications import Sends

#: Of the edges of a pipeline, down and up.
Ways = tuple[list[Hop], list[Hop]]


def edges(replica: Replica, costs: Costs) -> Ways:
    """Return the times of a microbatch's activations between neighbouring stages, and of its
    gradients back."""
    down, up = (
        [
            _hop(costs, costs.stage_sends(replica, i, backward), edge.streams)
            for i, edge in enumerate(replica.edges)
        ]
        for backward in (False, True)
    )
    return down, up


def _hop(costs: Costs, sends: Sends, streams: int) -> Hop:
    """Return the hop of a message: the wire is busy with it, and its part inside a site overlaps
    the next message."""
    network, key = costs.network, (id(sends), streams)  # Costs keep what was sent.
    if key not in costs.hops:
        across = network.flows_s(sends.across, max(costs.engine.streams, streams))
        inside = network.flows_s(sends.inside, costs.engine.streams)
        costs.hops[key] = Hop(across.busy, across.delay + inside.busy + inside.delay)
    return costs.hops[key]


def crossing(replica: Replica, costs: Costs, edge: int, backward: bool) -> dict[str, float]:
    """Bytes of a microbatch that leave each site over an edge."""
    return costs.network.leaving(costs.stage_sends(replica, edge, backward).across)


def sent_between(replica: Replica, costs: Costs) -> dict[str, float]:
    """Bytes of a step that leave each site for another stage: activations, gradients, a tied
    table's both ways."""
    sent: dict[str, float] = {}
    parts = [
        (crossing(replica, costs, edge, backward), replica.microbatches)
        for edge in range(len(replica.edges))
        for backward in (False, True)
    ]
    if costs.graph.tied and len(replica.stages) > 1:
        parts += [(costs.network.leaving(sends.across), 1) for sends in table(replica, costs)]
    for sizes, times in parts:
        for site, size in sizes.items():
            sent[site] = sent.get(site, 0.0) + times * size
    return sent


class Tie(NamedTuple):
    """What a tied table costs the first and the last stage: seconds that both wait after their
    sums; or seconds of the head's gradient on its way to the table, which leaves when the last
    stage ends, and of the gradient of the step's own rows on its way back; and what those bytes
    take of the first stage's processors."""

    both: float = 0.0
    across: float = 0.0
    back: float = 0.0
    taken: float = 0.0

    def waits(self, summed: Sequence[float], ends: Sequence[float]) -> list[float]:
        """Seconds that each stage waits, given when its passes and the sums of its gradients
        ended."""
        waits = [0.0] * len(ends)
        waits[0] = waits[-1] = self.both
        if self.across:
            waits[0] = max(self.taken, ends[-1] + self.across - summed[0])
        return waits


def tied_bytes(replica: Replica, costs: Costs) -> tuple[float, float]:
    """Bytes of a tied table between a pipeline's ends in a step: the head's gradient, and what
    comes back."""
    first = replica.stages[0]
    size = costs.graph.size("vd") * (4.0 if costs.engine.direct else first.grad_sync.bits / 8)
    # What rounding left of a sum over several workers is in rows of other steps, too
    # (`runtime.state.tied_embeddings`).
    rounded = first.grad_sync.bits < 32 and len(first.mesh.batch) > 1
    if rounded or not costs.engine.receives_ahead:
        return size, size
    return size, size * min(1.0, replica.batch * costs.train.seq_len / costs.graph.sizes["v"])


def table(replica: Replica, costs: Costs) -> tuple[Sends, Sends]:
    """Return a tied table's messages in a step: the head's gradient to the first stage, and what
    comes back."""
    first, last, rows = replica.stages[0], replica.stages[-1], costs.graph.sizes["v"]
    there, again = tied_bytes(replica, costs)
    return costs.table_sends(last, first, there / rows), costs.table_sends(
        first, last, again / rows
    )


def tie(replica: Replica, costs: Costs) -> Tie:
    """Return the exchange of a tied table's gradient between a pipeline's ends."""
    if not costs.graph.tied or len(replica.stages) == 1:
        return Tie()
    first, last = replica.stages[0], replica.stages[-1]
    size, touched = tied_bytes(replica, costs)
    if costs.engine.ties_collective:
        # Each device of a stage meets its peer of the other; the update waits for the sum.
        return Tie(
            both=costs.network.all_reduce_s((first.mesh.ranks[0], last.mesh.ranks[-1]), size)
        )
    streams = (
        1
        if costs.engine.direct
        else max(costs.engine.streams, *(edge.streams for edge in replica.edges))
    )
    there, again = (sum(_hop(costs, sends, streams)) for sends in table(replica, costs))
    network, ranks = costs.network, (*first.mesh.ranks, *last.mesh.ranks)
    ends = [network.sites[stage.mesh.ranks[0]] for stage in (first, last)]
    carried = 0.0
    if ends[0] != ends[1]:
        there += max(carried_s(network, ranks, site, size) for site in ends)
        carried = carried_s(network, ranks, ends[0], size + touched)
    if not costs.engine.receives_ahead:
        return Tie(both=2 * there)
    return Tie(across=there, back=again, taken=carried)
