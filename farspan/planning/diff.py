"""Two plans side by side: first how they are configured differently, then each figure of their
estimates."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farspan.domain.cluster import Cluster
from farspan.domain.cost import Estimate
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.plan_words import join_counted, stage_words
from farspan.domain.units import (
    counted,
    format_bytes,
    format_count,
    format_seconds,
    format_usd,
    short_time,
)
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


def compare_plans(a: PlanSide, b: PlanSide, cluster: Cluster) -> PlanDifference:
    """Compare two plans of one cluster."""
    a_settings = describe_settings(a.plan, cluster)
    b_settings = describe_settings(b.plan, cluster)
    differing = []
    same = []
    for setting in a_settings | b_settings:
        a_text = a_settings.get(setting, "none")
        b_text = b_settings.get(setting, "none")
        if a_text == b_text:
            same.append(setting)
        else:
            differing.append(DiffRow(what=setting, a=a_text, b=b_text))
    return PlanDifference(
        names=(a.name, b.name),
        configuration=tuple(differing),
        same=tuple(same),
        figures=compare_figures(a, b, cluster),
    )


def describe_settings(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """Describe a plan's settings, by name."""
    model = plan.model
    train = plan.train
    replicas = str(len(plan.replicas))
    if plan.sync is not None:
        sync = plan.sync
        hidden = ", while they go on" if sync.overlap else ""
        every = "step" if sync.every == 1 else f"{sync.every} steps"
        replicas += f", which meet every {every} in {sync.bits} bits{hidden}"
    kinds = {host.name: [device.kind for device in host.devices] for host in cluster.hosts}
    devices = [f"{kinds[at.host][at.index]} in {at.host}" for at in plan.devices]
    size = f"{train.batch} x {train.seq_len}, {train.precision}"
    settings = {
        "technique": plan.technique,
        "devices": join_counted(devices),
        "model": f"{model.family} of {format_count(count_parameters(model))} parameters",
        "training": f"{counted(train.steps, 'step')} of {size}",
        "engine": plan.engine,
        "replicas": replicas,
    }
    for number, replica in enumerate(plan.replicas, start=1):
        of = "" if len(plan.replicas) == 1 else f" of replica {number}"
        microbatches = str(replica.microbatches)
        if len(replica.stages) > 1:
            microbatches += f", in flight {'/'.join(map(str, replica.in_flight))}"
        settings[f"stages{of}"] = str(len(replica.stages))
        settings[f"microbatches{of}"] = microbatches
        for i, stage in enumerate(replica.stages, start=1):
            settings[f"stage {i}{of}"] = stage_words(stage, model.layers)
            settings[f"rows of stage {i}{of}"] = join_counted([str(rows) for rows in stage.rows])
    return settings


def compare_figures(a: PlanSide, b: PlanSide, cluster: Cluster) -> tuple[DiffRow, ...]:
    """Return every figure of the estimates, and B's over A's. Time, dollars and energy are those of
    a ranking: to the loss of synchronous training, queues included; those of the run itself follow
    where they differ."""
    estimates = (a.estimate, b.estimate)
    uneven = any(estimate.token_efficiency != 1.0 for estimate in estimates)
    to = " to equal loss" if uneven else ""
    a_figures = _estimate_figures(a, cluster, to)
    b_figures = _estimate_figures(b, cluster, to)
    if all(estimate.equal_loss_factor == 1.0 for estimate in estimates):
        del a_figures["the run's own steps"]
    if all(estimate.loss is None for estimate in estimates):
        del a_figures["training loss"]
    rows = []
    for what, (value, show) in a_figures.items():
        other = b_figures[what][0]
        a_text = "?" if value is None else show(value)
        b_text = "?" if other is None else show(other)
        ratio = other / value if value and other is not None else None
        rows.append(DiffRow(what=what, a=a_text, b=b_text, ratio=ratio))
    return tuple(rows)


def _estimate_figures(
    side: PlanSide, cluster: Cluster, to: str
) -> dict[str, tuple[float | None, Callable[[float], str]]]:
    """Return each figure of a plan, and how it is written."""
    estimate = side.estimate
    queue_s = side.queue_s
    scale = estimate.equal_loss_factor
    low_s, high_s = estimate.equal_loss_interval_s
    bubble_s = estimate.bubble_s if estimate.bubble_s > 1e-9 * estimate.step_s else 0.0
    usd = None if estimate.usd is None else estimate.usd * scale
    kwh = None if estimate.kwh is None else estimate.kwh * scale
    costs = costs_of(side.plan, cluster)
    by_pair = between_sites(traffic(side.plan, costs), costs.network)
    sent_bytes = sum(sum(purposes.values()) for purposes in by_pair.values())
    values: dict[str, tuple[float | None, Callable[[float], str]]] = {
        "step": (estimate.step_s, short_time),
        "compute": (estimate.compute_s, short_time),
        "exposed communication": (estimate.communication_s, short_time),
        "bubble": (bubble_s, short_time),
        "bytes between sites a step": (sent_bytes, format_bytes),
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
        f"energy in kWh{to}": (kwh, _format_kwh),
        "the run's own steps": (estimate.run_s, format_seconds),
        "training loss": (estimate.loss, "{:.3f}".format),
    }
    return values


def _format_kwh(kwh: float) -> str:
    return f"{kwh:,.0f}" if kwh >= 100 else f"{kwh:.3g}"
