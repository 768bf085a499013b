"""What the recipe's knobs are worth where a small text is read once or many times: whole trainings
on one NVIDIA GPU.

    python -m benchmarks.many_epochs CORPUS.npz [...] [--settings GROUP ...] [--seconds 240]

farspan's model, its first weights and its update, in bf16 with fp32 masters; a step is one CUDA
graph, so that a run of 3 M parameters over 20 M tokens takes seconds. `--pack FOLDER OUT.npz` makes
a corpus file of a prepared corpus. Each run is a row of benchmarks/results/many_epochs.jsonl, with
its whole curve; those that are there are not made again, and none is begun after `--seconds`. Also
runs on a CPU, slowly. `--table` prints the rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan import models
from farspan.corpus.token_files import TokenFile
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.struct_files import load
from farspan.domain.train import Schedule
from farspan.planning.choose_train import batch_tokens
from farspan.planning.recipe import peak_rate
from farspan.planning.size import shape_for
from farspan.runtime.model.decoder import Decoder, initialize_model
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.state.muon import newton_schulz
from farspan.semantics.lr_schedule import learning_rate
from farspan.semantics.muon_matrices import block_matrices

RESULTS = Path(__file__).parent / "results" / "many_epochs.jsonl"
S = 256
VALIDATIONS = 12


@dataclass(frozen=True)
class Setting:
    """One training: `lr` 0 is the rule's, `batch` tokens of a step (0: the rule's), `unique` tokens
    of the text at most (0: all), `average` the share of the run that the moving average of weights
    reaches back."""

    corpus: str = ""
    size: int = 3_000_000
    epochs: float = 1.0
    unique: int = 0
    muon: bool = True
    lr: float = 0.0
    batch: int = 0
    embedding: float = 3.0
    decay: float = 0.1
    dropout: float = 0.0
    mask: float = 0.0
    reshuffle: bool = True
    schedule: str = "linear"
    floor: float = 0.0
    average: float = 0.03
    seed: int = 0


#: What the product did before there was a recipe.
BEFORE = Setting(muon=False, embedding=1.0, reshuffle=False, schedule="cosine", floor=0.1)


def groups() -> dict[str, list[Setting]]:
    """Return settings by what they try."""
    base = Setting()
    many = [replace(base, epochs=e) for e in (10, 20, 4)]
    knobs: list[dict[str, Any]] = [
        {},
        {"dropout": 0.1},
        {"dropout": 0.2},
        {"decay": 0.5},
        {"decay": 1.5},
        {"mask": 0.1},
        {"reshuffle": False},
    ]
    stronger: list[dict[str, Any]] = [{"dropout": 0.3}, {"dropout": 0.2, "decay": 0.5}]
    few = [replace(base, unique=300_000, epochs=e) for e in (10, 40)]
    large = [replace(base, size=15_000_000, epochs=e) for e in (4, 10)]
    tuned = [replace(BEFORE, floor=0.0, schedule="linear", lr=lr) for lr in (3e-3, 6e-3, 1.2e-2)]
    return {
        "epochs": [replace(one, **knob) for one in many for knob in knobs],
        "few": [replace(one, **knob) for one in few for knob in (*knobs, *stronger)],
        "large": [replace(one, **knob) for one in large for knob in knobs[:4]],
        "before": [replace(BEFORE, epochs=e) for e in (1, 4, 10, 20)],
        "one": [*tuned, *(replace(base, epochs=e) for e in (1.0, 1 / 1.4, 0.5))],
        "one-15m": [
            replace(one, size=15_000_000)
            for one in (
                *(replace(one, lr=one.lr / 2) for one in tuned),
                *(replace(base, epochs=e) for e in (1.0, 1 / 1.2, 1 / 1.4)),
            )
        ],
        "decay": [
            *(replace(base, epochs=10, decay=d) for d in (1.0, 1.5)),
            *(replace(few[1], decay=d) for d in (0.1, 0.5, 1.5)),
            *(replace(many[2], decay=d) for d in (0.1, 0.5, 1.0)),
            *(replace(large[0], decay=d) for d in (0.1, 0.5)),
            *(replace(many[1], decay=d) for d in (0.5, 1.5)),
            replace(base, decay=0.5),
        ],
        "slow": [replace(tuned[0], lr=1.5e-3)],
        "slow-15m": [
            *(replace(tuned[0], size=15_000_000, lr=lr) for lr in (3e-3, 1.5e-3, 7e-4)),
            *(replace(base, size=15_000_000, epochs=e) for e in (1 / 1.2, 1.0)),
        ],
        "rates": [replace(base, epochs=e, lr=lr) for e in (1, 10) for lr in (3e-3, 1.2e-2, 2.4e-2)],
        "batch": [replace(base, epochs=10, batch=b) for b in (2048, 4096, 16384)],
    }


class Text:
    """A corpus's tokens and where its documents begin; `unique` tokens of it, whole documents drawn
    by one seed."""

    def __init__(self, path: Path, unique: int) -> None:
        held = np.load(path)
        self.vocabulary = int(held["vocabulary"])
        self.val = held["val"].astype(np.int64)
        tokens = held["train"].astype(np.int64)
        offsets = held["offsets"]
        if unique:
            order = np.random.default_rng(5).permutation(len(offsets) - 1)
            size = np.cumsum(np.diff(offsets)[order])
            order = np.sort(order[: int(np.searchsorted(size, unique)) + 1])
            tokens = np.concatenate([tokens[offsets[i] : offsets[i + 1]] for i in order])[
                : unique + 1
            ]
            offsets = np.concatenate([[0], np.cumsum(np.diff(offsets)[order])]).clip(
                max=len(tokens)
            )
        self.tokens = tokens
        self.offsets = offsets
        self.windows = (len(tokens) - 1) // S

    def stream(self, rng: np.random.Generator, reshuffled: bool) -> np.ndarray:
        if not reshuffled:
            return self.tokens
        order = rng.permutation(len(self.offsets) - 1)
        return np.concatenate([self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in order])


class Training:
    """One run's state, flat as farspan's: working weights in bf16 on a GPU, masters, moments."""

    def __init__(self, text: Text, spec: ModelSpec, setting: Setting, device: torch.device) -> None:
        self.text = text
        self.setting = setting
        self.device = device
        tokens = setting.epochs * text.windows * S
        self.rows = max(1, round((setting.batch or batch_tokens(tokens)) / S))
        self.steps = max(1, round(setting.epochs * text.windows / self.rows))
        self.lr = setting.lr or peak_rate(count_parameters(spec), muon=setting.muon)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Decoder(spec)
        initialize_model(self.model, setting.seed)
        self.model.to(device, self.dtype)
        self._flatten(spec)
        self._plan_reading()

    def _flatten(self, spec: ModelSpec) -> None:
        matrices = block_matrices(models.graph(spec)) if self.setting.muon else {}
        named = sorted(
            self.model.named_parameters(), key=lambda item: (item[0] in matrices, item[1].dim() < 2)
        )
        self.parameters = [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.master, self.first, self.second, self.grad = (
            torch.zeros(sum(sizes), device=self.device) for _ in range(4)
        )
        self.masters, self.grads = self.views(self.master), self.views(self.grad)
        initial = Decoder(spec)
        initialize_model(initial, self.setting.seed)
        fresh = dict(initial.named_parameters())
        with torch.no_grad():
            for (name, _), master in zip(named, self.masters, strict=True):
                master.copy_(fresh[name])
        self.average = self.master.clone()
        plain = [name not in matrices for name, _ in named]
        wide = sum(
            size
            for size, (_, p), other in zip(sizes, named, plain, strict=True)
            if other and p.dim() > 1
        )
        rest = sum(size for size, other in zip(sizes, plain, strict=True) if other)
        #: [0, wide) tables (and matrices of AdamW), [wide, rest) vectors, from there on Muon's.
        self.wide = wide
        self.rest = rest
        self.muon = [
            (i, [rows for rows, _ in matrices[name].parts])
            for i, (name, _) in enumerate(named)
            if name in matrices
        ]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Of each parameter its part of a flat tensor."""
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [
            part.view(parameter.shape)
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]

    def _plan_reading(self) -> None:
        new = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=self.device)  # noqa: E731
        text = self.text
        #: Twice, so that a step may end one epoch and begin the next.
        self.stream, self.order = new(len(text.tokens)), new(text.windows + self.rows)
        self.place = new(1)
        self.count = new(1)
        schedule = Schedule(
            kind=self.setting.schedule,
            floor=self.setting.floor,
            warmup_steps=max(1, round(0.05 * self.steps)),
        )
        rates = [learning_rate(schedule, self.lr, i, self.steps) for i in range(self.steps)]
        self.rates = torch.tensor(rates, device=self.device)
        self.within = torch.arange(S, device=self.device)
        self.row = torch.arange(self.rows, device=self.device)
        self.clock = torch.zeros((), device=self.device)
        self.loss = torch.zeros((), device=self.device)

    def batch(self) -> tuple[Tensor, Tensor, Dropout | None]:
        windows = self.order[(self.place + self.row)]
        places = windows[:, None] * S + self.within
        inputs = self.stream[places]
        targets = self.stream[places + 1]
        if self.setting.mask:
            chosen = torch.rand(inputs.shape, device=self.device) < self.setting.mask
            others = torch.randint_like(inputs, self.text.vocabulary)
            inputs = torch.where(chosen, others, inputs)
        if not self.setting.dropout:
            return inputs, targets, None
        seeds = ((self.count * self.rows + self.row) * 2654435761 + self.setting.seed) % 2147483647
        return inputs, targets, Dropout(self.setting.dropout, seeds.to(torch.int32))

    def step(self) -> None:
        """One step, all on the device: it may be recorded as a graph."""
        inputs, targets, dropout = self.batch()
        loss = (
            self.model.summed_loss(self.model.forward_blocks(inputs, dropout), targets)
            / targets.numel()
        )
        gradients = torch.autograd.grad(loss, self.parameters)
        self.loss.copy_(loss.detach())
        with torch.no_grad():
            torch._foreach_copy_(self.grads, list(gradients))
            self.grad.div_(torch.linalg.vector_norm(self.grad).clamp(min=1.0))
            self.clock.add_(1)
            lr = self.rates[self.count].squeeze(0)
            self._adamw(
                slice(0, self.wide),
                lr * (self.setting.embedding if self.setting.muon else 1.0),
                self.setting.decay,
            )
            self._adamw(slice(self.wide, self.rest), lr, 0.0)
            self._muon(lr)
            reach = max(1.0, self.setting.average * self.steps)
            self.average.lerp_(
                self.master,
                1 - torch.clamp((1 + self.clock) / (10 + self.clock), max=1 - 1 / reach),
            )
            self.publish(self.masters)
            self.place.add_(self.rows)
            self.count.add_(1)

    def _adamw(self, part: slice, lr: Tensor, decay: float) -> None:
        p, g, m, v = (flat[part] for flat in (self.master, self.grad, self.first, self.second))
        m.lerp_(g, 0.1)
        v.mul_(0.95).addcmul_(g, g, value=0.05)
        p.mul_(1 - lr * decay)
        step = m / (1 - 0.9**self.clock) / ((v / (1 - 0.95**self.clock)).sqrt_() + 1e-8)
        p.sub_(step * lr)

    def _muon(self, lr: Tensor) -> None:
        if not self.muon:
            return
        part = slice(self.rest, None)
        self.first[part].lerp_(self.grad[part], 0.05)
        self.grad[part].lerp_(self.first[part], 0.95)
        self.master[part].mul_(1 - lr * self.setting.decay)
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for i, rows in self.muon:
            for master, momentum in zip(
                self.masters[i].split(rows), self.grads[i].split(rows), strict=True
            ):
                by_shape.setdefault((momentum.shape[0], momentum.shape[1]), []).append(
                    (master, momentum)
                )
        for shape, pairs in by_shape.items():
            made = newton_schulz(torch.stack([momentum for _, momentum in pairs]), 5, self.dtype)
            for (master, _), direction in zip(pairs, made, strict=True):
                master.sub_(direction * (lr * 0.2 * max(shape) ** 0.5))

    @torch.no_grad()
    def publish(self, masters: list[Tensor]) -> None:
        torch._foreach_copy_(self.parameters, masters)

    def begin_epoch(self, epoch: int, left_over: np.ndarray) -> None:
        """Return the epoch's tokens, and its windows after those that the last step left of the one
        before."""
        rng = np.random.default_rng((self.setting.seed, epoch))
        self.stream.copy_(
            torch.from_numpy(self.text.stream(rng, self.setting.reshuffle and epoch > 0))
        )
        windows = np.concatenate([left_over, rng.permutation(self.text.windows)])
        self.order[: len(windows)].copy_(torch.from_numpy(windows))
        self.place.zero_()

    @torch.no_grad()
    def validated(self, averaged: bool) -> float:
        if averaged:
            ends = np.cumsum([p.numel() for p in self.parameters]).tolist()
            self.publish(
                [
                    self.average[e - p.numel() : e].view(p.shape)
                    for e, p in zip(ends, self.parameters, strict=True)
                ]
            )
        val = torch.from_numpy(self.text.val).to(self.device)
        total = 0.0
        count = (len(val) - 1) // S
        inputs = val[: count * S].view(count, S)
        targets = val[1 : count * S + 1].view(count, S)
        for x, y in zip(inputs.split(64), targets.split(64), strict=True):
            total += float(self.model.summed_loss(self.model.forward_blocks(x), y))
        self.publish(self.masters)
        return total / (count * S)

    def recorded(self, eager: bool) -> Callable[[], None]:
        """Return what makes a step: on a GPU a graph of it, recorded after three steps that are
        then undone."""
        if eager or self.device.type != "cuda":
            return self.step
        kept = (
            self.master,
            self.first,
            self.second,
            self.average,
            self.place,
            self.count,
            self.clock,
        )
        before = [flat.clone() for flat in kept]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for flat, value in zip(kept, before, strict=True):
            flat.copy_(value)
        self.publish(self.masters)
        return graph.replay

    def run(self, eager: bool = False) -> dict[str, Any]:
        self.begin_epoch(0, np.array([], np.int64))
        step = self.recorded(eager)
        epoch = 0
        place = 0
        held = self.text.windows
        curve = []
        trained = []
        began = time.perf_counter()
        every = max(1, self.steps // VALIDATIONS)
        for i in range(self.steps):
            if place + self.rows > held:
                epoch += 1
                left = self.order[place:held].cpu().numpy()
                self.begin_epoch(epoch, left)
                place = 0
                held = len(left) + self.text.windows
            step()
            place += self.rows
            if (i + 1) % every == 0 or i + 1 == self.steps:
                trained.append([i + 1, round(float(self.loss), 4)])
                curve.append(
                    [i + 1, round(self.validated(False), 4), round(self.validated(True), 4)]
                )
        seconds = time.perf_counter() - began
        return {
            "steps": self.steps,
            "step_tokens": self.rows * S,
            "peak": self.lr,
            "seconds": round(seconds, 2),
            "unique_tokens": self.text.windows * S,
            "tokens": self.steps * self.rows * S,
            "curve": curve,
            "trained": trained,
            "final": curve[-1][1],
            "best": min(loss for _, loss, _ in curve),
            "averaged": curve[-1][2],
            "best_averaged": min(loss for _, _, loss in curve),
        }


def train(
    paths: dict[str, Path], setting: Setting, device: torch.device, eager: bool
) -> dict[str, Any]:
    text = Text(paths[setting.corpus], setting.unique)
    spec = shape_for("llama", setting.size, vocab_size=text.vocabulary, context=S, knobs={})
    torch.manual_seed(setting.seed)
    found = Training(text, spec, setting, device).run(eager)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        **asdict(setting),
        "parameters": count_parameters(spec),
        **found,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "commit": commit,
        "date": date.today().isoformat(),
    }


