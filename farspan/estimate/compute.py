"""Seconds of an operator on a device: the roofline (Williams et al. 2009), the slower of arithmetic
and memory.

FLOP/s are those timed on the device at the nearest shape. Else they are the best product that
anybody published for the kind, or a share of the data sheet's, times the engine's efficiency. The
board's power holds them down. Bytes a second are the data sheet's times the engine's share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from farspan.domain.cluster import Device, DType
from farspan.domain.engine import Activity, AttentionSpeed, Engine, GpuEngine
from farspan.domain.graph import Operator, OpGraph, backward_flops, forward_flops, is_windowed
from farspan.semantics.kernel_choice import BYTES, HeadChunks, activities, gpu_activities
from farspan.semantics.tensor_sharding import UNDIVIDED, OperatorDivision

#: Where neither a data sheet nor a measurement is known: a T4's figures, the slowest GPU in common
#: use, and one core with AVX2 (both as in `catalog/devices.yaml`). Every estimate that uses them
#: says so.
UNKNOWN_FLOPS = {"cuda": 65e12, "mps": 5e12, "cpu": 64e9}
UNKNOWN_MEMORY_BANDWIDTH = {"cuda": 320e9, "mps": 100e9, "cpu": 3.2e9}
#: Without tensor units fp32 is this much slower on GPUs (T4: 8.1 of 65 TFLOP/s); CPUs have the
#: figure as it is.
UNKNOWN_FP32 = {"cuda": 1 / 8, "mps": 1.0, "cpu": 1.0}

#: The share of a data sheet's FLOP/s that the best product reaches where nobody published a
#: measurement of the kind: the median of the kinds in `catalog/devices.yaml` that have one (bf16
#: and fp16 0.6 to 1.2, fp32 0.7 to 1.0). Of CPU cores a choice: AMX waits for its tiles.
ATTAINED: dict[str, dict[DType, float]] = {
    "cuda": {"bf16": 0.8, "fp16": 0.8, "tf32": 0.8, "fp32": 0.86},
    "mps": {"fp32": 0.77},
    "cpu": {"bf16": 0.55 / 0.9, "fp16": 0.55 / 0.9, "fp32": 0.8 / 0.9},
}


#: Activities over what a device has of an operator's parameters.
WEIGHT_ACTIVITIES = frozenset({"weight", "table", "gradient", "padding", "head_gradient", "tied"})


class OperatorWork(NamedTuple):
    """One pass over one operator on one device."""

    flops: float
    bytes: float
    m: int
    k: int
    n: int
    #: Bytes that other kernels move, before or after: no arithmetic hides them; and those that
    #: composed ones do.
    unhidden: float = 0.0
    composed: float = 0.0
    #: Kernels that are launched.
    launches: float = 1
    #: Of attention by a kernel that keeps no scores: positions, and the size of a head.
    attention: tuple[int, int] | None = None


class GpuWork(NamedTuple):
    """What decides how a GPU does its work on an operator, in addition to the engine."""

    chunks: HeadChunks
    are_keys_repeated: bool


class Kernels(NamedTuple):
    """Seconds of a pass over an operator: of its kernels, and to launch them."""

    computing: float
    launching: float

    def scaled(self, by: tuple[float, float]) -> Kernels:
        return Kernels(self.computing * by[0], self.launching * by[1])


class DeviceSpeed:
    """What one device does in a second, at one dtype under one engine. `slowdown` multiplies every
    time."""

    def __init__(
        self,
        device: Device,
        dtype: DType,
        engine: Engine,
        slowdown: float = 1.0,
        *,
        recorded: bool = False,
    ) -> None:
        """Take the speed of a device; `recorded` where its step is one CUDA graph."""
        engine = engine.on_device(device.backend)
        dtype = product_dtype(device, dtype, engine)
        self._measured = [
            (rate, rate.flops[dtype]) for rate in device.times.rates if dtype in rate.flops
        ]
        self._flops = best_product(device, dtype) * engine.efficiency[dtype]
        if engine.flops_per_watt is not None and device.sheet.watts is not None:
            self._flops = min(self._flops, engine.flops_per_watt * device.sheet.watts)
        self._bandwidth = (
            device.sheet.bandwidth or UNKNOWN_MEMORY_BANDWIDTH[device.backend]
        ) * engine.bandwidth
        self._composed = (
            self._bandwidth * (engine.composed_bandwidth or engine.bandwidth) / engine.bandwidth
        )
        launch_s = engine.launch_s
        if engine.gpu is not None and not isinstance(device.times.launch_s, msgspec.UnsetType):
            launch_s = device.times.launch_s * engine.gpu.launch_cost
        self._launch_s = launch_s / device.slot.share
        #: Launches go on beside what was launched.
        self.ahead = device.backend != "cpu"
        self.gpu = engine.gpu
        self._attention_flops = 0.0
        self._attention: AttentionSpeed | None = None
        if engine.gpu is not None:
            self._attention = find_attention(engine.gpu, device.sheet.capability)
            self._attention_flops = _peak_flops(device, dtype)
            if BYTES[dtype] == 4:
                self._attention_flops = _peak_flops(device, "fp32") * engine.gpu.full_attention
        #: Seconds of a GPU between two kernels, and whether the host launches none of them.
        self._gap_s = engine.gpu.kernel_gap_s if engine.gpu else 0.0
        self.recorded = recorded and engine.gpu is not None
        if self.recorded:
            self._launch_s = 0.0
        self._width, self._aligned = BYTES[dtype], sorted(engine.aligned.items(), reverse=True)
        self.slowdown = slowdown * device.learned.pace

    def flops(self, m: int, k: int, n: int) -> float:
        """FLOP/s of a product of [m, k] and [k, n]: timed at the nearest shape, by ratio, or from
        the data sheet."""
        if not self._measured:
            return self._flops * self._alignment(k, n)
        shape = (math.log(m), math.log(k), math.log(n))

        def distance(at: int) -> float:
            rate = self._measured[at][0]
            return sum(
                abs(a - math.log(b)) for a, b in zip(shape, (rate.m, rate.k, rate.n), strict=True)
            )

        return self._measured[min(range(len(self._measured)), key=distance)][1]

    def _alignment(self, k: int, n: int) -> float:
        """Matrix units read 16 bytes at a time (NVIDIA, Matrix Multiplication Background, section
        4.1): the share that is left where rows begin elsewhere."""
        even = math.gcd(k, n) * self._width
        if even % 16 == 0 or not self._aligned:
            return 1.0
        return next(
            (share for each, share in self._aligned if even % each == 0), self._aligned[-1][1]
        )

    def attention_flops(self, positions: int, head: int) -> float:
        """FLOP/s of attention that keeps no scores over `positions`, half of whose products
        count."""
        assert self._attention is not None
        share = self._attention.share(positions, head)
        if self._width == 4:
            share /= max(self._attention.shares.values())
        return self._attention_flops * share

    def _work_flops(self, work: OperatorWork) -> float:
        if work.attention is not None and self._attention is not None:
            return self.attention_flops(*work.attention)
        return self.flops(work.m, work.k, work.n)

    def kernels(self, work: OperatorWork) -> Kernels:
        """Return the seconds of a pass over an operator."""
        arithmetic = work.flops / self._work_flops(work) if work.flops else 0.0
        computing = max(arithmetic, work.bytes / self._bandwidth) + work.unhidden / self._bandwidth
        computing += work.composed / self._composed + work.launches * self._gap_s
        return Kernels(self.slowdown * computing, self.slowdown * work.launches * self._launch_s)

    def together(self, computing: float, launching: float) -> float:
        """Return the seconds of both: the longer one where launches overlap with kernels."""
        return max(computing, launching) if self.ahead else computing + launching

    def stream_s(self, size: float) -> float:
        """Seconds to stream bytes through memory."""
        return self.slowdown * size / self._bandwidth


def best_product(device: Device, dtype: DType) -> float:
    """FLOP/s of the best matrix product at a dtype: published, or a share of the data sheet's."""
    if measured := device.sheet.measured.get(dtype):
        return measured
    return _peak_flops(device, dtype) * ATTAINED[device.backend].get(dtype, 1.0)


