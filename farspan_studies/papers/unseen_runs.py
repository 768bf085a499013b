"""`farspan reproduce published`: training runs and block times of others, priced as a user
gets them.

The list (`published/runs.json`) was written down before any of it was priced. Which engine stands
for which software follows from two facts of each run: whether it was compiled, and whether its
attention is Megatron-LM's fused one. All else is the product's own: engines as they are, and a
cluster file that says of the network what the source says, and nothing more.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from farspan import models
from farspan.domain import catalog
from farspan.domain.cluster import SITE_RTT_S, Cluster, Device, DType, Host, Site
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec, train_flops_per_token
from farspan.domain.plan import Axis, Edge, GradSync, Inputs, Mesh, Plan, Replica, Stage
from farspan.domain.train import TrainSpec
from farspan.estimate.estimate_plan import price
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan_studies.papers.published import planned_devices
from farspan_studies.papers.published_runs import (
    Block,
    Run,
    Shape,
    published_blocks,
    published_runs,
)

#: What everything is compared with: every run at this share of its GPUs' data sheets.
USUAL_MFU = 0.45
#: PyTorch DDP's default bucket (arXiv 2006.15704).
BUCKET_BYTES = 25 * 2**20
#: Interval scores are of central intervals of this level.
LEVEL = 0.8


class UnseenRun(msgspec.Struct, frozen=True, kw_only=True):
    """A published run beside its prediction, in seconds a step."""

    id: str
    source: str
    #: The repository or paper that it comes from.
    origin: str
    gpu: str
    gpus: int
    #: Gbit/s between its hosts that the product assumes, where the source states none.
    assumed_gbit: float | None = None
    parallel: str
    precision: str
    engine: str
    measured_s: float
    predicted_s: float
    error: float
    interval: tuple[float, float]
    inside: bool
    #: Of the same run at `USUAL_MFU`.
    usual_error: float


class UnseenBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Published times of blocks beside their prediction; `known_error` is that once another shape
    on the same GPU, with the same software, has told the pace."""

    id: str
    gpu: str
    precision: str
    measured_s: float
    predicted_s: float
    error: float
    known_error: float | None


def unseen_runs() -> tuple[UnseenRun, ...]:
    """Every run of the list, priced."""
    return tuple(map(priced_run, published_runs().runs))


def priced_run(run: Run) -> UnseenRun:
    """One run beside its prediction."""
    plan, cluster = run_plan(run)
    used = load_engine(plan.engine)
    costs = Costs(models.graph(plan.model), plan.train, Network(cluster, plan.devices, used))
    estimate = price(plan, costs, brief=True)
    measured = measured_s(run)
    low, high = estimate.interval
    flops = run.batch * run.seq_len * train_flops_per_token(plan.model, run.seq_len)
    usual = flops / (run.gpus * USUAL_MFU * cluster.devices[0].sheet.flops[run.precision])
    axes = {"data": run.data, "tensor": run.tensor, "pipeline": run.pipeline}
    names = [host.name for host in cluster.hosts]
    assumed = cluster.assumed_network(names[0], names[-1]) if len(names) > 1 else None
    return UnseenRun(
        id=run.id,
        source=run.source,
        origin=run.origin,
        assumed_gbit=None if assumed is None else assumed.rate * 8 / 1e9,
        gpu=run.gpu,
        gpus=run.gpus,
        precision=run.precision,
        engine=used.name,
        parallel=" x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        or "one GPU",
        measured_s=measured,
        predicted_s=estimate.step_s,
        error=estimate.step_s / measured - 1,
        interval=estimate.interval,
        inside=low <= measured / estimate.step_s <= high,
        usual_error=usual / measured - 1,
    )


def measured_s(run: Run) -> float:
    """Seconds a step, as it was measured."""
    if run.step_s is not None:
        return run.step_s
    assert run.tokens_per_s is not None, f"{run.id}: TFLOP/s of a formula in words"
    return run.batch * run.seq_len / run.tokens_per_s


# -- what a run's facts say as a plan
#   ----------------------------------------------------------------------------------


def software(run: Run | Block) -> str:
    """Return the engine that stands for a run's software."""
    if isinstance(run, Run) and run.compiled:
        return "compiled2024"
    return "megatron2021" if run.attention == "fused" else "torch2024"


