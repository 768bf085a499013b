"""Numbers that papers printed, and the plans that they ran, as data: `published/`.

Nothing but comparisons reads these files: no estimate, no search and no default depends on them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from farspan import models
from farspan.domain.cluster import Cluster, Device, DType
from farspan.domain.clusterfile import load_cluster
from farspan.domain.graph import OpGraph, forward_flops
from farspan.domain.model import ModelSpec
from farspan.domain.plan import (
    Axis,
    Edge,
    GradSync,
    Inputs,
    Mesh,
    Plan,
    PlannedDevice,
    Replica,
    Stage,
    Zero,
)
from farspan.domain.struct_files import parse_json
from farspan.domain.train import TrainSpec

T = TypeVar("T")
#: Slices of arXiv 2602.02632 whose twelve gpt2m cells count, and those that its text contradicts.
COUNTED = ("TACC-TACC", "UTAH-GPN", "UTAH-MASS")
OPEN = ("BRIS-STAR", "GAT-AMST")


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run that the FABRIC paper reports: minutes for 20 epochs, or TFLOP/s a GPU, or only
    whether it ran."""

    slice: str
    devices: int
    model: str
    technique: str
    #: "ok?": implied by the text, not said; such rows count in no score.
    status: Literal["ok", "ok?", "oom"]
    source: str
    minutes: float | None = None
    tflops: float | None = None
    note: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sequence: int
    rows_per_device: int
    microbatches: int
    precision: DType
    epochs: int
    tokens_per_epoch: int
    source: str

    def train(self, devices: int) -> TrainSpec:
        """Return the run on so many devices: the batch grows with them, the epochs stay. Scores are
        kept whole, as the Flax model does without a flash kernel."""
        rows = self.rows_per_device * devices
        steps = self.epochs * self.tokens_per_epoch / (rows * self.sequence)
        return TrainSpec(
            steps=round(steps),
            batch=rows,
            seq_len=self.sequence,
            precision=self.precision,
            attention="vanilla",
        )


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published plan before it has devices: so many stages of equal FLOPs, each over one axis."""

    stages: int
    axis: Axis
    source: str
    zero: Zero = 0
    splits: dict[str, str] = {}


class Usable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gib: float
    source: str


class Fabric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """arXiv 2602.02632."""

    source: str
    software: str
    settings: Settings
    #: The cluster file of each slice, and what its driver reports of each kind's memory.
    clusters: dict[str, str]
    usable_memory: dict[str, Usable]
    plans: dict[str, Recipe]
    rows: tuple[Row, ...]

    def cluster(self, name: str, devices: int) -> Cluster:
        """Return the first devices of a slice, with the memory that the driver reports."""
        whole = catalog_cluster(self.clusters[name]).first(devices)
        return whole.with_devices(
            lambda host, i: msgspec.structs.replace(
                host.devices[i], memory=self._memory(host.devices[i])
            )
        )

    def _memory(self, device: Device) -> int:
        usable = self.usable_memory.get(device.kind)
        return round(usable.gib * 2**30) if usable else device.memory


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of the cost study's figure 3; `plotted` in the unit of the file."""

    model: str
    scheme: str
    devices: int
    plotted: float


