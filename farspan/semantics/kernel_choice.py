"""Which kernels a step runs: attention by score matrices or by the flash kernel, and the loss in
chunks of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from farspan.domain.cluster import DType
from farspan.domain.engine import Activity
from farspan.domain.graph import Operator, OpGraph, is_windowed
from farspan.domain.train import Precision, TrainSpec
from farspan.semantics.tensor_sharding import returns_to_residual

#: Bytes of a number.
BYTES: dict[DType, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
#: The runtime makes logits this many bytes at a time, so that long batches with large vocabularies
#: stay small.
LOGITS_CHUNK_BYTES = 64 * 2**20
#: Rows of logits that a GPU makes at a time where the loss is one kernel: few enough launches, and
#: products of a size that fills the card (pytorch#124480: 4 chunks of 16,384 tokens 38.5 ms, 16
#: chunks 43.7, 32 chunks 48.7). Multiples of 256 fill the products' tiles.
FUSED_LOGITS_ROWS = 4096
FUSED_ROWS_UNIT = 256
#: Share of a device's memory that such logits take at most.
FUSED_LOGITS_SHARE = 1 / 32
#: On GPUs the head has a multiple of this many rows, the last ones zeros: cuBLAS has its
#: fast products for multiples of 8 alone. With GPT-2's 50,257 it took kernels of Turing's on an
#: H200, and the head more than half of a step (docs/log.md).
VOCABULARY_UNIT = 64
#: Triton has kernels from Volta on (https://github.com/triton-lang/triton, "Compatibility").
LEAST_TRITON_CAPABILITY = 7.0
#: PyTorch's kernels take grouped queries from Ampere on.
LEAST_FLASH_CAPABILITY = 8.0
#: From so many positions to so many, by the bytes of a number, attention on CPUs goes through score
#: matrices and keeps the probabilities, which beats the flash kernel there; its memory grows with
#: the square. Up to 64 positions in fp32 the flash kernel is as fast or faster (AMD EPYC). It takes
#: so many queries at a time: the fastest of 64, 128 and 256 at 256 to 1,024 positions on one core
#: of an Intel with AMX (docs/log.md).
CPU_SCORES, CPU_QUERIES = {2: (1, 1024), 4: (65, 1024), 8: (65, 1024)}, {2: 128, 4: 64, 8: 64}


def matrix_precision(precision: Precision, kinds: Iterable[object]) -> Precision:
    """Return the precision of the products in an update of matrices on devices of these kinds: the
    training's, but fp32 where different devices' rounding would make their copies of the weights
    diverge."""
    return precision if len(set(kinds)) == 1 else "fp32"


def keeps_scores(length: int, width: int, backend: str) -> bool:
    """Return whether attention other than by the textbook keeps probabilities, of numbers of
    `width` bytes."""
    least, most = CPU_SCORES[width]
    return backend == "cpu" and least <= length <= most


def fused_logits_rows(vocabulary: int, width: int, memory: float) -> int:
    """Return the rows of logits, numbers of `width` bytes, that a device with `memory` bytes makes
    at a time where the loss is one kernel."""
    fitting = memory * FUSED_LOGITS_SHARE / (vocabulary * width)
    rows = int(min(FUSED_LOGITS_ROWS, fitting)) // FUSED_ROWS_UNIT * FUSED_ROWS_UNIT
    return max(FUSED_ROWS_UNIT, rows)


def padded_vocabulary(vocabulary: int, backend: str) -> int:
    """Return the rows of the head that are multiplied on devices of this backend."""
    if backend != "cuda":
        return vocabulary
    return -(-vocabulary // VOCABULARY_UNIT) * VOCABULARY_UNIT


def repeats_keys(graph: OpGraph, width: int, capability: float | msgspec.UnsetType) -> bool:
    """Return whether a GPU repeats keys and values for grouped queries, as no fast kernel takes
    numbers of `width` bytes as they are (`runtime.model.attention_policy`)."""
    if graph.sizes["r"] == graph.sizes["e"]:
        return False
    if width == 4:
        return True
    return not isinstance(capability, msgspec.UnsetType) and capability < LEAST_FLASH_CAPABILITY


class HeadChunks(NamedTuple):
    """How a GPU goes through the logits of a microbatch: `rows` at a time, `padding` times as wide
    as the vocabulary; the loss of each by a compiled kernel, or by PyTorch's operators."""

    num_chunks: int
    rows: int
    padding: float
    is_fused: bool


