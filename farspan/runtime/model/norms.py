"""Norms of the decoder: LayerNorm, RMSNorm, and RMSNorm over all heads of a tensor axis.

Shapes: B rows (sequences), S positions, D d_model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farspan.domain.model import ModelSpec
from farspan.runtime.model.tensor_axis import Layouts


class LayerNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.layer_norm(x_BSD, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """RMSNorm of `dim` numbers; with offset gains it multiplies by 1 + its weight."""

    def __init__(self, dim: int, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = spec.norm_eps
        self.has_offset = bool(spec.offset_gains)

    @property
    def gains(self) -> Tensor:
        return 1 + self.weight if self.has_offset else self.weight

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.rms_norm(x_BSD, self.weight.shape, self.gains, self.eps)


def normalize_parts(
    parts: tuple[Tensor, Tensor],
    norms: tuple[RMSNorm, RMSNorm],
    widths: tuple[int, int],
    layouts: Layouts,
) -> tuple[Tensor, Tensor]:
    """Return q and k (B, S, heads and dims) after RMSNorm over all heads. Where the axis divides
    these, its ranks have parts of `widths`, and sum their squares."""
    if layouts.operator_ways("attn.head_norm") == 1:
        return norms[0](parts[0]), norms[1](parts[1])
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    whole = [part.to(dtype) for part in parts]
    squares_2BS1 = torch.stack([x.square().sum(dim=-1, keepdim=True) for x in whole])
    sums_2BS1 = layouts.sum_over_axis(squares_2BS1)
    normalized = []
    for x, norm, width, sum_BS1 in zip(whole, norms, widths, sums_2BS1, strict=True):
        x = x * torch.rsqrt(sum_BS1 / width + norm.eps)
        normalized.append((x * norm.gains).to(parts[0].dtype))
    return normalized[0], normalized[1]


def make_norm(spec: ModelSpec) -> nn.Module:
    if spec.norm == "layernorm":
        return LayerNorm(spec.d_model, spec.norm_eps)
    return RMSNorm(spec.d_model, spec)
