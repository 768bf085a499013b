"""How run.yaml is trained: steps that keep within every limit, precision, batch, learning rate."""

from __future__ import annotations

import math

import msgspec

from farspan.domain.cluster import Cluster
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import ModelSpec, parameters
from farspan.domain.probe import ProbeResult
from farspan.domain.problems import Refusal
from farspan.domain.train import Optimizer, Precision, Schedule, TrainSpec
from farspan.domain.units import format_count, format_seconds, parse_seconds
from farspan.estimate.price import RESERVE
from farspan.planning.choose_model import ChosenModel, price_per_hour
from farspan.planning.quantities import asked_rows, asked_tokens, out_of_range, positive
from farspan.planning.size import FRESH_EPOCHS, SMALLEST, TOKENS_PER_PARAMETER, TOLERANCE

#: A run has about so many validations, and spends about this share of its compute on them (forward is a third).
VALIDATIONS, VALIDATION_SHARE = 12, 0.05
#: Below so many tokens a parameter a model is called too large for its corpus.
FAR_TOO_FEW = 5
#: Epochs after which a budget alone no longer prolongs a run: repeats there teach almost nothing (arXiv 2305.16264 fits
#: a decay of 15 repeats).
MOST_EPOCHS = 16
#: Tokens of a step that even the shortest run reads: fewer leave a device idle between updates. A choice, not a fit.
FEWEST_BATCH_TOKENS = 2048
#: Tokens of a probe's step at most: enough to fill a device, few enough to be quick.
MOST_PROBE_TOKENS = 8192


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One bound on the run's tokens. One of time or money is `seconds` of training, which steps never exceed."""

    tokens: float
    why: str
    seconds: float | None = None


class ChosenTrain(msgspec.Struct, frozen=True, kw_only=True):
    train: TrainSpec
    origin: dict[str, str]
    warnings: tuple[str, ...]


def learning_rate(count: int) -> float:
    """Peak learning rate for `count` parameters: 0.1325 N^-0.305, at most 3e-3.

    Least squares in logarithms over the eight models (125M to 175B) of GPT-3's table 2.1 (arXiv 2005.14165). Below
    125M it is extrapolated, and the cap keeps it where small transformers are known to train.
    """
    return min(3e-3, float(f"{0.1325 * count**-0.305:.2g}"))


def batch_tokens(run_tokens: float) -> float:
    """Tokens of a step for a run over so many tokens: 0.58 D^0.571, FEWEST_BATCH_TOKENS at least.

    Fitted by Step Law (arXiv 2503.04715) on models of 60M to 1B parameters; extrapolated to shorter runs.
    """
    return max(FEWEST_BATCH_TOKENS, 0.58 * float(run_tokens**0.571))


