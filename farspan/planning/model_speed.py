"""The speed of a model on a cluster before there is a plan: from a trial of one device, or
predicted for one."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from farspan import models
from farspan.domain.cluster import Cluster, Device, DType, Host
from farspan.domain.cost import Estimate
from farspan.domain.engine import Engine
from farspan.domain.model import ModelSpec
from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.probe_requests import ProbeResult, Speed
from farspan.domain.problems import Problem
from farspan.domain.train import Precision, TrainSpec
from farspan.estimate.estimate_plan import estimate
from farspan.estimate.memory import activation_slack
from farspan.techniques import Task, data


def threads_per_core(cluster: Cluster) -> float:
    """Return the CPU workers' threads for each core of the fullest host, at least 1: that many
    share one core's speed."""
    most = 1.0
    for host in cluster.hosts:
        if host.cpus:
            threads = [dev.slot.threads for dev in host.devices if dev.backend == "cpu"]
            most = max(most, sum(threads) / host.cpus)
    return most


def step_seconds(rows: int, seq_len: int, speed: Speed, cluster: Cluster) -> float:
    """Return the seconds of a step in which the busiest worker reads `rows` sequences, from the
    speed of one worker alone."""
    return rows * seq_len / speed.tokens_per_s * threads_per_core(cluster)


def hourly_price(cluster: Cluster) -> float | None:
    """Return US dollars an hour for every device together; None where any price is unknown."""
    prices = [device.usd_per_hour for device in cluster.devices]
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


def on_one_device(model: ModelSpec, train: TrainSpec, cluster: Cluster, engine: Engine) -> Estimate:
    """Estimate what one worker on the cluster's first device would take for `train.batch` sequences
    at a time."""
    host = cluster.machines[0].name
    device = cluster.devices[0]
    graph = models.graph(model)
    mesh = Mesh(ranks=(0,), shape=(1,), axes=("data",))
    stage = Stage(
        units=(0, graph.units),
        mesh=mesh,
        rows=(train.batch,),
        grad_sync=GradSync(bucket_bytes=None),
        recompute=train.recompute,
    )
    threads = device.slot.threads
    plan = Plan(
        technique="data",
        model=model,
        train=train,
        replicas=(Replica(stages=(stage,)),),
        devices=(PlannedDevice(host=host, backend=device.backend, index=0, threads=threads),),
        inputs=Inputs(cluster="", corpus=""),
    )
    return estimate(plan, graph, cluster, engine)


def fit_batch(
    model: ModelSpec, train: TrainSpec, cluster: Cluster, engine: Engine
) -> TrainSpec | Problem:
    """Return the training with the most of its sequences at a time that fit on the first device; or
    what it lacks for one."""
    drafted = data.plan(Task(model, models.graph(model), cluster, train, engine, only=(0,)))
    if isinstance(drafted, Problem):
        return drafted
    return replace(train, batch=drafted.replicas[0].micro_rows(0, 0))


def predict_probe(
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    engine: Engine,
    precisions: tuple[Precision, ...],
) -> ProbeResult:
    """Predict what a trial would find, by the estimator: where the cluster is not at hand, or
    should not be disturbed."""
    speeds: dict[Precision, Speed] = {}
    for precision in precisions:
        tried = replace(train, precision=precision)
        alone = on_one_device(model, tried, cluster, engine)
        memory = alone.memory_bytes - round(alone.memory[0].snapshot)
        speeds[precision] = Speed(
            step_s=alone.step_s, tokens_per_s=alone.tokens_per_s, memory_bytes=memory
        )
    return ProbeResult(
        rows=train.batch,
        seq_len=train.seq_len,
        speeds=speeds,
        compiled=train.compile is True,
    )


def calibrate_cluster(
    cluster: Cluster, model: ModelSpec, train: TrainSpec, engine: Engine, probe: ProbeResult
) -> Cluster:
    """Return the cluster whose devices of the first one's kind keep the speed and the memory that a
    trial measured there.

    Memory beyond the predicted tensors is the framework's. Where CPUs took less than predicted, the
    allocator has given more of the activations back.
    """
    tried = replace(train, batch=probe.rows, seq_len=probe.seq_len, compile=probe.compiled)
    speed = probe.speeds[train.precision]
    alone = on_one_device(model, tried, cluster, engine)
    first = cluster.devices[0]
    slowdown = speed.step_s / alone.step_s
    # A trial saves nothing.
    memory = alone.memory[0]
    elsewhere = alone.memory_bytes - round(memory.framework + memory.snapshot)
    framework = speed.memory_bytes - elsewhere
    changes: dict[str, Any] = {"pace": slowdown, "framework": max(0, framework)}
    if framework < 0 and first.backend == "cpu":
        slack = activation_slack(models.graph(model), engine.on(("cpu",)))
        assumed = first.learned.slack or slack
        too_much = (memory.framework - framework) / memory.activations
        changes |= {"framework": None, "slack": max(1.0, assumed - too_much)}

    def calibrate(host: Host, index: int) -> Device:
        device = host.devices[index]
        return device.but(**changes) if device.kind == first.kind else device

    return cluster.with_devices(calibrate)


def product_flops(cluster: Cluster, engine: Engine, precisions: tuple[DType, ...]) -> float:
    """Return the FLOP/s of large matrix products of all devices together at the fastest of these
    dtypes."""
    from farspan.estimate.compute import DeviceSpeed

    fastest = []
    for device in cluster.devices:
        speeds = [DeviceSpeed(device, dtype, engine) for dtype in precisions]
        fastest.append(max(speed.flops(4096, 4096, 4096) for speed in speeds))
    return sum(fastest)


def common_precisions(cluster: Cluster) -> tuple[Precision, ...]:
    """Return the dtypes that every device computes in hardware, fastest on the first one first."""
    first = cluster.devices[0].sheet
    others = [device.sheet.precisions for device in cluster.devices]
    common = [dtype for dtype in first.precisions if all(dtype in dtypes for dtypes in others)]
    common.sort(key=lambda dtype: dtype != "bf16")
    common.sort(key=lambda dtype: -first.flops.get(dtype, -math.inf))
    return tuple(common) or ("fp32",)
