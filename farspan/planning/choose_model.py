"""Which model run.yaml means: a preset, a Hugging Face folder, a shape, or a size found from corpus
and machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import msgspec

from farspan import models
from farspan.corpus.hub_models import find_model_folder
from farspan.domain.cluster import Cluster
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.cost import OVERHEAD_SHARE
from farspan.domain.escapes import key_word, shell_word, yaml_word
from farspan.domain.model import Lora, ModelSpec, count_parameters
from farspan.domain.problems import Refusal
from farspan.domain.units import format_bytes, format_count, format_seconds, parse_fraction
from farspan.models._adapters import max_rank
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
#: Tokens of a training sequence of a continued model, unless run.yaml says otherwise: as
#: transformers' example `run_clm.py` takes.
MOST_CONTINUED_WINDOW = 1024
#: A larger share is proposed where it holds out this multiple of a window's tokens: shares of few
#: documents are kept on average alone.
ENOUGH_HELD_OUT = 4

#: What no key of run.yaml changes of a preset, and no other knob decides.
PRESET_KNOBS = ("norm_eps", "rope_theta", "rope_scaling", "head_size")


class ChosenModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model, the tokens of a training sequence, and where each value came from."""

    model: ModelSpec
    seq_len: int
    origin: dict[str, str]
    warnings: tuple[str, ...] = ()
    #: Of a model that is continued: the tokens it was trained on, where they are known.
    trained_tokens: int | None = None


def choose_model(
    config: RunConfig, corpus: CorpusManifest, cluster: Cluster, matmul_flops: Callable[[], float]
) -> ChosenModel:
    """Choose the model to train.

    `matmul_flops` measures the FLOP/s of bare matrix products on all devices together, at their
    fastest precision; it is called only where `size: auto` needs it.
    """
    if config.model.path is not None:
        chosen = _from_folder(config, corpus)
    elif config.model.preset is not None:
        chosen = _from_preset(config, corpus)
    else:
        chosen = _from_size(config, corpus, cluster, matmul_flops)
    _demand_windows(config, corpus, chosen.seq_len)
    return chosen


def _from_folder(config: RunConfig, corpus: CorpusManifest) -> ChosenModel:
    folder = find_model_folder(str(config.model.path))
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
    if (adapting := config.train.adapting) is not None:
        most = max_rank(spec, models.projections(spec))
        if adapting.rank > most:
            fact = f"the smallest dimension of the model's projections is {most}"
            raise out_of_range("train.lora", adapting.rank, fact, f"set train.lora: {most:d}")
        lora = Lora(rank=adapting.rank, alpha=adapting.alpha)
        spec = msgspec.structs.replace(spec, lora=lora)
    seq_len, seq_len_from = _choose_window(config, corpus, spec)
    if seq_len > spec.context:
        fact = f"the model in {folder} has {spec.context} positions"
        raise out_of_range("model.context", seq_len, fact, f"set model.context: {spec.context:d}")
    origin = {
        "model": f"run.yaml: {folder}/config.json",
        **({"model.lora": "run.yaml: train.lora"} if spec.lora else {}),
        "train.seq_len": seq_len_from,
    }
    return ChosenModel(
        model=spec,
        seq_len=seq_len,
        origin=origin,
        trained_tokens=models.read_trained_tokens(folder),
    )


def _from_preset(config: RunConfig, corpus: CorpusManifest) -> ChosenModel:
    preset = models.preset(str(config.model.preset))
    base = preset.spec
    knobs = _given_knobs(config)
    if config.model.family not in (None, base.family):
        fact = f"preset {preset.name} is of family {base.family}"
        raise out_of_range("model.family", config.model.family, fact, "remove model.family")
    if "heads" in knobs and base.kv_heads == base.heads:
        knobs.setdefault("kv_heads", knobs["heads"])
    shape = {key: getattr(base, key) for key in KNOBS} | knobs
    context = config.model.context or base.context
    rebuild = functools.partial(_resize_preset, base)
    spec = _build_model(rebuild, vocab_size=corpus.vocab_size, context=context, **shape)
    preset_origin = f"run.yaml: preset {preset.name}"
    origin = {
        "model": preset_origin,
        "model.vocab_size": "corpus: its tokenizer's",
        "model.context": given_or(config.model.context, preset_origin),
    }
    for key in knobs:
        origin[f"model.{key}"] = "run.yaml"
    warnings: tuple[str, ...] = ()
    if preset.planning_only:
        too_large = "is a preset for planning: it is too large to train on most machines"
        warnings = (f"{preset.name} {too_large}",)
    return ChosenModel(model=spec, seq_len=context, origin=origin, warnings=warnings)


