"""Matrices of a decoder, and LoRA adapters of frozen ones (arXiv 2106.09685).

Shapes: R rank, J matrices that lie in one parameter (such as q, k and v), each with an adapter of
its own; A is (J R, inputs), B is (outputs, R).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farspan import models
from farspan.domain.model import Lora, ModelSpec

#: The ends of the names of adapters' parameters.
A_SUFFIX = ".lora_a"
B_SUFFIX = ".lora_b"


class Linear(nn.Linear):
    """A matrix without first values: `initial_parameters` or a checkpoint has them. On the meta
    device torch's own would make it import its compiler, which takes a worker two seconds."""

    def reset_parameters(self) -> None:
        pass


class LoraLinear(Linear):
    """A matrix with adapters: `x W + scale x A B`, each of the matrices in it with its own."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, lora: Lora, rows: tuple[int, ...]
    ) -> None:
        """`rows` of the matrices that lie one below another in it."""
        super().__init__(inputs, outputs, bias=bias)
        self.lora_a = nn.Parameter(torch.empty(len(rows) * lora.rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, lora.rank))
        self.lora = lora
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        lora = self.lora
        # The narrow tensor is scaled: it has the fewest numbers.
        narrow = F.linear(x, self.lora_a) * lora.scale
        if len(self.rows) == 1:
            change = F.linear(narrow, self.lora_b)
        else:
            parts = zip(narrow.split(lora.rank, -1), self.lora_b.split(self.rows), strict=True)
            change = torch.cat([F.linear(part, b) for part, b in parts], dim=-1)
        return F.linear(x, self.weight, self.bias) + change


def make_projection(name: str, inputs: int, outputs: int, *, bias: bool, spec: ModelSpec) -> Linear:
    """Make a projection of a block, with adapters where the model has them."""
    if not spec.lora:
        return Linear(inputs, outputs, bias=bias)
    return LoraLinear(inputs, outputs, bias, spec.lora, models.projections(spec)[name])


def is_adapter(name: str) -> bool:
    return name.endswith((A_SUFFIX, B_SUFFIX))


def freeze_base(module: nn.Module) -> None:
    """Let all parameters but those of adapters stay as they are."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def adapter_parts(
    a: Tensor, b: Tensor, lora: Lora, rows: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return A (R, inputs) and B (rows, R) of each matrix in a parameter."""
    return list(zip(a.split(lora.rank), b.split(list(rows)), strict=True))


def merge_adapters(
    spec: ModelSpec, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the fp32 weights of the model without adapters that computes the same: W + scale B
    A."""
    assert spec.lora
    rows = models.projections(spec)
    merged = {name: tensor.float() for name, tensor in base.items()}
    for name, a in adapters.items():
        if not name.endswith(A_SUFFIX):
            continue
        path = name.removesuffix(A_SUFFIX)
        part = path.split(".", 2)[2]
        pairs = adapter_parts(a.float(), adapters[path + B_SUFFIX].float(), spec.lora, rows[part])
        change = torch.cat([b @ a for a, b in pairs])
        merged[f"{path}.weight"] = merged[f"{path}.weight"] + spec.lora.scale * change
    return merged
