"""Attention forward and backward by each of PyTorch's kernels: gpt2-medium's heads, 16,384 tokens.

The kernel that PyTorch takes by itself, and the one that `attention_policy` takes, have their names
in the row of each shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from gpu_stage import Context, median_s
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from farspan.runtime.model.attention_policy import attention_policy
from farspan.runtime.model.kernels import causal_attention

HEADS = 16
HEAD_SIZE = 64
TOKENS = 16 * 1024
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Shape(NamedTuple):
    length: int
    dtype: torch.dtype
    kv_heads: int = HEADS

    @property
    def words(self) -> str:
        grouped = f", {self.kv_heads} heads of keys" if self.kv_heads < HEADS else ""
        return f"{self.length} tokens, {str(self.dtype).removeprefix('torch.')}{grouped}"


#: In order of worth: a stage that ends early has the first ones.
SHAPES = (
    Shape(1024, torch.bfloat16),
    Shape(256, torch.bfloat16),
    Shape(4096, torch.bfloat16),
    Shape(1024, torch.bfloat16, kv_heads=4),
    Shape(1024, torch.float16),
    Shape(1024, torch.float32),
    Shape(1024, torch.float32, kv_heads=4),
    Shape(512, torch.bfloat16),
    Shape(2048, torch.bfloat16),
)


def measure(context: Context) -> None:
    for shape in SHAPES[:2] if context.dry else SHAPES:
        measure_shape(context, shape)


def measure_shape(context: Context, shape: Shape) -> None:
    tokens = 512 if context.dry else TOKENS
    length = 32 if context.dry else shape.length
    rows = max(1, tokens // length)
    # Half of the scores are computed: two products forward, five backward, 2 FLOPs each.
    flops = 7 * rows * HEADS * length**2 * HEAD_SIZE
    q, k, v = (
        torch.randn(
            rows, heads, length, HEAD_SIZE, device=context.device, dtype=shape.dtype
        ).requires_grad_()
        for heads in (HEADS, shape.kv_heads, shape.kv_heads)
    )
    policy = attention_policy(context.device, shape.dtype)
    found: dict[str, object] = {
        "shape": shape.words,
        "rows": rows,
        "policy": policy.reason,
        "chosen": chosen_backend(q, k, v),
    }
    rates = dict[str, float | None]()
    rates["farspan"] = rate(context, flops, q, k, v, None)
    for name, backend in BACKENDS.items():
        rates[name] = rate(context, flops, q, k, v, backend)
    found["flops"] = rates
    words = ", ".join(
        f"{name} {'refused' if value is None else f'{value / 1e12:.0f} TFLOP/s'}"
        for name, value in rates.items()
    )
    context.row(found, f"{shape.words}: {words}; PyTorch takes {found['chosen']}")


def chosen_backend(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the kernel that PyTorch takes where nobody asks for one."""
    grouped = q.shape[1] != k.shape[1]
    number = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=None, enable_gqa=grouped)
    return SDPBackend(number).name


def rate(
    context: Context, flops: float, q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None
) -> float | None:
    """Return FLOP/s of one kernel, or of farspan's choice; None where it refuses the shape."""
    grouped = q.shape[1] != k.shape[1]
    policy = attention_policy(context.device, q.dtype)

    def step() -> None:
        q.grad = k.grad = v.grad = None
        if backend is None:
            y = causal_attention(q, k, v, policy)
        else:
            with sdpa_kernel(backend):
                y = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=grouped
                )
        y.sum().backward()

    try:
        return flops / median_s(step, context.device, warmup=2, rounds=3, count=3)
    except RuntimeError:
        return None
