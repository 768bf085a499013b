"""gpt2-medium and gpt2 at 16 x 1,024 tokens: farspan's step beside a plain compiled PyTorch loop,
in turns.

Both train in bf16 with torch.compile and AdamW on random tokens. Figures are medians over rounds;
MFU is model FLOPs (`domain.model.train_flops_per_token`) by the catalogue's peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from gpu_stage import Context, profile_row, seconds
from gpu_step import TINY, farspan_step, random_batch
from torch import nn

from farspan import models
from farspan.domain import catalog
from farspan.domain.model import ModelSpec, train_flops_per_token
from farspan.domain.train import TrainSpec

#: At least as fast beside the plain loop, and these shares of the peak, by the catalogue's kind.
RATIOS = {"gpt2-medium": 1.10, "gpt2": 1.05}
MFU = {"h200": 0.50, "h100": 0.46, "h100-sxm": 0.46}
#: Seconds that another model's compiling and rounds take.
NEXT_MODEL_S = 40.0
#: Steps before the clock runs: they compile.
WARMUP = 5


def measure(context: Context) -> None:
    for number, preset in enumerate(RATIOS):
        if number == 0 or context.left_s > NEXT_MODEL_S:
            contest(context, preset)
        else:
            context.row({"skipped": preset}, f"{preset}: {context.left_s:.0f} s were left")


def contest(context: Context, preset: str) -> None:
    spec = TINY if context.dry else models.presets()[preset].spec
    sequences, rounds, steps = (2, 2, 1) if context.dry else (16, 6, 8)
    train = TrainSpec(
        steps=1, batch=sequences, seq_len=spec.context, precision="bf16", compile=True
    )
    makers: dict[str, Callable[[], Callable[[], None]]] = {
        "pytorch": lambda: plain_step(spec, sequences, context.device),
        "farspan": lambda: farspan_step(spec, train, context.device),
    }
    contestants = {}
    for name, make in makers.items():
        began = time.perf_counter()
        contestants[name] = make()
        seconds(contestants[name], WARMUP, context.device)
        warm_s = time.perf_counter() - began
        context.row(
            {"preset": preset, "contestant": name, "compiled_s": warm_s},
            f"{preset}, {name}: {warm_s:.0f} s until compiled",
        )
    step_s: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, step in contestants.items():
            step_s[name].append(seconds(step, steps, context.device))
        times = {name: found[-1] for name, found in step_s.items()}
        context.row(
            {"preset": preset, "round": number, "step_s": times},
            ", ".join(f"{name} {time_s * 1e3:.1f} ms" for name, time_s in times.items()),
        )
    report(context, preset, spec, sequences, step_s)
    for name, step in contestants.items():
        profile_row(context, f"{preset}, {name}", step)


def report(
    context: Context,
    preset: str,
    spec: ModelSpec,
    sequences: int,
    step_s: dict[str, list[float]],
) -> None:
    peak = catalog.peak_flops(context.device_name, "bf16", 1)
    contestants = {}
    for name, found in step_s.items():
        rate = sequences * spec.context / statistics.median(found)
        mfu = rate * train_flops_per_token(spec, spec.context) / peak if peak else None
        contestants[name] = {"tokens_per_s": rate, "mfu": mfu, "step_s": found}
    ratio = statistics.median(
        plain / own for own, plain in zip(step_s["farspan"], step_s["pytorch"], strict=True)
    )
    speeds = [
        f"{name} {found['tokens_per_s']:,.0f} tokens/s"
        + (f", MFU {found['mfu']:.1%}" if found["mfu"] else "")
        for name, found in contestants.items()
    ]
    targets = {"ratio": RATIOS[preset]}
    mfu = MFU.get(catalog.find_kind(context.device_name) or "")
    if mfu is not None and preset == "gpt2-medium":
        targets["mfu"] = mfu
    asked = ", ".join(f"{name} {value:.2f}" for name, value in targets.items())
    context.row(
        {
            "peak_flops": peak,
            "preset": preset,
            "dry": context.dry,
            "rows": sequences,
            "context": spec.context,
            "ratio": ratio,
            "targets": targets,
            "contestants": contestants,
        },
        f"{preset}: {'; '.join(speeds)}; ratio {ratio:.2f} (asked: {asked})",
    )


class PlainBlock(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        D = spec.d_model
        self.heads = spec.heads
        self.ln_1 = nn.LayerNorm(D)
        self.ln_2 = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        B, S, D = x_BSD.shape
        parts = self.qkv(self.ln_1(x_BSD)).split(D, dim=2)
        q, k, v = (part.view(B, S, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(y.transpose(1, 2).reshape(B, S, D))
        return x_BSD + self.down(F.gelu(self.up(self.ln_2(x_BSD)), approximate="tanh"))


class Plain(nn.Module):
    """GPT-2 as people write it: nanoGPT's model without dropout."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tok = nn.Embedding(spec.vocab_size, spec.d_model)
        self.pos = nn.Embedding(spec.context, spec.d_model)
        self.blocks = nn.ModuleList(PlainBlock(spec) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.d_model)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.tok(tokens_BS) + self.pos.weight[: tokens_BS.shape[1]]
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits = F.linear(self.norm(x_BSD), self.tok.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets_BS.flatten())


def plain_step(spec: ModelSpec, sequences: int, device: torch.device) -> Callable[[], None]:
    """Return a plain loop: autocast, the whole model compiled, clipping, fused AdamW."""
    model = Plain(spec).to(device)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    data = random_batch(spec, sequences, device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(data.inputs, data.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
