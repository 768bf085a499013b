"""The figures of a run: which curves are drawn, and each chart with links that hold it as SVG and its points as CSV."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from urllib.parse import quote

import msgspec

from farspan.domain.results import Step
from farspan.report.charts import Chart, Series, scales, thin, to_csv, to_svg
from farspan.report.history import Run

#: How far smoothing reaches to each side, as a share of the points.
_SMOOTHING = 1 / 100


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """The run over its steps, one entry a step or validation; None where there is no value."""

    tokens: list[float]
    time_s: list[float]
    loss: list[float | None]
    val_loss: list[float | None]
    lr: list[float | None]
    grad_norm: list[float | None]
    tokens_per_s: list[float | None]
    memory_bytes: list[float | None]


class _Axis(msgspec.Struct, frozen=True):
    """What charts are drawn over, and where on it the run was resumed."""

    name: str
    values: list[float]
    marks: tuple[tuple[str, float], ...]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A chart as the template takes it. `x_range` are the values at the `sides`, which are pixels of the SVG."""

    chart: Chart
    svg: str
    svg_link: str
    csv_link: str
    x_range: tuple[float, float]
    sides: tuple[float, float]
    note: str


def curves(run: Run) -> Curves:
    """Everything that is drawn, by step."""
    steps = {timed.step.step: timed for timed in run.history.steps}
    validated = {event.step: event.loss for event in run.history.validations}
    numbers = sorted(steps.keys() | validated.keys())
    tokens, time_s = [0.0], [0.0]
    for number in numbers:
        timed = steps.get(number)
        tokens.append(timed.tokens if timed else tokens[-1])
        time_s.append(timed.time_s if timed else time_s[-1])

    def of_steps(value: Callable[[Step], float]) -> list[float | None]:
        return [value(steps[number].step) if number in steps else None for number in numbers]

    return Curves(
        tokens=tokens[1:],
        time_s=time_s[1:],
        loss=of_steps(lambda step: step.loss),
        val_loss=[validated.get(number) for number in numbers],
        lr=of_steps(lambda step: step.lr),
        grad_norm=of_steps(lambda step: step.grad_norm),
        tokens_per_s=of_steps(lambda step: step.tokens / step.step_s),
        memory_bytes=of_steps(lambda step: step.memory_bytes),
    )


def charts(run: Run) -> list[Chart]:
    """The six charts of a run; none before its first step."""
    history, data = run.history, curves(run)
    if not history.steps:
        return []
    seconds, unit = _time_unit(history.run_s)
    size, bytes_unit = (1e9, "GB") if history.memory_bytes >= 1e9 else (1e6, "MB")
    tokens_at = {timed.step.step: float(timed.tokens) for timed in history.steps}
    resumed = [(f"resumed after step {started.step:,}", started.step, at_s) for started, at_s in history.starts[1:]]
    by_tokens = _Axis("tokens", data.tokens, tuple((name, tokens_at.get(step, 0.0)) for name, step, _ in resumed))
    by_time = _Axis(
        f"time ({unit})",
        [time_s / seconds for time_s in data.time_s],
        tuple((name, at_s / seconds) for name, _, at_s in resumed),
    )
    loss = (*_both("train loss", data.loss, "train"), Series("validation loss", data.val_loss, "points", "val"))
    entropies = (("unigram entropy", run.corpus.unigram_nats), ("bigram entropy", run.corpus.bigram_nats))
    memory = Series(f"memory ({bytes_unit})", [value and value / size for value in data.memory_bytes], "line", "memory")
    rate = Series("learning rate", data.lr, "line", "lr")
    return [
        _chart("loss-tokens", "Loss against tokens", by_tokens, loss, levels=entropies),
        _chart("loss-time", "Loss against time", by_time, loss, levels=entropies),
        _chart("speed", "Tokens a second", by_time, _both("tokens/s", data.tokens_per_s, "speed"), from_zero=True),
        _chart("memory", f"Memory of the largest worker, {bytes_unit}", by_time, (memory,), from_zero=True),
        _chart("lr", "Learning rate", by_tokens, (rate,), from_zero=True),
        _chart("grad-norm", "Gradient norm", by_tokens, _both("gradient norm", data.grad_norm, "norm"), log=True),
    ]


def _time_unit(longest_s: float) -> tuple[float, str]:
    """The largest unit of which the run has at least three: (its seconds, its name)."""
    units = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))
    return next((unit for unit in units if longest_s >= 3 * unit[0]), (1.0, "s"))


def _both(name: str, values: list[float | None], tint: str) -> tuple[Series, Series]:
    """A noisy series as it is, faint, and smoothed."""
    return Series(name, values, "faint", tint), Series(f"{name} smoothed", smooth(values), "line", tint)


def _chart(
    name: str,
    title: str,
    axis: _Axis,
    series: tuple[Series, ...],
    *,
    levels: tuple[tuple[str, float], ...] = (),
    log: bool = False,
    from_zero: bool = False,
) -> Chart:
    """A chart whose description says where its series begin and end: what a reader who sees no picture needs."""
    told = []
    for one in series:
        values = [value for value in one.values if value is not None]
        if values and one.kind != "faint":
            told.append(f"{one.name} goes from {values[0]:.4g} to {values[-1]:.4g}, lowest {min(values):.4g}")
    told += [f"{level} is {value:.4g}" for level, value in levels]
    return Chart(
        name=name,
        title=title,
        text=f"Over {axis.name}: {'; '.join(told)}.",
        x_label=axis.name,
        x=axis.values,
        series=series,
        levels=levels,
        marks=axis.marks,
        log=log,
        from_zero=from_zero,
    )


def smooth(values: Sequence[float | None]) -> list[float | None]:
    """Each value's mean with its neighbours, as many before as after so that nothing lags; None stays None."""
    known = [value for value in values if value is not None]
    sums = [0.0, *accumulate(known)]
    reach, index = math.ceil(len(known) * _SMOOTHING), 0
    means: list[float | None] = []
    for value in values:
        if value is None:
            means.append(None)
            continue
        near = min(reach, index, len(known) - 1 - index)
        means.append((sums[index + near + 1] - sums[index - near]) / (2 * near + 1))
        index += 1
    return means


def figure(whole: Chart, style: str) -> Figure:
    chart = thin(whole)
    x, _ = scales(chart)
    colours = dict(reversed(re.findall(r"--([\w-]+):\s*([^;]+);", style)))
    # Programs that take SVG files know no CSS variables: a file has the light colours written out.
    alone = to_svg(chart, re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], style))
    notes = ["dotted: resumed"] if chart.marks else []
    if len(chart.x) < len(whole.x):
        notes.append(f"{len(chart.x):,} of {len(whole.x):,} steps drawn, extremes kept")
    return Figure(
        chart=chart,
        svg=to_svg(chart),
        svg_link="data:image/svg+xml;base64," + base64.b64encode(alone.encode()).decode(),
        csv_link="data:text/csv;charset=utf-8," + quote(to_csv(chart), safe=",. ()/"),
        x_range=(x.low, x.high),
        sides=(x.start, x.end),
        note=" · ".join(notes),
    )
