"""One NVIDIA GPU: our own step beside a plain compiled PyTorch loop, and beside what the planner
says blind.

    python benchmarks/gpu.py [--rows 16] [--rounds 8] [--steps 10] [--only contest|predicted]  #
    writes results/gpu.json

The contest is of gpt2-medium at context 1024: both train in bf16 with torch.compile, flash
attention and AdamW on random tokens, in turns. tokens/s are medians over rounds; MFU is model FLOPs
(`domain.model.train_flops_per_token`) by the peak that the catalogue states. After it come steps of
many shapes as farspan makes them by default, each beside the seconds and bytes that the estimator
predicts from the catalogue's data sheet alone, written down before the step is made. Without an
NVIDIA GPU it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from wan import said_of_here

from farspan import models
from farspan.domain import catalog
from farspan.domain.cluster import Cluster, Host, Site
from farspan.domain.engine import engine
from farspan.domain.model import ModelSpec, train_flops_per_token
from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.train import Muon, Optimizer, TrainSpec
from farspan.estimate.price import estimate
from farspan.planning.size import shape_for
from farspan.runtime.comm.topology import Topology
from farspan.runtime.device import release
from farspan.runtime.model.decoder import drawn
from farspan.runtime.parallel.executor import Executor
from farspan.runtime.parallel.pipeline import Batch
from farspan.runtime.worker import compile_blocks

RESULTS = Path(__file__).parent / "results" / "gpu.json"
#: At least as fast as the plain loop, and this share of the peak on an H100 or H200.
TARGETS = {"ratio": 1.0, "mfu": 0.5}
Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2-medium")
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--only", choices=("contest", "predicted"))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: this waits for a machine with an NVIDIA GPU")
        return
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found |= {
        "device": torch.cuda.get_device_name(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **said_of_here(),
    }
    if given.only != "predicted":
        found |= contest(given)
        RESULTS.write_text(json.dumps(found, indent=1))
    if given.only != "contest":
        found["predicted"] = predicted()
        RESULTS.write_text(json.dumps(found, indent=1))


def contest(given: argparse.Namespace) -> dict[str, Any]:
    spec = models.presets()[given.preset].spec
    train = TrainSpec(
        steps=1, batch=given.rows, seq_len=spec.context, precision="bf16", compile=True
    )
    contestants = {"farspan": ours(spec, train)[0], "pytorch": plain(spec, given.rows)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for step in contestants.values():
        timed(step, 5)  # Compiles.
    for _ in range(given.rounds):
        for name, step in contestants.items():
            seconds[name].append(timed(step, given.steps) / given.steps)
    return report(given, spec, seconds)


def timed(step: Step, count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def report(
    given: argparse.Namespace, spec: ModelSpec, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    tokens, name = given.rows * spec.context, torch.cuda.get_device_name()
    peak = catalog.peak_flops(name, "bf16", 1)
    rows = {}
    for contestant, found in seconds.items():
        rate = tokens / statistics.median(found)
        mfu = rate * train_flops_per_token(spec, spec.context) / peak if peak else None
        rows[contestant] = {"tokens_per_s": rate, "mfu": mfu, "step_s": found}
        print(f"{contestant}: {rate:,.0f} tokens/s, MFU {f'{mfu:.1%}' if mfu else 'n/a'}")
    ratio = statistics.median(
        b / a for a, b in zip(seconds["farspan"], seconds["pytorch"], strict=True)
    )
    print(
        f"farspan / pytorch: {ratio:.2f} (asked {TARGETS['ratio']}; MFU asked {TARGETS['mfu']:.0%})"
    )
    return {
        "peak_flops": peak,
        "preset": given.preset,
        "rows": given.rows,
        "context": spec.context,
        "ratio": ratio,
        "contestants": rows,
        "memory_bytes": torch.cuda.max_memory_allocated(),
    }


def cases() -> list[tuple[str, ModelSpec, TrainSpec]]:
    """Shapes that are priced blind and then made: small models of `farspan train`, and the
    presets."""
    small = {
        name: shape_for("llama", size, vocab_size=8192, context=256, knobs={})
        for name, size in (("3m", 3_000_000), ("15m", 15_000_000), ("60m", 60_000_000))
    }
    specs = small | {
        name: models.presets()[name].spec for name in ("gpt2", "gpt2-medium", "gpt2-large")
    }
    muon = Optimizer(muon=Muon())
    asked = [
        ("3m", 8, {}),
        ("3m", 8, {"optimizer": muon}),
        ("3m", 64, {}),
        ("15m", 32, {}),
        ("15m", 32, {"optimizer": muon}),
        ("60m", 64, {}),
        ("60m", 64, {"precision": "fp32"}),
        ("gpt2", 4, {}),
        ("gpt2", 16, {}),
        ("gpt2", 32, {}),
        ("gpt2", 16, {"precision": "tf32"}),
        ("gpt2", 16, {"precision": "fp32"}),
        ("gpt2", 16, {"optimizer": muon}),
        ("gpt2", 16, {"attention": "vanilla"}),
        ("gpt2-medium", 16, {}),
        ("gpt2-medium", 16, {"recompute": True}),
        ("gpt2-large", 8, {}),
    ]
    return [
        (
            name,
            specs[name],
            TrainSpec(
                **(
                    {"steps": 1, "batch": rows, "seq_len": specs[name].context, "precision": "bf16"}
                    | knobs
                )
            ),
        )
        for name, rows, knobs in asked
    ]


def predicted() -> list[dict[str, Any]]:
    """Of each case the seconds of a step and the peak of allocated bytes: from the data sheet, and
    as they are."""
    name = torch.cuda.get_device_name()
    kind = catalog.kind_of(name)
    device = catalog.devices()[kind].device(name) if kind else None
    if device is None:
        print(f"skipped: the catalogue has no {name}")
        return []
    cluster = Cluster(sites=(Site(name="here", hosts=(Host(name="here", devices=(device,)),)),))
    print(
        f"\n{'':44} {'predicted':>10} {'measured':>10} {'ratio':>6} {'predicted':>10} "
        f"{'measured':>10}"
    )
    rows = []
    for model, spec, train in cases():
        said = estimate(plan_of(spec, train), models.graph(spec), cluster, engine("farspan"))
        release(torch.device("cuda"))
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step, end = ours(spec, train)
        timed(step, 3)
        step_s = statistics.median(timed(step, 3) / 3 for _ in range(5))
        peak = torch.cuda.max_memory_allocated() - held
        end()
        del step, end
        knobs = [
            train.precision,
            *("muon",) * bool(train.optimizer.muon),
            *("recompute",) * train.recompute,
            *(train.attention,) * (train.attention != "sdpa"),
        ]
        rows.append(
            {
                "model": model,
                "rows": train.batch,
                "seq_len": train.seq_len,
                "knobs": knobs,
                "predicted_s": said.step_s,
                "interval": said.interval,
                "measured_s": step_s,
                "predicted_bytes": said.memory_bytes,
                "bytes": peak,
                "memory": {
                    name: getattr(said.memory[0], name) for name in said.memory[0].__struct_fields__
                },
            }
        )
        words = f"{model}, {train.batch} x {train.seq_len}, {' '.join(knobs)}"
        print(
            f"{words:44} {said.step_s * 1e3:7.2f} ms {step_s * 1e3:7.2f} ms "
            f"{said.step_s / step_s:6.2f} "
            f"{said.memory_bytes / 1e9:7.2f} GB {peak / 1e9:7.2f} GB",
            flush=True,
        )
    return rows


def batch(spec: ModelSpec, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(spec.vocab_size, (rows, spec.context + 1), device="cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plan_of(spec: ModelSpec, train: TrainSpec) -> Plan:
    stage = Stage(
        units=(0, spec.layers + 2),
        mesh=Mesh(ranks=(0,), shape=(1,), axes=("data",)),
        rows=(train.batch,),
        grad_sync=GradSync(bucket_bytes=25 * 2**20),
        recompute=train.recompute,
    )
    return Plan(
        technique="data",
        model=spec,
        train=train,
        replicas=(Replica(stages=(stage,)),),
        inputs=Inputs(cluster="", corpus=""),
        devices=(PlannedDevice(host="here", backend="cuda", index=0, threads=1),),
    )


def ours(spec: ModelSpec, train: TrainSpec) -> tuple[Step, Step]:
    """The worker's own step: passes, gradient norm, clipping, update; and what lets go of its
    memory."""
    torch.backends.cuda.matmul.allow_tf32 = train.precision == "tf32"
    executor = Executor(Topology(plan_of(spec, train), 0), torch.device("cuda", 0))
    executor.load(drawn(spec, 0))
    if train.compile:
        compile_blocks(executor.model, torch.device("cuda", 0))
    data, scale, count = (
        Batch(*batch(spec, train.batch)),
        1 / (train.batch * spec.context),
        iter(range(1, 10**9)),
    )
    tokens = data.inputs.cpu().numpy()

    def step() -> None:
        outcome = executor.gradients(tokens, lambda i: data, scale)
        executor.update(train.optimizer, 6e-4, next(count), max(1.0, outcome.norm))

    return step, executor.state.end


class PlainBlock(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        D, self.heads = spec.d_model, spec.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

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
        self.tok, self.pos = (
            nn.Embedding(spec.vocab_size, spec.d_model),
            nn.Embedding(spec.context, spec.d_model),
        )
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


def plain(spec: ModelSpec, rows: int) -> Step:
    """A plain loop: autocast, the whole model compiled, clipping, fused AdamW."""
    model = Plain(spec).cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens, targets = batch(spec, rows)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
