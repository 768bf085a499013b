"""Two plans side by side: first how they are configured differently, then each figure of their
estimates."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farspan.domain.cluster import Cluster
from farspan.domain.model import parameters
from farspan.domain.plan import Plan, Replica
from farspan.domain.results import Estimate
from farspan.domain.units import (
    counted,
    format_bytes,
    format_count,
    format_seconds,
    format_usd,
    short_time,
)
from farspan.domain.words import listed, stage_words
from farspan.estimate.traffic import between_sites, traffic
from farspan.planning.why import costs_of


class PlanSide(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its name for people and its estimate."""

    name: str
    plan: Plan
    estimate: Estimate
    #: Seconds that the job waits in a queue first.
    queue_s: float = 0.0


class DiffRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing of both plans, as text; for a figure also what B has of A's."""

    what: str
    a: str
    b: str
    ratio: float | None = None


class PlanDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of the configuration that differ, names of those that do not, and every figure."""

    names: tuple[str, str]
    configuration: tuple[DiffRow, ...]
    same: tuple[str, ...]
    figures: tuple[DiffRow, ...]


def difference(a: PlanSide, b: PlanSide, cluster: Cluster) -> PlanDifference:
    """What sets two plans of one cluster apart."""
    both = (configuration(a.plan, cluster), configuration(b.plan, cluster))
    names = list(dict.fromkeys((*both[0], *both[1])))
    rows = [
        DiffRow(what=name, a=both[0].get(name, "none"), b=both[1].get(name, "none"))
        for name in names
    ]
    return PlanDifference(
        names=(a.name, b.name),
        configuration=tuple(row for row in rows if row.a != row.b),
        same=tuple(row.what for row in rows if row.a == row.b),
        figures=figures(a, b, cluster),
    )


def configuration(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """What a plan says, by name."""
    train = plan.train
    kinds = {host.name: [device.kind for device in host.devices] for host in cluster.hosts}
    settings = {
        "technique": plan.technique,
        "devices": listed(
            [f"{kinds[device.host][device.index]} in {device.host}" for device in plan.devices]
        ),
        "model": f"{plan.model.family} of {format_count(parameters(plan.model))} parameters",
        "training": (
            f"{counted(train.steps, 'step')} of {train.batch} x {train.seq_len}, {train.precision}"
        ),
        "engine": plan.engine,
        "replicas": _replicas(plan),
    }
    layers = plan.model.layers
    for number, replica in enumerate(plan.replicas, start=1):
        of = "" if len(plan.replicas) == 1 else f" of replica {number}"
        settings[f"stages{of}"] = str(len(replica.stages))
        settings[f"microbatches{of}"] = _microbatches(replica)
        for i, stage in enumerate(replica.stages, start=1):
            settings[f"stage {i}{of}"] = stage_words(stage, layers)
            settings[f"rows of stage {i}{of}"] = listed([str(rows) for rows in stage.rows])
    return settings


def _replicas(plan: Plan) -> str:
    if plan.sync is None:
        return str(len(plan.replicas))
    sync = plan.sync
    hidden = ", while they go on" if sync.overlap else ""
    every = "step" if sync.every == 1 else f"{sync.every} steps"
    return f"{len(plan.replicas)}, which meet every {every} in {sync.bits} bits{hidden}"


def _microbatches(replica: Replica) -> str:
    depths = (
        f", in flight {'/'.join(map(str, replica.in_flight))}" if len(replica.stages) > 1 else ""
    )
    return f"{replica.microbatches}{depths}"


def figures(a: PlanSide, b: PlanSide, cluster: Cluster) -> tuple[DiffRow, ...]:
    """Return every figure of the estimates, and B's over A's. Time, dollars and energy are those of
    a ranking: to the loss of synchronous training, queues included; those of the run itself follow
    where they differ."""
    uneven = any(side.estimate.token_efficiency != 1.0 for side in (a, b))
    first, second = (_figures(side, cluster, " to equal loss" * uneven) for side in (a, b))
    if all(side.estimate.equal_loss_factor == 1.0 for side in (a, b)):
        del first["the run's own steps"]
    if all(side.estimate.loss is None for side in (a, b)):
        del first["training loss"]
    rows = []
    for what, (value, show) in first.items():
        other = second[what][0]
        texts = ["?" if figure is None else show(figure) for figure in (value, other)]
        ratio = other / value if value and other is not None else None
        rows.append(DiffRow(what=what, a=texts[0], b=texts[1], ratio=ratio))
    return tuple(rows)


def _figures(
    side: PlanSide, cluster: Cluster, to: str
) -> dict[str, tuple[float | None, Callable[[float], str]]]:
    """Return each figure of a plan, and how it is written."""
    estimate = side.estimate
    queue_s = side.queue_s
    scale = estimate.equal_loss_factor
    (low_s, high_s) = estimate.equal_loss_interval_s
    bubble_s = estimate.bubble_s if estimate.bubble_s > 1e-9 * estimate.step_s else 0.0
    usd = None if estimate.usd is None else estimate.usd * scale
    kwh = None if estimate.kwh is None else estimate.kwh * scale
    return {
        "step": (estimate.step_s, short_time),
        "compute": (estimate.compute_s, short_time),
        "exposed communication": (estimate.communication_s, short_time),
        "bubble": (bubble_s, short_time),
        "bytes between sites a step": (_sent(side.plan, cluster), format_bytes),
        "tokens/s": (estimate.tokens_per_s, "{:,.0f}".format),
        "TFLOP/s per device": (estimate.tflops_per_device, "{:.3g}".format),
        "MFU": (estimate.mfu, "{:.1%}".format),
        "memory of the fullest device": (estimate.memory_bytes, format_bytes),
        "tokens for one of synchronous training": (
            1 / estimate.token_efficiency,
            "{:.3g}".format,
        ),
        f"run{to}": (queue_s + estimate.equal_loss_s, format_seconds),
        "interval, low": (queue_s + low_s, format_seconds),
        "interval, high": (queue_s + high_s, format_seconds),
        f"dollars{to}": (usd, format_usd),
        f"energy in kWh{to}": (kwh, lambda kwh: f"{kwh:,.0f}" if kwh >= 100 else f"{kwh:.3g}"),
        "the run's own steps": (estimate.run_s, format_seconds),
        "training loss": (estimate.loss, "{:.3f}".format),
    }


def _sent(plan: Plan, cluster: Cluster) -> float:
    costs = costs_of(plan, cluster)
    by_pair = between_sites(traffic(plan, costs), costs.network)
    return sum(sum(purposes.values()) for purposes in by_pair.values())
