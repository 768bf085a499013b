"""How a fixed corpus is trained on: what run.yaml leaves to the recipe, from how often the text is
read."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec.structs import replace

from farspan import models
from farspan.domain.config import OptimizerKind, TrainConfig
from farspan.domain.model import ModelSpec, matmul_parameters, parameters
from farspan.domain.train import Muon, Optimizer, Regularization, ScheduleKind, TrainSpec
from farspan.domain.units import format_count
from farspan.planning.size import FRESH_EPOCHS
from farspan.semantics.matrices import matrices, update_flops

#: A device's update of matrices may take so much of the step's other arithmetic: Muon reaches
#: AdamW's loss in half of the tokens (docs/learning.md).
MOST_UPDATE = 0.6


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of a training, by their names in run.yaml."""

    optimizer: OptimizerKind
    weight_decay: float
    embedding: float
    average: float
    schedule: ScheduleKind
    floor: float
    dropout: float
    mask: float
    reshuffle: bool


#: As small models are usually trained (nanoGPT, train.py, without its dropout).
PLAIN = Recipe(
    optimizer="adamw",
    weight_decay=0.1,
    embedding=1.0,
    average=0.0,
    schedule="cosine",
    floor=0.1,
    dropout=0.0,
    mask=0.0,
    reshuffle=False,
)
#: Muon's peak learning rate at so many parameters (docs/log.md, one size); by others' it goes as
#: AdamW's does.
MUON_RATE = 6e-3
MUON_PARAMETERS = 2.9e6


#: Weight decay of a text that is read E times: DECAY sqrt(E), as of MOST_EPOCHS where it is more.
#: [fitted] on 2.9 M parameters (benchmarks/results/many_epochs.jsonl): of 0.1, 0.5, 1.0 and 1.5
#: best was 0.5 at 4 epochs, 0.5 or 1.0 at 10, 1.5 at 40.
DECAY = 0.25
MOST_EPOCHS = 40.0
#: What a moving average of the weights reaches back, of the run. Beyond FRESH_EPOCHS it is what is
#: validated: where the weights themselves begin to fit the text's noise, it lies up to 0.4 nats
#: below them (the same results).
AVERAGED = 0.03
#: What a step leaves of the average at most.
MOST_KEPT = 0.9999


def studied(epochs: float, steps: int) -> Recipe:
    """What was found best for a text that is read so many times in so many steps (docs/log.md)."""
    decay = 0.1 if epochs <= 1 else round(DECAY * math.sqrt(min(epochs, MOST_EPOCHS)), 2)
    average = (
        min(MOST_KEPT, round(1 - 1 / max(1.0, AVERAGED * steps), 4))
        if epochs > FRESH_EPOCHS
        else 0.0
    )
    return Recipe(
        optimizer="auto",
        weight_decay=decay,
        embedding=3.0,
        average=average,
        schedule="linear",
        floor=0.0,
        dropout=0.0,
        mask=0.0,
        reshuffle=epochs > 1,
    )


def peak_rate(count: int, *, muon: bool = False) -> float:
    """Peak learning rate for `count` parameters: AdamW's 0.1325 N^-0.305, at most 3e-3; Muon's goes
    as steeply.

    Least squares in logarithms over the eight models (125M to 175B) of GPT-3's table 2.1 (arXiv
    2005.14165). Below 125M it is extrapolated, and the cap keeps it where small transformers are
    known to train.
    """
    if muon:
        return min(1e-2, float(f"{MUON_RATE * (count / MUON_PARAMETERS) ** -0.305:.2g}"))
    return min(3e-3, float(f"{0.1325 * count**-0.305:.2g}"))


def applied(
    train: TrainSpec, asked: TrainConfig, model: ModelSpec, epochs: float, device_tokens: float
) -> tuple[TrainSpec, dict[str, str]]:
    """The training with its recipe, for a text that is read so many times by devices that read so
    many tokens a step each; and where each value came from."""
    own = asked.optimizing
    base = PLAIN if asked.recipe == "plain" else studied(epochs, train.steps)
    given: dict[str, Any] = {
        "optimizer": own.kind,
        "weight_decay": own.weight_decay,
        "embedding": own.embedding,
        "average": own.average,
        "schedule": asked.schedule,
        "floor": asked.floor,
        "dropout": asked.dropout,
        "mask": asked.mask,
        "reshuffle": asked.reshuffle,
    }
    origin = {
        f"train.{key}": f"default: recipe {asked.recipe}" if value == "auto" else "run.yaml"
        for key, value in given.items()
    }
    recipe = replace(base, **{key: value for key, value in given.items() if value != "auto"})
    kind = recipe.optimizer
    if kind == "auto":
        share = updating_share(model, device_tokens)
        kind = "adamw" if share > MOST_UPDATE else "muon"
        origin["train.optimizer"] += (
            f": updating matrices takes about {share:.0%} of a step's arithmetic"
        )
    muon = kind == "muon"
    origin["train.lr"] = "run.yaml"
    if own.lr == "auto":
        lr = peak_rate(parameters(model), muon=muon and asked.recipe == "auto")
        train = replace(train, optimizer=replace(train.optimizer, lr=lr))
        name = "Muon" if muon else "AdamW"
        count = format_count(parameters(model))
        origin["train.lr"] = f"default: recipe {asked.recipe}, {name} at {count} parameters"
    regular = Regularization(dropout=recipe.dropout, mask=recipe.mask, reshuffle=recipe.reshuffle)
    return replace(
        train,
        optimizer=_optimizer(train.optimizer, recipe, muon=muon),
        schedule=replace(train.schedule, kind=recipe.schedule, floor=recipe.floor),
        regularization=regular if regular != Regularization() else msgspec.UNSET,
    ), origin


def drafted_optimizer(asked: TrainConfig, count: int) -> Optimizer:
    """What a probe trains a model of `count` parameters with: Muon where it is asked for or may be
    chosen."""
    own = asked.optimizing
    plain = own.kind == "adamw" or (own.kind == "auto" and asked.recipe == "plain")
    lr = peak_rate(count) if own.lr == "auto" else own.lr
    return Optimizer(
        lr=lr,
        beta1=own.beta1,
        beta2=own.beta2,
        clip=own.clip,
        muon=msgspec.UNSET if plain else Muon(),
    )


def updating_share(model: ModelSpec, device_tokens: float) -> float:
    """Arithmetic of Muon's update over that of the products of a step, on a device that reads so
    many tokens of it and updates all matrices."""
    graph = models.graph(model)
    updating = graph.layers * sum(
        update_flops(matrix, Muon().iterations) for matrix in matrices(graph).values()
    )
    return updating / (6.0 * matmul_parameters(model) * device_tokens)


def _optimizer(drafted: Optimizer, recipe: Recipe, *, muon: bool) -> Optimizer:
    return replace(
        drafted,
        weight_decay=recipe.weight_decay,
        average=recipe.average or msgspec.UNSET,
        muon=Muon(embedding=recipe.embedding) if muon else msgspec.UNSET,
    )