def run_plan(run: Run) -> tuple[Plan, Cluster]:
    """Return a run's plan, Megatron-LM's order of ranks: tensor axis, data axis, stages; on hosts
    in a row."""
    cluster = _cluster(run)
    spec = model_spec(run.model)
    graph = models.graph(spec)
    parts = run.batch // (run.data * run.microbatch)
    each = run.data * run.tensor
    layers = spec.layers
    axes: dict[Axis, int] = (
        {"data": run.data, "tensor": run.tensor} if run.tensor > 1 else {"data": run.data}
    )
    splits = {
        op.name: op.divisible
        for unit in (graph.embedding, graph.block, graph.head)
        for op in unit
        if op.divisible and all(graph.sizes[dim] % run.tensor == 0 for dim in op.divisible)
    }
    few = BITS[run.precision] if run.zero or run.attention == "fused" else 32
    bounds = [0, *(1 + s * layers // run.pipeline for s in range(1, run.pipeline)), layers + 2]
    stages = tuple(
        Stage(
            units=(bounds[s], bounds[s + 1]),
            mesh=Mesh(
                ranks=tuple(range(s * each, (s + 1) * each)),
                shape=tuple(axes.values()),
                axes=tuple(axes),
            ),
            rows=(run.batch // run.data,) * run.data,
            grad_sync=GradSync(bucket_bytes=BUCKET_BYTES, bits=few),
            zero=run.zero,
            splits=splits if run.tensor > 1 else {},
            recompute=run.recompute == "full",
        )
        for s in range(run.pipeline)
    )
    gpipe = "GPipe" in run.software
    depths = tuple(parts if gpipe else min(parts, run.pipeline - s) for s in range(run.pipeline))
    replica = Replica(
        stages=stages,
        edges=(Edge(bits=BITS[run.precision]),) * (run.pipeline - 1),
        microbatches=parts,
        in_flight=depths if run.pipeline > 1 else (1,),
    )
    train = TrainSpec(
        steps=1,
        batch=run.batch,
        seq_len=run.seq_len,
        precision=run.precision,
        attention="sdpa" if run.attention == "flash" else "vanilla",
        recompute=run.recompute == "full",
    )
    plan = Plan(
        technique="published",
        model=spec,
        train=train,
        replicas=(replica,),
        devices=planned_devices(cluster),
        inputs=Inputs(cluster="", corpus=""),
        engine=software(run),
    )
    return plan, cluster


#: Bits of a number on its way.
BITS: dict[DType, Literal[16, 32]] = {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16}
#: Rows of a classifier's matrix, where a run has no head of the vocabulary's size.
CLASSES = 16


@functools.cache
def model_spec(shape: Shape) -> ModelSpec:
    """Return the decoder of a shape; one that has no head of its vocabulary's size gets a
    classifier's."""
    fields = {name: getattr(shape, name) for name in shape.__struct_fields__ if name != "lm_head"}
    fields["vocab_size"] = shape.vocab_size if shape.lm_head else CLASSES
    return ModelSpec(**fields)


def _cluster(run: Run) -> Cluster:
    """Return a site of as many hosts as the run had, with what its source states of the network."""
    count = -(-run.gpus // run.gpus_per_host)
    device = gpu(run.gpu)
    hosts = tuple(
        Host(
            name=f"h{i}",
            devices=(device,) * min(run.gpus_per_host, run.gpus - i * run.gpus_per_host),
        )
        for i in range(count)
    )
    return Cluster(
        sites=(
            Site(
                name="s",
                hosts=hosts,
                lan_bandwidth=None if run.network_gbit is None else run.network_gbit * 1e9 / 8,
                lan_rtt_s=round_trip_s(run),
            ),
        )
    )


def round_trip_s(run: Run) -> float | None:
    """Return the round trip of hosts side by side and twice the delay that a run says it set; None
    where it set none."""
    words = (run.network or "").split()
    delay = next(
        (float(words[i + 1]) * 1e-3 for i, word in enumerate(words[:-1]) if word == "delay"), None
    )
    return None if delay is None else SITE_RTT_S + 2 * delay


@functools.cache
def gpu(name: str) -> Device:
    """Return the catalogue's device of a data sheet's name. Raises ValueError where it has none."""
    kind = catalog.find_kind(name)
    device = catalog.load_devices()[kind].device(kind) if kind else None
    if device is None:
        raise ValueError(f"the catalogue has no {name}")
    return device


# -- blocks
#   ------------------------------------------------------------------------------------------------


def unseen_blocks() -> tuple[UnseenBlock, ...]:
    """Every block time of the list, priced from the data sheet; and with the pace of another
    shape."""
    priced = [
        (block, block.forward_s + (block.backward_s or 0.0), block_s(block))
        for block in published_blocks().blocks
    ]
    rows = []
    for block, measured, predicted in priced:
        # One other shape: the nearest in predicted time, by ratio.
        others = [
            (abs(math.log(said / predicted)), took / said)
            for other, took, said in priced
            if _tells(other, block)
        ]
        known = predicted * min(others)[1] / measured - 1 if others else None
        rows.append(
            UnseenBlock(
                id=block.id,
                gpu=block.gpu,
                precision=block.precision,
                measured_s=measured,
                predicted_s=predicted,
                error=predicted / measured - 1,
                known_error=known,
            )
        )
    return tuple(rows)


def _tells(other: Block, block: Block) -> bool:
    """Whether one time tells of another: same GPU, software and precision, another shape."""
    alike = all(
        getattr(other, name) == getattr(block, name)
        for name in ("gpu", "software", "precision", "covers")
    )
    return (
        alike
        and other.id != block.id
        and (other.model, other.batch, other.seq_len)
        != (
            block.model,
            block.batch,
            block.seq_len,
        )
    )


def block_s(block: Block) -> float:
    """Predicted seconds of what a published time covers: forward, and backward where it was
    measured."""
    used = load_engine(software(block))
    spec = model_spec(block.model)
    graph = models.graph(spec)
    device = gpu(block.gpu)
    train = TrainSpec(
        steps=1,
        batch=block.batch,
        seq_len=block.seq_len,
        precision=block.precision,
        attention="sdpa" if block.attention == "flash" else "vanilla",
    )
    cluster = Cluster(sites=(Site(name="s", hosts=(Host(name="h", devices=(device,)),)),))
    costs = Costs(graph, train, Network(cluster, planned_devices(cluster), used))
    operators = tuple(
        op
        for op in graph.block
        if block.covers != "blocks without attention's scores" or op.name != "attn"
    )
    units = [(operators, block.layers)]
    if block.covers == "blocks, embedding and head":
        units += [(graph.embedding, 1), (graph.head[:-1], 1)]
    times = [(costs.unit_s(0, unit, block.batch, {}, 1), count) for unit, count in units]
    return sum(
        count * (forward + (backward if block.backward_s else 0.0))
        for (forward, backward), count in times
    )


class BlockScore(msgspec.Struct, frozen=True, kw_only=True):
    """Median errors over the block times of one GPU at one precision."""

    gpu: str
    precision: str
    times: int
    median: float
    known_median: float | None


def block_scores(rows: Sequence[UnseenBlock]) -> tuple[BlockScore, ...]:
    """By GPU and precision."""
    scores = []
    for gpu, precision in dict.fromkeys((row.gpu, row.precision) for row in rows):
        own = [row for row in rows if (row.gpu, row.precision) == (gpu, precision)]
        known = [abs(row.known_error) for row in own if row.known_error is not None]
        scores.append(
            BlockScore(
                gpu=gpu,
                precision=precision,
                times=len(own),
                median=statistics.median(abs(row.error) for row in own),
                known_median=statistics.median(known) if known else None,
            )
        )
    return tuple(scores)


# -- scores
#   ------------------------------------------------------------------------------------------------


class RunScore(msgspec.Struct, frozen=True, kw_only=True):
    """Errors over runs, of time; the share inside their intervals, how wide these are, and their
    proper score."""

    runs: int
    median: float
    usual_median: float
    worst: float
    inside: float
    #: Upper over lower bound, in the median.
    width: float
    interval_score: float


def score(rows: Sequence[UnseenRun]) -> RunScore:
    """Return what a list of runs says of the predictions."""
    return RunScore(
        runs=len(rows),
        median=statistics.median(abs(row.error) for row in rows),
        usual_median=statistics.median(abs(row.usual_error) for row in rows),
        worst=max(abs(row.error) for row in rows),
        inside=statistics.fmean(row.inside for row in rows),
        width=statistics.median(row.interval[1] / row.interval[0] for row in rows),
        interval_score=statistics.fmean(
            interval_score(row.measured_s / row.predicted_s, row.interval) for row in rows
        ),
    )


class SourceScore(msgspec.Struct, frozen=True, kw_only=True):
    """Errors over the runs of one source."""

    origin: str
    runs: int
    median: float
    usual_median: float
    inside: float


def source_scores(rows: Sequence[UnseenRun]) -> tuple[SourceScore, ...]:
    """By source, those with the most runs first: runs of one source have much in common."""
    origins = dict.fromkeys(row.origin for row in rows)
    scores = []
    for origin in origins:
        own = score([row for row in rows if row.origin == origin])
        scores.append(
            SourceScore(
                origin=origin,
                runs=own.runs,
                median=own.median,
                usual_median=own.usual_median,
                inside=own.inside,
            )
        )
    return tuple(sorted(scores, key=lambda one: (-one.runs, one.origin)))


def interval_score(value: float, interval: tuple[float, float], level: float = LEVEL) -> float:
    """Return the interval score of Gneiting and Raftery (2007), section 6.2, of logarithms: the
    width, and what lies outside weighed by 2 / (1 - level). Less is better."""
    low, high = map(math.log, interval)
    outside = max(0.0, low - math.log(value)) + max(0.0, math.log(value) - high)
    return high - low + 2 / (1 - level) * outside
