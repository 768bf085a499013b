"""The training that a plan asks for, in one process and in double precision, by the textbook: an
oracle.

It shares no arithmetic with `farspan.runtime`: a decoder in a few lines, torch's own AdamW and SGD,
and DiLoCo as its papers have it. Only the order of the data, and what of it is masked and dropped,
is the runtime's.

Shapes: B rows, S positions, D d_model, H heads, K kv heads, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan, Sync
from farspan.domain.struct_files import load
from farspan.domain.train import Schedule, TrainSpec
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.dropout import Dropout
from farspan.runtime.training.sample_order import (
    PackedWindows,
    ReshuffledWindows,
    SampleOrder,
    dropout_seeds,
    mask,
)

Weights = dict[str, Tensor]
#: What is left of something (B, S, D) at a place of the model.
Drop = Callable[[Tensor, int], Tensor]


def kept(x_BSD: Tensor, place: int) -> Tensor:
    return x_BSD


class Data(NamedTuple):
    """A corpus, in windows and in the order of a run of `spec`."""

    train: PackedWindows
    val: PackedWindows
    order: SampleOrder
    spec: TrainSpec
    vocabulary: int

    @classmethod
    def of(cls, corpus: Path, train: TrainSpec) -> Data:
        windows, val = (
            PackedWindows(np.fromfile(corpus / f"{n}.bin", "<u2"), train.seq_len)
            for n in ("train", "val")
        )
        if train.regular.reshuffle:
            offsets = np.fromfile(corpus / "train.idx", "<i8")
            windows = ReshuffledWindows(
                windows.tokens, train.seq_len, offsets=offsets, seed=train.seed
            )
        vocabulary = load(corpus / "corpus.json", CorpusManifest).vocab_size
        return cls(
            windows,
            val,
            SampleOrder(windows.count, train.seed, train.regular.reshuffle),
            train,
            vocabulary,
        )

    def read(self, samples: NDArray[np.int64]) -> tuple[Tensor, Tensor, Drop]:
        """Inputs, targets, and what is dropped on the way."""
        inputs, targets = self.train.read(self.order.window(samples))
        regular = self.spec.regular
        if regular.mask:
            inputs = mask(inputs, samples, regular.mask, self.vocabulary, self.spec.seed)
        seeds = torch.from_numpy(dropout_seeds(samples, self.spec.seed))
        dropout = Dropout(regular.dropout, seeds)

        def drop(x_BSD: Tensor, place: int) -> Tensor:
            return dropout.at_places(place + 1)[place](x_BSD)

        return (
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            drop if regular.dropout else kept,
        )

    def step_with_a_short_window(self, batch: int) -> int:
        """The first step that reads the window with fewer targets than the others."""
        order = self.order.window(np.arange(self.train.count))
        return int(np.flatnonzero(order == self.train.count - 1)[0]) // batch


def start(spec: ModelSpec, seed: int = 0) -> Weights:
    """Weights (fp32) with which no part of a model is idle: attention is uneven, biases are not
    zero, gains not one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Decoder(spec).named_parameters()}
    found = {}
    for name, shape in sorted(shapes.items()):
        gain = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        std = (
            0.1
            if len(shape) < 2 or name.startswith(("tok", "pos", "head"))
            else 0.7 / math.sqrt(shape[1])
        )
        found[name] = gain + std * torch.randn(shape, generator=generator)
    return found


# -- the model
#   ------------------------------------------------------------------------------------------------


def logits(
    weights: Mapping[str, Tensor], spec: ModelSpec, tokens_BS: Tensor, drop: Drop = kept
) -> Tensor:
    """(B, S, V)."""
    x_BSD = weights["tok.weight"][tokens_BS]
    if spec.scaled_embedding:
        x_BSD = x_BSD * math.sqrt(spec.d_model)
    if spec.positions == "learned":
        x_BSD = x_BSD + weights["pos.weight"][spec.extra_positions :][: tokens_BS.shape[1]]
    x_BSD = drop(x_BSD, 0)
    for i in range(spec.layers):
        block = {
            name.split(".", 2)[2]: w
            for name, w in weights.items()
            if name.startswith(f"blocks.{i}.")
        }
        before_BSD = x_BSD
        h_BSD = _attention(block, spec, _norm_if_there(block, spec, "attn_norm", x_BSD), i)
        x_BSD = x_BSD + drop(_norm_if_there(block, spec, "attn_post_norm", h_BSD), 2 * i + 2)
        input_BSD = before_BSD if spec.parallel_residual else x_BSD
        h_BSD = _mlp(block, spec, _norm_if_there(block, spec, "mlp_norm", input_BSD))
        x_BSD = x_BSD + drop(_norm_if_there(block, spec, "mlp_post_norm", h_BSD), 2 * i + 3)
    head = weights["tok.weight" if spec.tied else "head.weight"]
    return _norm(weights, spec, "norm", x_BSD) @ head.T


