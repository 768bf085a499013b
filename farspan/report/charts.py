"""Line charts as SVG text, with the points that they draw as CSV. Coordinates inside are pixels of a 560 x 330 box."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal

import msgspec

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 46
#: A chart draws at most the lowest and the highest point of so many groups of neighbours: about one a pixel.
GROUPS = 320

Value = float | None


class Series(msgspec.Struct, frozen=True):
    """One column of values, None where there is none. `tint` is a colour of chart.css."""

    name: str
    values: Sequence[Value]
    kind: Literal["line", "faint", "points"]
    tint: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Series over one `x`, ascending. `levels` are named horizontal lines, `marks` named vertical ones."""

    name: str
    title: str
    text: str
    x_label: str
    x: Sequence[float]
    series: tuple[Series, ...]
    levels: tuple[tuple[str, float], ...] = ()
    marks: tuple[tuple[str, float], ...] = ()
    log: bool = False
    from_zero: bool = False


class Scale(msgspec.Struct, frozen=True):
    """Values between `low` and `high` to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (self._flat(number) for number in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def _flat(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.log else value


def thin(chart: Chart) -> Chart:
    """The chart with few enough points to draw: the extremes of its first series, and every lone point."""
    count = len(chart.x)
    if count <= 2 * GROUPS:
        return chart
    leading = [(-math.inf if value is None else value) for value in chart.series[0].values]
    size = math.ceil(count / GROUPS)
    kept = {0, count - 1}
    for start in range(0, count, size):
        group = range(start, min(start + size, count))
        kept |= {min(group, key=leading.__getitem__), max(group, key=leading.__getitem__)}
    for series in chart.series:
        if series.kind == "points":
            kept |= {index for index, value in enumerate(series.values) if value is not None}
    picked = sorted(kept)
    return msgspec.structs.replace(
        chart,
        x=[chart.x[index] for index in picked],
        series=tuple(
            msgspec.structs.replace(series, values=[series.values[index] for index in picked])
            for series in chart.series
        ),
    )


def to_csv(chart: Chart) -> str:
    """A heading, then one line a point; an empty cell where a series has no value."""
    heading = ",".join([chart.x_label, *(series.name for series in chart.series)])
    columns = [chart.x, *(series.values for series in chart.series)]
    rows = (",".join("" if value is None else f"{value:.6g}" for value in row) for row in zip(*columns, strict=True))
    return "\n".join([heading, *rows]) + "\n"


def scales(chart: Chart) -> tuple[Scale, Scale]:
    """The horizontal and the vertical scale, with room around the values."""
    values = [value for series in chart.series for value in series.values if value is not None]
    values += [level for _, level in chart.levels]
    low, high = min(values), max(values)
    if chart.log:
        low, high = max(low, 1e-12) / 1.25, max(high, 1e-12) * 1.25
    else:
        low = 0.0 if chart.from_zero else low
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = (0.0 if low >= 0 and low < room else low - room), high + room
    last = max(chart.x)
    x = Scale(0.0, last if last > 0 else 1.0, LEFT, WIDTH - RIGHT)
    return x, Scale(low, high, HEIGHT - BOTTOM, TOP, chart.log)


def ticks(scale: Scale, most: int) -> list[float]:
    """At most about `most` round numbers inside the scale."""
    if scale.log:
        exponents = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [digit * 10.0**power for power in exponents for digit in digits]
            found = [value for value in found if scale.low <= value <= scale.high]
            if len(found) <= most:
                break
        return found
    rough = (scale.high - scale.low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def label(value: float) -> str:
    """A tick's text: `0`, `4.5`, `5,000`, `20k`, `1.5M`, `3e-4`."""
    size = abs(value)
    for least, scale, suffix in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return f"{value / scale:.4g}{suffix}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1e-2 or size < 1e-12:
        return f"{value if size >= 1e-2 else 0:.4g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def to_svg(chart: Chart, style: str | None = None) -> str:
    """The chart as one `<svg>`; with `style`, as a file of its own."""
    x, y = scales(chart)
    head = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{chart.name}-t {chart.name}-d"'
    )
    if style is None:
        head += ' tabindex="0"'
    else:
        head += f' xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        f'{head}><title id="{chart.name}-t">{escape(chart.title)}</title>',
        f'<desc id="{chart.name}-d">{escape(chart.text)}</desc>',
        f"<style>{style}</style>" if style is not None else "",
        *_axes(chart, x, y),
        *(_series(series, chart.x, x, y) for series in chart.series),
        *_levels(chart, y),
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" style="display:none"/></svg>',
    ]
    return "".join(parts)


def _axes(chart: Chart, x: Scale, y: Scale) -> Iterable[str]:
    floor = HEIGHT - BOTTOM
    for value in ticks(y, 7):
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y(value):.1f}" dy=".35em" text-anchor="end">{label(value)}</text>'
    for value in ticks(x, 6):
        yield f'<text class="tick" x="{x(value):.1f}" y="{floor + 18}" text-anchor="middle">{label(value)}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="name" x="{middle}" y="{HEIGHT - 7}" text-anchor="middle">{escape(chart.x_label)}</text>'
    for name, value in chart.marks:
        yield f'<line class="mark" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{TOP}" y2="{floor}">'
        yield f"<title>{escape(name)}</title></line>"


def _levels(chart: Chart, y: Scale) -> Iterable[str]:
    above = -math.inf
    for name, value in sorted(chart.levels, key=lambda level: -level[1]):
        at = y(value)
        # A name stands above its line, or below it where the line before is too near.
        name_at = at - 5 if at - above >= 18 else at + 14
        above = at
        yield f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield (
            f'<text class="note" x="{WIDTH - RIGHT}" y="{name_at:.1f}" text-anchor="end">'
            f"{escape(name)} {label(value)}</text>"
        )


def _series(series: Series, xs: Sequence[float], x: Scale, y: Scale) -> str:
    points = [(x(at), y(value)) for at, value in zip(xs, series.values, strict=True) if value is not None]
    if series.kind == "points" or len(points) == 1:
        return "".join(f'<circle class="dot {series.tint}" cx="{a:.1f}" cy="{b:.1f}" r="3.6"/>' for a, b in points)
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline class="{series.kind} {series.tint}" points="{path}"/>'
