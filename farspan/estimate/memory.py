"""Memory of one worker, by formula: state that stays, activations of the microbatches in flight,
logits, buffers.

Activations are counted as in Korthikanti et al. (arXiv 2205.05198), without dropout, from what each
operator of the graph keeps; state as in ZeRO (arXiv 1910.02054).
"""

from __future__ import annotations

import math

from farspan.domain.engine import Engine
from farspan.domain.graph import Operator, OpGraph, is_windowed
from farspan.domain.plan import Mesh
from farspan.domain.train import TrainSpec
from farspan.semantics.kernel_choice import (
    BYTES,
    fused_logits_rows,
    padded_vocabulary,
    scored_keys,
)
from farspan.semantics.muon_matrices import NO_MATRICES, OwnedMatrices, by_shape
from farspan.semantics.tensor_sharding import RESIDUAL, weight_share

#: Bytes a parameter of replicas that synchronize: the parameters of their last meeting, and the
#: outer momentum (arXiv 2311.08105); while an exchange goes on, what it left from too.
MEETING, OVERLAPPING = 8, 12
#: Channels of an NCCL communicator by what joins the devices of a host: two for each link of an
#: A100's twelve, and what rings over PCIe get (src/graph/search.cc, ncclTopoDupChannels and its
#: callers).
CHANNELS = {"nvlink": 24, "xgmi": 24, "pcie": 4, "unified": 2}


def local_parameters(
    graph: OpGraph,
    units: tuple[int, int],
    splits: dict[str, str],
    ways: int,
    *,
    frozen: bool = False,
) -> float:
    """Parameters that each device of a tensor axis of `ways` holds of a stage, those that are
    trained or those that are `frozen`; a tied table inside it counts once."""
    total = sum(
        count
        * graph.size(weight.dims)
        * weight_share(op, weight.dims, splits.get(op.name, ""), ways)
        for unit, count in graph.kinds(*units)
        for op in unit
        for weight in op.weights
        if bool(weight.frozen) is frozen
    )
    is_frozen = graph.embedding[0].is_frozen
    if graph.tied and is_frozen is frozen and units == (0, graph.units):
        ends = (graph.embedding[0], graph.head[1])
        total -= graph.size("vd") * min(
            weight_share(op, "vd", splits.get(op.name, ""), ways) for op in ends
        )
    return total


def kept_per_row(
    graph: OpGraph,
    unit: tuple[Operator, ...],
    train: TrainSpec,
    splits: dict[str, str],
    ways: int,
    backend: str,
) -> float:
    """Bytes that one unit keeps of one sequence for its backward pass."""
    working, total = BYTES[train.precision], 0.0
    for op in unit:
        split, keeps = splits.get(op.name, ""), op.keeps
        width = 4 if op.upcasts and backend == "cpu" else working
        keys = scored_keys(train, backend, op) if op.kind == "attention" else None
        if op.kind == "attention" and keys is None and is_windowed(op, train.seq_len):
            # Chunks of q, keys and values of two chunks each, which GPUs have for every head, and
            # the chunks' results.
            repeated = "bsnr" if backend == "cuda" else "bsne"
            keeps = ("bsnr", *(repeated,) * 4, "bsnr")
        if keys is not None:
            # Scores as matrices need contiguous q, k and v: copies, which outlive the projection.
            keeps = op.keeps[:1]
            heads = graph.size("nr") // graph.sizes["e"]
            # The textbook's softmax is in fp32; what it multiplies is a copy where that is not the
            # precision.
            score = 4 + working if train.attention == "vanilla" and working < 4 else working
            total += score * heads * train.seq_len * keys / (ways if split else 1)
        for dims in keeps:
            divided = split == "b" or (split and split in dims)
            total += width * graph.size(dims, b=1, s=train.seq_len) / (ways if divided else 1)
    return total


def activations_per_row(
    graph: OpGraph,
    units: tuple[int, int],
    train: TrainSpec,
    backend: str,
    *,
    splits: dict[str, str] | None = None,
    ways: int = 1,
    recompute: bool = False,
) -> float:
    """Bytes that a stage keeps of one sequence in flight. With recompute only the blocks' inputs
    stay; the one block that is computed again is in `recomputed_per_row`."""
    total = 0.0
    for unit, count in graph.kinds(*units):
        if recompute and graph.is_block(unit):
            divided = ways if (splits or {}).get(RESIDUAL) == "b" else 1
            total += (
                count * BYTES[train.precision] * graph.size("bsd", b=1, s=train.seq_len) / divided
            )
        else:
            total += count * kept_per_row(graph, unit, train, splits or {}, ways, backend)
    return total


