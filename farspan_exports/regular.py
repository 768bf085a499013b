"""What other systems take for granted of a plan, and where a plan of unlike parts departs from
it."""

from __future__ import annotations

import itertools

import msgspec

from farspan.domain.plan import Plan, Stage, Zero
from farspan.semantics.kernel_choice import BYTES


class Regular(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of one replica whose stages and devices all do alike."""

    #: Devices along each axis: stages, copies by site, data, tensor.
    stages: int
    sites: int
    data: int
    tensor: int
    #: Sequences a step of each batch coordinate, and parts that it goes through them in.
    rows: int
    microbatches: int
    zero: Zero
    recompute: bool
    #: Units before which stages begin, and the number of units.
    cuts: tuple[int, ...]

    @property
    def micro_rows(self) -> int:
        return self.rows // self.microbatches


def irregular(plan: Plan) -> list[str]:
    """Why a plan is not one of like parts; none where it is."""
    if len(plan.replicas) > 1:
        steps = "" if plan.sync is None or plan.sync.every == 1 else f"{plan.sync.every} "
        every = f", which meet every {steps}step{'s' * bool(steps)}" if plan.sync else ""
        return [f"{len(plan.replicas)} replicas keep optimizer state of their own{every}"]
    (replica,) = plan.replicas
    return [
        *_unlike_stages(replica.stages),
        *_unlike_rows(replica.stages),
        *_sums(replica.stages),
        *_edges(plan),
        *(["Muon updates its matrices"] if plan.train.optimizer.muon else []),
        *(["it trains adapters of frozen weights"] if plan.model.lora else []),
    ]


def _edges(plan: Plan) -> list[str]:
    whole = 8 * BYTES[plan.train.precision]
    few = [edge.bits for replica in plan.replicas for edge in replica.edges if edge.bits < whole]
    return [f"activations between stages are sent in {min(few)} bits"] if few else []


def _unlike_stages(stages: tuple[Stage, ...]) -> list[str]:
    reasons = []
    meshes = {(stage.mesh.axes, stage.mesh.shape) for stage in stages}
    if len(meshes) > 1:
        words = (" x ".join(map(str, stage.mesh.shape)) for stage in stages)
        reasons.append(f"its stages have unlike meshes: {', '.join(words)}")
    for field, word in (
        ("zero", "ZeRO levels"),
        ("recompute", "choices of recompute"),
        ("splits", "operator splits"),
    ):
        if any(getattr(a, field) != getattr(b, field) for a, b in itertools.pairwise(stages)):
            reasons.append(f"its stages have unlike {word}")
    return reasons


def _unlike_rows(stages: tuple[Stage, ...]) -> list[str]:
    rows = sorted({row for stage in stages for row in stage.rows})
    if len(rows) > 1:
        return [f"devices read unlike shares of a step, {rows[0]} to {rows[-1]} sequences"]
    return []


def _sums(stages: tuple[Stage, ...]) -> list[str]:
    reasons = []
    if any(stage.grad_sync.topology == "hierarchical" for stage in stages):
        reasons.append("gradients are summed inside each site first and between sites once")
    if bits := [stage.grad_sync.bits for stage in stages if stage.grad_sync.bits != 32]:
        reasons.append(f"gradients are sent in {bits[0]} bits")
    return reasons


def evened(plan: Plan) -> Plan:
    """Return the plan, of one stage, with the next number of microbatches that divides every
    device's rows."""
    (first, *others) = plan.replicas
    rows = {row for stage in first.stages for row in stage.rows}
    if others or len(first.stages) > 1 or len(rows) > 1:
        return plan
    (row,) = rows
    parts = next(
        parts for parts in range(min(row, first.microbatches), row + 1) if row % parts == 0
    )
    return msgspec.structs.replace(
        plan, replicas=(msgspec.structs.replace(first, microbatches=parts),)
    )


def regular(plan: Plan) -> Regular:
    """Return the plan as one of like parts; only where `irregular` finds none that is not."""
    (replica,) = plan.replicas
    first = replica.stages[0]
    return Regular(
        stages=len(replica.stages),
        sites=first.mesh.size("site"),
        data=first.mesh.size("data"),
        tensor=first.mesh.size("tensor"),
        rows=first.rows[0],
        microbatches=replica.microbatches,
        zero=first.zero,
        recompute=first.recompute,
        cuts=(*(stage.units[0] for stage in replica.stages), replica.stages[-1].units[1]),
    )


def one_forward_one_backward(plan: Plan) -> bool:
    """Whether a pipeline has as many microbatches in flight as 1F1B (arXiv 1806.03377): stages
    still to come, its own included."""
    (replica,) = plan.replicas
    stages = len(replica.stages)
    return replica.in_flight == tuple(min(stages - i, replica.microbatches) for i in range(stages))


def node_order(plan: Plan) -> tuple[str, ...] | None:
    """Hosts in the order in which they must be numbered so that rank r runs the plan's r-th place
    (stages outermost, tensor axis innermost); None where no numbering of hosts does it."""
    (replica,) = plan.replicas
    ranks = [rank for stage in replica.stages for rank in stage.mesh.ranks]
    runs = [
        (host, list(group))
        for host, group in itertools.groupby(ranks, key=lambda rank: plan.devices[rank].host)
    ]
    if len({host for host, _ in runs}) < len(runs):
        return None
    for _, group in runs:
        indices = [plan.devices[rank].index for rank in group]
        if indices != list(range(len(indices))):
            return None
    return tuple(host for host, _ in runs)


def launch_note(plan: Plan, start: str) -> str:
    """How many processes to start, and on which hosts in which order."""
    hosts = node_order(plan) or ()
    (replica,) = plan.replicas
    each = [
        sum(
            plan.devices[rank].host == host for stage in replica.stages for rank in stage.mesh.ranks
        )
        for host in hosts
    ]
    nodes = ", ".join(f"{host} ({count})" for host, count in zip(hosts, each, strict=True))
    return f"start it with {start}, hosts numbered in this order (processes each): {nodes}"
