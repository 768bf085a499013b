"""How run.yaml is trained: steps that keep within every limit, precision, batch, learning rate."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from farspan.domain.cluster import Cluster
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.cost import OVERHEAD_SHARE
from farspan.domain.escapes import key_word
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.plan_words import join_words
from farspan.domain.probe_requests import ProbeResult
from farspan.domain.problems import Refusal
from farspan.domain.train import Precision, TrainSpec
from farspan.domain.units import counted, format_count, format_seconds
from farspan.estimate.interruptions import choose_save_interval
from farspan.planning.choose_model import ChosenModel
from farspan.planning.device_modes import settle_asked
from farspan.planning.mixture import choose_shares, warn_repeats
from farspan.planning.model_speed import step_seconds
from farspan.planning.quantities import (
    asked_rows,
    asked_tokens,
    deadline_s,
    given_or,
    out_of_range,
    save_every_s,
)
from farspan.planning.recipe import Continued, apply_recipe, drafted_optimizer
from farspan.planning.size import FRESH_EPOCHS, SMALLEST, TOKENS_PER_PARAMETER, TOLERANCE
from farspan.semantics.compile_choice import NO_NVIDIA_GPU, SCALED_LOSS, is_for_gpus

#: A run's validations, and the share of its compute that they take, both about (forward is a
#: third). Fewer validations, where the fewest windows would take more.
VALIDATIONS = 12
FEWEST_VALIDATIONS = 4
VALIDATION_SHARE = 0.05
VALIDATIONS_DEFAULT = f"default: {FEWEST_VALIDATIONS} to {VALIDATIONS} a run"
#: Tokens of a source that each validation reads at least, in 8 to 16 windows. A choice, not a fit.
FEWEST_VALIDATED_TOKENS = 8192
FEWEST_VALIDATED = (8, 16)
#: Validations in a row, each clearly worse than the best, after which a run that reads its text
#: again and again ends: a quarter of the run. A choice, not a fit.
PATIENCE = 3
#: Below these tokens a parameter a model is called too large for its corpus.
FAR_TOO_FEW = 5
#: Epochs after which a budget alone no longer prolongs a run: repeats there teach almost nothing
#: (arXiv 2305.16264 fits a decay of 15 repeats).
MAX_USEFUL_EPOCHS = 16
#: Tokens of a step that even the shortest run reads: fewer leave a device idle between updates. A
#: choice, not a fit.
FEWEST_BATCH_TOKENS = 2048
#: Tokens of a probe's step at most: enough to fill a device, few enough to be quick.
MOST_PROBE_TOKENS = 8192


def batch_tokens(run_tokens: float) -> float:
    """Return the tokens of a step for a run over D tokens: 0.58 D^0.571, FEWEST_BATCH_TOKENS at
    least.

    Fitted by Step Law (arXiv 2503.04715) on models of 60M to 1B parameters; extrapolated to shorter
    runs.
    """
    return max(FEWEST_BATCH_TOKENS, 0.58 * float(run_tokens**0.571))


def draft_training(config: RunConfig, chosen: ChosenModel, workers: int) -> TrainSpec:
    """Return the training of a probe that measures this model on one device: all that run.yaml
    settles by itself; `batch` is the sequences that the device is likely to get at a time."""
    asked = config.train
    seq_len = chosen.seq_len
    rows = asked.batch.per_device or FEWEST_BATCH_TOKENS // seq_len
    if asked.batch.global_ is not None:
        rows = asked_rows(asked.batch.global_, seq_len) // workers
    batch = max(1, min(rows, MOST_PROBE_TOKENS // seq_len))
    optimizer = drafted_optimizer(asked, chosen.model)
    attention = "sdpa" if asked.attention == "auto" else asked.attention
    return TrainSpec(
        steps=1,
        batch=batch,
        seq_len=seq_len,
        precision="fp32",
        optimizer=optimizer,
        attention=attention,
        recompute=asked.recompute,
        wan_bits=asked.wan_bits,
        compile=asked.compile is True,
        seed=asked.seed,
        keep=config.checkpoint.keep,
        checkpoint_every_s=save_every_s(config),
    )


def choose_train(
    config: RunConfig,
    chosen: ChosenModel,
    drafted: TrainSpec,
    corpus: CorpusManifest,
    cluster: Cluster,
    probe: ProbeResult,
) -> tuple[TrainSpec, dict[str, str], tuple[str, ...]]:
    """Return the drafted training made concrete, where each value came from, and warnings. The
    tightest of steps, tokens, epochs, time and dollars decides the length."""
    asked = config.train
    seq_len = chosen.seq_len
    workers = len(cluster.devices)
    precision, precision_from = _choose_precision(config, cluster, probe)
    speed = probe.speeds[precision]
    end_s = deadline_s(config, cluster)
    seconds = math.inf if end_s is None else (1 - OVERHEAD_SHARE) * end_s

    # The batch goes by the run's tokens, which the tightest limit bounds.
    shares = choose_shares(config.data_config, corpus)
    epoch_tokens = corpus.epoch_tokens(shares)
    limits = _token_limits(config, chosen.model, epoch_tokens, timed=end_s is not None)
    in_time = seconds / step_seconds(1, seq_len, speed, cluster) * workers * seq_len
    run_tokens = min(in_time, *(tokens for tokens, _ in limits))
    batch, batch_from = _choose_batch(config, chosen, corpus, workers, run_tokens)
    step_tokens = batch * seq_len
    step_s = step_seconds(-(-batch // workers), seq_len, speed, cluster)
    steps, most_steps, steps_from = _choose_steps(config, limits, step_tokens, seconds, step_s)

    # What follows from the number of steps.
    schedule = replace(drafted.schedule, warmup_steps=_choose_warmup(config, steps))
    validations, validate_tokens = _choose_validations(corpus, steps * step_tokens, seq_len)
    validate_every = asked.validate_every
    if validate_every == "auto":
        validate_every = -(-steps // validations)
    epochs = steps * step_tokens / epoch_tokens
    patience = asked.patience
    if patience == "auto":
        patience = PATIENCE if epochs > FRESH_EPOCHS else 0
    train = replace(
        drafted,
        steps=steps,
        batch=batch,
        precision=precision,
        deadline_s=end_s,
        most_steps=most_steps if most_steps > steps else msgspec.UNSET,
        schedule=schedule,
        validate_every=validate_every,
        validate_tokens=validate_tokens,
        patience=patience,
        shares=shares,
    )
    best_s = None
    if config.checkpoint.every == "auto":
        best_s = choose_save_interval(cluster, count_parameters(chosen.model))
    if best_s is not None:
        train = replace(train, checkpoint_every_s=best_s)
    continued = None
    if config.model.path is not None:
        continued = Continued(chosen.trained_tokens)
    train, origin = apply_recipe(
        train,
        asked,
        chosen.model,
        epochs,
        step_tokens / workers,
        continued=continued,
    )
    train, modes_from = _choose_modes(config, cluster, train)
    origin |= modes_from

    patience_default = f"default: {PATIENCE} beyond {FRESH_EPOCHS} epochs"
    origin["train.steps"] = steps_from
    origin["train.batch"] = batch_from
    origin["train.precision"] = precision_from
    if best_s is not None:
        origin["train.checkpoint_every_s"] = "auto: least expected time at the cluster's preemption"
    elif config.checkpoint.every != "auto":
        origin["train.checkpoint_every_s"] = "run.yaml"
    origin["train.warmup_steps"] = given_or(asked.warmup, "default: 5 % of the steps")
    origin["train.deadline_s"] = "default: none" if end_s is None else "run.yaml: budget"
    origin["train.patience"] = given_or(asked.patience, patience_default)
    origin["train.validate_every"] = given_or(asked.validate_every, VALIDATIONS_DEFAULT)
    is_continued = continued is not None
    return train, origin, _list_warnings(chosen.model, corpus, train, is_continued=is_continued)


def _choose_modes(
    config: RunConfig, cluster: Cluster, train: TrainSpec
) -> tuple[TrainSpec, dict[str, str]]:
    """Return the training with what is asked of compiling and of graphs, and where it came from;
    each plan chooses for its devices what `auto` leaves open."""
    asked = config.train
    if asked.graph is True:
        obstacle = SCALED_LOSS if train.precision == "fp16" else ""
        if not is_for_gpus(cluster):
            obstacle = NO_NVIDIA_GPU
        if obstacle:
            raise out_of_range("train.graph", "true", obstacle, "set train.graph: auto")
    compile_default = "auto: by device and length of the run"
    graph_default = "auto: by device and what launches take"
    if not is_for_gpus(cluster):
        kinds = join_words(sorted({device.kind for device in cluster.devices}))
        compile_default = f"auto: {kinds} compiles only where run.yaml asks for it"
        graph_default = f"auto: {NO_NVIDIA_GPU}"
    origin = {
        "train.compile": given_or(asked.compile, compile_default),
        "train.graph": given_or(asked.graph, graph_default),
    }
    train = settle_asked(train, cluster, compiled=asked.compile, graph=asked.graph)
    return train, origin


def _choose_precision(
    config: RunConfig, cluster: Cluster, probe: ProbeResult
) -> tuple[Precision, str]:
    asked = config.train.precision
    if asked == "auto":
        tokens_per_s = {}
        for precision, speed in probe.speeds.items():
            if all(precision in device.sheet.dtypes for device in cluster.devices):
                tokens_per_s[precision] = speed.tokens_per_s
        best = max(tokens_per_s, key=lambda precision: tokens_per_s[precision])
        speeds = ", ".join(f"{p} {format_count(rate)}" for p, rate in tokens_per_s.items())
        return best, f"machine: the fastest measured (tokens/s: {speeds})"
    if lacking := cluster.lacking(asked):
        fact = f"{', '.join(lacking)} does not compute it in hardware"
        raise out_of_range("train.precision", asked, fact, "set train.precision: auto")
    return asked, "run.yaml"


def _token_limits(
    config: RunConfig, model: ModelSpec, epoch_tokens: int, timed: bool
) -> list[tuple[float, str]]:
    """Return bounds of the run's tokens, and where each came from: those that run.yaml gives, or
    else a default."""
    asked = config.train
    limits: list[tuple[float, str]] = []
    if asked.tokens is not None:
        limits.append(
            (asked_tokens(asked.tokens, count_parameters(model)), "run.yaml: train.tokens")
        )
    if asked.epochs is not None:
        limits.append((asked.epochs * epoch_tokens, "run.yaml: train.epochs"))
    if limits:
        return limits
    if timed:
        origin = f"default: {MAX_USEFUL_EPOCHS} epochs, before the budget ends"
        return [(MAX_USEFUL_EPOCHS * epoch_tokens, origin)]
    tokens = min(TOKENS_PER_PARAMETER * count_parameters(model), FRESH_EPOCHS * epoch_tokens)
    return [(tokens, "default: the fewer of 20 tokens a parameter and 4 epochs")]


def _choose_batch(
    config: RunConfig, chosen: ChosenModel, corpus: CorpusManifest, workers: int, run_tokens: float
) -> tuple[int, str]:
    """Return the sequences of a step over all devices, and where the number came from."""
    windows = (corpus.train.tokens - 1) // chosen.seq_len
    asked = config.train.batch
    if asked.global_ is None and asked.per_device is None:
        return _auto_batch(chosen, windows, workers, run_tokens, corpus.source)
    if asked.per_device is not None:
        rows = asked.per_device * workers
        key = "train.batch.per_device"
        value = str(asked.per_device)
        fix = f"{windows // workers:d}"
    else:
        assert asked.global_ is not None
        rows = asked_rows(asked.global_, chosen.seq_len)
        key = "train.batch.global"
        value = str(asked.global_)
        fix = f"{windows:d} sequences"
    if rows > windows:
        step = f"{counted(rows, 'sequence')} of {chosen.seq_len} tokens"
        fact = f"a step would read {step}, the corpus has {windows:,}"
        raise out_of_range(key, value, fact, f"set {key_word(key)}: {fix}")
    return rows, "run.yaml"


def _auto_batch(
    chosen: ChosenModel, windows: int, workers: int, run_tokens: float, source: str
) -> tuple[int, str]:
    """Return a power of two of sequences, the same for every device; at least 16 steps an epoch
    where the corpus allows."""
    if windows < workers:
        sequences = f"{counted(windows, 'sequence')} of {chosen.seq_len} tokens"
        raise Refusal(
            "corpus-too-small",
            what="the corpus cannot fill one batch",
            where=source,
            fact=f"it has {sequences} for {counted(workers, 'device')}",
            remedy=f"set parallel.workers: {windows:d}",
        )
    rows = 2 ** max(0, round(math.log2(batch_tokens(run_tokens) / chosen.seq_len)))
    rows = max(1, min(rows, windows // 16))
    device_rows = max(1, round(rows / workers))
    return device_rows * workers, "default: by the run's tokens (arXiv 2503.04715)"


def _choose_steps(
    config: RunConfig,
    limits: list[tuple[float, str]],
    step_tokens: int,
    seconds: float,
    step_s: float,
) -> tuple[int, int, str]:
    """Return steps within every limit, one at least, and within `seconds`, which even one step may
    exceed; steps within the limits alone, which a run may make that is faster than `step_s`; and
    where the first came from."""
    asked = config.train
    step_limits = []
    for tokens, origin in limits:
        if asked.steps is None or not origin.startswith("default"):
            step_limits.append((max(1, int(tokens // step_tokens)), origin))
    if asked.steps is not None:
        step_limits.append((asked.steps, "run.yaml: train.steps"))
    most_steps = min((limit for limit, _ in step_limits), default=0)
    if seconds < math.inf:
        speed = f"{format_count(step_tokens / step_s)} tokens/s"
        origin = f"run.yaml and machine: budget, {format_seconds(seconds)} at {speed}"
        step_limits.append((int(seconds // step_s), origin))
    steps, origin = min(step_limits)
    if steps < 1:
        in_dollars = config.budget.time is None
        key = "budget.usd" if in_dollars else "budget.time"
        value = config.budget.usd if in_dollars else config.budget.time
        fact = f"one step takes {format_seconds(step_s)}"
        remedy = f"raise {key_word(key)}, or lower train.batch.global or the size"
        raise out_of_range(key, value, fact, remedy)
    return steps, most_steps, origin


def _choose_warmup(config: RunConfig, steps: int) -> int:
    warmup = config.train.warmup
    if warmup == "auto":
        return min(2000, -(-steps // 20))
    if warmup > steps:
        fact = f"the run has {counted(steps, 'step')}"
        raise out_of_range("train.warmup", warmup, fact, "set train.warmup: auto")
    return warmup


def _choose_validations(corpus: CorpusManifest, run_tokens: int, seq_len: int) -> tuple[int, int]:
    """Return the number of a run's validations, and the tokens of each (0: all). Together they take
    VALIDATION_SHARE of the run's compute; FEWEST_VALIDATIONS may take more."""
    affordable = VALIDATION_SHARE * 3 * run_tokens
    sources = len(corpus.parts) if corpus.parts else 1
    least, most = FEWEST_VALIDATED
    fewest = sources * max(least, min(most, FEWEST_VALIDATED_TOKENS // seq_len))
    validations = affordable / (min(fewest * seq_len, corpus.val.tokens))
    validations = max(FEWEST_VALIDATIONS, min(VALIDATIONS, int(validations)))
    windows = max(fewest, int(affordable / VALIDATIONS // seq_len))
    tokens = 0 if windows * seq_len >= corpus.val.tokens else windows * seq_len
    return validations, tokens


def _list_warnings(
    model: ModelSpec, corpus: CorpusManifest, train: TrainSpec, *, is_continued: bool
) -> tuple[str, ...]:
    """Return warnings of a model that is too large, and of text that is read too often. A continued
    model has its size from what it read before."""
    count = count_parameters(model)
    corpus_tokens = corpus.epoch_tokens(train.shares)
    seen = train.steps * train.tokens_per_step
    warnings = []
    fresh = min(FRESH_EPOCHS * corpus_tokens, seen)
    fits = max(SMALLEST, fresh / TOKENS_PER_PARAMETER)
    if not is_continued and seen / count < FAR_TOO_FEW and count > fits * (1 + TOLERANCE):
        count_text = f"{format_count(count)} parameters, {format_count(seen)} tokens"
        warnings.append(
            f"the model is too large for what it will see: {count_text}, {seen / count:.2g} a "
            f"parameter where 20 is compute-optimal; {format_count(fits)} parameters fit"
        )
    epochs = seen / corpus_tokens
    if epochs > FRESH_EPOCHS:
        warnings.append(
            f"the run reads the corpus {epochs:.3g} times; beyond {FRESH_EPOCHS} repeats teach "
            "less and less (arXiv 2305.16264): more text, or fewer steps"
        )
    else:
        warnings += warn_repeats(corpus, train)
    return tuple(warnings)
