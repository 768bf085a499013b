"""How a fixed corpus is trained on: what run.yaml leaves to the recipe, from how often the text is
read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from farspan import models
from farspan.domain.config import OptimizerKind, TrainConfig
from farspan.domain.model import ModelSpec, count_parameters, matmul_parameters
from farspan.domain.train import Muon, Optimizer, Regularization, ScheduleKind, TrainSpec
from farspan.domain.units import format_count
from farspan.planning.quantities import given_or
from farspan.planning.size import FRESH_EPOCHS
from farspan.semantics.muon_matrices import matrices, update_flops

#: A device's update of matrices may take this share of the step's other arithmetic: Muon reaches
#: AdamW's loss in half of the tokens (docs/learning.md).
MOST_UPDATE = 0.6


class TrainingRecipe(msgspec.Struct, frozen=True, kw_only=True):
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
PLAIN = TrainingRecipe(
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
#: Muon's peak learning rate at MUON_PARAMETERS (docs/log.md, one size); at others it goes as
#: AdamW's does.
MUON_RATE = 6e-3
MUON_PARAMETERS = 2.9e6


#: Weight decay of a text that is read E times: DECAY sqrt(E), as of MOST_EPOCHS where it is more.
#: [fitted] on 2.9 M parameters (benchmarks/results/many_epochs.jsonl): of 0.1, 0.5, 1.0 and 1.5
#: best was 0.5 at 4 epochs, 0.5 or 1.0 at 10, 1.5 at 40.
DECAY = 0.25
MAX_RECIPE_EPOCHS = 40.0
#: What a moving average of the weights reaches back, of the run. Beyond FRESH_EPOCHS it is what is
#: validated: where the weights themselves begin to fit the text's noise, it lies up to 0.4 nats
#: below them (the same results).
AVERAGING_SHARE = 0.03
#: What a step leaves of the average at most.
MOST_KEPT = 0.9999


def studied_recipe(epochs: float, steps: int) -> TrainingRecipe:
    """Return the best settings for a text that is read in these epochs and steps (docs/log.md)."""
    decay = 0.1 if epochs <= 1 else round(DECAY * math.sqrt(min(epochs, MAX_RECIPE_EPOCHS)), 2)
    average = 0.0
    if epochs > FRESH_EPOCHS:
        reach = max(1.0, AVERAGING_SHARE * steps)
        average = min(MOST_KEPT, round(1 - 1 / reach, 4))
    return TrainingRecipe(
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


#: A model that continues with weights of its own takes this share of the peak learning rate of one
#: that begins at random, with warm-up and decay again (arXiv 2403.08763, which takes all of it for
#: hundreds of billions of tokens). [fitted] to SmolLM2-135M on 7 MB of text (docs/models.md): a
#: tenth learns half as much, all of it makes the model worse on other text.
CONTINUED_RATE = 0.3
#: A model that has read this many tokens a parameter (compute-optimal, arXiv 2203.15556) takes all
#: of the rate, as one does that goes on with its pretraining; the share falls as it has read more.
YOUNG_TOKENS = 20.0


#: Adapters take this many times the rate of full fine-tuning ("LoRA Without Regret", Schulman et
#: al. 2025: 10 times over 14 models, nearly the same at every rank with alpha 32).
LORA_RATE = 10.0
#: As arXiv 2106.09685, table 11, has it of GPT-2's adapters: decay takes them back to their base.
LORA_DECAY = 0.01


class Continued(NamedTuple):
    """A model that continues with weights of its own: the tokens that these were trained on, where
    that is known."""

    trained_tokens: int | None = None

    def rate_share(self, parameters: int) -> float:
        """Return the share of a new model's peak learning rate that it takes."""
        if not self.trained_tokens:
            return CONTINUED_RATE
        share = YOUNG_TOKENS * parameters / self.trained_tokens
        return max(CONTINUED_RATE, min(1.0, share))


def continued_recipe(epochs: float, steps: int, model: Continued) -> TrainingRecipe:
    """Return the settings for a model that continues with weights of its own: of one that farspan
    has trained those of a new one, else AdamW, which is what most models were trained by (Muon
    after AdamW gains little, arXiv 2502.16982, section 3.5)."""
    recipe = studied_recipe(epochs, steps)
    if model.trained_tokens is not None:
        return recipe
    return replace(recipe, optimizer="adamw", embedding=1.0)


