"""Plan: which device computes what. Techniques write it, the estimator prices it, and the runtime
executes it.

Inside one replica everything is one synchronous computation, also across sites; several replicas
exist only where they keep separate optimizer state. Mesh axes: "site" and "data" divide a step's
sequences, "data" also the state where ZeRO does, "tensor" divides operators.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Annotated, Literal

import msgspec

from farspan.domain.model import ModelSpec
from farspan.domain.struct_files import ContentHashOrNone, content_hash
from farspan.domain.train import TrainSpec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Axis = Literal["site", "data", "tensor"]
#: What is divided over the data axis: nothing; optimizer state; and gradients; and parameters
#: (arXiv 1910.02054).
Zero = Literal[0, 1, 2, 3]
#: Gradients over all devices in one ring, or inside each site first and between sites once.
Topology = Literal["flat", "hierarchical"]


class Mesh(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Ranks laid out over named axes, row-major: the last axis varies fastest. A tensor axis is the
    last.

    It keeps what it was asked for: searches ask the same mesh repeatedly.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        ranks = len(self.ranks)
        if len(self.shape) != len(self.axes) or math.prod(self.shape) != ranks:
            raise ValueError(f"{ranks} ranks over axes {self.axes} of shape {self.shape}")
        if "tensor" in self.axes[:-1]:
            raise ValueError("the tensor axis is the last")

    def size(self, axis: Axis) -> int:
        """Coordinates along an axis; 1 where the mesh lacks it."""
        return self._sizes.get(axis, 1)

    @functools.cached_property
    def _sizes(self) -> dict[Axis, int]:
        return dict(zip(self.axes, self.shape, strict=True))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that differ in their coordinate along `axis` only, group by group."""
        if axis not in self._groups:
            size = self.size(axis)
            step = 1
            if axis in self.axes:
                step = math.prod(self.shape[self.axes.index(axis) + 1 :])
            groups = []
            for start in range(len(self.ranks)):
                if start // step % size == 0:
                    stop = start + size * step
                    groups.append(self.ranks[start:stop:step])
            self._groups[axis] = tuple(groups)
        return self._groups[axis]

    @functools.cached_property
    def _groups(self) -> dict[Axis, tuple[tuple[int, ...], ...]]:
        """The groups of each axis that was asked for."""
        return {}

    @functools.cached_property
    def batch(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each batch coordinate: those that share one tensor axis see the same
        sequences."""
        return self.groups("tensor")

    @functools.cached_property
    def transposed(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each tensor coordinate: those that hold the same parts of operators for
        other sequences."""
        size = self.size("tensor")
        return tuple(self.ranks[k::size] for k in range(size))


def row_quantum(mesh: Mesh, splits: dict[str, str]) -> int:
    """Return the number that must divide every microbatch's sequences: the width of a tensor axis
    that divides them."""
    return mesh.size("tensor") if "b" in splits.values() else 1


class GradSync(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients of the batch axes are summed: in buckets of `bucket_bytes` (None: one message a
    tensor), each sent as soon as it is whole; over one ring, or inside each site first and between
    sites once."""

    bucket_bytes: Positive | None
    topology: Topology = "flat"
    #: Bits of a number in transit; fewer than 32 keep an error feedback.
    bits: Literal[8, 16, 32] = 32
    #: Bytes a second that each worker's connection to another site carries at most; None does not
    #: hold it back.
    wan_rate: Positive | None = None


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Units [first, last) of the model (0 embeds, layers + 1 is the head) on one mesh; batch
    coordinate i reads `rows[i]` sequences a step. `splits` names the dim of each operator that the
    tensor axis divides ("" copies it)."""

    units: tuple[int, int]
    mesh: Mesh
    rows: tuple[int, ...]
    grad_sync: GradSync
    zero: Zero = 0
    splits: dict[str, str] = {}
    recompute: bool = False

    def __post_init__(self) -> None:
        coordinates = len(self.mesh.ranks) // self.mesh.size("tensor")
        if len(self.rows) != coordinates:
            raise ValueError(f"{len(self.rows)} row counts for {coordinates} batch coordinates")


class Edge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What crosses between two neighbouring stages, forward activations and backward gradients
    alike."""

    bits: Literal[8, 16, 32]
    streams: Positive = 1


class Replica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One synchronous computation. Each batch coordinate goes through its rows in `microbatches`
    parts; stage i has begun at most `in_flight[i]` that it has not finished."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...] = ()
    microbatches: Positive = 1
    in_flight: tuple[Positive, ...] = (1,)

    def __post_init__(self) -> None:
        stages = len(self.stages)
        edges = len(self.edges)
        depths = len(self.in_flight)
        if edges != stages - 1 or depths != stages:
            raise ValueError(f"{stages} stages, {edges} edges, {depths} depths")
        if len({sum(stage.rows) for stage in self.stages}) > 1:
            raise ValueError("stages of one pipeline read unlike numbers of sequences")
        if stages > 1:
            all_rows = list(itertools.chain.from_iterable(stage.rows for stage in self.stages))
            if any(rows % self.microbatches for rows in all_rows):
                raise ValueError(
                    f"{self.microbatches} microbatches divide the rows of a stage unevenly"
                )
            if any(rows < 1 for rows in all_rows):
                raise ValueError("a batch coordinate of a pipeline's stage reads no sequence")
        for stage in self.stages:
            quantum = row_quantum(stage.mesh, stage.splits)
            multiple = self.microbatches * quantum
            for rows in stage.rows if quantum > 1 else ():
                if rows % multiple:
                    raise ValueError(
                        f"{rows} rows in {self.microbatches} microbatches: operators that divide "
                        f"rows over a tensor axis of {quantum} need a multiple of {multiple}"
                    )

    @property
    def batch(self) -> int:
        return sum(self.stages[0].rows)

    def micro_rows(self, stage: int, coordinate: int) -> int:
        """Sequences of the largest microbatch of a batch coordinate."""
        return -(-self.stages[stage].rows[coordinate] // self.microbatches)

    def microbatch_rows(self, stage: int, coordinate: int, microbatch: int) -> int:
        """Sequences of one microbatch of a batch coordinate: its rows as evenly as they divide."""
        rows = self.stages[stage].rows[coordinate]
        start = microbatch * rows // self.microbatches
        return (microbatch + 1) * rows // self.microbatches - start

    def microbatch_span(self, stage: int, coordinate: int, microbatch: int) -> tuple[int, int]:
        """Return the sequences [start, stop) of a step that a batch coordinate of a stage reads as
        one microbatch."""
        # Earlier microbatches of all coordinates come first, then this one of earlier coordinates.
        all_rows = self.stages[stage].rows
        start = sum(microbatch * rows // self.microbatches for rows in all_rows)
        for earlier in range(coordinate):
            start += self.microbatch_rows(stage, earlier, microbatch)
        return start, start + self.microbatch_rows(stage, coordinate, microbatch)


class Sync(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How replicas synchronize (DiLoCo, arXiv 2311.08105): every `every` steps the mean change of
    all parameters becomes the gradient of an outer Nesterov step."""

    every: Positive
    bits: Literal[4, 8, 16, 32] = 32
    #: The exchange overlaps with the next steps (arXiv 2501.18512).
    overlap: bool = False
    lr: float = 0.7
    momentum: float = 0.9


class PlannedDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device that a rank expects to find. Hosts of one site are near each other."""

    host: str
    site: str = ""
    backend: str
    index: int
    threads: int
    #: The cluster's name of it; plans of before there was one have none, and keep their hash.
    kind: str | msgspec.UnsetType = msgspec.UNSET
    #: Whether its worker compiles the blocks of the model, and whether it records its step as one
    #: CUDA graph. Unset where nothing decided it.
    compile: bool | msgspec.UnsetType = msgspec.UNSET
    graph: bool | msgspec.UnsetType = msgspec.UNSET


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content hashes of what the plan was made from; empty of what there was none."""

    cluster: ContentHashOrNone
    corpus: ContentHashOrNone


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a worker needs but the token files. `technique` is a label for people: no code
    may read it."""

    technique: str
    model: ModelSpec
    train: TrainSpec
    replicas: tuple[Replica, ...]
    devices: tuple[PlannedDevice, ...]
    inputs: Inputs
    engine: str = "farspan"
    sync: Sync | None = None
    version: int = 2

    @property
    def hash(self) -> str:
        return content_hash(self)


def find_flaw(plan: Plan) -> str:
    """Return the flaw of a plan by itself; empty where it has none."""
    ranks: list[int] = []
    for replica in plan.replicas:
        for stage in replica.stages:
            ranks += stage.mesh.ranks
    ranks.sort()
    devices = len(plan.devices)
    if ranks != list(range(devices)):
        listed = ", ".join(map(str, ranks))
        return f"its stages run on ranks {listed}, not once on each of {devices} devices"
    batch = sum(replica.batch for replica in plan.replicas)
    if batch != plan.train.batch:
        return f"its replicas read {batch} sequences a step, the training has {plan.train.batch}"
    if len(plan.replicas) > 1 and plan.sync is None:
        return f"its {len(plan.replicas)} replicas never meet: it has no sync"
    units = plan.model.layers + 2
    for replica in plan.replicas:
        bounds: list[int] = []
        joined = True
        next_unit = 0
        for stage in replica.stages:
            first, last = stage.units
            bounds += (first, last)
            joined = joined and first == next_unit < last
            next_unit = last
        if not joined or next_unit != units:
            return (
                f"its stages have units {bounds}, which are not the model's {units} one after "
                "another"
            )
    if plan.model.lora and (flaw := _adapters_flaw(plan)):
        return flaw
    recorded = any(at.graph is True for at in plan.devices)
    if recorded and (devices > 1 or plan.train.precision == "fp16"):
        return "its step is to be one CUDA graph, which neither several devices nor fp16 can have"
    return ""


def _adapters_flaw(plan: Plan) -> str:
    """Return why the adapters of a plan cannot be trained; empty where they can."""
    stages: list[Stage] = []
    for replica in plan.replicas:
        stages += replica.stages
    divided = any(stage.zero or stage.mesh.size("tensor") > 1 for stage in stages)
    if len(stages) > 1 or divided or plan.sync is not None:
        return "it trains adapters, which one device or data parallelism alone can"
    if plan.train.optimizer.muon:
        return "it trains adapters by Muon, which updates whole matrices"
    return ""