def _peak_flops(device: Device, dtype: DType) -> float:
    """FLOP/s of a device by its data sheet; or of an unknown one."""
    peak = device.sheet.flops.get(dtype)
    if peak is None:
        peak = UNKNOWN_FLOPS[device.backend] * (
            UNKNOWN_FP32[device.backend] if dtype in ("fp32", "tf32") else 1.0
        )
    return peak


def find_attention(gpu: GpuEngine, capability: float | msgspec.UnsetType) -> AttentionSpeed:
    """Find the speed of the kernel that a card of a compute capability takes."""
    if isinstance(capability, msgspec.UnsetType):
        return next(speed for speed in gpu.attention if speed.capability is None)
    known = {speed.capability: speed for speed in gpu.attention if speed.capability is not None}
    return known[max(least for least in known if least <= capability)]


def product_dtype(device: Device, dtype: DType, engine: Engine) -> DType:
    """Return the dtype whose rate decides matrix products: TF32 for fp32 where plan or engine ask
    for it and the device has it."""
    if dtype == "tf32" or (dtype == "fp32" and engine.tf32):
        return "tf32" if "tf32" in device.sheet.flops else "fp32"
    return dtype


def work(
    graph: OpGraph,
    op: Operator,
    rows: int,
    seq_len: int,
    width: int,
    keys: float | None,
    engine: Engine,
    part: OperatorDivision = UNDIVIDED,
    gpu: GpuWork | None = None,
) -> tuple[OperatorWork, OperatorWork]:
    """Return the forward and the backward pass of one operator over `rows` sequences.

    A device of a tensor axis does its `part`: a product's arithmetic and its operands, which the
    backward pass reads and writes twice; and what other kernels move (`Engine.kernels`). `width` is
    a number's bytes, `keys` is `semantics.kernel_choice.scored_keys`. On a GPU that the engine
    knows, `gpu` decides what is launched.

    Each device of an axis launches all the kernels that one device alone would.
    """
    size, product = {"b": rows, "s": seq_len}, op.kind in ("matmul", "attention")
    moved = 0.0
    if product:
        moved += graph.size(op.inputs[0], **size) * part.read
        moved += graph.size(op.output, **size) * part.written
    if op.kind == "matmul":
        moved += sum(graph.size(weight.dims) for weight in op.weights) * part.weights
    m, k, n = _product_shape(graph, op, rows * seq_len, part)
    if gpu is None:
        done = activities(graph, op, rows, seq_len, keys)
    else:
        done = gpu_activities(
            graph, op, rows, seq_len, keys, gpu.chunks, are_keys_repeated=gpu.are_keys_repeated
        )
    works = []
    is_fused = gpu is not None and op.kind == "attention" and keys is None
    own = engine.gpu.attention_launches if engine.gpu and is_fused else engine.launches
    for backward, flops in enumerate((forward_flops, backward_flops)):
        if backward and op.kind == "lookup" and op.is_frozen:
            works.append(OperatorWork(0.0, 0.0, m, k, n, launches=0))
            continue
        streamed = composed = 0.0
        launches = own[0 if op.is_frozen else backward] if product else 0
        for activity, elements in done.items():
            if moves := engine.kernels.get(activity):
                there = moves.bytes(bool(backward), width) * elements * _share(op, activity, part)
                streamed, composed = (
                    streamed + there * (not moves.composed),
                    composed + there * moves.composed,
                )
                launches += moves.launches[backward] * _repeats(op, activity, gpu)
        arithmetic = flops(graph, op, rows, seq_len, keys) * part.arithmetic
        # A frozen product is followed by one for the gradient of its input.
        operands = width * moved * (1 + (backward and not op.is_frozen))
        works.append(OperatorWork(arithmetic, operands, m, k, n, streamed, composed, launches))
    if gpu is not None and op.kind == "matmul" and op.output == "bsv":
        works = _chunked_head(graph, op, works, rows * seq_len, width, part, gpu.chunks)
    elif is_fused and is_windowed(op, seq_len):
        sizes = seq_len, graph.sizes["e"]
        works = [work._replace(attention=sizes) for work in works]
    elif is_fused:
        # One kernel leaves out what lies in the future: half of all.
        sizes = seq_len, graph.sizes["e"]
        works = [work._replace(flops=work.flops / 2, attention=sizes) for work in works]
    return works[0], works[1]


