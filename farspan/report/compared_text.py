"""Measured against predicted in words: sentences and table rows, for the terminal and for the
page."""

from __future__ import annotations

from collections.abc import Iterator

from farspan.domain.units import counted, format_bytes, short_time
from farspan.report.compared import Comparison, DeviceRow
from farspan.report.plan_terminal import MOST, Line, filled, legend, wrapped

#: Parts that are predicted to take less than this share of a step have no ratio.
COMPARED = 0.01


def sentences(comparison: Comparison) -> list[str]:
    """How long a step took, then what drifts and what planning again would give."""
    steps = comparison.steps
    low, high = map(short_time, steps.bounds)
    inside = "inside" if steps.inside else "outside"
    change = f"{100 * (steps.measured_s / steps.predicted_s - 1):+.0f} %"
    lines = [
        f"step {short_time(steps.measured_s)}, predicted {short_time(steps.predicted_s)} "
        f"({change}), {inside} the "
        f"interval ({low} to {high}); half of the steps took "
        f"{' to '.join(map(short_time, steps.half))}",
        *map(str, comparison.drifts),
    ]
    if not steps.inside and not comparison.drifts:
        lines.append("what was traced names no device and no link as the cause")
    return [*lines, comparison.again] if comparison.again else lines


def part_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Rows (part, predicted, measured, measured / predicted) of the step of the slowest device."""
    rows = []
    for part in comparison.parts:
        predicted = "" if part.predicted_s is None else _time(part.predicted_s)
        compares = (
            part.predicted_s is not None
            and part.predicted_s >= COMPARED * comparison.steps.predicted_s
        )
        ratio = f"{part.measured_s / part.predicted_s:.2f}" if compares and part.predicted_s else ""
        rows.append((part.name, predicted, _time(part.measured_s), ratio))
    return rows


def _time(seconds: float) -> str:
    return short_time(seconds) if seconds >= 1e-6 else "0 ms"


def memory_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Rows (device, predicted, measured, measured / predicted) of peak memory."""
    return [
        (
            row.name,
            format_bytes(row.memory_predicted),
            "no log here" if row.memory is None else format_bytes(row.memory),
            "" if row.memory is None else f"{row.memory / row.memory_predicted:.2f}",
        )
        for row in comparison.rows
    ]


def traced_line(comparison: Comparison) -> str:
    """Which step the rows show, and whether it was like the others."""
    usual, this = map(short_time, (comparison.steps.measured_s, comparison.traced_s))
    return (
        f"step {comparison.traced:,}, the last that was traced on all of them, took {this}; the "
        f"median step {usual}"
    )


def timeline(comparison: Comparison, width: int) -> Iterator[Line]:
    """Two lines a device, measured above predicted, on one scale; then what one has to know of
    them."""
    if comparison.drawn:
        yield from _drawn(comparison, width)
    for note in comparison.notes:
        yield from wrapped(note, width)


def _drawn(comparison: Comparison, width: int) -> Iterator[Line]:
    yield [(f"Step {comparison.traced:,} of each device, measured above predicted", "strong")]
    name = max(len("predicted"), *(len(_label(row)) for row in comparison.drawn))
    cells = width - name - 2
    for row in comparison.drawn[:MOST]:
        yield [
            (f"{_label(row):{name}}  ", ""),
            *filled(row.measured, row.stage, comparison.ends, cells),
        ]
        if row.predicted:
            yield [
                (f"{'predicted':>{name}}  ", "soft"),
                *filled(row.predicted, row.stage, comparison.ends, cells),
            ]
    if len(comparison.drawn) > MOST:
        yield [(f"{counted(len(comparison.drawn) - MOST, 'more device')} on the page", "soft")]
    yield [(" " * (name + 2) + "0" + short_time(comparison.ends).rjust(cells - 1), "soft")]
    marks = (mark for row in comparison.drawn for mark in (*row.measured, *row.predicted))
    yield from wrapped(legend(marks, "nothing recorded, or predicted to wait"), width)


def _label(row: DeviceRow) -> str:
    """`rank 3, stage 2`."""
    part = row.words.split(":")[0] if "stage" in row.words else ""
    return f"rank {row.rank}" + (f", {part}" if part else "")
