"""The speed of a model on a cluster before there is a plan: from a trial of one device, or
predicted for one."""

from __future__ import annotations

import math

from msgspec.structs import replace

from farspan import models
from farspan.domain.cluster import Cluster, Device, DType, Host
from farspan.domain.engine import Engine
from farspan.domain.model import ModelSpec
from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.probe import ProbeResult, Speed
from farspan.domain.problems import Problem
from farspan.domain.results import Estimate
from farspan.domain.train import Precision, TrainSpec
from farspan.estimate.price import estimate
from farspan.techniques import Task, data


def crowding(cluster: Cluster) -> float:
    """CPU workers' threads for each core of the most crowded host, at least 1: so many share one
    core's speed."""
    shares = [1.0]
    for host in cluster.hosts:
        if host.cpus:
            shares.append(
                sum(device.slot.threads for device in host.devices if device.backend == "cpu")
                / host.cpus
            )
    return max(shares)


def step_seconds(rows: int, seq_len: int, speed: Speed, cluster: Cluster) -> float:
    """A step in which the busiest worker reads `rows` sequences, from the speed of one worker
    alone."""
    return rows * seq_len / speed.tokens_per_s * crowding(cluster)


def hourly_price(cluster: Cluster) -> float | None:
    """US dollars an hour for every device together; None where any price is unknown."""
    prices = [device.usd_per_hour for device in cluster.devices]
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


def on_one_device(model: ModelSpec, train: TrainSpec, cluster: Cluster, engine: Engine) -> Estimate:
    """What one worker on the cluster's first device would take for `train.batch` sequences at a
    time."""
    host = cluster.machines[0]
    device = cluster.devices[0]
    graph = models.graph(model)
    stage = Stage(
        units=(0, graph.units),
        mesh=Mesh(ranks=(0,), shape=(1,), axes=("data",)),
        rows=(train.batch,),
        grad_sync=GradSync(bucket_bytes=None),
        recompute=train.recompute,
    )
    at = PlannedDevice(host=host.name, backend=device.backend, index=0, threads=device.slot.threads)
    plan = Plan(
        technique="data",
        model=model,
        train=train,
        replicas=(Replica(stages=(stage,)),),
        devices=(at,),
        inputs=Inputs(cluster="", corpus=""),
    )
    return estimate(plan, graph, cluster, engine)


def fitting(
    model: ModelSpec, train: TrainSpec, cluster: Cluster, engine: Engine
) -> TrainSpec | Problem:
    """The training with as many of its sequences at a time as fit on the first device; or what it
    lacks for one."""
    drafted = data.plan(Task(model, models.graph(model), cluster, train, engine, only=(0,)))
    if isinstance(drafted, Problem):
        return drafted
    return replace(train, batch=drafted.replicas[0].micro_rows(0, 0))


def predicted(
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    engine: Engine,
    precisions: tuple[Precision, ...],
) -> ProbeResult:
    """What a trial would find, by the estimator: where the cluster is not at hand, or should not be
    disturbed."""
    speeds: dict[Precision, Speed] = {}
    for precision in precisions:
        alone = on_one_device(model, replace(train, precision=precision), cluster, engine)
        memory = alone.memory_bytes - round(alone.memory[0].snapshot)
        speeds[precision] = Speed(
            step_s=alone.step_s, tokens_per_s=alone.tokens_per_s, memory_bytes=memory
        )
    return ProbeResult(rows=train.batch, seq_len=train.seq_len, speeds=speeds)


def calibrated(
    cluster: Cluster, model: ModelSpec, train: TrainSpec, engine: Engine, probe: ProbeResult
) -> Cluster:
    """The cluster whose devices of the first one's kind keep the pace and the memory that a trial
    measured there."""
    tried = replace(train, batch=probe.rows, seq_len=probe.seq_len)
    speed = probe.speeds[train.precision]
    alone = on_one_device(model, tried, cluster, engine)
    kind = cluster.devices[0].kind
    # A trial saves nothing.
    elsewhere = alone.memory_bytes - round(alone.memory[0].framework + alone.memory[0].snapshot)
    framework = max(0, speed.memory_bytes - elsewhere)

    def tried_device(host: Host, index: int) -> Device:
        device = host.devices[index]
        if device.kind != kind:
            return device
        return device.but(pace=speed.step_s / alone.step_s, framework=framework)

    return cluster.with_devices(tried_device)


def product_flops(cluster: Cluster, engine: Engine, precisions: tuple[DType, ...]) -> float:
    """FLOP/s of large matrix products of all devices together at the fastest of these dtypes."""
    from farspan.estimate.compute import DeviceSpeed

    return sum(
        max(DeviceSpeed(device, dtype, engine).flops(4096, 4096, 4096) for dtype in precisions)
        for device in cluster.devices
    )


def common_precisions(cluster: Cluster) -> tuple[Precision, ...]:
    """Dtypes that every device computes in hardware, fastest on the first one first."""
    first = cluster.devices[0]
    others = [device.sheet.precisions for device in cluster.devices]
    both = [dtype for dtype in first.sheet.precisions if all(dtype in dtypes for dtypes in others)]
    return tuple(
        sorted(both, key=lambda dtype: (-first.sheet.flops.get(dtype, -math.inf), dtype != "bf16"))
    ) or ("fp32",)
