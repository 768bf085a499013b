"""The charts of a run: which curves are drawn, and over what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from farspan.report import losses
from farspan.report.charts import Axis, Chart, Series
from farspan.report.history import RunHistory

#: How far smoothing reaches to each side, as a share of the points.
_SMOOTHING = 1 / 100
#: Seconds of a unit of time, and its name.
TIME_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))


def run_charts(run: RunHistory) -> list[Chart]:
    """Return the six charts of a run; none before its first step, and none of gradients if no norm
    was finite."""
    history = run.history
    if not history.steps:
        return []
    by_tokens, by_time = _token_and_time_axes(run)
    steps = [timed.step for timed in history.steps]
    loss = _noisy_and_smoothed("train loss", [step.loss for step in steps], "train")
    loss += _validation_series(run)

    # Those of the table, which are of the tokens that the last validation read.
    entropies = losses.entropies(run, losses.last_validation(run))
    levels = tuple((f"{name} entropy", nats) for name, nats in entropies.items())
    start = losses.start_validation(run)
    if start is not None:
        levels += (("before training", losses.comparable_loss(start)[0]),)
    speeds = [step.tokens / step.step_s for step in steps]
    speed = _noisy_and_smoothed("tokens/s", speeds, "speed")
    size, unit = (1e9, "GB") if history.memory_bytes >= 1e9 else (1e6, "MB")
    worker = "rank 0" if run.others else "the largest worker"
    memory = [step.memory_bytes / size for step in steps]
    used = (Series(f"memory ({unit})", memory, "line", "memory"),)
    rate = (Series("learning rate", [step.lr for step in steps], "line", "lr"),)
    charts = [
        Chart("loss-tokens", "Loss against tokens", by_tokens, loss, levels=levels),
        Chart("loss-time", "Loss against time", by_time, loss, levels=levels),
        Chart("speed", "Tokens a second", by_time, speed, "zero"),
        Chart("memory", f"Memory of {worker}, {unit}", by_time, used, "zero"),
        Chart("lr", "Learning rate", by_tokens, rate, "zero"),
    ]
    norms = [step.grad_norm for step in steps]
    if any(norm is not None for norm in norms):
        norm = _noisy_and_smoothed("gradient norm", norms, "norm")
        charts.append(Chart("grad-norm", "Gradient norm", by_tokens, norm, "log"))
    return charts


def _validation_series(run: RunHistory) -> tuple[Series, ...]:
    """Return the validation losses, on the tokens that every validation read; and the run's
    headline loss, if it is of more tokens."""
    end = losses.last_validation(run)
    steps = [timed.step.step for timed in run.history.steps]
    if end is None:
        return (Series("validation loss", [None] * len(steps), "points", "val"),)
    validated = {event.step: losses.comparable_loss(event)[0] for event in run.history.validations}
    points = [validated.get(step) for step in steps]
    _, tokens, of = losses.comparable_loss(end)
    name = "validation loss"
    if of is not None and tokens != of:
        name = f"validation loss {losses.read_on(tokens, of)}"
    series = Series(name, points, "points", "val")
    if tokens == end.tokens:
        return (series,)
    last = [end.loss if step == end.step else None for step in steps]
    last_name = f"last validation {losses.read_on(end.tokens, end.of)}".rstrip()
    return series, Series(last_name, last, "points", "norm")


def _token_and_time_axes(run: RunHistory) -> tuple[Axis, Axis]:
    """Return the axes: tokens, and time in the largest unit that the run has three of; resumptions
    are marked."""
    steps = run.history.steps
    run_s = run.history.run_s
    size_s, unit = next((unit for unit in TIME_UNITS if run_s >= 3 * unit[0]), (1.0, "s"))
    tokens_at = {timed.step.step: timed.tokens for timed in steps}
    token_marks = []
    time_marks = []
    for start, at_s in run.history.starts[1:]:
        name = f"resumed after step {start.step:,}"
        token_marks.append((name, tokens_at.get(start.step, 0)))
        time_marks.append((name, at_s / size_s))
    tokens = [timed.tokens for timed in steps]
    times = [timed.time_s / size_s for timed in steps]
    return Axis("tokens", tokens, tuple(token_marks)), Axis(
        f"time ({unit})", times, tuple(time_marks)
    )


def _noisy_and_smoothed(name: str, values: Sequence[float | None], tint: str) -> tuple[Series, ...]:
    """Return a noisy series as it is, faint, and smoothed; both without a point where there is no
    value."""
    means = iter(moving_mean([value for value in values if value is not None]))
    smoothed = [None if value is None else next(means) for value in values]
    return Series(name, values, "faint", tint), Series(f"{name} smoothed", smoothed, "line", tint)


def moving_mean(values: Sequence[float]) -> list[float]:
    """Average each value with its neighbours, the same number before and after: nothing lags."""
    sums = [0.0, *accumulate(values)]
    reach = math.ceil(len(values) * _SMOOTHING)
    last = len(values) - 1
    means = []
    for index in range(len(values)):
        near = min(reach, index, last - index)
        near_sum = sums[index + near + 1] - sums[index - near]
        means.append(near_sum / (2 * near + 1))
    return means
