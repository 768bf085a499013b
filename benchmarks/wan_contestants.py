"""Stock PyTorch on two sites, one process a rank: what `benchmarks/wan.py` compares farspan's plans
with.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=... GLOO_SOCKET_IFNAME=... python
    wan_contestants.py ddp [options]

The first half of the ranks is the first site. `ddp`, `fsdp2` and `hsdp` share a step's sequences
between all ranks; `zero2` is DeepSpeed's; `gpipe` and `1f1b` are torch.distributed.pipelining with
a stage a site and data parallelism inside it, whose gradients are summed in one all-reduce at the
end of a step. All clip by the global norm and update with fused AdamW, in fp32 or with bf16
autocast (`zero2`: its own bf16).

A step is timed on every rank by itself, from its start to the start of the next, with no barrier.
Each rank prints one line of JSON. The model has a tied table as GPT-2 has; a stock pipeline cannot
tie its ends, so there the head is a matrix of its own that starts as a copy of the table: the first
step's loss is the same, later ones are not unless all are run with --untied. Weights and tokens
follow from --seed alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

#: The mean loss of this rank's sequences (None where another rank computes it), and the gradient
#: norm before clipping.
Answer = tuple[float | None, float]
CLIP = 1.0
HEAD_SIZE = 64


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_SIZE
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, S, D = x.shape
        q, k, v = (
            t.view(B, S, self.heads, HEAD_SIZE).transpose(1, 2) for t in self.qkv(x).split(D, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, S, D))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A plain GPT-2, or the part of one that a stage holds: what it lacks is None."""

    def __init__(self, given: argparse.Namespace, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(given.vocab, given.width)
        self.positions = nn.Embedding(given.context, given.width)
        self.blocks = nn.ModuleList(Block(given.width) for _ in range(given.layers))
        self.norm = nn.LayerNorm(given.width)
        self.head = nn.Linear(given.width, given.vocab, bias=False)
        self.bf16 = given.bf16
        torch.manual_seed(given.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and name != "head.weight":
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if tied:
            self.head.weight = self.table.weight
        else:
            self.head.weight.data.copy_(self.table.weight.data)

    def cut(self, stage: int, blocks: int) -> GPT:
        """Keep the first of two stages, with so many blocks, or the second."""
        self.blocks = self.blocks[:blocks] if stage == 0 else self.blocks[blocks:]
        if stage == 0:
            self.norm = self.head = None
        else:
            self.table = self.positions = None
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is not None:
            x = self.table(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))


def rows(
    given: argparse.Namespace, step: int, coordinate: int, coordinates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one of several equal shares of a step; the next token mostly
    follows from the last."""
    rng = np.random.default_rng((given.seed, step))
    shape = (given.sequences, given.seq_len + 1)
    jumps = np.where(rng.random(shape) < 0.9, 7, rng.integers(0, given.vocab, shape))
    each = given.sequences // coordinates
    mine = (np.cumsum(jumps, axis=1) % given.vocab)[coordinate * each : (coordinate + 1) * each]
    tokens = torch.from_numpy(mine)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """nanoGPT's: fused, with decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)


def ddp(model: GPT, given: argparse.Namespace) -> nn.Module:
    return DistributedDataParallel(
        model, bucket_cap_mb=given.bucket_mb, gradient_as_bucket_view=True
    )


def fsdp(model: GPT, given: argparse.Namespace) -> nn.Module:
    """Every block a group of its own, the rest another; `hsdp` divides inside a site and copies
    between sites."""
    world = dist.get_world_size()
    shape, names = (
        ((world,), ("data",)) if given.kind == "fsdp2" else ((2, world // 2), ("site", "data"))
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not given.kept)
    return fully_shard(model, mesh=mesh, reshard_after_forward=not given.kept)  # type: ignore[return-value]


def over_batch(given: argparse.Namespace) -> Callable[[int], Answer]:
    """Return the step of a model that every rank computes whole, for a share of the sequences."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    whole = GPT(given, tied=not given.untied)
    model = ddp(whole, given) if given.kind == "ddp" else fsdp(whole, given)
    parameters = list(model.parameters())
    optimizer = adamw(model)

    def step(number: int) -> Answer:
        inputs, targets = rows(given, number, rank, world)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in parameters])  # type: ignore[misc]
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    return step


def deepspeed(given: argparse.Namespace) -> Callable[[int], Answer]:
    """DeepSpeed's ZeRO-2 step: gradients are scattered and state is divided; in bf16 its own, with
    fp32 masters."""
    # It asks for what its own launcher sets; this one starts one rank a device.
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    import deepspeed as library

    rank = dist.get_rank()
    world = dist.get_world_size()
    model = GPT(given, tied=not given.untied)
    model.bf16 = False
    engine, *_ = library.initialize(
        model=model,
        optimizer=adamw(model),
        config={
            "train_micro_batch_size_per_gpu": given.sequences // world,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": given.bf16},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )

    def step(number: int) -> Answer:
        inputs, targets = rows(given, number, rank, world)
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.item(), float(engine.get_global_grad_norm())

    return step


def pipeline(given: argparse.Namespace) -> Callable[[int], Answer]:
    """Return the step of one of two stages: microbatches, the sum over the stage's ranks, the norm
    over both stages."""
    half = dist.get_world_size() // 2
    stage, coordinate = divmod(dist.get_rank(), half)
    across = [dist.new_group([c, c + half]) for c in range(half)][coordinate]
    inside = [dist.new_group(list(range(s * half, (s + 1) * half))) for s in range(2)][stage]
    model = GPT(given, tied=False).cut(stage, given.cut)
    parameters = list(model.parameters())
    optimizer = adamw(model)
    made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[given.kind](
        PipelineStage(model, stage, 2, torch.device("cpu"), group=across),
        given.microbatches,
        loss_fn=loss_of,
    )

    def step(number: int) -> Answer:
        inputs, targets = rows(given, number, coordinate, half)
        losses: list[torch.Tensor] = []
        if stage == 0:
            made.step(inputs)
        else:
            made.step(target=targets, losses=losses, return_outputs=False)
        average(parameters, inside, half)
        norm = clip(parameters, across)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().item() if losses else None, norm

    return step


def average(parameters: list[nn.Parameter], group: dist.ProcessGroup, ways: int) -> None:
    """All gradients' mean over the group, in one all-reduce."""
    flat = torch.cat([p.grad.view(-1) for p in parameters])
    dist.all_reduce(flat, group=group)
    for p, part in zip(
        parameters, flat.div_(ways).split([p.numel() for p in parameters]), strict=True
    ):
        p.grad.copy_(part.view_as(p.grad))


def clip(parameters: list[nn.Parameter], across: dist.ProcessGroup) -> float:
    """Clip by the norm of both stages' gradients together; returns it."""
    square = nn.utils.get_total_norm([p.grad for p in parameters]).square()  # type: ignore[misc]
    dist.all_reduce(square, group=across)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)
    return norm.item()


STEPS = {
    "ddp": over_batch,
    "fsdp2": over_batch,
    "hsdp": over_batch,
    "zero2": deepspeed,
    "gpipe": pipeline,
    "1f1b": pipeline,
}


def measure(step: Callable[[int], Answer], warmup: int, steps: int) -> dict[str, object]:
    """Seconds of each step from its start to the next one's, and what else the steps gave."""
    clock = time.time() - time.perf_counter()
    starts = []
    busy = []
    answers = []
    for number in range(warmup + steps):
        starts.append(time.perf_counter())
        busy.append(time.process_time())
        answers.append(step(number))
    starts.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(starts)]
    return {
        "warmup_s": times[:warmup],
        "step_s": times[warmup:],
        "began": clock + starts[warmup],
        "ended": clock + starts[-1],
        "cpu_s": time.process_time() - busy[warmup],
        "losses": [loss for loss, _ in answers],
        "norms": [norm for _, norm in answers],
        "rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def end_with_parent() -> None:
    """End this process when the one that started it has ended, however that happened."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=tuple(STEPS))
    sizes = {
        "layers": 8,
        "width": 256,
        "vocab": 8192,
        "context": 256,
        "sequences": 8,
        "seq-len": 256,
        "warmup": 2,
        "steps": 12,
        "seed": 0,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--untied", action="store_true", help="the head is a matrix of its own everywhere"
    )
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--bucket-mb", type=int, default=25, help="ddp: largest bucket")
    parser.add_argument(
        "--kept",
        action="store_true",
        help="fsdp2, hsdp: weights stay gathered after the forward pass",
    )
    parser.add_argument(
        "--microbatches", type=int, default=4, help="gpipe, 1f1b: of each rank's sequences"
    )
    parser.add_argument("--cut", type=int, default=4, help="gpipe, 1f1b: blocks of the first stage")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds that a collective waits at most"
    )
    return parser.parse_args()


def main() -> None:
    given = arguments()
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=given.timeout))
    found = measure(STEPS[given.kind](given), given.warmup, given.steps)
    print(json.dumps({"rank": dist.get_rank(), **found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
