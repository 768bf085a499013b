"""farspan's recipe beside those of others, written plainly: the loss of each after the same time on
a small text.

    python -m benchmarks.learning_peers [--time 600] [--seeds 0] [--only NAME ...] [--work FOLDER]

About 120 k tokens of source code (those of benchmarks/learning.py), read again and again for so
many seconds of one core; as many contestants at a time as there are cores. Models of 2.9 M
parameters, context 256, 2,048 tokens a step, fp32, the same tokens and the same validation split,
which takes none of the time. Each is scored at the end and at its best of ten validations. Writes
rows to benchmarks/results/learning_peers.jsonl.

- `recipe` and `before`: `farspan train --set budget.time=`, which also starts, saves and validates
  within the time.
- `nanogpt`: nanoGPT's model and optimizer with its configuration for a small text
  (config/train_shakespeare_char.py): AdamW at 1e-3, betas 0.9 and 0.99, dropout 0.2, decay 0.1, a
  cosine to a tenth.
- `nanochat`: nanochat's first release (nanochat/gpt.py, scripts/base_train.py): Muon at 0.02, AdamW
  at 0.2 and 0.004 times (d / 768)^-0.5 for embedding and head, betas 0.8 and 0.95, its zeros and
  norms, the last fifth falling to 0.
- `course`: transformers' GPT-2 with what the course of Hugging Face trains from scratch with
  (chapter 7.6): AdamW at 5e-4, decay 0.1, dropout 0.1, a cosine to 0.

Warm-up is 5 % of steps where the original has a number of steps for runs of another length.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farspan
from benchmarks.learning import few, text_of
from farspan.corpus.token_files import TokenFile
from farspan.domain.config import DataConfig, RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import count_parameters
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Validated, read_events
from farspan.domain.struct_files import load

RESULTS = Path(__file__).parent / "results" / "learning_peers.jsonl"
V = 8192
T = 256
B = 8
VALIDATIONS = 10
FARSPAN = {"recipe": "auto", "before": "plain"}


class NanoGPT(nn.Module):
    """nanoGPT's model.py without biases: d 192, 6 heads, 3 blocks."""

    def __init__(self, d: int = 192, heads: int = 6, blocks: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.wte = nn.Embedding(V, d)
        self.wpe = nn.Embedding(T, d)
        self.drop = nn.Dropout(dropout)
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d, bias=False) for _ in range(blocks))
        self.out = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(d, 4 * d, bias=False) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * d, d, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(d, bias=False) for _ in range(2 * blocks + 1))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        for matrix in (*self.out, *self.down):
            nn.init.normal_(matrix.weight, std=0.02 / math.sqrt(2 * blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        rows, length, d = x.shape
        for i, (qkv, out, up, down) in enumerate(
            zip(self.qkv, self.out, self.up, self.down, strict=True)
        ):
            parts = (
                qkv(self.norms[2 * i](x))
                .view(rows, length, 3, self.heads, -1)
                .permute(2, 0, 3, 1, 4)
            )
            y = F.scaled_dot_product_attention(  # type: ignore[misc]
                *parts, is_causal=True, dropout_p=self.dropout * self.training
            )
            x = x + self.drop(out(y.transpose(1, 2).reshape(rows, length, d)))
            x = x + self.drop(down(F.gelu(up(self.norms[2 * i + 1](x)))))
        return F.linear(self.norms[-1](x), self.wte.weight)


class NanoChat(nn.Module):
    """nanochat's gpt.py: rotary positions, norms of q and k, relu squared, head and embedding
    apart. As those take twice the parameters, d 128 and 4 blocks have as many parameters as the
    others."""

    def __init__(self, d: int = 128, heads: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.wte = nn.Embedding(V, d)
        self.head = nn.Linear(d, V, bias=False)
        shapes = {
            "q": (d, d),
            "k": (d, d),
            "v": (d, d),
            "out": (d, d),
            "up": (d, 4 * d),
            "down": (4 * d, d),
        }
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            for _ in range(blocks)
        )
        nn.init.normal_(self.wte.weight, std=1.0)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            for name, matrix in block.items():
                rows, columns = matrix.weight.shape
                std = (
                    0.0
                    if name in ("out", "down")
                    else min(1.0, math.sqrt(rows / columns)) / math.sqrt(columns)
                )
                nn.init.normal_(matrix.weight, std=std)
        frequencies = 10_000 ** (-torch.arange(0, d // heads, 2).float() / (d // heads))
        angles = torch.outer(torch.arange(T).float(), frequencies)[:, None]
        self.cos = angles.cos()
        self.sin = angles.sin()

    def _heads(self, x: Tensor, rotate: bool) -> Tensor:
        x = x.view(*x.shape[:2], self.heads, -1)
        if rotate:
            first, second = x.chunk(2, dim=-1)
            cos = self.cos[: x.shape[1]]
            sin = self.sin[: x.shape[1]]
            x = norm(torch.cat([first * cos + second * sin, second * cos - first * sin], -1))
        return x.transpose(1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = norm(self.wte(tokens))
        for block in self.blocks:
            h = norm(x)
            q = self._heads(block["q"](h), True)
            k = self._heads(block["k"](h), True)
            v = self._heads(block["v"](h), False)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).reshape(x.shape))
            x = x + block["down"](F.relu(block["up"](norm(x))).square())
        return 15 * torch.tanh(self.head(norm(x)) / 15)


class Course(nn.Module):
    """transformers' GPT-2 as it is by default."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=V, n_positions=T, n_embd=192, n_layer=3, n_head=6, use_cache=False
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class Muon:
    """nanochat's muon.py, its products in fp32: bf16 is emulated on many CPUs."""

    def __init__(self, matrices: list[nn.Parameter], lr: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr}]
        self.state = [(matrix, torch.zeros_like(matrix)) for matrix in matrices]
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        momentum = 0.85 + 0.1 * min(1.0, self.steps / 300)
        self.steps += 1
        for matrix, average in self.state:
            gradient = matrix.grad
            assert gradient is not None
            average.lerp_(gradient, 1 - momentum)
            x = gradient.lerp(average, momentum)
            tall = x.shape[0] > x.shape[1]
            x = x.mT if tall else x
            x = x / (x.norm() + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.add_(x.mT if tall else x, alpha=-self.param_groups[0]["lr"] * scale)


def adamw(model: nn.Module, lr: float, beta2: float) -> list[Any]:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=True)]


def nanochat_optimizers(model: nn.Module) -> list[Any]:
    assert isinstance(model, NanoChat)
    scale = (model.wte.embedding_dim / 768) ** -0.5
    groups = [
        {"params": [model.head.weight], "lr": 0.004 * scale},
        {"params": [model.wte.weight], "lr": 0.2 * scale},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
    return [adam, Muon(list(model.blocks.parameters()), 0.02)]


def cosine(floor: float) -> Callable[[float], float]:
    def share(done: float) -> float:
        if done < 0.05:
            return done / 0.05
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))

    return share


