"""ModelSpec: the knobs of a decoder, and what follows from them by arithmetic (parameters,
FLOPs)."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer. Families differ only in these knobs; one module builds them
    all."""

    family: Literal["gpt2", "llama", "opt"]
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_ff: int
    vocab_size: int
    context: int
    norm: Literal["layernorm", "rmsnorm"]
    activation: Literal["gelu_tanh", "relu", "swiglu"]
    positions: Literal["learned", "rope"]
    bias: bool
    tied: bool
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    #: Rows of the position table beyond `context` (OPT keeps 2 for padding).
    extra_positions: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab_size", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head size, got {self.head_dim}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


def matmul_parameters(spec: ModelSpec) -> int:
    """Weights that multiply every token: attention, MLP and the head (tied or not), without
    biases."""
    kv = spec.kv_heads * spec.head_dim
    attention = spec.d_model * (2 * spec.d_model + 2 * kv)
    matrices = 3 if spec.activation == "swiglu" else 2
    mlp = matrices * spec.d_model * spec.d_ff
    return spec.layers * (attention + mlp) + spec.vocab_size * spec.d_model


def count_parameters(spec: ModelSpec) -> int:
    """Exact number of trainable parameters; a tied head is counted once."""
    kv = spec.kv_heads * spec.head_dim
    norm = spec.d_model * (2 if spec.norm == "layernorm" else 1)
    biases = 0
    if spec.bias:
        mlp_inputs = 2 if spec.activation == "swiglu" else 1
        biases = 3 * spec.d_model + 2 * kv + mlp_inputs * spec.d_ff
    positions = 0
    if spec.positions == "learned":
        positions = (spec.context + spec.extra_positions) * spec.d_model
    untied = 0 if spec.tied else spec.vocab_size * spec.d_model
    outside_matmuls = spec.layers * (2 * norm + biases) + norm + positions + untied
    return matmul_parameters(spec) + outside_matmuls


def train_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Model FLOPs of forward and backward, a token: `6 N + 12 L d T` (PaLM, arXiv 2204.02311,
    appendix B).

    N counts the matrix-multiplied weights including the head. Attention is counted whole, not
    halved for the causal mask; recomputation is not counted. Both are the convention of MFU.
    """
    attention = 12.0 * spec.layers * spec.d_model * seq_len
    return 6.0 * matmul_parameters(spec) + attention
