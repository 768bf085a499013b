"""Which model run.yaml means: a preset, a Hugging Face folder, a shape, or a size found from corpus
and machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.escapes import key_word, shell_word, yaml_word
from farspan.domain.model import ModelSpec, parameters
from farspan.domain.problems import Refusal
from farspan.domain.results import RESERVE
from farspan.domain.units import format_bytes, format_count, format_seconds, parse_fraction
from farspan.planning.quantities import (
    SIZES,
    asked_parameters,
    asked_tokens,
    deadline_s,
    given_or,
    out_of_range,
)
from farspan.planning.size import FRESH_EPOCHS, KNOBS, TOLERANCE, Knobs, auto_parameters, shape_for

#: Where run.yaml names no family: the better one at equal parameters (no position table, gated
#: MLP).
DEFAULT_FAMILY = "llama"
#: `size: auto` without any budget sizes the model for a run of this long.
AUTO_RUN_S = 3600.0
#: Training is taken to reach this share of the speed of bare matrix products, as well-run GPUs do
#: of their peak (arXiv 2204.02311, table 3: 21-46 %).
TRAINING_SHARE = 0.3
#: Contexts that are tried down to the shortest worth training, when the user fixed none.
SHORTEST_CONTEXT = 32
#: A larger share is proposed where it holds out so many times the tokens of a window: shares of
#: few documents are kept on average alone.
ENOUGH_HELD_OUT = 4


class ChosenModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model, the tokens of a training sequence, and where each value came from."""

    model: ModelSpec
    seq_len: int
    origin: dict[str, str]
    warnings: tuple[str, ...] = ()


def choose_model(
    config: RunConfig, corpus: CorpusManifest, cluster: Cluster, matmul_flops: Callable[[], float]
) -> ChosenModel:
    """The model to train. `matmul_flops` measures the FLOP/s of bare matrix products on all devices
    together, at their fastest precision; it is called only where `size: auto` needs it."""
    if config.model.path is not None:
        chosen = _from_folder(config, corpus)
    elif config.model.preset is not None:
        chosen = _from_preset(config, corpus)
    else:
        chosen = _from_size(config, corpus, cluster, matmul_flops)
    _demand_windows(config, corpus, chosen.seq_len)
    return chosen


def _from_folder(config: RunConfig, corpus: CorpusManifest) -> ChosenModel:
    folder = Path(str(config.model.path)).expanduser()
    spec = models.read_config(folder)
    if spec.vocab_size < corpus.vocab_size:
        raise Refusal(
            "tokenizer-mismatch",
            what="the corpus has token ids that the model does not know",
            where=folder,
            fact=(
                f"the corpus's vocabulary has {corpus.vocab_size} tokens, the model's "
                f"{spec.vocab_size}"
            ),
            remedy=f"set tokenizer.use: {yaml_word(folder)}",
        )
    seq_len = config.model.context or spec.context
    if seq_len > spec.context:
        fact = f"the model in {folder} has {spec.context} positions"
        raise out_of_range("model.context", seq_len, fact, f"set model.context: {spec.context:d}")
    origin = {
        "model": f"run.yaml: {folder}/config.json",
        "train.seq_len": given_or(config.model.context, "run.yaml: the model's own"),
    }
    return ChosenModel(model=spec, seq_len=seq_len, origin=origin)


def _from_preset(config: RunConfig, corpus: CorpusManifest) -> ChosenModel:
    preset = models.preset(str(config.model.preset))
    base = preset.spec
    knobs = _knobs(config)
    if config.model.family not in (None, base.family):
        fact = f"preset {preset.name} is of family {base.family}"
        raise out_of_range("model.family", config.model.family, fact, "remove model.family")
    if "heads" in knobs and base.kv_heads == base.heads:
        knobs.setdefault("kv_heads", knobs["heads"])
    fields = {key: getattr(base, key) for key in KNOBS} | knobs
    context = config.model.context or base.context
    spec = _built(
        lambda: models.family(base.family).shape(
            vocab_size=corpus.vocab_size, context=context, **fields
        )
    )
    origin = {
        "model": f"run.yaml: preset {preset.name}",
        "model.vocab_size": "corpus: its tokenizer's",
        "model.context": given_or(config.model.context, f"run.yaml: preset {preset.name}"),
        **{f"model.{key}": "run.yaml" for key in knobs},
    }
    large = (f"{preset.name} is a preset for planning: it is too large to train on most machines",)
    return ChosenModel(
        model=spec, seq_len=context, origin=origin, warnings=large if preset.planning_only else ()
    )


def _from_size(
    config: RunConfig, corpus: CorpusManifest, cluster: Cluster, matmul_flops: Callable[[], float]
) -> ChosenModel:
    family = config.model.family or DEFAULT_FAMILY
    knobs = _knobs(config)
    origin = {
        "model.family": given_or(config.model.family, "default"),
        "model.vocab_size": "corpus: its tokenizer's",
        **{f"model.{key}": "run.yaml" for key in knobs},
    }
    if "layers" in knobs and "d_model" in knobs:
        target = None
        origin["model.size"] = "run.yaml: model.layers and model.d_model"
    else:
        target, origin["model.size"] = _target(config, corpus, cluster, matmul_flops)
    context, origin["model.context"] = _context(config, corpus, target)
    if target is None:
        build = models.family(family).shape
        spec = _built(lambda: build(vocab_size=corpus.vocab_size, context=context, **knobs))
    else:
        spec = _sized(config, family, target, corpus.vocab_size, context, knobs)
        origin["model.shape"] = (
            f"default: the size study's fit (arXiv 2410.19456) at {format_count(target)} parameters"
        )
    return ChosenModel(model=spec, seq_len=context, origin=origin)