def warmdown(done: float) -> float:
    return min(1.0, (1 - done) / 0.2)


#: Of each peer: its model, its optimizers, and the share of their rates after a share of the run.
PEERS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[nn.Module], list[Any]], Callable[[float], float]]
] = {
    "nanogpt": (NanoGPT, lambda model: adamw(model, 1e-3, 0.99), cosine(0.1)),
    "nanochat": (NanoChat, nanochat_optimizers, warmdown),
    "course": (Course, lambda model: adamw(model, 5e-4, 0.999), cosine(0.0)),
}


def windows(tokens: np.ndarray, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of an epoch in an order of its own, as farspan's; the next epoch when it ends."""
    count = (len(tokens) - 1) // T
    left = np.array([], np.int64)
    while True:
        if len(left) < B:
            left = np.concatenate([left, rng.permutation(count)])
        rows = np.stack([tokens[w * T : w * T + T + 1] for w in left[:B]]).astype(np.int64)
        left = left[B:]
        yield torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])


@torch.no_grad()
def validated(model: nn.Module, tokens: np.ndarray) -> float:
    model.eval()
    total = 0.0
    count = (len(tokens) - 1) // T
    for first in range(0, count, B):
        rows = np.stack(
            [tokens[w * T : w * T + T + 1] for w in range(first, min(first + B, count))]
        ).astype(np.int64)
        x = torch.from_numpy(rows[:, :-1])
        y = torch.from_numpy(rows[:, 1:])
        total += float(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"))
    model.train()
    return total / (count * T)


def trained(name: str, corpus: Path, seconds: float, seed: int) -> dict[str, Any]:
    """One peer's run in this process."""
    manifest = load(corpus / "corpus.json", CorpusManifest)
    train, val = (TokenFile.open(corpus, split, manifest).tokens for split in ("train", "val"))  # type: ignore[arg-type]
    build, optimizers_of, share = PEERS[name]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = build()
    data = windows(train, np.random.default_rng(seed))
    optimizers = optimizers_of(model)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    spent = 0.0
    steps = 0
    curve = []
    while spent < seconds:
        began = time.perf_counter()
        x, y = next(data)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group, lr in zip(optimizer.param_groups, peak, strict=True):
                group["lr"] = lr * share(spent / seconds)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        spent = spent + time.perf_counter() - began
        steps = steps + 1
        if spent >= (len(curve) + 1) * seconds / VALIDATIONS:
            curve.append([steps, validated(model, val)])
    return {
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "validated": curve,
    }


def farspan_run(
    name: str, text: Path, run: Path, seconds: float, seed: int, core: int
) -> dict[str, Any]:
    """`farspan train` with a recipe on one core."""
    keys = (
        f"data={{source: {text}, val: 25%}}",
        "size=tiny",
        "tokenizer.vocab=8192",
        f"budget.time={seconds:g}s",
        "train.batch.global=8 sequences",
        f"train.recipe={FARSPAN[name]}",
        f"train.seed={seed}",
        "checkpoint.keep=1",
    )
    run.with_suffix(".yaml").write_text("{}\n")
    words = [
        "train",
        str(run.with_suffix(".yaml")),
        "--run",
        str(run),
        *(w for key in keys for w in ("--set", key)),
    ]
    with open(run.with_suffix(".log"), "ab") as log:
        subprocess.run(
            [sys.executable, "-m", "farspan", *words],
            stdout=log,
            stderr=log,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    curve = [
        [e.step, e.loss] for e in read_events(RunFolder(run).events) if isinstance(e, Validated)
    ]
    return {
        "steps": curve[-1][0],
        "parameters": count_parameters(RunFolder(run).load_plan().model),
        "validated": curve,
    }


def peer_run(name: str, corpus: Path, seconds: float, seed: int, core: int) -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.learning_peers",
            "--child",
            name,
            str(corpus),
            str(seconds),
            str(seed),
        ],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[*FARSPAN, *PEERS], choices=[*FARSPAN, *PEERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--time", type=float, default=600.0, help="seconds of one core")
    parser.add_argument("--work", type=Path, default=Path("runs/learning"))
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, corpus, seconds, seed = given.child
        print(json.dumps(trained(name, Path(corpus), float(seconds), int(seed))))
        return
    given.work.mkdir(parents=True, exist_ok=True)
    text = few(text_of("source", given.work / "source"), given.work / "few").resolve()
    data = DataConfig(source=str(text), val="25%")
    corpus, manifest = farspan.prepare(RunConfig(data=data), tokenizer={"vocab": 8192})
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    lock = threading.Lock()
    left = deque((seed, name) for seed in given.seeds for name in given.only)

    def work(core: int) -> None:
        while True:
            with lock:
                if not left:
                    return
                seed, name = left.popleft()
            if name in FARSPAN:
                run = given.work / f"peers-{name}-{seed}-{given.time:g}-{time.time():.0f}"
                found = farspan_run(name, text, run, given.time, seed, core)
            else:
                found = peer_run(name, corpus, given.time, seed, core)
            losses = [loss for _, loss in found["validated"]]
            row = {
                "name": name,
                "seed": seed,
                "seconds": given.time,
                "final_loss": losses[-1],
                "best_loss": min(losses),
                "unique_tokens": manifest.train.tokens,
                **found,
                "commit": commit,
                "date": date.today().isoformat(),
            }
            with lock, open(RESULTS, "a") as results:
                results.write(json.dumps(row) + "\n")
            print(
                f"{name}, seed {seed}: {losses[-1]:.3f} at the end, {min(losses):.3f} at its best, "
                f"{found['steps']} steps of {found['parameters']:,} parameters",
                flush=True,
            )

    threads = [
        threading.Thread(target=work, args=(core,)) for core in sorted(os.sched_getaffinity(0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