def recomputed_per_row(
    graph: OpGraph,
    train: TrainSpec,
    backend: str,
    splits: dict[str, str] | None = None,
    ways: int = 1,
) -> float:
    """Bytes of the one block that a recomputing stage holds whole at a time, of one sequence;
    of the kind that keeps most."""
    return max(
        kept_per_row(graph, block, train, splits or {}, ways, backend) for block in graph.blocks
    )


def logits_bytes(
    graph: OpGraph,
    train: TrainSpec,
    micro_rows: int,
    engine: Engine,
    backend: str = "cpu",
    share: float = 1.0,
    head_share: float = 1.0,
    memory: float = math.inf,
) -> float:
    """Return the loss: logits of one chunk with their fp32 softmax, a device having a share;
    and the head's gradient with its running sum, for its part of the head. On a GPU with `memory`
    bytes the loss of a whole vocabulary may be one kernel, with larger chunks of logits alone; a
    copy of the head, and its sums, are as long as it is multiplied."""
    width = BYTES[train.precision]
    whole = graph.size("bsv", b=micro_rows, s=train.seq_len) * width * share
    if engine.logits_chunk is None:
        return whole * (1 + 4 // width)
    is_frozen = graph.head[1].is_frozen
    # On CPUs the softmax takes the logits' place, which `slack` has in it, and `frozen_slack` not.
    softmax = 0 if is_frozen and backend == "cpu" else 4 // width
    chunk = min(whole, engine.logits_chunk) * (1 + softmax)
    head = graph.size("vd") * head_share
    # A frozen head has no gradient.
    sums = 0 if is_frozen else 2 * 4
    copied = 0.0
    if backend == "cuda" and head_share == 1.0:
        vocabulary = graph.sizes["v"]
        columns = padded_vocabulary(vocabulary, backend)
        rows = fused_logits_rows(columns, width, memory)
        padding = columns / vocabulary
        chunk = max(chunk, min(whole, rows * vocabulary * width) * padding)
        head *= padding
        copied = width * head if padding > 1 else 0.0
    return chunk + sums * head + copied


def activation_slack(graph: OpGraph, engine: Engine) -> float:
    """Return the factor on what comes and goes within a step, where no trial has measured it."""
    if engine.frozen_slack and graph.head[1].is_frozen:
        return engine.frozen_slack
    return engine.slack


def communicators(mesh: Mesh, piped: bool, devices: int) -> int:
    """Communicators of a worker: one for each axis, for its neighbours in a pipeline, and for all
    of the plan."""
    axes = sum(size > 1 for size in mesh.shape)
    return axes + piped + (devices > 1 and (axes > 1 or piped))


def snapshot_bytes(parameters: float, copies: int, outer: float) -> float:
    """Return the bytes that a worker copies for a checkpoint: fp32 master and two moments of its
    part of the parameters, and `outer` bytes a parameter of replicas that synchronize."""
    return parameters / copies * (12 + outer)


def state_bytes(
    parameters: float,
    train: TrainSpec,
    engine: Engine,
    zero: int,
    ways: int,
    matrices: OwnedMatrices = NO_MATRICES,
) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of a worker that shares them with `ways` - 1 others by
    ZeRO's level. Of matrices that are updated whole there is no second moment; parts of their
    buckets are filled up, and where a worker has a whole bucket, all of its parts."""
    dtype, padding = train.precision, matrices.padding
    weights = parameters / (ways if zero == 3 else 1) + padding * (1 if zero == 3 else ways)
    gradients = parameters / (ways if zero >= 2 else 1) + padding * (1 if zero >= 2 else ways)
    optimizer = (parameters / (ways if zero >= 1 else 1) + padding) * engine.optimizer_bytes[dtype]
    return (
        weights * engine.weight_bytes[dtype],
        gradients * engine.gradient_bytes[dtype],
        optimizer - 4 * matrices.elements,
    )


def updating_bytes(matrices: OwnedMatrices) -> float:
    """Return the most that updates of matrices take at a time: all steps, and of those of one
    shape, that are made together, the momenta and two results, in fp32."""
    alike = by_shape(matrices.updated)
    sizes = [count * rows * columns for (rows, columns), count in alike.items()]
    return 4.0 * sum(sizes) + 12.0 * max(sizes, default=0)