def _resize_preset(base: ModelSpec, **sizes: Any) -> ModelSpec:
    """Build a preset's family in these sizes, with what no key of run.yaml changes."""
    spec = models.family(base.family).shape(**sizes)
    kept = {key: getattr(base, key) for key in PRESET_KNOBS}
    return msgspec.structs.replace(spec, **kept)


def _from_size(
    config: RunConfig, corpus: CorpusManifest, cluster: Cluster, matmul_flops: Callable[[], float]
) -> ChosenModel:
    asked = config.model
    family = asked.family or DEFAULT_FAMILY
    knobs = _given_knobs(config)
    origin = {
        "model.family": given_or(asked.family, "default"),
        "model.vocab_size": "corpus: its tokenizer's",
    }
    for key in knobs:
        origin[f"model.{key}"] = "run.yaml"

    # Layers and width given: no count of parameters is aimed at.
    target = None
    if "layers" in knobs and "d_model" in knobs:
        origin["model.size"] = "run.yaml: model.layers and model.d_model"
    else:
        target, origin["model.size"] = _choose_parameters(config, corpus, cluster, matmul_flops)
    context, origin["model.context"] = _choose_context(config, corpus, target)
    sizes = {"vocab_size": corpus.vocab_size, "context": context}
    if target is None:
        spec = _build_model(models.family(family).shape, **sizes, **knobs)
        return ChosenModel(model=spec, seq_len=context, origin=origin)
    spec = _build_model(shape_for, family=family, target=target, knobs=knobs, **sizes)
    count = count_parameters(spec)
    key = "size" if asked.params is None else "model.params"
    size = config.size if asked.params is None else asked.params
    if size not in ("auto", *SIZES) and abs(count / target - 1) > TOLERANCE:
        fact = (
            f"with a vocabulary of {corpus.vocab_size} tokens and these knobs the nearest has "
            f"{count:,} parameters"
        )
        raise out_of_range(key, size, fact, f"set {key_word(key)}: {count:d}")
    size_text = format_count(target)
    fitted = "default: the size study's fit (arXiv 2410.19456)"
    origin["model.shape"] = f"{fitted} at {size_text} parameters"
    return ChosenModel(model=spec, seq_len=context, origin=origin)


def _given_knobs(config: RunConfig) -> Knobs:
    given = {key: getattr(config.model, key) for key in KNOBS}
    return {key: value for key, value in given.items() if value is not None}


def _build_model(build: Callable[..., ModelSpec], **sizes: Any) -> ModelSpec:
    try:
        return build(**sizes)
    except ValueError as error:
        raise Refusal(
            "out-of-range",
            what="a model of this shape cannot be built",
            where="run.yaml, key model",
            fact=str(error),
            remedy="change one of these keys under model",
            key="model",
        ) from None


def _choose_parameters(
    config: RunConfig, corpus: CorpusManifest, cluster: Cluster, matmul_flops: Callable[[], float]
) -> tuple[int, str]:
    """Return the parameters to aim at, and where the number came from."""
    asked = asked_parameters(config)
    if asked is not None:
        return asked, "run.yaml"
    budget = deadline_s(config, cluster)
    seconds = (1 - OVERHEAD_SHARE) * (budget or AUTO_RUN_S)
    epochs = min(config.train.epochs or FRESH_EPOCHS, FRESH_EPOCHS)
    tokens = epochs * corpus.train.tokens
    asked_count = config.train.tokens
    if asked_count is not None and "param" not in str(asked_count):
        tokens = min(tokens, asked_tokens(asked_count, 1))
    target = auto_parameters(tokens, TRAINING_SHARE * seconds * matmul_flops())
    token_text = format_count(tokens)
    time_text = format_seconds(seconds)
    time_from = "budget" if budget else "default: no budget is set"
    return target, (
        f"corpus and machine: 20 tokens a parameter (arXiv 2203.15556) of {token_text} tokens, "
        f"payable in {time_text} ({time_from})"
    )


