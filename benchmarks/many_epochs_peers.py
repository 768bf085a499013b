"""farspan's recipe beside those of others on one NVIDIA GPU: the loss of each after the same
seconds on a small text.

    python -m benchmarks.many_epochs_peers CORPUS.npz [--time 5] [--seeds 0 1 2]

The peers of benchmarks/learning_peers.py and the trainings of benchmarks/many_epochs.py, each step
one CUDA graph, in bf16, 2.9 M parameters, context 256. A step is timed first; as many are then made
as fit into the time. Validations take none of it. Steps read 8,192 tokens, nanoGPT's 16,384 as its
configuration says. Rows go to results/many_epochs_peers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import learning_peers as peers
from benchmarks.many_epochs import BEFORE, S, Setting, Text, Training
from farspan.planning.size import shape_for

RESULTS = Path(__file__).parent / "results" / "many_epochs_peers.jsonl"
BATCH = 8192
OURS = {
    "before": BEFORE,
    "decay 0.1": Setting(),
    "decay 0.5": Setting(decay=0.5),
    "decay 1.0": Setting(decay=1.0),
}
#: Replays of a step that it is timed by.
TIMED = 60


class GraphMuon(peers.Muon):
    """nanochat's Muon with a rate and a momentum that a graph reads."""

    def begin(self, device: torch.device) -> None:
        self.count = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self) -> None:
        momentum = 0.85 + 0.1 * torch.clamp(self.count / 300, max=1.0)
        self.count.add_(1)
        for matrix, average in self.state:
            gradient = matrix.grad
            assert gradient is not None
            average.lerp_(gradient, 1 - momentum)
            x = gradient.lerp(average, momentum)
            tall = x.shape[0] > x.shape[1]
            x = (x.mT if tall else x).bfloat16()
            x = x / (x.norm() + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.sub_((x.mT if tall else x) * (self.param_groups[0]["lr"] * scale))


class Peer(Training):
    """Another's model and optimizers, reading as `Training` does."""

    def __init__(
        self, name: str, text: Text, setting: Setting, steps: int, device: torch.device
    ) -> None:
        self.text = text
        self.setting = setting
        self.device = device
        self.steps = steps
        self.lr = 1.0
        self.rows = setting.batch // S
        self.dtype = torch.bfloat16
        build, optimizers_of, self.share = peers.PEERS[name]
        torch.manual_seed(setting.seed)
        torch.set_default_device(device)
        self.model = build()  # type: ignore[assignment]
        self.optimizers = optimizers_of(self.model)
        self._plan_reading()
        shares = [self.share(i / steps) for i in range(steps)]
        self.shares = torch.tensor(shares)
        torch.set_default_device("cpu")
        self.parameters = list(self.model.parameters())
        self.peaks = list[tuple[Tensor, float]]()
        for i, optimizer in enumerate(self.optimizers):
            if isinstance(optimizer, peers.Muon):
                self.optimizers[i] = optimizer = GraphMuon(
                    [m for m, _ in optimizer.state], optimizer.param_groups[0]["lr"]
                )
                optimizer.begin(device)
            for group in optimizer.param_groups:
                peak = float(group["lr"])
                group["lr"] = torch.tensor(peak, device=device)
                group["capturable"] = True
                self.peaks.append((group["lr"], peak))

    def step(self) -> None:
        torch.set_default_device(self.device)
        inputs, targets, _ = self.batch()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(
                self.model(inputs).flatten(0, 1).float(), targets.flatten()
            )
        for parameter, gradient in zip(
            self.parameters, torch.autograd.grad(loss, self.parameters), strict=True
        ):
            parameter.grad = gradient
        self.loss.copy_(loss.detach())
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        share = self.shares[self.count].squeeze(0)
        for rate, peak in self.peaks:
            rate.copy_(share * peak)
        for optimizer in self.optimizers:
            optimizer.step()
        self.place.add_(self.rows)
        self.count.add_(1)
        torch.set_default_device("cpu")

    def recorded(self, eager: bool) -> Callable[[], None]:
        before = [parameter.detach().clone() for parameter in self.parameters]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if not eager:
            with torch.cuda.graph(graph):
                self.step()
        self.reset(before)
        return self.step if eager else graph.replay

    @torch.no_grad()
    def reset(self, weights: list[Tensor]) -> None:
        torch._foreach_copy_(self.parameters, weights)
        for optimizer in self.optimizers:
            if isinstance(optimizer, GraphMuon):
                optimizer.count.zero_()
                for _, average in optimizer.state:
                    average.zero_()
            else:
                for state in optimizer.state.values():
                    for value in state.values():
                        value.zero_()
        self.place.zero_()
        self.count.zero_()

    @torch.no_grad()
    def validated(self, averaged: bool) -> float:
        torch.set_default_device(self.device)
        self.model.eval()
        val = torch.from_numpy(self.text.val).to(self.device)
        total = 0.0
        count = (len(val) - 1) // S
        inputs = val[: count * S].view(count, S)
        targets = val[1 : count * S + 1].view(count, S)
        for x, y in zip(inputs.split(64), targets.split(64), strict=True):
            with torch.autocast("cuda", torch.bfloat16):
                logits = self.model(x)
            total += float(
                nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), y.flatten(), reduction="sum"
                )
            )
        self.model.train()
        torch.set_default_device("cpu")
        return total / (count * S)


def built(name: str, text: Text, setting: Setting, steps: int, device: torch.device) -> Training:
    if name in peers.PEERS:
        return Peer(name, text, setting, steps, device)
    spec = shape_for("llama", setting.size, vocab_size=text.vocabulary, context=S, knobs={})
    return Training(text, spec, replace(setting, epochs=steps * BATCH / (text.windows * S)), device)


def step_seconds(training: Training) -> float:
    training.begin_epoch(0, np.array([], np.int64))
    step = training.recorded(False)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMED):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / TIMED


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("corpora", nargs="+", type=Path)
    parser.add_argument("--time", type=float, default=5.0)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[*OURS, *peers.PEERS])
    given = parser.parse_args()
    device = torch.device("cuda")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    for path in given.corpora:
        text = Text(path, 0)
        for seed in given.seeds:
            for name in given.only:
                batch = 2 * BATCH if name == "nanogpt" else BATCH
                setting = replace(
                    OURS.get(name, Setting()), corpus=path.stem, seed=seed, batch=batch
                )
                steps = round(given.time / step_seconds(built(name, text, setting, 1000, device)))
                training = built(name, text, setting, steps, device)
                row: dict[str, Any] = {
                    "name": name,
                    "corpus": path.stem,
                    "seed": seed,
                    "time": given.time,
                    "parameters": sum(p.numel() for p in training.parameters),
                    **training.run(),
                    "device": torch.cuda.get_device_name(),
                    "commit": commit,
                }
                with open(RESULTS, "a") as results:
                    results.write(json.dumps(row) + "\n")
                losses = (
                    f"{row['final']:.3f} best {row['best']:.3f} averaged {row['best_averaged']:.3f}"
                )
                print(
                    path.stem,
                    seed,
                    f"{name:10} {losses} {row['steps']} steps {row['seconds']:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