def _norm(weights: Mapping[str, Tensor], spec: ModelSpec, name: str, x: Tensor) -> Tensor:
    if spec.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = (
        x
        / torch.sqrt(x.square().mean(-1, keepdim=True) + spec.norm_eps)
        * (weights[f"{name}.weight"] + (1 if spec.offset_gains else 0))
    )
    return x + weights[f"{name}.bias"] if spec.norm == "layernorm" else x


def _norm_if_there(weights: Mapping[str, Tensor], spec: ModelSpec, name: str, x: Tensor) -> Tensor:
    return _norm(weights, spec, name, x) if f"{name}.weight" in weights else x


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _attention(weights: Mapping[str, Tensor], spec: ModelSpec, x_BSD: Tensor, i: int) -> Tensor:
    B, S, _ = x_BSD.shape
    E = spec.head_dim
    group = spec.heads // spec.kv_heads
    sizes = [spec.heads * E, spec.kv_heads * E, spec.kv_heads * E]
    q, k, v = _linear(weights, "attn.qkv", x_BSD).split(sizes, dim=-1)
    if spec.joint_qk_norm:
        q = _norm(weights, spec, "attn.q_norm", q)
        k = _norm(weights, spec, "attn.k_norm", k)
    q, k, v = (t.reshape(B, S, -1, E).transpose(1, 2) for t in (q, k, v))
    if spec.qk_norm:
        q = _norm(weights, spec, "attn.q_norm", q)
        k = _norm(weights, spec, "attn.k_norm", k)
    if spec.positions == "rope" and i not in (spec.unrotated_layers or ()):
        q = _rotated(q, spec, i)
        k = _rotated(k, spec, i)
    k = k.repeat_interleave(group, 1)
    v = v.repeat_interleave(group, 1)
    scores_BHSS = q @ k.transpose(2, 3) / math.sqrt(spec.query_scalar or E)
    back_SS = torch.arange(S)[:, None] - torch.arange(S)
    size = spec.window.size if spec.window and i in spec.window.layers else S
    scores_BHSS = scores_BHSS.masked_fill((back_SS < 0) | (back_SS >= size), -math.inf)
    y_BHSE = scores_BHSS.softmax(-1) @ v
    return _linear(weights, "attn.out", y_BHSE.transpose(1, 2).reshape(B, S, -1))