def draft(config: RunConfig, chosen: ChosenModel, workers: int) -> TrainSpec:
    """What the probe trains to measure this model on one device: the settings that decide speed, and as `batch` the
    sequences that the device is likely to get at a time."""
    asked, seq_len = config.train.batch, chosen.seq_len
    rows = asked.per_device or FEWEST_BATCH_TOKENS // seq_len
    if asked.global_ is not None:
        rows = asked_rows(asked.global_, seq_len) // workers
    batch = max(1, min(rows, MOST_PROBE_TOKENS // seq_len))
    return _spec(config, chosen, steps=1, batch=batch, precision="fp32", lr=1e-4, warmup=0)


def choose_train(
    config: RunConfig, chosen: ChosenModel, corpus: CorpusManifest, cluster: Cluster, probe: ProbeResult
) -> ChosenTrain:
    """The training spec. The tightest of steps, tokens, epochs, time and dollars decides the length of the run."""
    model, workers = chosen.model, len(cluster.devices)
    precision, precision_from = _precision(config, cluster, probe)
    rate = probe.speeds[precision].tokens_per_s
    deadline_s = _deadline_s(config, cluster)
    limits = _limits(config, model, corpus, deadline_s, rate * workers)
    batch, batch_from = _batch(config, chosen, corpus, workers, min(limit.tokens for limit in limits))
    step_s = -(-batch // workers) * chosen.seq_len / rate
    steps, steps_from = _steps(config, limits, batch * chosen.seq_len, step_s)
    warmup = _warmup(config, steps)
    lr = config.train.optimizer.lr
    train = _spec(
        config, chosen, steps=steps, batch=batch, precision=precision, warmup=warmup,
        lr=learning_rate(parameters(model)) if lr == "auto" else lr, deadline_s=deadline_s,
        validate_tokens=_validate_tokens(corpus, steps * batch * chosen.seq_len, chosen.seq_len),
    )  # fmt: skip
    origin = {
        "train.steps": steps_from,
        "train.batch": batch_from,
        "train.precision": precision_from,
        "train.lr": "run.yaml" if lr != "auto" else "default: fitted on GPT-3's table 2.1 (arXiv 2005.14165)",
        "train.warmup_steps": "run.yaml" if config.train.warmup != "auto" else "default: 5 % of the steps",
        "train.deadline_s": "run.yaml: budget" if deadline_s is not None else "default: none",
        "train.validate_every": "run.yaml" if config.train.validate_every != "auto" else "default: 12 a run",
    }
    return ChosenTrain(train=train, origin=origin, warnings=_warnings(model, corpus, train))


def _spec(
    config: RunConfig, chosen: ChosenModel, *, steps: int, batch: int, precision: Precision, lr: float, warmup: int,
    deadline_s: float | None = None, validate_tokens: int = 0,
) -> TrainSpec:  # fmt: skip
    asked, optimizer = config.train, config.train.optimizer
    every = -(-steps // VALIDATIONS) if asked.validate_every == "auto" else asked.validate_every
    return TrainSpec(
        steps=steps, batch=batch, seq_len=chosen.seq_len, precision=precision, deadline_s=deadline_s,
        optimizer=Optimizer(
            lr=lr, beta1=optimizer.beta1, beta2=optimizer.beta2, weight_decay=optimizer.weight_decay,
            clip=optimizer.clip,
        ),
        schedule=Schedule(kind=asked.schedule, warmup_steps=warmup),
        attention="sdpa" if asked.attention == "auto" else asked.attention,
        recompute=asked.recompute, compile=asked.compile, seed=asked.seed, validate_every=every,
        validate_tokens=validate_tokens, patience=asked.patience, keep=config.checkpoint.keep,
        checkpoint_every_s=positive(parse_seconds, config.checkpoint.every, "checkpoint.every", "5m"),
    )  # fmt: skip


def _precision(config: RunConfig, cluster: Cluster, probe: ProbeResult) -> tuple[Precision, str]:
    everywhere = [p for p in probe.speeds if all(p in device.dtypes for device in cluster.devices)]
    asked = config.train.precision
    if asked == "auto":
        best = max(everywhere, key=lambda p: probe.speeds[p].tokens_per_s)
        speeds = ", ".join(f"{p} {format_count(probe.speeds[p].tokens_per_s)}" for p in everywhere)
        return best, f"machine: the fastest measured (tokens/s: {speeds})"
    if lacking := sorted({d.kind for d in cluster.devices if asked not in d.dtypes}):
        fact = f"{', '.join(lacking)} does not compute it in hardware"
        raise out_of_range("train.precision", asked, fact, "set train.precision: auto")
    return asked, "run.yaml"


def _deadline_s(config: RunConfig, cluster: Cluster) -> float | None:
    """The wall-clock end that the budget's time and dollars set, whichever is sooner."""
    ends = []
    if config.budget.time is not None:
        ends.append(positive(parse_seconds, config.budget.time, "budget.time", "1h"))
    if config.budget.usd is not None:
        ends.append(config.budget.usd / price_per_hour(config, cluster) * 3600)
    return min(ends, default=None)


def _limits(
    config: RunConfig, model: ModelSpec, corpus: CorpusManifest, deadline_s: float | None, tokens_per_s: float
) -> list[Limit]:
    """Every bound in tokens, but for `train.steps`, which needs the batch first."""
    asked, limits = config.train, []
    if asked.tokens is not None:
        limits.append(Limit(tokens=asked_tokens(asked.tokens, parameters(model)), why="run.yaml: train.tokens"))
    if asked.epochs is not None:
        limits.append(Limit(tokens=asked.epochs * corpus.train.tokens, why="run.yaml: train.epochs"))
    if deadline_s is not None:
        seconds = (1 - RESERVE) * deadline_s
        why = f"run.yaml and machine: budget, {format_seconds(deadline_s)} at {format_count(tokens_per_s)} tokens/s"
        limits.append(Limit(tokens=seconds * tokens_per_s, why=why, seconds=seconds))
        if len(limits) == 1 and asked.steps is None:
            why = f"default: {MOST_EPOCHS} epochs, before the budget ends"
            limits.append(Limit(tokens=MOST_EPOCHS * corpus.train.tokens, why=why))
    if not limits:
        why = "default: the fewer of 20 tokens a parameter and 4 epochs"
        tokens = min(TOKENS_PER_PARAMETER * parameters(model), FRESH_EPOCHS * corpus.train.tokens)
        limits.append(Limit(tokens=tokens, why=why))
    return limits


def _batch(
    config: RunConfig, chosen: ChosenModel, corpus: CorpusManifest, workers: int, run_tokens: float
) -> tuple[int, str]:
    """Sequences of a step over all devices, and where the number came from."""
    windows, asked = (corpus.train.tokens - 1) // chosen.seq_len, config.train.batch
    if asked.global_ is None and asked.per_device is None:
        return _auto_batch(chosen, windows, workers, run_tokens, corpus.source)
    if asked.per_device is not None:
        rows, key, value = asked.per_device * workers, "train.batch.per_device", str(asked.per_device)
    else:
        assert asked.global_ is not None
        rows, key, value = asked_rows(asked.global_, chosen.seq_len), "train.batch.global", str(asked.global_)
    if rows > windows:
        fact = f"a step would read {rows} sequences of {chosen.seq_len} tokens, the corpus has {windows}"
        fits = f"{windows} sequences" if key.endswith("global") else str(windows // workers)
        raise out_of_range(key, value, fact, f"set {key}: {fits}")
    return rows, "run.yaml"


def _auto_batch(chosen: ChosenModel, windows: int, workers: int, run_tokens: float, source: str) -> tuple[int, str]:
    """A power of two of sequences, the same for every device; at least 16 steps an epoch where the corpus allows."""
    if windows < workers:
        raise Refusal(
            "corpus-too-small",
            what="the corpus cannot fill one batch",
            where=source,
            fact=f"it has {windows} sequences of {chosen.seq_len} tokens for {workers} devices",
            remedy=f"set parallel.workers: {windows}",
        )
    rows = 2 ** max(0, round(math.log2(batch_tokens(run_tokens) / chosen.seq_len)))
    rows = max(1, min(rows, windows // 16))
    return max(1, round(rows / workers)) * workers, "default: by the run's tokens (arXiv 2503.04715)"


def _steps(config: RunConfig, limits: list[Limit], step_tokens: int, step_s: float) -> tuple[int, str]:
    found = [(_whole_steps(limit, step_tokens, step_s), limit.why) for limit in limits]
    if config.train.steps is not None:
        only_default = limits[0].why.startswith("default")
        found = [*([] if only_default else found), (config.train.steps, "run.yaml: train.steps")]
    steps, why = min(found)
    if steps < 1:
        key = "budget.time" if config.budget.time is not None else "budget.usd"
        value = config.budget.time if config.budget.time is not None else config.budget.usd
        fact = f"one step takes {format_seconds(step_s)}"
        raise out_of_range(key, value, fact, f"raise {key}, or lower train.batch.global or the size")
    return steps, why


def _whole_steps(limit: Limit, step_tokens: int, step_s: float) -> int:
    """Steps that stay within the limit; at least one, unless it is one of time."""
    return max(1, int(limit.tokens // step_tokens)) if limit.seconds is None else int(limit.seconds // step_s)


def _warmup(config: RunConfig, steps: int) -> int:
    if config.train.warmup == "auto":
        return min(2000, -(-steps // 20))
    if config.train.warmup > steps:
        fact = f"the run has {steps} steps"
        raise out_of_range("train.warmup", config.train.warmup, fact, "set train.warmup: auto")
    return config.train.warmup


def _validate_tokens(corpus: CorpusManifest, run_tokens: int, seq_len: int) -> int:
    """Tokens of one validation (0: all) so that all of them take VALIDATION_SHARE of the run; 16 windows at least."""
    affordable = VALIDATION_SHARE * 3 * run_tokens / VALIDATIONS
    windows = max(16, int(affordable // seq_len))
    return 0 if windows * seq_len >= corpus.val.tokens else windows * seq_len


def _warnings(model: ModelSpec, corpus: CorpusManifest, train: TrainSpec) -> tuple[str, ...]:
    count, seen, found = parameters(model), train.steps * train.tokens_per_step, []
    epochs = seen / corpus.train.tokens
    fits = max(SMALLEST, min(FRESH_EPOCHS * corpus.train.tokens, seen) / TOKENS_PER_PARAMETER)
    if seen / count < FAR_TOO_FEW and count > fits * (1 + TOLERANCE):
        found.append(
            f"the model is too large for what it will see: {format_count(count)} parameters, {format_count(seen)} "
            f"tokens, {seen / count:.2g} a parameter where 20 is compute-optimal; {format_count(fits)} parameters fit"
        )
    if epochs > FRESH_EPOCHS:
        found.append(
            f"the run reads the corpus {epochs:.3g} times; beyond {FRESH_EPOCHS} repeats teach less and less "
            "(arXiv 2305.16264): more text, or fewer steps"
        )
    return tuple(found)