def _knobs(config: RunConfig) -> Knobs:
    given = {key: getattr(config.model, key) for key in KNOBS}
    return {key: value for key, value in given.items() if value is not None}


def _built(build: Callable[[], ModelSpec]) -> ModelSpec:
    try:
        return build()
    except ValueError as error:
        raise Refusal(
            "out-of-range",
            what="a model of this shape cannot be built",
            where="run.yaml, key model",
            fact=str(error),
            remedy="change one of these keys under model",
            key="model",
        ) from None


def _target(
    config: RunConfig, corpus: CorpusManifest, cluster: Cluster, matmul_flops: Callable[[], float]
) -> tuple[int, str]:
    """Parameters to aim at, and where the number came from."""
    asked = asked_parameters(config)
    if asked is not None:
        return asked, "run.yaml"
    budget = deadline_s(config, cluster)
    seconds = (1 - RESERVE) * (budget or AUTO_RUN_S)
    epochs = min(config.train.epochs or FRESH_EPOCHS, FRESH_EPOCHS)
    tokens = epochs * corpus.train.tokens
    if config.train.tokens is not None and "param" not in str(config.train.tokens):
        tokens = min(tokens, asked_tokens(config.train.tokens, 1))
    target = auto_parameters(tokens, TRAINING_SHARE * seconds * matmul_flops())
    return target, (
        f"corpus and machine: 20 tokens a parameter (arXiv 2203.15556) of {format_count(tokens)} "
        "tokens, "
        f"payable in {format_seconds(seconds)} "
        f"({'budget' if budget else 'default: no budget is set'})"
    )


def _context(config: RunConfig, corpus: CorpusManifest, target: int | None) -> tuple[int, str]:
    """Positions: longer for larger models, halved while the corpus cannot fill a window."""
    if config.model.context is not None:
        return config.model.context, "run.yaml"
    context = next(
        (c for limit, c in ((10e6, 256), (100e6, 512)) if (target or limit) < limit), 1024
    )
    wanted = context
    while context > SHORTEST_CONTEXT and context > _longest(corpus):
        context //= 2
    return (
        context,
        "default: by size"
        if context == wanted
        else "corpus: the longest that its validation split fills",
    )


def _longest(corpus: CorpusManifest) -> int:
    """The longest context of which train and validation split both fill one window and its last
    target."""
    return min(corpus.train.tokens, corpus.val.tokens) - 1


def _sized(
    config: RunConfig, family: str, target: int, vocab: int, context: int, knobs: Knobs
) -> ModelSpec:
    spec = _built(lambda: shape_for(family, target, vocab_size=vocab, context=context, knobs=knobs))
    key, asked = (
        ("size", config.size)
        if config.model.params is None
        else ("model.params", config.model.params)
    )
    if asked not in ("auto", *SIZES) and abs(parameters(spec) / target - 1) > TOLERANCE:
        fact = (
            f"with a vocabulary of {vocab} tokens and these knobs the nearest has "
            f"{parameters(spec):,} parameters"
        )
        raise out_of_range(key, asked, fact, f"set {key_word(key)}: {parameters(spec):d}")
    return spec


def _demand_windows(config: RunConfig, corpus: CorpusManifest, seq_len: int) -> None:
    """Refuses a corpus of which a split cannot fill one window of `seq_len` tokens and its last
    target."""
    longest = _longest(corpus)
    if seq_len <= longest:
        return
    sizes = f"{corpus.train.tokens} tokens to train on and {corpus.val.tokens} to validate on"
    fits = longest >= SHORTEST_CONTEXT
    if config.model.context is not None and fits:
        raise out_of_range(
            "model.context", seq_len, f"the corpus has {sizes}", f"set model.context: {longest:d}"
        )
    raise Refusal(
        "corpus-too-small",
        what="the corpus cannot fill one training and one validation window of the model",
        where=corpus.source,
        fact=f"there are {sizes}; each needs at least {seq_len + 1}",
        remedy=f"set model.context: {longest:d}" if fits else _remedy(config, corpus, seq_len),
    )


def _remedy(config: RunConfig, corpus: CorpusManifest, seq_len: int) -> str:
    """How a corpus comes to fill its windows: a larger share is held out where that is enough, else
    text is added."""
    needed = seq_len + 1
    train = corpus.train
    val = corpus.val
    asked_percent = 100 * parse_fraction(config.data_config.val)
    for percent in (10, 20, 30):
        held = (train.tokens + val.tokens) * percent / 100
        is_enough = val.tokens < needed < train.tokens and held >= ENOUGH_HELD_OUT * needed
        if is_enough and percent > asked_percent:
            path_word = yaml_word(corpus.source)
            return f"write in run.yaml: data: {{source: {path_word}, val: {percent:d}%}}"
    # The split stays as it is while the text grows.
    factor = needed / max(1, min(train.tokens, val.tokens))
    missing_bytes = (factor - 1) * (train.text_bytes + val.text_bytes)
    missing_bytes = max(1, math.ceil(missing_bytes))
    return (
        f"add text to {shell_word(corpus.source)}: about {format_bytes(missing_bytes)} are missing"
    )
