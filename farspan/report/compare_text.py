"""Write a run and its prediction as rows of tables, and its traced step as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from farspan.domain.cost import OVERHEAD_SHARE, Measurement
from farspan.domain.units import counted, format_bytes, short_time
from farspan.estimate.loss_forecast import revised
from farspan.report import losses
from farspan.report.compare import FIGURES, Comparison, DeviceRow
from farspan.report.history import COMPLETE, RunHistory
from farspan.report.plan_picture import Mark
from farspan.report.plan_terminal import MAX_LANES, Line, filled, legend, wrapped

#: Parts that are predicted to take less than this share of a step have no ratio.
MIN_COMPARED_SHARE = 0.01

#: A row of a table; the first of a table is its heading.
Row = tuple[str, str, str, str]


def comparison_tables(
    run: RunHistory, measured: Measurement | None, compared: Comparison | None
) -> list[list[Row]]:
    """Return the tables of a run and its prediction; of several devices also those of a step, its
    parts, and each device's memory."""
    rows_of = {"run": figure_rows(run, measured)}
    if compared is not None:
        rows_of["step"] = step_rows(compared)
        if compared.slowest is not None:
            least_s = MIN_COMPARED_SHARE * compared.steps.predicted_s
            parts = []
            for part in compared.parts:
                seconds = (part.predicted_s, part.measured_s)
                parts.append(_compare_row(part.name, *seconds, _format_part, least=least_s))
            rows_of[f"step {compared.traced:,} of the slowest, {compared.slowest.name}"] = parts
        memory = []
        for row in compared.rows:
            used = (row.memory_predicted, row.memory)
            memory.append(_compare_row(row.name, *used, format_bytes))
        rows_of["peak memory"] = memory
    heads = ("predicted", "measured", "ratio")
    return [[(name, *heads), *rows] for name, rows in rows_of.items() if rows]


def _compare_row(
    what: str,
    predicted: float | None,
    measured: float | None,
    show: Callable[[Any], str],
    *,
    least: float = 0.0,
) -> Row:
    """Return a row; without a ratio where either is missing or too little is predicted."""
    ratio = ""
    if predicted and measured is not None and predicted >= least:
        ratio = f"{measured / predicted:.2f}"
    a, b = ("" if value is None else show(value) for value in (predicted, measured))
    return what, a, b, ratio


def _format_part(seconds: float) -> str:
    return short_time(seconds) if seconds >= 1e-6 else "0 ms"


def figure_rows(run: RunHistory, measured: Measurement | None) -> list[Row]:
    """Return the figures of a run that were predicted, and its loss.

    The predicted time and money of a run that ended early are those of the steps that it did; under
    a deadline fewer may have been predicted than the plan has.
    """
    estimate = run.history.estimate
    train = run.plan.train
    if estimate is None or measured is None:
        return []
    steps = train.steps
    if train.deadline_s is not None:
        in_time = round((1 - OVERHEAD_SHARE) * estimate.run_s / estimate.step_s)
        steps = max(1, min(steps, in_time))
    part = "" if measured.steps == train.steps else f" of {counted(measured.steps, 'step')}"
    rows = [_compare_row("step time", estimate.step_s, measured.step_s, short_time)]
    for figure in FIGURES:
        predicted = getattr(estimate, figure.field, None)
        value = getattr(measured, figure.field, None)
        if predicted is None or value is None:
            continue
        what = figure.what
        if figure.order == "work":
            what += part
            predicted *= measured.steps / steps
        rows.append(_compare_row(what, predicted, value, figure.show))
    return rows + _loss_rows(run)


def _loss_rows(run: RunHistory) -> list[Row]:
    """Return the loss of a run that has ended as it was predicted before, and after the first
    fifth; the last column is the difference."""
    forecast = run.forecast
    end = losses.last_validation(run)
    steps = run.history.steps
    if forecast is None or end is None or run.history.reason not in COMPLETE:
        return []
    predicted = {"validation loss": forecast.loss}
    train = run.plan.train
    whole = steps[-1].step.steps or train.steps
    for event in run.history.validations:
        share = event.step / whole
        later = revised(forecast, train.schedule, share, event.loss, event.bigram_nats)
        if later is not None:
            predicted[f"the same, from step {event.step:,}"] = later[0]
            break
    rows = []
    for what, loss in predicted.items():
        rows.append((what, f"{loss:.3f}", f"{end.loss:.3f}", f"{end.loss - loss:+.3f}"))
    return rows


def step_rows(compared: Comparison) -> list[Row]:
    """Return the median step with its interval and quartiles, then each device or link whose speed
    lies outside the interval."""
    steps = compared.steps
    inside = "inside" if steps.inside else "outside"
    what = f"step, {inside} the interval"
    rows = [_compare_row(what, steps.predicted_s, steps.measured_s, short_time)]
    interval = "-".join(map(short_time, steps.bounds))
    quartiles = "-".join(map(short_time, steps.half))
    rows.append(("interval; middle half of the steps", interval, quartiles, ""))
    for drift in compared.drifts:
        rows.append(_compare_row(drift.label, drift.predicted_s, drift.measured_s, short_time))
    if not steps.inside and not compared.drifts:
        rows.append(("no traced device or link is the cause", "", "", ""))
    return rows


def step_lines(compared: Comparison) -> list[str]:
    """Return the rows of `step_rows` as lines, and what planning again would give."""
    lines = []
    for what, predicted, measured, ratio in step_rows(compared):
        if predicted:
            what += f": {measured}, predicted {predicted}"
        lines.append(f"{what} ({ratio} x)" if ratio else what)
    return [*lines, compared.again] if compared.again else lines


def traced_line(comparison: Comparison) -> str:
    """Return which step the rows show, and the median step."""
    traced = short_time(comparison.traced_s)
    usual = short_time(comparison.steps.measured_s)
    return f"step {comparison.traced:,}, the last traced on all devices: {traced}; median {usual}"


def draw_timeline(comparison: Comparison, width: int) -> Iterator[Line]:
    """Yield two lines a device, measured above predicted, on one scale; then the notes."""
    if drawn := comparison.drawn:
        yield [(f"Step {comparison.traced:,} of each device, measured above predicted", "strong")]
        labels = [_row_label(row) for row in drawn]
        column = max(map(len, ["predicted", *labels]))
        cells = width - column - 2
        ends = comparison.ends
        shown: list[Mark] = []
        for row in drawn:
            shown += (*row.measured, *row.predicted)
        for label, row in zip(labels[:MAX_LANES], drawn, strict=False):
            yield [(f"{label:{column}}  ", ""), *filled(row.measured, row.stage, ends, cells)]
            if row.predicted:
                predicted = f"{'predicted':>{column}}  "
                yield [(predicted, "soft"), *filled(row.predicted, row.stage, ends, cells)]
        if len(drawn) > MAX_LANES:
            more = counted(len(drawn) - MAX_LANES, "more device")
            yield [(f"{more} on the page", "soft")]
        scale = short_time(ends).rjust(cells - 1)
        yield [(f"{'':{column}}  0{scale}", "soft")]
        yield from wrapped(legend(shown, "nothing recorded, or predicted to wait"), width)
    for note in comparison.notes:
        yield from wrapped(note, width)


def _row_label(row: DeviceRow) -> str:
    """Return `rank 3, stage 2`."""
    label = f"rank {row.rank}"
    if "stage" not in row.words:
        return label
    stage, _, _ = row.words.partition(":")
    return f"{label}, {stage}"