def _rotated(x_BHSE: Tensor, spec: ModelSpec, i: int) -> Tensor:
    """Pairs of the two halves of a head's first dims as complex numbers, turned by position."""
    S = x_BHSE.shape[2]
    R = spec.rotary_dims or spec.head_dim
    base = spec.rope_theta
    if spec.window and i in spec.window.layers:
        base = spec.window.rope_theta
    turn = torch.outer(torch.arange(S).double(), base ** (-torch.arange(0, R, 2).double() / R))
    halves = x_BHSE[..., : R // 2].contiguous(), x_BHSE[..., R // 2 : R].contiguous()
    x = torch.complex(*halves) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((x.real, x.imag, x_BHSE[..., R:]), -1)


def _mlp(weights: Mapping[str, Tensor], spec: ModelSpec, x: Tensor) -> Tensor:
    h = _linear(weights, "mlp.up", x)
    if spec.activation == "swiglu":
        gate, value = h.chunk(2, -1)
        return _linear(weights, "mlp.down", F.silu(gate) * value)
    if spec.activation == "geglu_tanh":
        gate, value = h.chunk(2, -1)
        return _linear(weights, "mlp.down", F.gelu(gate, approximate="tanh") * value)
    if spec.activation == "relu":
        return _linear(weights, "mlp.down", F.relu(h))
    approximate = "none" if spec.activation == "gelu" else "tanh"
    return _linear(weights, "mlp.down", F.gelu(h, approximate=approximate))


def mean_loss(
    weights: Mapping[str, Tensor],
    spec: ModelSpec,
    tokens: Tensor,
    targets: Tensor,
    drop: Drop = kept,
) -> Tensor:
    """Over all valid targets together."""
    return F.cross_entropy(
        logits(weights, spec, tokens, drop).flatten(0, 1), targets.flatten(), ignore_index=-1
    )


# -- training
#   ------------------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """Of one step of one replica: mean loss, and the gradients by name."""

    loss: float
    by_name: Weights

    @property
    def norm(self) -> float:
        return math.sqrt(sum(float(g.square().sum()) for g in self.by_name.values()))


def gradients(plan: Plan, data: Data, weights: Weights, step: int) -> list[Gradient]:
    """Of each replica at these weights."""
    found = []
    before = step * plan.train.batch
    for replica in plan.replicas:
        batch = data.read(np.arange(before, before + replica.batch))
        before += replica.batch
        leaves = {name: value.double().requires_grad_() for name, value in weights.items()}
        loss = mean_loss(leaves, plan.model, *batch)
        loss.backward()
        found.append(
            Gradient(
                float(loss.detach()),
                {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None},
            )
        )
    return found


def share_of_gradient(
    plan: Plan, data: Data, weights: Weights, spans: Sequence[tuple[int, int]]
) -> Weights:
    """What some samples of the first step add to the gradient of a plan of one replica."""
    leaves = {name: value.double().requires_grad_() for name, value in weights.items()}
    _, targets, _ = data.read(np.arange(plan.train.batch))
    tokens, mine, _ = data.read(np.concatenate([np.arange(*span) for span in spans]))
    share = (mine >= 0).sum() / (targets >= 0).sum()
    (share * mean_loss(leaves, plan.model, tokens, mine)).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


class Replica:
    """A model that trains by itself."""

    def __init__(self, train: TrainSpec, weights: Weights) -> None:
        self.train = train
        self.losses = list[float]()
        self.norms = list[float]()
        self.weights = {name: value.double().requires_grad_() for name, value in weights.items()}
        with_ = train.optimizer
        self.momenta = {
            n: torch.zeros_like(w)
            for n, w in self.weights.items()
            if with_.muon and n.startswith("blocks.") and w.dim() >= 2
        }
        rest = [w for name, w in self.weights.items() if name not in self.momenta]
        decayed, others = (
            [w for w in rest if (w.dim() >= 2) == matrix] for matrix in (True, False)
        )
        faster = with_.muon.embedding if with_.muon else 1.0
        groups = [
            {"params": decayed, "weight_decay": with_.weight_decay, "faster": faster},
            {"params": others, "weight_decay": 0.0, "faster": 1.0},
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], betas=(with_.beta1, with_.beta2), eps=with_.eps
        )

    def step(self, number: int, spec: ModelSpec, batch: tuple[Tensor, Tensor, Drop]) -> None:
        loss = mean_loss(self.weights, spec, *batch)
        loss.backward()
        gradients = [w.grad for w in self.weights.values() if w.grad is not None]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        clip = self.train.optimizer.clip
        if clip and norm > clip:
            for gradient in gradients:
                gradient.mul_(clip / norm)
        lr = self.train.optimizer.lr * share(self.train.schedule, number, self.train.steps)
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["faster"]
        self._muon(spec, lr)
        self.adamw.step()
        for w in self.weights.values():
            w.grad = None
        self.losses.append(float(loss.detach()))
        self.norms.append(norm)

    @torch.no_grad()
    def _muon(self, spec: ModelSpec, lr: float) -> None:
        """As Jordan et al. 2024 have it, with the scale of arXiv 2502.16982; q, k, v, gate and
        value each by itself."""
        head = spec.head_dim
        cuts = {"qkv": [spec.heads * head, spec.kv_heads * head, spec.kv_heads * head]}
        cuts |= {"up": [spec.d_ff, spec.d_ff]} if spec.is_gated else {}
        for name, momentum in self.momenta.items():
            weight = self.weights[name]
            muon = self.train.optimizer.muon
            assert muon and weight.grad is not None
            momentum.mul_(muon.momentum).add_(weight.grad, alpha=1 - muon.momentum)
            nesterov = (1 - muon.momentum) * weight.grad + muon.momentum * momentum
            parts = nesterov.split(cuts.get(name.split(".")[-2], len(weight)))
            step = torch.cat(
                [
                    0.2 * math.sqrt(max(part.shape)) * _newton_schulz(part, muon.iterations)
                    for part in parts
                ]
            )
            weight.mul_(1 - lr * self.train.optimizer.weight_decay).sub_(lr * step)

    @property
    def now(self) -> Weights:
        return {name: w.detach().clone() for name, w in self.weights.items()}

    @torch.no_grad()
    def become(self, weights: Weights) -> None:
        for name, w in self.weights.items():
            w.copy_(weights[name])


