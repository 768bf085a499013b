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


def figures(run: RunHistory) -> list[Chart]:
    """Return the six charts of a run; none before its first step, and none of gradients if no norm
    was finite."""
    history = run.history
    if not history.steps:
        return []
    by_tokens, by_time = _axes(run)
    steps = [timed.step for timed in history.steps]
    validated = {event.step: losses.compared(event)[0] for event in history.validations}
    loss = (
        *_both("train loss", [step.loss for step in steps], "train"),
        Series(
            _validation_name(run), [validated.get(step.step) for step in steps], "points", "val"
        ),
        *_last_validation(run),
    )
    # Those of the table, which are of the tokens that the last validation read.
    entropies = tuple(
        (f"{name} entropy", nats) for name, nats in losses.entropies(run, losses.last(run)).items()
    )
    speed = _both("tokens/s", [step.tokens / step.step_s for step in steps], "speed")
    size, unit = (1e9, "GB") if history.memory_bytes >= 1e9 else (1e6, "MB")
    whose = "rank 0" if run.others else "the largest worker"
    memory = Series(
        f"memory ({unit})", [step.memory_bytes / size for step in steps], "line", "memory"
    )
    rate = Series("learning rate", [step.lr for step in steps], "line", "lr")
    norms = [step.grad_norm for step in steps]
    charts = [
        Chart("loss-tokens", "Loss against tokens", by_tokens, loss, levels=entropies),
        Chart("loss-time", "Loss against time", by_time, loss, levels=entropies),
        Chart("speed", "Tokens a second", by_time, speed, "zero"),
        Chart("memory", f"Memory of {whose}, {unit}", by_time, (memory,), "zero"),
        Chart("lr", "Learning rate", by_tokens, (rate,), "zero"),
    ]
    if any(norm is not None for norm in norms):
        charts.append(
            Chart(
                "grad-norm",
                "Gradient norm",
                by_tokens,
                _both("gradient norm", norms, "norm"),
                "log",
            )
        )
    return charts


def _validation_name(run: RunHistory) -> str:
    """With the tokens that every validation read, where these are not all."""
    end = losses.last(run)
    _, tokens, of = (0.0, 0, None) if end is None else losses.compared(end)
    return (
        "validation loss"
        if of is None or tokens == of
        else f"validation loss {losses.read_on(tokens, of)}"
    )


def _last_validation(run: RunHistory) -> tuple[Series, ...]:
    """Return the run's headline loss, if it is of more tokens than the other points."""
    end = losses.last(run)
    if end is None or losses.compared(end)[1] == end.tokens:
        return ()
    values = [end.loss if timed.step.step == end.step else None for timed in run.history.steps]
    name = f"last validation {losses.read_on(end.tokens, end.of)}".rstrip()
    return (Series(name, values, "points", "norm"),)


def _axes(run: RunHistory) -> tuple[Axis, Axis]:
    """Tokens, and time in the largest unit of which the run has at least three; where it was
    resumed is marked."""
    steps = run.history.steps
    run_s = run.history.run_s
    units = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
    seconds, unit = next((size, name) for size, name in units if run_s >= 3 * size or name == "s")
    tokens_at = {timed.step.step: timed.tokens for timed in steps}
    resumed = [
        (f"resumed after step {start.step:,}", start.step, at_s)
        for start, at_s in run.history.starts[1:]
    ]
    return (
        Axis(
            "tokens",
            [timed.tokens for timed in steps],
            tuple((name, tokens_at.get(step, 0)) for name, step, _ in resumed),
        ),
        Axis(
            f"time ({unit})",
            [timed.time_s / seconds for timed in steps],
            tuple((name, at_s / seconds) for name, _, at_s in resumed),
        ),
    )


def _both(name: str, values: Sequence[float | None], tint: str) -> tuple[Series, Series]:
    """Return a noisy series as it is, faint, and smoothed; both without a point where there is no
    value."""
    means = iter(smooth([value for value in values if value is not None]))
    smoothed = [None if value is None else next(means) for value in values]
    return Series(name, values, "faint", tint), Series(f"{name} smoothed", smoothed, "line", tint)


def smooth(values: Sequence[float]) -> list[float]:
    """Each value's mean with its neighbours, as many before as after so that nothing lags."""
    sums = [0.0, *accumulate(values)]
    reach = math.ceil(len(values) * _SMOOTHING)
    last = len(values) - 1
    means = []
    for index in range(len(values)):
        near = min(reach, index, last - index)
        means.append((sums[index + near + 1] - sums[index - near]) / (2 * near + 1))
    return means
