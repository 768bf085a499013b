"""Whether a device compiles the blocks of a model, and whether it records its step as one CUDA
graph: one rule each, with its reason in words."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from farspan.domain.cluster import Cluster, Device
from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.train import TrainSpec
from farspan.domain.units import format_seconds, short_time

#: NVIDIA's Ampere. Triton supports 8.0 and later (github.com/triton-lang/triton, "Compatibility"),
#: though it may still take earlier cards.
LEAST_COMPILED_CAPABILITY = 8.0
#: Seconds of a run from which compiling pays. The first start takes 30 to 60 s for it, and steps
#: take about a fifth less (gpt2-medium on an H200: 98 ms to 80 ms by counted bytes, docs/gpu.md).
#: The compiler's cache keeps the result, so that later starts take a few seconds.
LEAST_RUN_S = 300.0
#: Why a step is not recorded as a graph: by its device, and by its precision.
NO_NVIDIA_GPU = "only an NVIDIA GPU records its step"
SCALED_LOSS = "the host decides after each step in fp16 whether its loss scale was too large"


class Choice(NamedTuple):
    """What a rule decides, and why."""

    value: bool
    reason: str


def runs_compiled(plan: Plan, rank: int) -> bool:
    """Return whether a rank of a plan compiles its blocks: as its device is planned, or as its
    training asks where nothing decided it."""
    return is_compiled(plan.devices[rank], plan.train)


def is_compiled(at: PlannedDevice, train: TrainSpec) -> bool:
    """Return whether a planned device compiles its blocks, as `runs_compiled`."""
    return train.compile is True if isinstance(at.compile, msgspec.UnsetType) else at.compile


def records_graph(plan: Plan, rank: int) -> bool:
    """Return whether a rank of a plan records its step as one CUDA graph."""
    return plan.devices[rank].graph is True


def is_for_gpus(cluster: Cluster) -> bool:
    """Return whether there is a device for which the rules could decide anything."""
    return any(device.backend == "cuda" for device in cluster.devices)


def choose_compile(
    device: Device, triton: bool | msgspec.UnsetType, run_s: float, ways: int = 1
) -> Choice:
    """Choose whether a device compiles by itself, in a run of `run_s` seconds on a tensor axis of
    `ways` devices. `triton` is unset where nobody looked: CUDA wheels of PyTorch bring it on Linux,
    and a worker that lacks it computes without."""
    kind = device.kind
    if device.backend != "cuda":
        return Choice(False, f"{kind} compiles only where run.yaml asks for it")
    capability = device.sheet.capability
    if isinstance(capability, msgspec.UnsetType):
        return Choice(False, f"nothing knows a compute capability of {kind}")
    if capability < LEAST_COMPILED_CAPABILITY:
        fact = f"{kind} has compute capability {capability}, before {LEAST_COMPILED_CAPABILITY}"
        return Choice(False, fact)
    if triton is False:
        return Choice(False, f"the host of {kind} has no Triton, PyTorch's compiler for GPUs")
    if ways > 1:
        return Choice(False, "a tensor axis exchanges inside blocks, which would cut their graphs")
    length = "long" if math.isinf(run_s) else format_seconds(run_s)
    if run_s < LEAST_RUN_S:
        least = format_seconds(LEAST_RUN_S)
        return Choice(False, f"the run takes about {length}, and compiling pays from {least} on")
    fact = f"{kind} has compute capability {capability}, and the run takes about {length}"
    return Choice(True, fact)


def find_graph_obstacle(plan: Plan) -> str:
    """Return why a plan's step cannot be recorded as one CUDA graph, or nothing where it can be.

    Dropout and masks are no obstacles: their seeds and tokens come in buffers that stay in place.
    """
    backends = {at.backend for at in plan.devices}
    if backends != {"cuda"}:
        return NO_NVIDIA_GPU
    if len(plan.devices) > 1:
        return f"{len(plan.devices)} devices exchange within a step"
    if plan.train.precision == "fp16":
        return SCALED_LOSS
    return ""


def choose_graph(plan: Plan, device: Device, launching_s: float, computing_s: float) -> Choice:
    """Choose whether a plan's only device records its step by itself, whose kernels take
    `launching_s` to launch and `computing_s` to compute."""
    obstacle = find_graph_obstacle(plan)
    if obstacle:
        return Choice(False, obstacle)
    if isinstance(device.sheet.capability, msgspec.UnsetType):
        return Choice(False, f"nothing knows a compute capability of {device.kind}")
    launching = short_time(launching_s)
    computing = short_time(computing_s)
    if launching_s > computing_s:
        return Choice(True, f"launching a step's kernels takes {launching}, their work {computing}")
    return Choice(False, f"a step's work takes {computing}, launching its kernels {launching}")


def with_choices(
    at: PlannedDevice, train: TrainSpec, compiled: Choice, recorded: Choice
) -> PlannedDevice:
    """Return a planned device with what the rules chose where the training leaves it to them, and
    with a graph where it asks for one."""
    if train.compile == "auto":
        at = msgspec.structs.replace(at, compile=compiled.value)
    if train.graph == "auto":
        at = msgspec.structs.replace(at, graph=recorded.value)
    elif train.graph is True:
        at = msgspec.structs.replace(at, graph=True)
    return at
