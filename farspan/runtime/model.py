"""The decoder: GPT-2 and Llama families in one module, driven by ModelSpec.

Shapes: B rows (sequences), S positions, D d_model, H heads, K kv heads, E head size, F d_ff, V vocabulary.
Parameter names are farspan's own; `models/` maps them to and from Hugging Face's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farspan.domain.model import ModelSpec
from farspan.runtime.kernels import causal_attention, head_loss


class LayerNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.layer_norm(x_BSD, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.rms_norm(x_BSD, self.weight.shape, self.weight, self.eps)


def _norm(spec: ModelSpec) -> nn.Module:
    return (LayerNorm if spec.norm == "layernorm" else RMSNorm)(spec.d_model, spec.norm_eps)


class Attention(nn.Module):
    """Causal self-attention. `qkv` holds the rows of q (H E), k (K E) and v (K E), in this order."""

    def __init__(self, spec: ModelSpec, vanilla: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkv = nn.Linear(spec.d_model, rows, bias=spec.bias)
        self.out = nn.Linear(spec.d_model, spec.d_model, bias=spec.bias)
        self.vanilla = vanilla

    def forward(self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        B, S, _ = x_BSD.shape
        split = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(x_BSD).view(B, S, -1, self.head_dim).transpose(1, 2).split(split, dim=1)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        attend = vanilla_attention if self.vanilla else causal_attention
        y_BHSE = attend(q, k, v)
        return self.out(y_BHSE.transpose(1, 2).reshape(B, S, -1))


def vanilla_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by the textbook, its S x S scores in memory: the cost study's "vanilla" setting, and an oracle."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores_BHSS = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future_SS = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores_BHSS = scores_BHSS.masked_fill(future_SS, float("-inf"))
    return torch.softmax(scores_BHSS.float(), dim=-1).to(v.dtype) @ v


def rotary_table(spec: ModelSpec, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosines and sines (S, E) of rotary positions, halves repeated as in Llama (arXiv 2104.09864)."""
    inverse_E2 = spec.rope_theta ** (-torch.arange(0, spec.head_dim, 2, device=device).float() / spec.head_dim)
    angles_SE2 = torch.outer(torch.arange(length, device=device).float(), inverse_E2)
    angles_SE = torch.cat((angles_SE2, angles_SE2), dim=-1)
    return angles_SE.cos(), angles_SE.sin()


def rotate(x_BHSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_SE.to(x_BHSE) + torch.cat((-second, first), dim=-1) * sin_SE.to(x_BHSE)


class MLP(nn.Module):
    """Two matrices and an activation. For SwiGLU `up` holds the gate's rows, then the value's."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.up = nn.Linear(spec.d_model, spec.d_ff * (2 if spec.activation == "swiglu" else 1), bias=spec.bias)
        self.down = nn.Linear(spec.d_ff, spec.d_model, bias=spec.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSF = self.up(x_BSD)
        if self.activation == "swiglu":
            gate_BSF, value_BSF = h_BSF.chunk(2, dim=-1)
            return self.down(F.silu(gate_BSF) * value_BSF)
        if self.activation == "relu":
            return self.down(F.relu(h_BSF))
        return self.down(F.gelu(h_BSF, approximate="tanh"))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, vanilla: bool) -> None:
        super().__init__()
        self.attn_norm, self.attn = _norm(spec), Attention(spec, vanilla)
        self.mlp_norm, self.mlp = _norm(spec), MLP(spec)

    def forward(self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), rotation)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class Decoder(nn.Module):
    """Tokens (B, S) to hidden states (B, S, D) with `hidden`, to logits (B, S, V) with `forward`."""

    def __init__(self, spec: ModelSpec, *, attention: str = "sdpa", recompute: bool = False) -> None:
        super().__init__()
        self.spec, self.recompute = spec, recompute
        self.tok = nn.Embedding(spec.vocab_size, spec.d_model)
        if spec.positions == "learned":
            self.pos = nn.Embedding(spec.context + spec.extra_positions, spec.d_model)
        self.blocks = nn.ModuleList(Block(spec, attention == "vanilla") for _ in range(spec.layers))
        self.norm = _norm(spec)
        if not spec.tied:
            self.head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)

    @property
    def head_VD(self) -> Tensor:
        return self.tok.weight if self.spec.tied else self.head.weight

    def streams(self, tokens_BS: Tensor) -> Iterator[Tensor]:
        """The residual stream (B, S, D) before the first block and after each. Raises ValueError past the context."""
        S = tokens_BS.shape[1]
        if S > self.spec.context:
            raise ValueError(f"{S} positions given, the model's context is {self.spec.context}")
        x_BSD = self.tok(tokens_BS)
        rotation = None
        if self.spec.positions == "learned":
            x_BSD = x_BSD + self.pos.weight[self.spec.extra_positions : self.spec.extra_positions + S]
        else:
            rotation = rotary_table(self.spec, S, tokens_BS.device)
        yield x_BSD
        for block in self.blocks:
            if self.recompute and self.training:
                x_BSD = torch.utils.checkpoint.checkpoint(block, x_BSD, rotation, use_reentrant=False)
            else:
                x_BSD = block(x_BSD, rotation)
            yield x_BSD

    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """States (B, S, D) after the final norm."""
        (x_BSD,) = deque(self.streams(tokens_BS), maxlen=1)
        return self.norm(x_BSD)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens_BS), self.head_VD)

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Cross-entropy in nats summed over valid targets (-1 is none), fp32."""
        x_ND = self.hidden(tokens_BS).flatten(0, 1)
        return head_loss(x_ND, self.head_VD, targets_BS.flatten())


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """GPT-2's initialisation: N(0, 0.02), residual projections divided by sqrt(2 layers), biases zero.

    Drawn on the CPU parameter by parameter in name order, so that any device and any split of the model sees the
    same values.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "norm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            std = 0.02
            if name.endswith(("attn.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * model.spec.layers)
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
