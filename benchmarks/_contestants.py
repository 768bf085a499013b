"""One contestant of benchmarks/training.py: `_contestants.py NAME CORPUS THREADS FD`.

Reads a number of steps from standard input, makes them, writes the seconds to FD; again until its
input ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

V = 8192
T = 256
B = 8
D = 384
H = 6
L = 6


def serve(step: Callable[[], object], out: int) -> None:
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        os.write(out, f"{time.perf_counter() - began}\n".encode())


def batches(corpus: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    tokens = np.memmap(corpus / "train.bin", "<u2", "r")
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(tokens) - T - 1, B)
        rows = torch.from_numpy(np.stack([tokens[s : s + T + 1].astype(np.int64) for s in starts]))
        yield rows[:, :-1], rows[:, 1:]


def farspan(corpus: Path, precision: str, out: int) -> None:
    """Return the product's own worker: its model, state, data order and step."""
    import tempfile

    from farspan.domain.corpus import CorpusManifest
    from farspan.domain.model import ModelSpec
    from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
    from farspan.domain.run import RunFolder, RunRecord
    from farspan.domain.struct_files import load, save
    from farspan.domain.train import Optimizer, TrainSpec
    from farspan.runtime.comm.worker_group import Group
    from farspan.runtime.training.trainer import Trainer
    from farspan.runtime.worker import build

    spec = ModelSpec(
        family="gpt2",
        layers=L,
        d_model=D,
        heads=H,
        kv_heads=H,
        d_ff=4 * D,
        vocab_size=V,
        context=T,
        norm="layernorm",
        activation="gelu_tanh",
        positions="learned",
        bias=True,
        tied=True,
    )
    mesh = Mesh(ranks=(0,), shape=(1,), axes=("data",))
    stage = Stage(units=(0, L + 2), mesh=mesh, rows=(B,), grad_sync=GradSync(bucket_bytes=2**20))
    manifest = load(corpus / "corpus.json", CorpusManifest)
    plan = Plan(
        technique="data",
        model=spec,
        train=TrainSpec(
            steps=10**6,
            batch=B,
            seq_len=T,
            precision=precision,
            optimizer=Optimizer(lr=6e-4),  # type: ignore[arg-type]
        ),
        replicas=(Replica(stages=(stage,)),),
        inputs=Inputs(cluster="", corpus=manifest.hash),
        devices=(
            PlannedDevice(host="here", backend="cpu", index=0, threads=torch.get_num_threads()),
        ),
    )
    run = RunFolder(Path(tempfile.mkdtemp()))
    run.corpus.write_bytes((corpus / "corpus.json").read_bytes())
    save(RunRecord(corpus=str(corpus), command=(), created=""), run.record)
    trainer = Trainer(build(plan, run, Group(0, 1, torch.device("cpu")), lambda event: None))

    def step() -> None:
        trainer._train_step(trainer.state.step)
        trainer.state.step += 1

    serve(step, out)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(D, 3 * D)
        self.c_proj = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, H, C // H).transpose(1, 2) for t in self.c_attn(x).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(D)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(D)
        self.c_fc = nn.Linear(D, 4 * D)
        self.c_proj = nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """As in nanoGPT's model.py, dropout 0."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.wpe = nn.Embedding(T, D)
        self.h = nn.ModuleList(Block() for _ in range(L))
        self.ln_f = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)
        self.wte.weight = self.lm_head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).view(-1, V), targets.reshape(-1))


def nanogpt(corpus: Path, precision: str, out: int) -> None:
    """nanoGPT's loop: autocast, clip, fused AdamW with decay on matrices only, gradients set to
    None."""
    torch.manual_seed(0)
    model = GPT()
    data = batches(corpus)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        tokens, targets = next(data)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        loss.item()

    serve(step, out)


def trainer(corpus: Path, precision: str, out: int) -> None:
    """Hugging Face Trainer on its own GPT-2; a callback holds it between turns."""
    import tempfile

    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    config = GPT2Config(
        vocab_size=V,
        n_positions=T,
        n_embd=D,
        n_layer=L,
        n_head=H,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )

    class Rows(torch.utils.data.Dataset):
        tokens = np.memmap(corpus / "train.bin", "<u2", "r")

        def __len__(self) -> int:
            return (len(self.tokens) - 1) // T

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = torch.from_numpy(self.tokens[index * T : index * T + T].astype(np.int64))
            return {"input_ids": row, "labels": row}

    class Turns(TrainerCallback):
        left = 0
        began = 0.0

        def on_step_begin(self, *_: object, **__: object) -> None:
            if self.left == 0:
                self.left = int(sys.stdin.readline())
                self.began = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            self.left -= 1
            if self.left == 0:
                os.write(out, f"{time.perf_counter() - self.began}\n".encode())

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=B,
        max_steps=10**6,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=precision == "bf16",
    )
    Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Rows(), callbacks=[Turns()]
    ).train()


def gemm(corpus: Path, precision: str, out: int) -> None:
    """Only the matrix products of one step, in bf16: what a step would take if all else were
    free."""
    x = {n: torch.randn(B * T, n).bfloat16() for n in (D, 3 * D, 4 * D, V)}
    weights = {
        (n, k): torch.randn(n, k).bfloat16()
        for n, k in ((3 * D, D), (D, D), (4 * D, D), (D, 4 * D), (V, D))
    }
    outs = {n: torch.empty(B * T, n).bfloat16() for n in (D, 3 * D, 4 * D, V)}
    heads = torch.randn(B * H, T, D // H).bfloat16()
    scores = torch.randn(B * H, T, T).bfloat16()

    def linear(n: int, k: int) -> None:
        torch.mm(x[k], weights[n, k].t(), out=outs[n])
        torch.mm(x[n], weights[n, k], out=outs[k])
        torch.mm(x[n].t(), x[k])

    def step() -> None:
        for _ in range(L):
            for n, k in ((3 * D, D), (D, D), (4 * D, D), (D, 4 * D)):
                linear(n, k)
            for _ in range(2):
                torch.bmm(heads, heads.transpose(1, 2))
            for _ in range(4):
                torch.bmm(scores, heads)
        linear(V, D)

    serve(step, out)


def main() -> None:
    name = sys.argv[1]
    corpus = Path(sys.argv[2])
    threads = int(sys.argv[3])
    out = int(sys.argv[4])
    torch.set_num_threads(threads)
    kind = name.split("-")[0]
    precision = ([*name.split("-"), ""])[1]
    {"farspan": farspan, "nanogpt": nanogpt, "trainer": trainer, "gemm": gemm}[kind](
        corpus, precision, out
    )


if __name__ == "__main__":
    main()