def _choose_context(
    config: RunConfig, corpus: CorpusManifest, target: int | None
) -> tuple[int, str]:
    """Return the positions, and where the number came from: more for larger models, halved while
    the corpus cannot fill a window."""
    if config.model.context is not None:
        return config.model.context, "run.yaml"
    context = 1024
    if target is not None and target < 100e6:
        context = 256 if target < 10e6 else 512
    return _fit_context(context, "default: by size", corpus)


def _choose_window(config: RunConfig, corpus: CorpusManifest, spec: ModelSpec) -> tuple[int, str]:
    """Return the tokens of a training sequence of a model that is continued, and where the number
    came from. Long contexts stay what they are: shorter windows are faster, and fit most texts."""
    if config.model.context is not None:
        return config.model.context, "run.yaml"
    window = spec.context
    origin = "run.yaml: the model's own"
    if window > MOST_CONTINUED_WINDOW:
        window = MOST_CONTINUED_WINDOW
        origin = f"default: of the model's {spec.context:,} positions"
    return _fit_context(window, origin, corpus)


def _fit_context(context: int, origin: str, corpus: CorpusManifest) -> tuple[int, str]:
    """Return the context, halved while the corpus cannot fill it, and where the number came
    from."""
    while context > SHORTEST_CONTEXT and context > _longest_context(corpus):
        context //= 2
        origin = "corpus: the longest that its validation split fills"
    return context, origin


def _longest_context(corpus: CorpusManifest) -> int:
    """Return the longest context that has one window and its last target in both splits."""
    return min(corpus.train.tokens, corpus.val.tokens) - 1


def _demand_windows(config: RunConfig, corpus: CorpusManifest, seq_len: int) -> None:
    """Refuse a corpus with a split that cannot fill one window of `seq_len` tokens and its last
    target."""
    longest = _longest_context(corpus)
    if seq_len <= longest:
        return
    sizes = f"{corpus.train.tokens} tokens to train on and {corpus.val.tokens} to validate on"
    fits = longest >= SHORTEST_CONTEXT
    fix = f"set model.context: {longest:d}"
    if config.model.context is not None and fits:
        raise out_of_range("model.context", seq_len, f"the corpus has {sizes}", fix)
    raise Refusal(
        "corpus-too-small",
        what="the corpus cannot fill one training and one validation window of the model",
        where=corpus.source,
        fact=f"there are {sizes}; each needs at least {seq_len + 1}",
        remedy=fix if fits else _remedy(config, corpus, seq_len),
    )


def _remedy(config: RunConfig, corpus: CorpusManifest, seq_len: int) -> str:
    """Suggest how the corpus can fill its windows: with a larger share held out where that is
    enough, else with more text."""
    needed = seq_len + 1
    train = corpus.train
    val = corpus.val
    asked_percent = 100 * parse_fraction(config.data_config.val)
    if val.tokens < needed < train.tokens:
        for percent in (10, 20, 30):
            held_out = (train.tokens + val.tokens) * percent / 100
            if held_out >= ENOUGH_HELD_OUT * needed and percent > asked_percent:
                if corpus.parts:
                    return f"set data.val: {percent:d}%"
                path_word = yaml_word(corpus.source)
                return f"write in run.yaml: data: {{source: {path_word}, val: {percent:d}%}}"
    # The split stays as it is while the text grows.
    growth = needed / max(1, min(train.tokens, val.tokens))
    missing_bytes = (growth - 1) * (train.text_bytes + val.text_bytes)
    missing_bytes = max(1, math.ceil(missing_bytes))
    path_words = " or ".join(map(shell_word, corpus.places))
    return f"add text to {path_words}: about {format_bytes(missing_bytes)} are missing"
