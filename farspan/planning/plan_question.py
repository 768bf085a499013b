"""A planning question in flags: a model, tokens and a cluster, without text and without the
machines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec
from msgspec.structs import replace

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.config import Quantity
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load
from farspan.domain.suggest import advise, known_names
from farspan.domain.train import Precision, TrainSpec
from farspan.domain.units import parse_count
from farspan.estimate.interruptions import choose_save_interval
from farspan.planning.choose_model import DEFAULT_FAMILY
from farspan.planning.choose_train import batch_tokens
from farspan.planning.device_modes import settle_asked
from farspan.planning.model_speed import common_precisions
from farspan.planning.quantities import (
    PARAMETERS,
    asked_rows,
    asked_tokens,
    out_of_range,
    parse_positive,
    setting_remedy,
)
from farspan.planning.size import shape_for

#: Vocabulary of a model that is asked for by its size alone: Llama-2's (arXiv 2307.09288).
VOCABULARY = 32_000
CONTEXT = 1024


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `farspan plan`; quantities as written. None takes a default, which `TrainSpec`
    shows."""

    model: str
    tokens: str = "20x_params"
    batch: Quantity | None = None
    seq_len: int | None = None
    precision: str = "auto"
    attention: str = "sdpa"
    recompute: bool = False
    wan_bits: Literal[8, 16, 32] = 32


def model_of(name: str, flag: str = "--model", file: str = "run.yaml") -> ModelSpec:
    """Return the model of a preset, a Hugging Face folder, a plan file, or parameters such as 124M
    (a Llama of the size study's shape). Raises Refusal (out-of-range) for what is none, at a `flag`
    or at the key of a `file`."""
    folder = Path(name).expanduser()
    if folder.suffix == ".json" and folder.is_file():
        return load(folder, Plan).model
    if (folder / "config.json").is_file():
        return models.read_config(folder)
    known = models.presets()
    if name in known:
        return known[name].spec
    if name[:1].isdigit():
        count = parse_positive(parse_count, name, flag, "124M", file, PARAMETERS)
        return shape_for(DEFAULT_FAMILY, count, vocab_size=VOCABULARY, context=CONTEXT, knobs={})
    flagged = flag.startswith("--")
    raise Refusal(
        "out-of-range",
        what=f"there is no model {name!r}",
        where=flag if flagged else f"{file}, key {flag}",
        fact=(
            "it is no number such as 124M, no folder with config.json and no plan file; "
            f"{known_names(name, tuple(known))}"
        ),
        remedy=advise(name, known, option=flag if flagged else ""),
    )


def train_of(question: Question, model: ModelSpec, cluster: Cluster, file: str = "") -> TrainSpec:
    """Return the training that a question means on a cluster; raises Refusal (out-of-range) for
    what cannot be, at a flag, or at a key below `train` of a `file`."""

    def key_of(name: str) -> str:
        return f"train.{name}" if file else f"--{name.replace('_', '-')}"

    seq_len = question.seq_len or model.context
    if not 1 <= seq_len <= model.context:
        key = key_of("seq_len")
        fact = f"the model has {model.context} positions"
        raise out_of_range(key, seq_len, fact, setting_remedy(key, f"{model.context}"), file)
    tokens = asked_tokens(question.tokens, count_parameters(model), "--tokens")
    devices = len(cluster.devices)
    if question.batch is not None:
        batch = asked_rows(question.batch, seq_len, key_of("batch"), file)
    else:
        rows = 2 ** max(0, round(math.log2(batch_tokens(tokens) / seq_len)))
        batch = math.ceil(rows / devices) * devices
    steps = max(1, round(tokens / (batch * seq_len)))
    precision = precision_of(question.precision, cluster, key_of("precision"), file)
    train = TrainSpec(
        steps=steps,
        batch=batch,
        seq_len=seq_len,
        precision=precision,
        attention="vanilla" if question.attention == "vanilla" else "sdpa",
        recompute=question.recompute,
        wan_bits=question.wan_bits,
    )
    best_s = choose_save_interval(cluster, count_parameters(model))
    if best_s is not None:
        train = replace(train, checkpoint_every_s=best_s)
    return settle_asked(train, cluster)


def precision_of(asked: str, cluster: Cluster, key: str, file: str = "") -> Precision:
    """Return a precision, or the fastest that all devices compute in hardware; refuse one that a
    device does not."""
    common = common_precisions(cluster)
    if asked == "auto":
        return common[0]
    known = ("auto", *get_args(Precision))
    if asked not in known:
        remedy = advise(asked, known, option="--precision", fix="--precision auto")
        raise out_of_range(key, asked, known_names(asked, known), remedy, file)
    precision = cast(Precision, asked)
    if lacking := cluster.lacking(precision):
        fact = f"{', '.join(lacking)} cannot compute it in hardware; {', '.join(common)} can be"
        raise out_of_range(key, asked, fact, setting_remedy(key, common[0]), file)
    return precision
