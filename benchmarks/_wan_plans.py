"""What `benchmarks/wan.py` measures: its models, the stock contestants' options, and farspan's
plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from farspan import models, techniques
from farspan.domain.cluster import Cluster
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec, matmul_parameters
from farspan.domain.plan import (
    Axis,
    GradSync,
    Inputs,
    Mesh,
    Plan,
    Replica,
    Stage,
    Sync,
    Topology,
    Zero,
)
from farspan.domain.problems import Problem
from farspan.domain.struct_files import content_hash
from farspan.domain.train import Schedule, TrainSpec
from farspan.planning.rank_plans import rank_plans
from farspan.techniques import Task
from farspan.techniques._search.one_stage import wan_bandwidth_share

ENGINE = "farspan"
#: Two sites of two workers.
RANKS = (0, 1, 2, 3)
SITES = ((0, 1), (2, 3))
DATA: tuple[Axis, ...] = ("data",)
TENSOR: tuple[Axis, ...] = ("data", "tensor")
BUCKETS_MB = (1, 5, 25, 100)
MICROBATCHES = (4, 8, 16)
BUCKET_BYTES = 4 * 2**20
#: Steps between meetings of DiLoCo's replicas.
EVERY = 4
CORPUS = content_hash("wan")
#: Of a number between sites.
Bits = Literal[8, 16, 32]


class Size(msgspec.Struct, frozen=True, kw_only=True):
    layers: int
    width: int
    vocab: int
    context: int
    #: Tokens of a step.
    tokens: int


#: `paper` moves much for what it computes, as the published runs over such links do: gradients of
#: 118 MB, 512 tokens. Two more show what tokens and parameters (366 MB) change.
SIZES = {
    "small": Size(layers=8, width=256, vocab=8192, context=256, tokens=2048),
    "paper": Size(layers=8, width=512, vocab=8192, context=256, tokens=512),
    "paper-2k": Size(layers=8, width=512, vocab=8192, context=256, tokens=2048),
    "paper-wide": Size(layers=12, width=768, vocab=8192, context=256, tokens=512),
}


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What every contestant computes. Results of different works are never put in one table."""

    model: str
    sequences: int
    tied: bool
    seed: int
    #: Stock PyTorch has bf16 as autocast.
    precision: Literal["fp32", "bf16"] = "fp32"
    #: The share of a core that each worker of the second site gets at most; two share one.
    slow: float = 1.0

    @property
    def size(self) -> Size:
        return SIZES[self.model]

    @property
    def seq_len(self) -> int:
        return self.size.tokens // self.sequences

    @property
    def spec(self) -> ModelSpec:
        size = self.size
        return models.family("gpt2").shape(
            d_model=size.width,
            layers=size.layers,
            vocab_size=size.vocab,
            context=size.context,
            tied=self.tied,
        )

    @property
    def cut(self) -> int:
        """Blocks of the first of two stages with equal work: the head counts as its matrix."""
        spec = self.spec
        head = spec.vocab_size * spec.d_model
        blocks = matmul_parameters(spec) - head
        return round((1 + head / blocks) * spec.layers / 2)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Those of MICROBATCHES that the sequences of each rank of a stage can be divided into."""
        rows = self.sequences // len(SITES[0])
        return tuple(count for count in MICROBATCHES if rows % count == 0)

    def train(self, steps: int) -> TrainSpec:
        """Only steps: no validation or checkpoint before the end."""
        return TrainSpec(
            steps=steps,
            batch=self.sequences,
            seq_len=self.seq_len,
            precision=self.precision,
            seed=self.seed,
            schedule=Schedule(kind="constant"),
            validate_every=10**6,
            validate_tokens=self.seq_len,
            checkpoint_every_s=1e6,
            keep=1,
        )


def stock(work: Work) -> dict[str, list[str]]:
    """Options of `wan_contestants.py` by contestant."""
    found = {f"torch/ddp-{size}": ["ddp", f"--bucket-mb={size}"] for size in BUCKETS_MB}
    found |= {
        "torch/fsdp2": ["fsdp2"],
        "torch/fsdp2-kept": ["fsdp2", "--kept"],
        "torch/hsdp": ["hsdp"],
    }
    for kind in ("gpipe", "1f1b"):
        found |= {
            f"torch/{kind}-{count}": [kind, f"--microbatches={count}", f"--cut={work.cut}"]
            for count in work.microbatches
        }
    return found


def ours(work: Work) -> tuple[str, ...]:
    """Names of farspan's contestants, all of which `plan` can make."""
    pipelines = [f"pipeshard-{count}" for count in work.microbatches]
    divided = [f"pipeshard-{count}-tensor" for count in MICROBATCHES if work.sequences % count == 0]
    sums = (
        "data",
        "data-sites",
        "data-sites-16",
        "data-sites-8",
        "zero1",
        "zero2",
        "fsdp",
        "hsdp",
        "shard",
    )
    # Where the update weighs as much as the passes, what the technique makes of its own is another
    # pipeline; where gradients are many, how fast they leave matters.
    large = () if work.model == "small" else ("pipeshard", "data-sites-unpaced")
    names = (*sums, *pipelines, *divided, *large, "diloco", "planner")
    return tuple(f"farspan/{name}" for name in names)