def head_chunks(
    vocabulary: int,
    tokens: int,
    width: int,
    memory: float,
    capability: float | msgspec.UnsetType = msgspec.UNSET,
    *,
    is_whole: bool = True,
) -> HeadChunks:
    """Return the chunks of logits of `tokens` tokens, in numbers of `width` bytes, on a GPU with
    `memory` bytes that has a whole vocabulary or a part of it. Where nothing knows its compute
    capability, it has a compiler."""
    columns = padded_vocabulary(vocabulary, "cuda") if is_whole else vocabulary
    is_fused = is_whole and (not capability or capability >= LEAST_TRITON_CAPABILITY)
    if is_fused:
        rows = fused_logits_rows(columns, width, memory)
    else:
        rows = max(1, LOGITS_CHUNK_BYTES // (vocabulary * width))
    rows = min(tokens, rows)
    return HeadChunks(-(-tokens // rows), rows, columns / vocabulary, is_fused)


def query_blocks(length: int, width: int) -> list[slice]:
    """Return the queries that attention on CPUs takes at a time, of numbers of `width` bytes."""
    most = CPU_QUERIES[width]
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]


def activities(
    graph: OpGraph, op: Operator, rows: int, seq_len: int, keys: float | None
) -> dict[Activity, float]:
    """Return an operator's activities other than matrix products, with the elements of each over
    `rows` sequences.

    `keys`: `scored_keys`; whole blocks of them are left out on CPUs only.
    """

    def size(dims: str) -> float:
        return graph.size(dims, b=rows, s=seq_len)

    # What is done with gradients of weights.
    trained = [weight for weight in op.weights if not weight.frozen]
    weights = sum(graph.size(weight.dims) for weight in trained)
    done: dict[Activity, float]
    if op.kind == "lookup":
        done = {"lookup": size("bsd")}
        return {"table": weights, **done} if trained else done
    if op.kind == "loss":
        return {"loss": size(op.inputs[0])}
    if op.kind == "matmul":
        done = {"weight": weights} if trained else {}
        if len(trained) > 1:
            done["bias"] = size(op.output)
        if returns_to_residual(op):
            done["residual"] = size("bsd")
        return done
    if op.kind == "attention":
        return _attended(graph, op, size, keys, whole=keys == seq_len)
    if op.weights:
        norm: dict[Activity, float] = {"rmsnorm" if op.upcasts else "layernorm": size(op.output)}
        if returns_to_residual(op):
            norm["residual"] = size("bsd")
        return norm
    if graph.sizes["w"] > 1:  # A gate by GELU is as one by SiLU.
        return {"swiglu": size(op.output)}
    return {"gelu" if op.keeps else "relu": size(op.output)}


def gpu_activities(
    graph: OpGraph,
    op: Operator,
    rows: int,
    seq_len: int,
    keys: float | None,
    chunks: HeadChunks,
    *,
    are_keys_repeated: bool,
) -> dict[Activity, float]:
    """Return an operator's activities on a GPU, as `activities`: the same, but for what backward
    passes and the loss launch there.

    A parameter's gradient is copied to its bucket by a kernel of its own, and q's, k's and v's are
    put together. The head is multiplied with padding, chunk by chunk.
    """

    def size(dims: str) -> float:
        return graph.size(dims, b=rows, s=seq_len)

    done = activities(graph, op, rows, seq_len, keys)
    done.pop("weight", None)
    parameters = sum(graph.size(weight.dims) for weight in op.weights)
    is_trained = bool(op.weights) and not op.is_frozen
    is_head = op.kind == "matmul" and op.output == "bsv"
    if op.kind == "loss":
        logits = done.pop("loss") * chunks.padding
        done["fused_loss" if chunks.is_fused else "loss"] = logits
        done["scalars"] = 1.0
    if is_head:
        if chunks.padding > 1:
            done["padding"] = parameters
        done["head_input"] = size("bsd")
    if is_head and is_trained:
        done["head_gradient"] = parameters
    if is_head and graph.tied and is_trained:
        # The embedding's parameter has the gradient of both.
        done["tied"] = parameters
    elif is_trained:
        done["gradient"] = parameters
    if op.kind == "lookup" and len(op.weights) > 1:
        done["positions"] = size("bsd")
    if op.kind == "attention" and keys is None:
        done["split"] = size("bsnc")
        if are_keys_repeated:
            done["repeated"] = size("bsnr")
        if is_windowed(op, seq_len):
            # Keys and values of each chunk and of the one before, for every head.
            done["repeated"] = 2 * size("bsnr")
    return done


def _attended(
    graph: OpGraph, op: Operator, size: Callable[[str], float], keys: float | None, *, whole: bool
) -> dict[Activity, float]:
    """Return attention's activities other than its products; `whole` if no keys are left out."""
    done: dict[Activity, float] = {}
    if len(op.keeps) > 1:  # Rotation made new q and k.
        done["rotary"] = size("bsnr") + size("bsne")
    if keys is not None:
        done["heads"] = size("bsnr")
        done["scores" if whole else "score_blocks"] = (
            keys * size("bsn") * graph.sizes["r"] / graph.sizes["e"]
        )
    return done


def first_key(start: int, window: int | None) -> int:
    """Return the first key that queries from `start` on look back at."""
    return 0 if window is None else max(0, start - window + 1)


def scored_keys(train: TrainSpec, backend: str, op: Operator) -> float | None:
    """Keys for which attention computes, and keeps, a query's scores, in the mean: all by the
    textbook, on CPUs those up to the last query of its block, and from its window's first; None
    where flash attention keeps none."""
    S, width = train.seq_len, BYTES[train.precision]
    if train.attention == "vanilla":
        return S
    if not keeps_scores(S, width, backend):
        return None
    window = op.window if isinstance(op.window, int) else None
    scores = 0
    for part in query_blocks(S, width):
        keys = part.stop - first_key(part.start, window)
        scores += (part.stop - part.start) * keys
    return scores / S
