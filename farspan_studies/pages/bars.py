"""Bars in groups, and dots over two axes: their values and scales. `template/bars.svg` and
`dots.svg` draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from farspan.report.charts import (
    BOTTOM_MARGIN,
    CHART_WIDTH,
    COLOURS,
    HEIGHT,
    LEFT_MARGIN,
    LETTER,
    RIGHT_MARGIN,
    TOP_MARGIN,
    Scale,
    label,
    quote_csv_cell,
)

#: Share of a group's width that its bars leave free.
GAP = 0.22


def tint(index: int) -> str:
    """Return the colour of a series, and its pale one once all are taken."""
    return COLOURS[index % len(COLOURS)] + (" pale" if index >= len(COLOURS) else "")


def tinted(names: Iterable[str]) -> list[tuple[str, str]]:
    """Series with their colours."""
    return [(name, tint(index)) for index, name in enumerate(names)]


class Bar(msgspec.Struct, frozen=True):
    """One value; None where there is none, and then `note` says why behind the `mark` in the bar's
    place."""

    value: float | None
    note: str = ""
    mark: str = "×"
    #: From where to where repeats, or a prediction, lie.
    span: tuple[float, float] | None = None


class Bars(msgspec.Struct, frozen=True):
    """For every group a bar of each series. `best` says whether the least or the most is best."""

    name: str
    title: str
    unit: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[Bar, ...]], ...]
    scale: Literal["zero", "log"] = "zero"

    @property
    def text(self) -> str:
        """What a reader who sees no picture needs: each group's least and most."""
        parts = []
        for place, group in enumerate(self.groups):
            known = [(bars[place].value, name) for name, bars in self.series]
            values = [(value, name) for value, name in known if value is not None]
            if values:
                low = min(values)
                high = max(values)
                parts.append(
                    f"{group}: least {low[0]:.4g} ({low[1]}), most {high[0]:.4g} ({high[1]})"
                )
        return f"{self.unit}. {'; '.join(parts)}."


class Dot(msgspec.Struct, frozen=True):
    x: float
    y: float
    what: str
    series: int


class Dots(msgspec.Struct, frozen=True):
    """Points over two logarithmic axes; with `equal` both are alike and a line says where y is
    x."""

    name: str
    title: str
    x_name: str
    y_name: str
    series: tuple[str, ...]
    dots: tuple[Dot, ...]
    equal: bool = False

    @property
    def text(self) -> str:
        return (
            f"{len(self.dots)} points of {', '.join(self.series)}: {self.y_name} over "
            f"{self.x_name}."
        )


def bar_scale(chart: Bars) -> Scale:
    """Return the vertical scale, from zero or, where values lie far apart, logarithmic."""
    values = [bar.value for _, bars in chart.series for bar in bars if bar.value is not None]
    values += [end for _, bars in chart.series for bar in bars if bar.span for end in bar.span]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if chart.scale == "log":
        return Scale(low / 2, high * 1.4, HEIGHT - BOTTOM_MARGIN, TOP_MARGIN, True)
    return Scale(0.0, high * 1.12 or 1.0, HEIGHT - BOTTOM_MARGIN, TOP_MARGIN)


def places(chart: Bars) -> list[list[tuple[float, float]]]:
    """Left edge and width of every bar, by group and series."""
    width = (CHART_WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / max(1, len(chart.groups))
    each = width * (1 - GAP) / max(1, len(chart.series))
    return [
        [
            (round(LEFT_MARGIN + width * (g + GAP / 2) + each * s, 1), round(each * 0.92, 1))
            for s in range(len(chart.series))
        ]
        for g in range(len(chart.groups))
    ]


def lines(group: str, chart: Bars) -> list[str]:
    """Return a group's name below its bars: a line a part, and a word where a part is wider than
    the group."""
    room = (CHART_WIDTH - LEFT_MARGIN - RIGHT_MARGIN) / max(1, len(chart.groups))
    parts = group.split(", ")
    return [
        word for part in parts for word in ([part] if LETTER * len(part) <= room else part.split())
    ]


def dot_scales(chart: Dots) -> tuple[Scale, Scale]:
    xs = [dot.x for dot in chart.dots]
    ys = [dot.y for dot in chart.dots]
    if chart.equal:
        xs = ys = [*xs, *ys]
    room = 1.3
    x = Scale(min(xs) / room, max(xs) * room, LEFT_MARGIN, CHART_WIDTH - RIGHT_MARGIN, True)
    return x, Scale(min(ys) / room, max(ys) * room, HEIGHT - BOTTOM_MARGIN, TOP_MARGIN, True)


def short(value: float) -> str:
    """Return a bar's number: three digits at most."""
    if value == 0:
        return "0"
    return label(round(value, 2 - math.floor(math.log10(abs(value)))))


def bars_csv(chart: Bars) -> str:
    """Return a line a group and series, with where repeats or a prediction lie; the note where
    there is no value."""
    rows = [",".join(map(quote_csv_cell, ("group", "series", chart.unit, "low", "high", "note")))]
    for place, group in enumerate(chart.groups):
        for name, bars in chart.series:
            bar = bars[place]
            figures = (
                "" if value is None else f"{value:.6g}"
                for value in (bar.value, *(bar.span or (None, None)))
            )
            rows.append(
                ",".join(
                    (
                        quote_csv_cell(group),
                        quote_csv_cell(name),
                        *figures,
                        quote_csv_cell(bar.note),
                    )
                )
            )
    return "\n".join(rows) + "\n"


def dots_csv(chart: Dots) -> str:
    rows = [",".join(map(quote_csv_cell, ("series", chart.x_name, chart.y_name, "what")))]
    rows += [
        f"{quote_csv_cell(chart.series[dot.series])},{dot.x:.6g},{dot.y:.6g},{quote_csv_cell(dot.what)}"
        for dot in chart.dots
    ]
    return "\n".join(rows) + "\n"


def spread(values: Sequence[float]) -> Literal["zero", "log"]:
    """Values that lie further apart than a picture shows need a logarithmic scale."""
    known = [value for value in values if value > 0]
    return "log" if known and max(known) > 30 * min(known) else "zero"