def planned(
    task: Task, technique: str, replicas: Sequence[Replica], sync: Sync | None = None
) -> Plan:
    cluster = content_hash(msgspec.to_builtins(task.cluster, str_keys=True))
    return Plan(
        technique=technique,
        model=task.model,
        train=task.train,
        replicas=tuple(replicas),
        devices=task.devices,
        inputs=Inputs(cluster=cluster, corpus=task.corpus),
        engine=task.engine.name,
        sync=sync,
    )


def question(work: Work, cluster: Cluster, steps: int) -> Task:
    spec = work.spec
    return Task(spec, models.graph(spec), cluster, work.train(steps), load_engine(ENGINE), CORPUS)


def plan(name: str, work: Work, task: Task) -> Plan:
    """Return the plan of one of `ours`, each technique's in its plainest form; ValueError where the
    planner has none."""
    kind, _, count = name.removeprefix("farspan/").partition("-")
    bits: dict[str, Bits] = {"sites-16": 16, "sites-8": 8}
    batch = task.train.batch
    zero: dict[str, Zero] = {"zero1": 1, "zero2": 2, "fsdp": 3}
    if kind == "planner":
        return picked(task)
    if kind == "diloco":
        replicas = [Replica(stages=(stage(task, site, batch // 2),)) for site in SITES]
        return planned(task, kind, replicas, Sync(every=EVERY))
    if name == "farspan/pipeshard":
        made = techniques.technique("pipeshard").plan(task)
        if isinstance(made, Problem):
            raise ValueError(made.fact)
        return made
    if kind == "pipeshard":
        # A stage a site; inside it data parallelism, or operators divided. All microbatches of the
        # first stage are in flight; the last one returns each at once.
        parts = int(count.removesuffix("-tensor"))
        axes = TENSOR if count.endswith("-tensor") else DATA
        cut = 1 + work.cut
        units = ((0, cut), (cut, task.graph.units))
        stages = [
            stage(task, site, batch, axes, units=part)
            for site, part in zip(SITES, units, strict=True)
        ]
        return planned(task, kind, [task.replica(stages, parts, (parts, 1))])
    if kind == "hsdp":
        made = stage(task, RANKS, batch, ("site", "data"), zero=3)
    elif kind == "shard":
        made = stage(task, RANKS, batch, TENSOR)
    else:
        topology = "hierarchical" if count else "flat"
        made = stage(
            task, RANKS, batch, zero=zero.get(kind, 0), topology=topology, bits=bits.get(count, 32)
        )
        if count == "sites-unpaced":
            made = replace(made, grad_sync=replace(made.grad_sync, wan_rate=None))
    return planned(task, kind, [Replica(stages=(made,))])


def picked(task: Task) -> Plan:
    """Return what the planner chooses among techniques that compute the same: those whose step
    times can be compared."""
    synchronous = [name for name in techniques.technique_names() if name != "diloco"]
    found = rank_plans(
        task.model, task.cluster, task.train, task.engine, allow=synchronous, corpus=task.corpus
    )
    if found.chosen is None:
        raise ValueError("the planner has no plan for this cluster")
    return found.candidates[found.chosen].plan


def stage(
    task: Task,
    ranks: tuple[int, ...],
    batch: int,
    axes: tuple[Axis, ...] = DATA,
    *,
    units: tuple[int, int] | None = None,
    zero: Zero = 0,
    topology: Topology = "flat",
    bits: Bits = 32,
) -> Stage:
    """`batch` sequences shared evenly over one axis of all ranks, or over two axes of which the
    last is of two ranks.

    Over a tensor axis operators are divided as Megatron-LM divides them (arXiv 1909.08053): heads,
    d_ff, vocabulary.
    """
    shape = (len(ranks),) if len(axes) == 1 else (len(ranks) // 2, 2)
    mesh = Mesh(ranks=ranks, shape=shape, axes=axes)
    operators = (
        op for unit in (task.graph.embedding, task.graph.block, task.graph.head) for op in unit
    )
    splits = {op.name: op.divisible for op in operators if op.divisible} if "tensor" in axes else {}
    return Stage(
        units=units or (0, task.graph.units),
        mesh=mesh,
        rows=(batch // len(mesh.batch),) * len(mesh.batch),
        zero=zero,
        splits=splits,
        grad_sync=GradSync(
            bucket_bytes=BUCKET_BYTES,
            topology=topology,
            bits=bits,
            wan_rate=wan_bandwidth_share(task, mesh, topology),
        ),
    )