def _repeats(op: Operator, activity: Activity, gpu: GpuWork | None) -> int:
    """Return how often an activity's kernels are launched: for each parameter's gradient, for each
    chunk of logits, or once."""
    if gpu is None:
        return 1
    if activity == "gradient":
        return len(op.weights)
    return gpu.chunks.num_chunks if activity in ("loss", "fused_loss") else 1


def _chunked_head(
    graph: OpGraph,
    op: Operator,
    works: list[OperatorWork],
    tokens: int,
    width: int,
    part: OperatorDivision,
    chunks: HeadChunks,
) -> list[OperatorWork]:
    """Return the head's products, padding included, chunk by chunk: each reads the head, and its
    gradient is a sum in fp32 over the chunks."""
    forward, backward = works
    states = tokens * graph.size(op.inputs[0][-1]) * part.read
    logits = tokens * graph.size(op.output[-1]) * part.written * chunks.padding
    head = graph.size(op.weights[0].dims) * part.weights * chunks.padding
    read = states + logits + chunks.num_chunks * head
    # The first chunk's product is written, and the others' are added to it: by the product, or, of
    # those that are written first, by a kernel of its own.
    summed = 4 * (2 * chunks.num_chunks - 1) * head
    launches = chunks.num_chunks
    if not chunks.is_fused:
        summed += 2 * width * chunks.num_chunks * head
        launches *= 2
    if op.is_frozen:
        summed = 0.0
        launches = 1
    chunked_forward = forward._replace(
        flops=forward.flops * chunks.padding,
        bytes=width * read,
        m=chunks.rows,
        launches=forward.launches + chunks.num_chunks - 1,
    )
    chunked_backward = backward._replace(
        flops=backward.flops * chunks.padding,
        bytes=width * (read + states + logits) + summed,
        m=chunks.rows,
        launches=backward.launches + chunks.num_chunks + launches - 2,
    )
    return [chunked_forward, chunked_backward]


def _product_shape(
    graph: OpGraph, op: Operator, tokens: int, part: OperatorDivision
) -> tuple[int, int, int]:
    """Return the matrices `[m, k] @ [k, n]` of one device. Rows of the batch divide m, a contracted
    dim divides k, an output dim n."""
    summed = "d"
    if op.kind == "matmul":
        summed = "".join(dim for dim in op.inputs[-1] if dim not in op.output)
    m, k, n = tokens, graph.size(summed), graph.size(op.output[2:] or "d")
    if part.arithmetic == 1.0:
        return m, k, n
    if part.written == 1.0:
        return m, max(1, round(k * part.arithmetic)), n
    if op.weights and part.weights == 1.0:
        return max(1, round(m * part.arithmetic)), k, n
    return m, k, max(1, round(n * part.arithmetic))


def _share(op: Operator, activity: Activity, part: OperatorDivision) -> float:
    """Return the share of an activity's elements that one device goes over."""
    if activity in WEIGHT_ACTIVITIES:
        return part.weights
    if activity == "residual":
        return part.residual
    # The loss goes over what it reads, everything else over what it writes.
    return part.read if op.kind == "loss" else part.written
