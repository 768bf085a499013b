"""Write a run beside its prediction as rows of tables, and its traced step as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from farspan.domain.results import RESERVE, Measurement
from farspan.domain.units import counted, format_bytes, short_time
from farspan.estimate.forecast import revised
from farspan.report import losses
from farspan.report.compare import FIGURES, Comparison, DeviceRow
from farspan.report.history import COMPLETE, RunHistory
from farspan.report.plan_terminal import MOST, Line, filled, legend, wrapped

#: Parts that are predicted to take less than this share of a step have no ratio.
COMPARED = 0.01

#: A row of a table; the first of a table is its heading.
Row = tuple[str, str, str, str]


def tables(
    run: RunHistory, measured: Measurement | None, compared: Comparison | None
) -> list[list[Row]]:
    """Return the tables of a run beside its prediction; of several devices also those of a step,
    its parts, and each device's memory."""
    beside = ("predicted", "measured", "ratio")
    found = [[("run", *beside), *figure_rows(run, measured)]]
    if compared is not None:
        found.append([("step", *beside), *step_rows(compared)])
        if compared.slowest is not None:
            least_s = COMPARED * compared.steps.predicted_s
            parts = [
                _row(part.name, part.predicted_s, part.measured_s, _time, least=least_s)
                for part in compared.parts
            ]
            where = f"step {compared.traced:,} of the slowest, {compared.slowest.name}"
            found.append([(where, *beside), *parts])
        memory = [
            _row(row.name, row.memory_predicted, row.memory, format_bytes) for row in compared.rows
        ]
        found.append([("peak memory", *beside), *memory])
    return [table for table in found if len(table) > 1]


def _row(
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
    shown = ["" if value is None else show(value) for value in (predicted, measured)]
    return what, shown[0], shown[1], ratio


def _time(seconds: float) -> str:
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
        steps = max(1, min(steps, round((1 - RESERVE) * estimate.run_s / estimate.step_s)))
    part = "" if measured.steps == train.steps else f" of {counted(measured.steps, 'step')}"
    rows = [_row("step time", estimate.step_s, measured.step_s, short_time)]
    for figure in FIGURES:
        predicted, value = (getattr(side, figure.field, None) for side in (estimate, measured))
        if predicted is not None and value is not None:
            whole = figure.order == "work"
            predicted *= measured.steps / steps if whole else 1
            rows.append(_row(figure.what + part * whole, predicted, value, figure.show))
    return rows + _loss_rows(run)


def _loss_rows(run: RunHistory) -> list[Row]:
    """Return the loss of a run that has ended as it was predicted before, and after the first
    fifth; the last column is the difference."""
    forecast = run.forecast
    end = losses.last(run)
    steps = run.history.steps
    if forecast is None or end is None or run.history.reason not in COMPLETE:
        return []
    predicted = {"validation loss": forecast.loss}
    whole = steps[-1].step.steps or run.plan.train.steps
    for event in run.history.validations:
        share = event.step / whole
        schedule = run.plan.train.schedule
        later = revised(forecast, schedule, share, event.loss, event.bigram_nats)
        if later is not None:
            predicted[f"the same, from step {event.step:,}"] = later[0]
            break
    return [
        (what, f"{loss:.3f}", f"{end.loss:.3f}", f"{end.loss - loss:+.3f}")
        for what, loss in predicted.items()
    ]


def step_rows(compared: Comparison) -> list[Row]:
    """Return the median step with its interval and quartiles, then each device or link whose speed
    lies outside the interval."""
    steps = compared.steps
    inside = "inside" if steps.inside else "outside"
    step = _row(f"step, {inside} the interval", steps.predicted_s, steps.measured_s, short_time)
    interval, quartiles = ("-".join(map(short_time, ends)) for ends in (steps.bounds, steps.half))
    drifting = [
        _row(drift.label, drift.predicted_s, drift.measured_s, short_time)
        for drift in compared.drifts
    ]
    if not steps.inside and not drifting:
        drifting = [("no traced device or link is the cause", "", "", "")]
    return [step, ("interval; middle half of the steps", interval, quartiles, ""), *drifting]


def step_lines(compared: Comparison) -> list[str]:
    """Return the rows of `step_rows` as lines, and what planning again would give."""
    lines = []
    for what, predicted, measured, ratio in step_rows(compared):
        figures = f": {measured}, predicted {predicted}" if predicted else ""
        lines.append(f"{what}{figures}" + (f" ({ratio} x)" if ratio else ""))
    return [*lines, compared.again] if compared.again else lines


def traced_line(comparison: Comparison) -> str:
    """Return which step the rows show, beside the median step."""
    usual, this = map(short_time, (comparison.steps.measured_s, comparison.traced_s))
    return f"step {comparison.traced:,}, the last traced on all devices: {this}; median {usual}"


def timeline(comparison: Comparison, width: int) -> Iterator[Line]:
    """Yield two lines a device, measured above predicted, on one scale; then the notes."""
    if drawn := comparison.drawn:
        yield [(f"Step {comparison.traced:,} of each device, measured above predicted", "strong")]
        name = max(len("predicted"), *(len(_label(row)) for row in drawn))
        cells = width - name - 2
        for row in drawn[:MOST]:
            own = f"{_label(row):{name}}  "
            predicted = f"{'predicted':>{name}}  "
            yield [(own, ""), *filled(row.measured, row.stage, comparison.ends, cells)]
            if row.predicted:
                marks = filled(row.predicted, row.stage, comparison.ends, cells)
                yield [(predicted, "soft"), *marks]
        if len(drawn) > MOST:
            yield [(f"{counted(len(drawn) - MOST, 'more device')} on the page", "soft")]
        yield [(" " * (name + 2) + "0" + short_time(comparison.ends).rjust(cells - 1), "soft")]
        every = [mark for row in drawn for mark in (*row.measured, *row.predicted)]
        yield from wrapped(legend(every, "nothing recorded, or predicted to wait"), width)
    for note in comparison.notes:
        yield from wrapped(note, width)


def _label(row: DeviceRow) -> str:
    """Return `rank 3, stage 2`."""
    stage = f", {row.words.split(':')[0]}" if "stage" in row.words else ""
    return f"rank {row.rank}{stage}"