class Size(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that the cost study's fit of shapes goes by."""

    family: str
    #: Parameters by its name.
    billions: float
    d_model: int
    layers: int
    source: str


class CostStudy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """arXiv 2410.19456."""

    source: str
    unit: str
    price_ratios: dict[str, float]
    price_source: str
    a100_40_usd_per_hour: float
    sequence: int
    batches: tuple[int, ...]
    devices: tuple[int, ...]
    note: str
    #: The ZeRO level that each scheme's name means.
    schemes: dict[str, Zero]
    fitted_on: tuple[str, ...]
    held_out: tuple[str, ...]
    sizes: tuple[Size, ...]
    points: tuple[Point, ...]


@functools.cache
def fabric() -> Fabric:
    return _load("fabric.json", Fabric)


@functools.cache
def cost_study() -> CostStudy:
    return _load("slm-cost.json", CostStudy)


def _load(name: str, kind: type[T]) -> T:
    file = resources.files("farspan_studies").joinpath("published").joinpath(name)
    return parse_json(file.read_bytes(), kind, f"published/{name}")


@functools.cache
def catalog_cluster(name: str) -> Cluster:
    """Return a cluster that ships with farspan."""
    return load_cluster(
        Path(str(resources.files("farspan.catalog").joinpath("clusters", f"{name}.yaml")))
    )


def planned_devices(cluster: Cluster) -> tuple[PlannedDevice, ...]:
    """Every device of a cluster, in rank order."""
    return tuple(
        PlannedDevice(
            host=host.name, backend=device.backend, index=index, threads=device.slot.threads
        )
        for host in cluster.hosts
        for index, device in enumerate(host.devices)
    )


def published_plan(
    name: str, recipe: Recipe, model: ModelSpec, cluster: Cluster, settings: Settings
) -> Plan:
    """Return a published plan on the devices of a slice. Raises ValueError where it divides what
    does not divide evenly."""
    devices = planned_devices(cluster)
    graph = models.graph(model)
    train = settings.train(len(devices))
    sync = GradSync(bucket_bytes=2 * graph.parameters(), bits=16)
    cuts = equal_cuts(graph, recipe.stages, settings.sequence)
    each = len(devices) // recipe.stages
    for op, dim in recipe.splits.items():
        if graph.sizes.get(dim, each) % each:
            raise ValueError(
                f"{op}: {graph.sizes[dim]} cannot be divided evenly over {each} devices"
            )
    stages = []
    for i in range(recipe.stages):
        mesh = Mesh(
            ranks=tuple(range(i * each, (i + 1) * each)), shape=(each,), axes=(recipe.axis,)
        )
        groups = len(mesh.batch)
        stages.append(
            Stage(
                units=(cuts[i], cuts[i + 1]),
                mesh=mesh,
                rows=(train.batch // groups,) * groups,
                grad_sync=sync,
                zero=recipe.zero,
                splits=recipe.splits if each > 1 else {},
            )
        )
    replica = Replica(
        stages=tuple(stages),
        edges=(Edge(bits=16),) * (len(stages) - 1),
        microbatches=settings.microbatches,
        in_flight=tuple(range(len(stages), 0, -1)),
    )
    return Plan(
        technique=name,
        model=model,
        train=train,
        replicas=(replica,),
        devices=devices,
        inputs=Inputs(cluster="", corpus=""),
        engine="alpa2022",
    )


def equal_cuts(graph: OpGraph, stages: int, seq_len: int) -> list[int]:
    """Where stages of as equal FLOPs as whole units allow begin and end, as Alpa's layers are
    clustered."""
    flops = [
        sum(forward_flops(graph, op, 1, seq_len) for op in graph.unit(i))
        for i in range(graph.units)
    ]
    total = math.fsum(flops)
    cuts = [0]
    for i in range(1, stages):
        sums = [
            abs(math.fsum(flops[:unit]) - i * total / stages) for unit in range(graph.units + 1)
        ]
        cuts.append(min(range(cuts[-1] + 1, graph.units), key=lambda unit: sums[unit]))
    return [*cuts, graph.units]


def alpa_tflops(
    model: ModelSpec, sequences: int, seq_len: int, step_s: float, devices: int
) -> float:
    """TFLOP/s a GPU as the paper prints them: `alpa.util.compute_gpt_tflops` without recomputation,
    `72 B S L H^2 (1 + S / 6H) + 6 B S H V`."""
    tokens = sequences * seq_len
    width = model.d_model
    blocks = 72 * tokens * model.layers * width**2 * (1 + seq_len / (6 * width))
    return (blocks + 6 * tokens * width * model.vocab_size) / step_s / devices / 1e12


def mean_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Mean of |predicted / published - 1|."""
    return math.fsum(abs(predicted / published - 1) for predicted, published in pairs) / len(pairs)
