"""Data parallelism: every device holds the whole model and computes a share of each step's sequences."""

from __future__ import annotations

from farspan.domain.cluster import Cluster, Device
from farspan.domain.codec import content_hash
from farspan.domain.model import ModelSpec
from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.problems import Problem
from farspan.domain.train import TrainSpec
from farspan.domain.units import format_bytes
from farspan.estimate.memory import activation_bytes_per_row, memory_bytes

#: PyTorch DDP's default, from Li et al., arXiv 2006.15704.
BUCKET_BYTES = 25 * 2**20
#: Share of a device's memory that a plan may fill: the formula leaves out fragmentation and scratch space.
FILL = 0.9


def plan(model: ModelSpec, cluster: Cluster, train: TrainSpec, *, corpus: str) -> Plan | Problem:
    """One replica of one stage over all devices, or why there is none. `corpus` is the corpus's content hash."""
    ranks = len(cluster.devices)
    if train.batch < ranks:
        return Problem(
            code="cannot-plan",
            what="the batch has fewer sequences than there are devices",
            where="run.yaml, key train.batch.global",
            fact=f"{train.batch} sequences a step, {ranks} devices",
            remedy=f"set train.batch.global: {ranks} sequences",
        )
    rows = tuple(train.batch // ranks + (rank < train.batch % ranks) for rank in range(ranks))
    smallest = min(cluster.devices, key=lambda device: device.memory)
    fitting = _rows_that_fit(model, train, smallest)
    if fitting < 1:
        return _too_large(model, train, smallest, ranks)
    microbatches = -(-rows[0] // min(fitting, rows[0]))
    stage = Stage(
        layers=(0, model.layers),
        mesh=Mesh(ranks=tuple(range(ranks)), shape=(ranks,), axes=("data",)),
        rows=rows,
        micro_rows=-(-rows[0] // microbatches),
        grad_sync=GradSync(bucket_bytes=BUCKET_BYTES),
    )
    return Plan(
        technique="data",
        model=model,
        train=train,
        replicas=(Replica(stages=(stage,)),),
        devices=_planned_devices(cluster),
        inputs=Inputs(cluster=content_hash(cluster), corpus=corpus),
    )


def _rows_that_fit(model: ModelSpec, train: TrainSpec, device: Device) -> int:
    free = FILL * device.memory - memory_bytes(model, train, 0, device.backend)
    return int(free // activation_bytes_per_row(model, train, device.backend))


def _too_large(model: ModelSpec, train: TrainSpec, device: Device, ranks: int) -> Problem:
    needed = memory_bytes(model, train, 1, device.backend)
    remedy = "lower model.context or the size" if train.recompute else "set train.recompute: true, or lower the size"
    # Workers on CPUs share their host's memory: fewer of them have more each.
    if device.backend == "cpu" and (fitting := int(FILL * device.memory * ranks // needed)) >= 1:
        remedy = f"set parallel.workers: {fitting}"
    return Problem(
        code="out-of-memory",
        what="the model does not fit one device, one sequence at a time",
        where=f"device {device.kind}",
        fact=f"predicted {format_bytes(needed)}, "
        f"usable {format_bytes(FILL * device.memory)} of {format_bytes(device.memory)}",
        remedy=remedy,
    )


def _planned_devices(cluster: Cluster) -> tuple[PlannedDevice, ...]:
    return tuple(
        PlannedDevice(host=host.name, backend=device.backend, index=index, threads=device.threads)
        for site in cluster.sites
        for host in site.hosts
        for index, device in enumerate(host.devices)
    )
