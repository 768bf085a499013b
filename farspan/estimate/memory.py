"""Memory of one worker, by formula: state that stays, activations of one microbatch, logits, and the framework."""

from __future__ import annotations

from farspan.domain.model import ModelSpec, parameters
from farspan.domain.train import TrainSpec

#: Resident bytes of a worker before it holds any tensor: interpreter, torch and its thread pools (measured on Linux:
#: 0.35 GB on CPU; a CUDA context with its libraries takes about as much of the device).
FRAMEWORK_BYTES = 400_000_000
#: The runtime makes logits this many bytes at a time, so that long batches with large vocabularies stay small.
LOGITS_CHUNK_BYTES = 64 * 2**20
#: Up to so many positions attention on CPUs goes through whole score matrices and keeps the probabilities, which beats
#: the flash kernel there; its memory grows with the square.
CPU_SCORES_POSITIONS = 1024

_WORKING_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def state_bytes(model: ModelSpec, train: TrainSpec) -> int:
    """fp32 weights, gradients and AdamW's two moments; below fp32 also the working copy of the weights."""
    working = 0 if train.precision == "fp32" else _WORKING_BYTES[train.precision]
    return parameters(model) * (4 + 4 + 8 + working)


def activation_bytes_per_row(model: ModelSpec, train: TrainSpec, backend: str) -> int:
    """What the backward pass keeps of one sequence in all layers.

    Counted as in Korthikanti et al. (arXiv 2205.05198), without dropout: a layer keeps its two inputs, two norms
    (RMSNorm both before and after its gain), q, k and v, the attention's output, and in the MLP each matrix's result
    and what feeds `down`; vanilla attention, and any short one on CPUs, also the probabilities. With recompute only
    the layers' inputs stay, and one whole layer.
    """
    working, S, D = _WORKING_BYTES[train.precision], train.seq_len, model.d_model
    kv = model.kv_heads * model.head_dim
    inputs = 6 if model.norm == "layernorm" else 8
    mlp = model.d_ff * (4 if model.activation == "swiglu" else 2)
    keeps_scores = train.attention == "vanilla" or (backend == "cpu" and S <= CPU_SCORES_POSITIONS)
    scores = model.heads * S if keeps_scores else 0
    layer = S * working * (inputs * D + 2 * kv + mlp + scores)
    return model.layers * S * working * D + layer if train.recompute else model.layers * layer


def head_bytes(model: ModelSpec, train: TrainSpec) -> int:
    """The loss: one chunk of logits with its fp32 softmax, and the head's gradient beside its running sum, in fp32."""
    chunk = LOGITS_CHUNK_BYTES * (1 + 4 // _WORKING_BYTES[train.precision])
    return chunk + 2 * 4 * model.vocab_size * model.d_model


def memory_bytes(model: ModelSpec, train: TrainSpec, micro_rows: int, backend: str) -> int:
    """Peak bytes of a worker that trains `micro_rows` sequences at a time."""
    fixed = FRAMEWORK_BYTES + state_bytes(model, train) + head_bytes(model, train)
    return fixed + micro_rows * activation_bytes_per_row(model, train, backend)
