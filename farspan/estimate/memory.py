"""Memory of one worker, by formula: state that stays, activations of one microbatch, logits, and the framework."""

from __future__ import annotations

from farspan.domain.model import ModelSpec, parameters
from farspan.domain.train import TrainSpec

#: Resident bytes of a worker before it holds any tensor: interpreter, torch and its thread pools (measured on Linux:
#: 0.35 GB on CPU; a CUDA context with its libraries takes about as much of the device).
FRAMEWORK_BYTES = 400_000_000

_WORKING_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def state_bytes(model: ModelSpec, train: TrainSpec) -> int:
    """Weights, gradients and AdamW's two fp32 moments; below fp32 also the fp32 master weights."""
    working = _WORKING_BYTES[train.precision]
    master = 0 if train.precision == "fp32" else 4
    return parameters(model) * (working + working + master + 8)


def activation_bytes_per_row(model: ModelSpec, train: TrainSpec) -> int:
    """What the backward pass keeps of one sequence, logits included.

    Counted as in Korthikanti et al. (arXiv 2205.05198), without dropout: a layer keeps its two inputs, two norms, q,
    k and v, the attention's output, and in the MLP each matrix's result and what feeds `down`. Vanilla attention adds
    its score matrix before and after the softmax. With recompute only each layer's input stays, and one whole layer.
    """
    working, S = _WORKING_BYTES[train.precision], train.seq_len
    kv = model.kv_heads * model.head_dim
    mlp = model.d_ff * (4 if model.activation == "swiglu" else 2)
    layer = S * working * (6 * model.d_model + 2 * kv + mlp)
    if train.attention == "vanilla":
        layer += model.heads * S * S * (4 + working)
    layers = model.layers * S * working * model.d_model + layer if train.recompute else model.layers * layer
    logits = S * model.vocab_size * (4 + working)
    return layers + logits


def memory_bytes(model: ModelSpec, train: TrainSpec, micro_rows: int) -> int:
    """Peak bytes of a worker that trains `micro_rows` sequences at a time."""
    return FRAMEWORK_BYTES + state_bytes(model, train) + micro_rows * activation_bytes_per_row(model, train)