def peak_rate(count: int, *, muon: bool = False) -> float:
    """Return the peak learning rate for `count` parameters: AdamW's 0.1325 N^-0.305, at most 3e-3;
    Muon's goes as steeply.

    Least squares in logarithms over the eight models (125M to 175B) of GPT-3's table 2.1 (arXiv
    2005.14165). Below 125M it is extrapolated, and the cap keeps it where small transformers are
    known to train.
    """
    if muon:
        rate = MUON_RATE * (count / MUON_PARAMETERS) ** -0.305
        return min(1e-2, float(f"{rate:.2g}"))
    return min(3e-3, float(f"{0.1325 * count**-0.305:.2g}"))


def apply_recipe(
    train: TrainSpec,
    asked: TrainConfig,
    model: ModelSpec,
    epochs: float,
    device_tokens: float,
    *,
    continued: Continued | None = None,
) -> tuple[TrainSpec, dict[str, str]]:
    """Return the training with its recipe, for a text that is read in these epochs by devices with
    `device_tokens` of a step each; and where each value came from. `continued`: the model has
    weights of its own."""
    own = asked.optimizing
    recipe_default = f"default: recipe {asked.recipe}"
    if asked.recipe == "plain":
        recipe = PLAIN
    elif continued is not None:
        recipe = continued_recipe(epochs, train.steps, continued)
    else:
        recipe = studied_recipe(epochs, train.steps)
    if continued is not None:
        recipe_default += ", continuing a model"
    if model.lora:
        recipe = replace(recipe, optimizer="adamw", weight_decay=LORA_DECAY)
        recipe_default += " by adapters"
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
    origin = {}
    for key, value in given.items():
        origin[f"train.{key}"] = given_or(value, recipe_default)
        if value != "auto":
            recipe = replace(recipe, **{key: value})
    kind = recipe.optimizer
    if kind == "auto":
        share = updating_share(model, device_tokens)
        kind = "adamw" if share > MOST_UPDATE else "muon"
        cost = f"updating matrices takes about {share:.0%} of a step's arithmetic"
        origin["train.optimizer"] += f": {cost}"
    muon = kind == "muon"
    origin["train.lr"] = "run.yaml"
    lr = train.optimizer.lr
    if own.lr == "auto":
        lr = peak_rate(count_parameters(model), muon=muon and asked.recipe == "auto")
        if continued is not None:
            # Adapters leave the model's weights as they are, however little these were trained.
            rate = continued.rate_share(count_parameters(model))
            if model.lora:
                rate = CONTINUED_RATE * LORA_RATE
            lr = float(f"{lr * rate:.2g}")
        name = "Muon" if muon else "AdamW"
        count = format_count(count_parameters(model))
        origin["train.lr"] = f"{recipe_default}, {name} at {count} parameters"
    optimizer = replace(
        train.optimizer,
        lr=lr,
        weight_decay=recipe.weight_decay,
        average=recipe.average or msgspec.UNSET,
        muon=Muon(embedding=recipe.embedding) if muon else msgspec.UNSET,
    )
    schedule = replace(train.schedule, kind=recipe.schedule, floor=recipe.floor)
    regular = Regularization(dropout=recipe.dropout, mask=recipe.mask, reshuffle=recipe.reshuffle)
    train = replace(
        train,
        optimizer=optimizer,
        schedule=schedule,
        regularization=regular if regular != Regularization() else msgspec.UNSET,
    )
    return train, origin


def drafted_optimizer(asked: TrainConfig, model: ModelSpec) -> Optimizer:
    """Return the optimizer of a probe for a model: Muon where it is asked for or may be chosen."""
    own = asked.optimizing
    count = count_parameters(model)
    plain = own.kind == "adamw" or (own.kind == "auto" and asked.recipe == "plain")
    lr = peak_rate(count) if own.lr == "auto" else own.lr
    return Optimizer(
        lr=lr,
        beta1=own.beta1,
        beta2=own.beta2,
        clip=own.clip,
        muon=msgspec.UNSET if plain or model.lora else Muon(),
    )


def updating_share(model: ModelSpec, device_tokens: float) -> float:
    """Return the arithmetic of Muon's update over that of the products of a step, on a device that
    reads `device_tokens` of it and updates all matrices."""
    graph = models.graph(model)
    iterations = Muon().iterations
    layer_flops = sum(update_flops(matrix, iterations) for matrix in matrices(graph).values())
    products = 6.0 * matmul_parameters(model) * device_tokens
    return graph.layers * layer_flops / products