def _newton_schulz(x: Tensor, iterations: int) -> Tensor:
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def share(schedule: Schedule, step: int, steps: int) -> float:
    """Of the peak learning rate: linear warm-up, then constant or cosine down to the floor at the
    last step."""
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return 1.0
    assert schedule.kind == "cosine"
    done = (step - schedule.warmup_steps) / max(1, steps - 1 - schedule.warmup_steps)
    return schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * done)) / 2


class Meetings:
    """DiLoCo's outer optimizer (arXiv 2311.08105). With overlap what is exchanged at one meeting is
    applied at the next (arXiv 2501.18512, section 2.3): a replica then adds what it learnt
    meanwhile. `shares` are the replicas' parts of a step's sequences."""

    def __init__(self, sync: Sync, replicas: list[Replica], shares: list[float]) -> None:
        self.sync = sync
        self.replicas = replicas
        self.shares = torch.tensor(shares, dtype=torch.float64)
        self.anchor = {name: w.clone().requires_grad_() for name, w in replicas[0].now.items()}
        self.sgd = torch.optim.SGD(
            self.anchor.values(), lr=sync.lr, momentum=sync.momentum, nesterov=sync.momentum > 0
        )
        #: Models as they left for the exchange that goes on, and the mean of their changes.
        self.left: list[Weights] | None = None
        self.change: Weights = {}
        #: Of any number in any replica between two meetings.
        self.greatest_change = 0.0

    def meet(self, last: bool) -> None:
        if self.left is not None:
            self._apply(self.left)
        self._exchange()
        if last or not self.sync.overlap:
            self._apply([replica.now for replica in self.replicas])

    def _exchange(self) -> None:
        self.left = [replica.now for replica in self.replicas]
        changes = {
            n: torch.stack([a.detach() - one[n] for one in self.left])
            for n, a in self.anchor.items()
        }
        self.change = {
            name: torch.tensordot(self.shares, each, 1) for name, each in changes.items()
        }
        self.greatest_change = max(
            self.greatest_change, *(float(each.abs().max()) for each in changes.values())
        )

    def _apply(self, left: list[Weights]) -> None:
        for name, anchor in self.anchor.items():
            anchor.grad = self.change[name]
        self.sgd.step()
        for replica, before in zip(self.replicas, left, strict=True):
            now = replica.now
            replica.become(
                {n: anchor.detach() + (now[n] - before[n]) for n, anchor in self.anchor.items()}
            )
        self.left = None


class Trained(NamedTuple):
    """Losses and gradient norms of each replica, step by step; the model in the end, and its
    validation loss; and the greatest change of a number between two meetings of replicas."""

    losses: list[list[float]]
    norms: list[list[float]]
    weights: Weights
    validation: float
    greatest_change: float


def averaged(
    train: TrainSpec, average: Weights | None, now: Weights, step: int, steps: int
) -> Weights | None:
    """The moving average of weights after so many steps more, the last of which is number
    `step`."""
    if average is None or not train.optimizer.average:
        return None
    left = min(train.optimizer.average, (1 + step) / (10 + step)) ** steps
    return {
        name: left * before + (1 - left) * now[name].detach() for name, before in average.items()
    }


def train(plan: Plan, data: Data, weights: Weights) -> Trained:
    """All steps of a plan from these weights."""
    replicas = [Replica(plan.train, weights) for _ in plan.replicas]
    shares = [planned.batch / plan.train.batch for planned in plan.replicas]
    meetings = Meetings(plan.sync, replicas, shares) if plan.sync is not None else None
    average = replicas[0].now if plan.train.optimizer.average else None
    for step in range(plan.train.steps):
        before = step * plan.train.batch
        for replica, planned in zip(replicas, plan.replicas, strict=True):
            replica.step(step, plan.model, data.read(np.arange(before, before + planned.batch)))
            before += planned.batch
        last = step + 1 == plan.train.steps
        if (
            meetings is not None
            and plan.sync is not None
            and ((step + 1) % plan.sync.every == 0 or last)
        ):
            meetings.meet(last)
            average = averaged(plan.train, average, meetings.anchor, step + 1, plan.sync.every)
        if meetings is None:
            average = averaged(plan.train, average, replicas[0].now, step + 1, 1)
    final = average or replicas[0].now
    inputs, targets = map(
        torch.from_numpy, data.val.read(np.arange(data.val.count, dtype=np.uint64))
    )
    with torch.no_grad():
        validation = float(mean_loss(final, plan.model, inputs, targets))
    greatest = meetings.greatest_change if meetings is not None else 0.0
    return Trained(
        [one.losses for one in replicas],
        [one.norms for one in replicas],
        final,
        validation,
        greatest,
    )
