"""Line charts: their values, scales and ticks. `template/chart.svg` draws them, in pixels of a 560
x 330 box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

CHART_WIDTH = 560
HEIGHT = 330
LEFT_MARGIN = 58
RIGHT_MARGIN = 14
TOP_MARGIN = 14
BOTTOM_MARGIN = 46
#: Pixels above a picture of its own: its title, a row of its legend, and a letter's width at 12
#: pixels.
TITLE = 32
LINE = 18
LETTER = 6.6
#: A chart draws at most the lowest and the highest point of so many groups of neighbours: about one
#: a pixel.
MAX_GROUPS = 320
#: Colours of chart.css that series, or stages, take in turn.
COLOURS = ("train", "val", "speed", "memory", "lr", "norm")
#: Nothing below it is shown on a logarithmic scale.
MIN_LOG_VALUE = 1e-12


class Axis(msgspec.Struct, frozen=True):
    """What a chart is drawn over, ascending; `marks` are named places on it; with `log` all are
    above 0."""

    name: str
    values: Sequence[float]
    marks: tuple[tuple[str, float], ...] = ()
    log: bool = False


class Series(msgspec.Struct, frozen=True):
    """One column of values, None where there is none. `tint` is a colour of chart.css."""

    name: str
    values: Sequence[float | None]
    kind: Literal["line", "faint", "points"]
    tint: str


class Chart(msgspec.Struct, frozen=True):
    """Series over one axis; `scale` is the vertical one, from its values, from zero, or
    logarithmic.

    `levels` are named horizontal lines.
    """

    name: str
    title: str
    x: Axis
    series: tuple[Series, ...]
    scale: Literal["free", "zero", "log"] = "free"
    levels: tuple[tuple[str, float], ...] = ()

    @property
    def text(self) -> str:
        """Where the series begin and end: what a reader who sees no picture needs."""
        parts = []
        for series in self.series:
            values = [value for value in series.values if value is not None]
            if values and series.kind != "faint":
                ends = f"from {values[0]:.4g} to {values[-1]:.4g}"
                parts.append(f"{series.name} goes {ends}, lowest {min(values):.4g}")
        parts += [f"{name} is {value:.4g}" for name, value in self.levels]
        return f"Over {self.x.name}: {'; '.join(parts)}."


class Scale(msgspec.Struct, frozen=True):
    """Values between `low` and `high` to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        ends = [self.low, self.high, value]
        if self.log:
            ends = [math.log10(max(end, MIN_LOG_VALUE)) for end in ends]
        low, high, value = ends
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)


def scales(chart: Chart) -> tuple[Scale, Scale]:
    """Return the horizontal and the vertical scale, with a margin around the values."""
    values = [level for _, level in chart.levels]
    for series in chart.series:
        values += [value for value in series.values if value is not None]
    low = min(values)
    high = max(values)
    if chart.scale == "log":
        low = max(low, MIN_LOG_VALUE) / 1.25
        high = max(high, MIN_LOG_VALUE) * 1.25
    else:
        low = 0.0 if chart.scale == "zero" else low
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low = 0.0 if 0 <= low < room else low - room
        high = high + room
    first = min(chart.x.values) if chart.x.log else 0.0
    last = max(chart.x.values) or 1.0
    x = Scale(first, last, LEFT_MARGIN, CHART_WIDTH - RIGHT_MARGIN, chart.x.log)
    y = Scale(low, high, HEIGHT - BOTTOM_MARGIN, TOP_MARGIN, chart.scale == "log")
    return x, y


def caption(named: Sequence[tuple[str, str]]) -> tuple[int, list[tuple[str, str, float, float]]]:
    """Return the height above a picture that is a file of its own, and where its legend's (name,
    tint) stand in it: rows that are as wide as the picture, above 0. A single series needs no
    legend."""
    if len(named) < 2:
        return TITLE, []
    spots: list[tuple[str, str, float, int]] = []
    x = float(LEFT_MARGIN)
    row = 0
    for name, tint in named:
        wide = 17 + LETTER * len(name) + 16
        if x + wide > CHART_WIDTH and x > LEFT_MARGIN:
            x = float(LEFT_MARGIN)
            row = row + 1
        spots.append((name, tint, x, row))
        x += wide
    height = TITLE + LINE * (row + 1)
    legend = []
    for name, tint, x, row in spots:
        legend.append((name, tint, x, TITLE + LINE * (row + 0.6) - height))
    return height, legend


def named(chart: Chart) -> list[tuple[str, str]]:
    """Return the names and tints of a chart's legend."""
    return [(series.name, series.tint) for series in chart.series]


def ticks(scale: Scale, most: int) -> list[float]:
    """Return at most about `most` round numbers inside the scale."""
    if scale.log:
        lowest = math.floor(math.log10(scale.low))
        highest = math.ceil(math.log10(scale.high))
        for digits in ((1, 2, 5), (1, 3), (1,)):
            numbers: list[float] = []
            for power in range(lowest, highest + 1):
                numbers += [digit * 10.0**power for digit in digits]
            numbers = [value for value in numbers if scale.low <= value <= scale.high]
            if len(numbers) <= most:
                break
        return numbers
    rough = (scale.high - scale.low) / most
    decade = 10.0 ** math.floor(math.log10(rough))
    steps = [decade * factor for factor in (1, 2, 2.5, 5, 10)]
    step = next(step for step in steps if step >= rough * 0.999)
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def label(value: float) -> str:
    """Format a tick: `0`, `4.5`, `5,000`, `20k`, `1.5M`, `3e-4`."""
    size = abs(value)
    for least, scale, suffix in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return f"{value / scale:.4g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1e-2 or size < MIN_LOG_VALUE:
        return f"{value if size >= 1e-2 else 0:.4g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def thin(chart: Chart) -> Chart:
    """Reduce a chart to few enough points to draw: the extremes of its first series, and every lone
    point."""
    count = len(chart.x.values)
    if count <= 2 * MAX_GROUPS:
        return chart
    leading = [(-math.inf if value is None else value) for value in chart.series[0].values]
    size = math.ceil(count / MAX_GROUPS)
    kept = {0, count - 1}
    for start in range(0, count, size):
        group = range(start, min(start + size, count))
        kept.add(min(group, key=leading.__getitem__))
        kept.add(max(group, key=leading.__getitem__))
    for series in chart.series:
        if series.kind == "points":
            kept |= {index for index, value in enumerate(series.values) if value is not None}
    picked = sorted(kept)
    thinned = []
    for series in chart.series:
        values = [series.values[index] for index in picked]
        thinned.append(msgspec.structs.replace(series, values=values))
    x = msgspec.structs.replace(chart.x, values=[chart.x.values[index] for index in picked])
    return msgspec.structs.replace(chart, x=x, series=tuple(thinned))


def quote_csv_cell(text: str) -> str:
    """Quote a text as a cell of a CSV file."""
    if not set(text) & set(',"\n'):
        return text
    quoted = text.replace('"', '""')
    return f'"{quoted}"'


def to_csv(chart: Chart) -> str:
    """Write a heading, then one line a point; an empty cell where a series has no value."""
    all_series: tuple[Axis | Series, ...] = (chart.x, *chart.series)
    lines = [",".join(quote_csv_cell(series.name) for series in all_series)]
    for row in zip(*(series.values for series in all_series), strict=True):
        cells = ["" if value is None else f"{value:.6g}" for value in row]
        lines.append(",".join(cells))
    return "\n".join([*lines, ""])
