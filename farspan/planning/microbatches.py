"""Plans with smaller or larger microbatches. The batch, and so the training, stays the same."""

from __future__ import annotations

from msgspec.structs import replace

from farspan.domain.plan import Plan, Replica


def largest_microbatch(replica: Replica) -> int:
    """Return the sequences of the largest microbatch of any device."""
    sizes = []
    for place, stage in enumerate(replica.stages):
        for coordinate in range(len(stage.rows)):
            sizes.append(replica.micro_rows(place, coordinate))
    return max(sizes)


def halve_microbatches(plan: Plan, rank: int | None = None) -> Plan | None:
    """Return the plan in which the replica of a rank (None: each) computes half the sequences at
    once. None where that is one sequence, or its rows cannot be divided further."""
    replicas = []
    for replica in plan.replicas:
        ranks = set[int]()
        for stage in replica.stages:
            ranks.update(stage.mesh.ranks)
        if rank is None or rank in ranks:
            smaller = _in_parts(replica, 2 * replica.microbatches)
            if smaller is None:
                return None
            replicas.append(smaller)
        else:
            replicas.append(replica)
    return replace(plan, replicas=tuple(replicas))


def double_microbatches(plan: Plan) -> Plan | None:
    """Return the plan in which each replica computes twice the sequences at once. None where one
    computes all at once, or its rows cannot be divided so."""
    replicas = []
    for replica in plan.replicas:
        larger = None
        if replica.microbatches > 1:
            larger = _in_parts(replica, -(-replica.microbatches // 2))
        if larger is None:
            return None
        replicas.append(larger)
    return replace(plan, replicas=tuple(replicas))


def _in_parts(replica: Replica, parts: int) -> Replica | None:
    """Return the replica with its rows in this number of parts, at most one for each sequence; None
    where its largest part stays what it is, or the rows cannot be divided so."""
    most = max(max(stage.rows) for stage in replica.stages)
    parts = min(parts, most)
    depths = tuple(min(depth, parts) for depth in replica.in_flight)
    try:
        changed = replace(replica, microbatches=parts, in_flight=depths)
    except ValueError:
        return None
    if largest_microbatch(changed) == largest_microbatch(replica):
        return None
    return changed
