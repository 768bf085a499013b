"""HeadCrossEntropy alone, forward and backward: 16 x 1,024 tokens and GPT-2's vocabulary in bf16.

As farspan runs it (padded to a multiple of 64 on CUDA, the loss compiled), with other chunks, by
PyTorch's operators, without the padding, and beside PyTorch's linear layer and cross-entropy on all
logits at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from gpu_stage import Context, median_s, peak_bytes, profile_row

from farspan.runtime.model import kernels
from farspan.runtime.model.fused_loss import choose_loss

#: Tokens whose loss is compared with one in float64.
EXACT_TOKENS = 512
#: Rows of a chunk beside farspan's own number.
CHUNK_ROWS = (1024, 2048, 8192)


def measure(context: Context) -> None:
    tokens, vocabulary = (64, 301) if context.dry else (16 * 1024, 50_257)
    for d_model in (32,) if context.dry else (768, 1024):
        data = Data(context, tokens, d_model, vocabulary)
        time_head(context, data, "farspan", data.farspan)
        for rows in (16,) if context.dry else CHUNK_ROWS:
            with mock.patch.object(kernels, "fused_logits_rows", lambda *given, rows=rows: rows):
                time_head(context, data, f"farspan, chunks of {rows}", data.farspan)
        time_head(context, data, "farspan by operators", data.operators)
        with mock.patch.object(kernels, "_pad_vocabulary", lambda V, device: V):
            time_head(context, data, "farspan by operators, unpadded", data.operators)
        time_head(context, data, "pytorch", data.pytorch)
        profile_row(context, f"head, d_model {d_model}", data.step(data.farspan))


class Data:
    """Random hidden states, a head and targets."""

    def __init__(self, context: Context, tokens: int, d_model: int, vocabulary: int) -> None:
        random = torch.Generator(context.device).manual_seed(0)
        where: dict[str, Any] = {"device": context.device, "generator": random}
        self.x_ND = torch.randn(tokens, d_model, **where).bfloat16().requires_grad_()
        weight = torch.randn(vocabulary, d_model, **where) * d_model**-0.5
        self.weight_VD = weight.bfloat16().requires_grad_()
        self.targets_N = torch.randint(vocabulary, (tokens,), **where)
        self.fused_loss, warning = choose_loss(context.device, torch.bfloat16)
        if warning:
            context.row({"warning": warning}, warning)

    def farspan(self, x_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        return kernels.head_cross_entropy(x_ND, self.weight_VD, targets_N, None, self.fused_loss)

    def operators(self, x_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        return kernels.head_cross_entropy(x_ND, self.weight_VD, targets_N)

    def pytorch(self, x_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x_ND, self.weight_VD).float(), targets_N, reduction="sum")

    def step(self, loss: Callable[..., torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            self.x_ND.grad = self.weight_VD.grad = None
            loss(self.x_ND, self.targets_N).backward()

        return run

    def error(self, loss: Callable[..., torch.Tensor]) -> float:
        """Relative error of the loss of the first tokens against float64."""
        x = self.x_ND[:EXACT_TOKENS].detach()
        targets = self.targets_N[:EXACT_TOKENS]
        with torch.no_grad():
            logits = x.double() @ self.weight_VD.double().t()
            exact = float(F.cross_entropy(logits, targets, reduction="sum"))
            return abs(float(loss(x, targets)) - exact) / exact


def time_head(
    context: Context, data: Data, variant: str, loss: Callable[..., torch.Tensor]
) -> None:
    step = data.step(loss)
    step_s = median_s(step, context.device)
    peak = peak_bytes(step, context.device)
    (N, D) = data.x_ND.shape
    V = data.weight_VD.shape[0]
    flops = 6 * N * D * V / step_s
    found = {
        "variant": variant,
        "tokens": N,
        "d_model": D,
        "vocabulary": V,
        "ms": step_s * 1e3,
        "flops": flops,
        "peak_bytes": peak,
        "relative_error": data.error(loss),
    }
    memory = "" if peak is None else f", {peak / 1e6:,.0f} MB"
    context.row(
        found,
        f"{variant}, d_model {D}: {step_s * 1e3:.2f} ms, {flops / 1e12:.0f} TFLOP/s{memory}, "
        f"error {found['relative_error']:.1e}",
    )