def pack(folder: Path, out: Path) -> None:
    manifest = load(folder / "corpus.json", CorpusManifest)
    read, val = (TokenFile.open(folder, split, manifest) for split in ("train", "val"))  # type: ignore[arg-type]
    np.savez_compressed(
        out, train=read.tokens, offsets=read.offsets, val=val.tokens, vocabulary=manifest.vocab_size
    )


def key(row: dict[str, Any]) -> str:
    return json.dumps({name: row[name] for name in asdict(Setting())}, sort_keys=True)


def rows() -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )


def wanted(given: argparse.Namespace) -> Iterator[Setting]:
    for name in given.settings:
        for setting in groups()[name]:
            for path in given.corpora:
                for seed in given.seeds:
                    yield replace(setting, corpus=path.stem, seed=seed)


def table(found: list[dict[str, Any]]) -> None:
    usual = asdict(Setting())
    last = ""
    for row in sorted(
        found, key=lambda r: (r["corpus"], r["size"], r["unique"], r["epochs"], r["best_averaged"])
    ):
        head = (
            f"{row['corpus']}, {row['parameters'] / 1e6:.1f} M, {row['unique_tokens']:,} tokens x "
            f"{row['epochs']:.2g}"
        )
        if head != last:
            print(f"\n{head}\n  {'':64} final   best  averaged  best, averaged  seconds")
            last = head
        told = ("corpus", "size", "unique", "epochs")
        words = (
            " ".join(f"{k}={row[k]}" for k, v in usual.items() if row[k] != v and k not in told)
            or "recipe"
        )
        print(
            f"  {words:64.64} {row['final']:.3f} {row['best']:.3f} {row['averaged']:.3f} "
            f"{row['best_averaged']:.3f}"
            f" {row['seconds']:8.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("corpora", nargs="*", type=Path)
    parser.add_argument("--settings", nargs="+", default=list(groups()), choices=groups())
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--pack", nargs=2, type=Path, metavar=("FOLDER", "OUT"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--eager", action="store_true", help="without a graph: each kernel launched by itself"
    )
    given = parser.parse_args()
    if given.pack:
        pack(*given.pack)
        return
    began = time.monotonic()
    known = {key(row) for row in rows()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    paths = {p.stem: p for p in given.corpora}
    for setting in wanted(given):
        if time.monotonic() - began > given.seconds:
            print("the rest waits for another call: --seconds is over")
            break
        if key(asdict(setting)) in known:
            continue
        row = train(paths, setting, device, given.eager)
        with open(RESULTS, "a") as results:
            results.write(json.dumps(row) + "\n")
        print(
            f"{row['seconds']:6.1f} s {row['final']:.3f} {row['best']:.3f} "
            f"{row['best_averaged']:.3f}",
            setting,
            flush=True,
        )
    if given.table:
        table(rows())


if __name__ == "__main__":
    main()
