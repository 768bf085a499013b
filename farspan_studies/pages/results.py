"""Rows of a bench to figures and tables: what is drawn follows from what varies, not from whose
study it is.

A value is the median of a cell's repeats. Where a figure leaves a setting out, it shows the best
over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

import msgspec

from farspan.domain.units import format_count, format_usd, short_time
from farspan.estimate.scaling_law import scaling_law_loss
from farspan.report.charts import COLOURS, Axis, Chart, Series
from farspan_studies.bench.matrix import Row, figures
from farspan_studies.pages.bars import Bar, Bars, Dot, Dots, spread, tint

#: Groups of bars that a figure stays readable with.
MOST_GROUPS = 12
#: Budgets on a figure's axis, and tokens a parameter that its ends buy: a choice, an order of
#: magnitude about the 20 that are compute-optimal.
BUDGETS = 60
SPENT = (2.0, 200.0)
#: What a bench may vary beside cluster, model, devices and technique, as tables head it.
SETTINGS: dict[str, Callable[[Row], object]] = {
    "a device": lambda row: row.cell.batch,
    "tokens": lambda row: row.cell.seq_len or "context",
    "precision": lambda row: row.cell.precision,
    "attention": lambda row: row.cell.attention,
}
MARKS = {
    "oom": "out of memory",
    "failed": "failed",
    "no-plan": "no plan",
    "ok": "it ran, without a figure",
}


class Point(msgspec.Struct, frozen=True):
    """A cell with all its repeats, measured, or only predicted."""

    row: Row
    #: Of those repeats that made steps; else of the prediction.
    minutes: float | None
    step_s: float | None
    tflops: float | None
    tokens_per_usd: float | None
    #: Least and most of the repeats' minutes, or of the predicted ones.
    span: tuple[float, float] | None
    measured: bool

    @property
    def why(self) -> str:
        """Why there is no value."""
        return f"{MARKS[self.row.status]}. {self.row.cause}"

    @property
    def mark(self) -> str:
        """What stands in its place."""
        return "✓" if self.row.status == "ok" and self.measured else "×"


def points(rows: Iterable[Row], *, predicted: bool = False) -> list[Point]:
    """Return the cells of a bench whose cluster has the devices for them, in the order in which
    they first came; with `predicted` as they were foretold."""
    groups: dict[str, list[Row]] = {}
    for row in (cell_row for cell_row in rows if cell_row.used):
        groups.setdefault(
            msgspec.json.encode(msgspec.structs.replace(row.cell, repeat=0)).decode(), []
        ).append(row)
    newest = map(_newest, groups.values())
    return [(_foretold(group[-1]) if predicted else _measured(group)) for group in newest]


def _newest(group: Sequence[Row]) -> list[Row]:
    """Those repeats that mean what the newest one does: a matrix that changed may ask for fewer of
    them."""

    def meaning(row: Row) -> tuple[object, ...]:
        return row.cluster_hash, row.model_hash, row.plan_hash, row.run_tokens

    last = meaning(max(group, key=lambda row: row.at))
    return [row for row in group if meaning(row) == last]


def _measured(group: Sequence[Row]) -> Point:
    done = [row for row in group if row.step_s is not None]
    if not done:
        return Point(group[-1], None, None, None, None, None, True)

    def middle(value: Callable[[Row], float | None]) -> float | None:
        known = [figure for row in done if (figure := value(row)) is not None]
        return median(known) if known else None

    minutes = [row.minutes for row in done if row.minutes is not None]
    span = (min(minutes), max(minutes)) if len(minutes) > 1 else None
    return Point(
        done[-1],
        middle(lambda row: row.minutes),
        middle(lambda row: row.step_s),
        middle(lambda row: row.tflops_per_device),
        middle(lambda row: row.tokens_per_usd),
        span,
        True,
    )


def _foretold(row: Row) -> Point:
    if row.predicted_s is None:
        if row.status == "ok":  # It ran; what is drawn here is what was foretold.
            row = msgspec.structs.replace(row, status="oom", cause="predicted to need more memory")
        return Point(row, None, None, None, None, None, False)
    derived = figures(row, row.predicted_s)
    span = None
    if row.predicted_low_s is not None and row.predicted_high_s is not None:
        span = (
            figures(row, row.predicted_low_s).minutes,
            figures(row, row.predicted_high_s).minutes,
        )
    return Point(
        row,
        derived.minutes,
        row.predicted_s,
        derived.tflops_per_device,
        derived.tokens_per_usd,
        span,
        False,
    )


def distinct(points: Iterable[Point], key: Callable[[Row], object]) -> list[str]:
    """Return the values of a setting, in the order in which they came."""
    return list(dict.fromkeys(str(key(point.row)) for point in points))


def best(
    points: Sequence[Point], value: Callable[[Point], float | None], *, most: bool
) -> Point | None:
    """Of the points that have the value the one with the least, or the most."""
    known = [point for point in points if value(point) is not None]
    if not known:
        return None
    return (max if most else min)(known, key=lambda point: value(point) or 0.0)


# -- figures
#   ------------------------------------------------------------------------------------------------


def bars(
    points: Sequence[Point],
    *,
    name: str,
    title: str,
    unit: str,
    group: Callable[[Row], object],
    series: Callable[[Row], object],
    value: Callable[[Point], float | None],
    most: bool,
) -> Bars | None:
    """Return a bar for every pair of settings: the best of its points, or a cross that says why
    there is none."""
    groups = distinct(points, group)
    names = distinct(points, series)
    series_bars = []
    for label in names:
        row = []
        for where in groups:
            own = [p for p in points if str(group(p.row)) == where and str(series(p.row)) == label]
            top = best(own, value, most=most)
            if top is not None:
                note = _settings(top.row) if len({_settings(p.row) for p in own}) > 1 else ""
                row.append(Bar(value(top), note, span=top.span if unit == "minutes" else None))
            else:
                row.append(Bar(None, own[0].why, own[0].mark) if own else Bar(None))
        series_bars.append((label, tuple(row)))
    values = [bar.value for _, row in series_bars for bar in row if bar.value is not None]
    if not values:
        return None
    return Bars(name, title, unit, tuple(groups), tuple(series_bars), spread(values))


def _settings(row: Row) -> str:
    a_device, *more = (str(setting(row)) for setting in SETTINGS.values())
    return ", ".join((row.cell.technique, f"{a_device} a device", *more))


def _varied(points: Sequence[Point]) -> dict[str, Callable[[Row], object]]:
    """Return the settings that points differ in."""
    return {
        name: setting for name, setting in SETTINGS.items() if len(distinct(points, setting)) > 1
    }


def crowded(points: Sequence[Point]) -> list[str]:
    """Clusters with more groups of bars than a figure stays readable with."""
    return [
        cluster
        for cluster in distinct(points, lambda row: row.cell.cluster)
        if len(_groups([point for point in points if point.row.cell.cluster == cluster]))
        > MOST_GROUPS
    ]


def studies(points: Sequence[Point]) -> list[Bars]:
    """Minutes and TFLOP/s of every technique, a figure a cluster: what runs on which devices, as
    the FABRIC paper's figures 3 to 7 show it."""
    charts: list[Bars] = []
    for cluster in (
        name
        for name in distinct(points, lambda row: row.cell.cluster)
        if name not in crowded(points)
    ):
        own = [point for point in points if point.row.cell.cluster == cluster]
        models, devices = (distinct(own, key) for key in (_model, _devices))

        def group(row: Row, both: bool = len(models) > 1, several: bool = len(devices) > 1) -> str:
            parts = ([_model(row)] if both or not several else []) + (
                [_devices(row)] if several else []
            )
            return ", ".join(parts)

        slug = "".join(mark if mark.isalnum() else "-" for mark in cluster.lower())
        for key, unit, value, most in (
            ("minutes", "minutes", lambda point: point.minutes, False),
            ("tflops", "TFLOP/s a device", lambda point: point.tflops, True),
        ):
            figure = bars(
                own,
                name=f"{key}-{slug}",
                title=f"{cluster}: {unit}",
                unit=unit,
                group=group,
                series=lambda row: row.cell.technique,
                value=value,
                most=most,
            )
            charts += [figure] if figure is not None else []
    return charts


def prices(points: Sequence[Point]) -> list[Bars]:
    """Tokens for a dollar by what varies, the best over all else, as the SLM cost paper's figures 1
    to 4 show it."""
    axes: tuple[tuple[str, str, Callable[[Row], object]], ...] = (
        ("batch", "sequences a device", lambda row: row.cell.batch),
        ("devices", "devices", _devices),
        ("technique", "technique", lambda row: row.cell.technique),
        ("attention", "attention", lambda row: row.cell.attention),
        ("precision", "precision", lambda row: row.cell.precision),
    )
    charts: list[Bars] = []
    clusters = distinct(points, lambda row: row.cell.cluster)
    # Clusters share a figure where it stays readable.
    shared = len(distinct(points, _place)) <= MOST_GROUPS / 2
    for key, words, setting in axes:
        for cluster in ("",) if shared else clusters:
            own = [point for point in points if shared or point.row.cell.cluster == cluster]
            if len(distinct(own, setting)) < 2:
                continue
            figure = bars(
                own,
                name=f"usd-{key}{cluster and '-'}{cluster}",
                title=(
                    f"{cluster}{cluster and ': '}{'t' if cluster else 'T'}okens for a dollar by "
                    f"{words}"
                ),
                unit="tokens for a dollar",
                group=_place if shared else _model,
                series=setting,
                value=lambda point: point.tokens_per_usd,
                most=True,
            )
            charts += [figure] if figure is not None else []
    return charts


def latency(points: Sequence[Point]) -> list[Chart]:
    """Seconds a step over the round trip, a line a technique, a figure for steps of so many tokens
    of a model; of plans over several sites."""
    charts: list[Chart] = []
    sizes = list(dict.fromkeys((_model(point.row), point.row.step_tokens) for point in points))
    for model, tokens in sizes:
        own = [
            point
            for point in points
            if (_model(point.row), point.row.step_tokens) == (model, tokens)
        ]
        own = [point for point in own if point.row.rtt_s is not None]
        trips = sorted({point.row.rtt_s for point in own if point.row.rtt_s is not None})
        if len(trips) < 2:
            continue
        series = []
        for number, technique in enumerate(distinct(own, lambda row: row.cell.technique)):
            tops = [
                best(
                    [p for p in own if p.row.cell.technique == technique and p.row.rtt_s == rtt_s],
                    lambda point: point.step_s,
                    most=False,
                )
                for rtt_s in trips
            ]
            steps = [None if top is None else top.step_s for top in tops]
            if any(step is not None for step in steps):
                series.append(Series(technique, steps, "line", tint(number)))
        values = [value for line in series for value in line.values if value is not None]
        axis = Axis("round trip (ms)", [1e3 * rtt_s for rtt_s in trips])
        name = f"latency-{len(charts)}"
        if series:
            scale = spread(values)
            of = (
                f"{model}, steps of {format_count(tokens)} tokens"
                if len(sizes) > len(dict(sizes))
                else model
            )
            charts.append(
                Chart(name, f"{of}: seconds a step by round trip", axis, tuple(series), scale)
            )
    return charts


def budgets(points: Sequence[Point]) -> Chart | None:
    """Return what a scaling law expects of each model's loss for a budget, spent in its cheapest
    setting: loss a dollar of arXiv 2410.19456, whose loss a token is here the law's
    (`estimate.scaling_law`), not a constant."""
    tops = {}
    for model in distinct(points, _model):
        own = [point for point in points if _model(point.row) == model]
        if (top := best(own, lambda point: point.tokens_per_usd, most=True)) and top.tokens_per_usd:
            tops[model] = (top.row.parameters, top.tokens_per_usd)
    if not tops:
        return None
    low, high = (
        pick(tokens * size / rate for size, rate in tops.values())
        for tokens, pick in zip(SPENT, (min, max), strict=True)
    )
    usd = [low * (high / low) ** (step / BUDGETS) for step in range(BUDGETS + 1)]
    series = tuple(
        Series(
            model, [scaling_law_loss(size, rate * budget) for budget in usd], "line", tint(number)
        )
        for number, (model, (size, rate)) in enumerate(tops.items())
    )
    return Chart("loss-usd", "Loss that a budget buys", Axis("dollars", usd, log=True), series)


def sizes(
    specs: Sequence[tuple[str, float, float, float]], fit: Callable[[float], tuple[float, float]]
) -> list[Chart]:
    """Width and layers over parameters, as points by family, and the fit through them: the cost
    study's figure 5. `specs` has (family, parameters, width, layers); `fit` gives (width,
    layers)."""
    over = sorted({size for _, size, _, _ in specs})
    smooth = sorted(
        {
            *over,
            *(over[0] * (over[-1] / over[0]) ** (step / BUDGETS) for step in range(BUDGETS + 1)),
        }
    )
    charts = []
    for place, what in enumerate(("width", "layers")):
        series = [Series("fit", [fit(size)[place] for size in smooth], "line", COLOURS[0])]
        for number, family in enumerate(dict.fromkeys(spec[0] for spec in specs), start=1):
            known = {
                size: (width, layers)[place]
                for name, size, width, layers in specs
                if name == family
            }
            series.append(
                Series(family, [known.get(size) for size in smooth], "points", COLOURS[number])
            )
        axis = Axis("parameters", smooth, log=True)
        charts.append(
            Chart(f"size-{what}", f"{what.capitalize()} by parameters", axis, tuple(series), "log")
        )
    return charts


def truth(rows: Iterable[Row]) -> Dots | None:
    """Every measured step beside its prediction."""
    known = [row for row in rows if row.step_s is not None and row.predicted_s is not None]
    names = tuple(dict.fromkeys(row.cell.technique for row in known))
    dots = tuple(
        Dot(
            row.step_s,
            row.predicted_s,
            f"{row.cell}: {short_time(row.step_s)} measured, "
            f"{short_time(row.predicted_s)} predicted",
            names.index(row.cell.technique),
        )
        for row in known
        if row.step_s is not None and row.predicted_s is not None
    )
    if not dots:
        return None
    return Dots(
        "truth",
        "Predicted against measured",
        "measured seconds a step",
        "predicted",
        names,
        dots,
        equal=True,
    )


def frontier(points: Sequence[Point]) -> Dots | None:
    """Minutes and dollars of each model's run, of the cells that no other of that model is both
    faster and cheaper than."""
    known = [
        (point, point.minutes, point.minutes / 60 * point.row.usd_per_hour)
        for point in points
        if point.minutes is not None and point.row.usd_per_hour
    ]
    names = tuple(distinct((point for point, _, _ in known), _model))
    dots = []
    for number, model in enumerate(names):
        cheapest = math.inf
        for point, minutes, usd in sorted(
            (k for k in known if _model(k[0].row) == model), key=lambda k: k[1:]
        ):
            if usd < cheapest:
                cheapest = usd
                dots.append(
                    Dot(
                        minutes,
                        usd,
                        f"{point.row.cell}: {minutes:.3g} minutes, {format_usd(usd)}",
                        number,
                    )
                )
    return (
        Dots("frontier", "Time against money", "minutes", "dollars", names, tuple(dots))
        if len(known) > 1
        else None
    )


def _model(row: Row) -> str:
    return row.cell.model


def _devices(row: Row) -> str:
    """Return a site by its name, as two may have as many; else how many."""
    named = row.cell.devices != "all" and not row.cell.devices.isdigit()
    return row.cell.devices if named else f"{row.used} device{'s' * (row.used != 1)}"


def _place(row: Row) -> str:
    return f"{row.cell.cluster}, {row.cell.model}"


# -- tables
#   ------------------------------------------------------------------------------------------------


class Table(msgspec.Struct, frozen=True):
    """Text in columns; `best` marks a cell of each line."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: tuple[int | None, ...]


def tables(points: Sequence[Point]) -> list[Table]:
    """Return what a paper would print of a bench."""
    return [*lasting(points), *bought(points)]


def lasting(points: Sequence[Point]) -> list[Table]:
    """Minutes of every technique, a line a cluster and setting, a table for every model on so many
    devices: the FABRIC paper's tables I and II. `x` is out of memory."""
    printed = []
    techniques = distinct(points, lambda row: row.cell.technique)
    for model, devices in _groups(points):
        own = [
            point
            for point in points
            if (_model(point.row), _devices(point.row)) == (model, devices)
        ]
        lines = []
        marks = []
        varied = _varied(own)
        for line in dict.fromkeys(_line(point.row, varied) for point in own):
            row = [point for point in own if _line(point.row, varied) == line]
            trips = [point.row.rtt_s for point in row if point.row.rtt_s is not None]
            cells = []
            values = []
            for technique in techniques:
                mine = [point for point in row if point.row.cell.technique == technique]
                top = best(mine, lambda point: point.minutes, most=False)
                values.append(None if top is None else top.minutes)
                cells.append(_cell(top, mine))
            known = [value for value in values if value is not None]
            marks.append(len(line) + 1 + values.index(min(known)) if known else None)
            lines.append((line[0], "" if not trips else f"{1e3 * trips[0]:.4g}", *line[1:], *cells))
        title = f"{model} on {devices}, minutes"
        heads = ("", "RTT ms", *varied, *techniques)
        printed.append(Table(title, heads, tuple(lines), tuple(marks)))
    return printed


def bought(points: Sequence[Point]) -> list[Table]:
    """Tokens for a dollar of every technique, a line a setting, a table for every model on so many
    devices: the cost study's figures 1 to 4 as numbers."""
    printed = []
    techniques = distinct(points, lambda row: row.cell.technique)
    for model, devices in _groups(points):
        own = [
            point
            for point in points
            if (_model(point.row), _devices(point.row)) == (model, devices)
        ]
        lines = []
        marks = []
        varied = _varied(own)
        for line in dict.fromkeys(_line(point.row, varied) for point in own):
            cells = []
            values = []
            for technique in techniques:
                mine = [
                    point
                    for point in own
                    if (_line(point.row, varied), point.row.cell.technique) == (line, technique)
                ]
                top = best(mine, lambda point: point.tokens_per_usd, most=True)
                values.append(0.0 if top is None else top.tokens_per_usd or 0.0)
                cells.append(format_count(values[-1]) if values[-1] else _cell(None, mine))
            marks.append(len(line) + values.index(max(values)) if any(values) else None)
            lines.append((*line, *cells))
        title = f"{model} on {devices}, tokens for a dollar"
        if any(mark is not None for mark in marks):
            printed.append(Table(title, ("", *varied, *techniques), tuple(lines), tuple(marks)))
    return printed


def _groups(points: Sequence[Point]) -> list[tuple[str, str]]:
    """Model and devices of each table."""
    return list(dict.fromkeys((_model(point.row), _devices(point.row)) for point in points))


def _line(row: Row, varied: Mapping[str, Callable[[Row], object]]) -> tuple[str, ...]:
    """Return what begins the line of a table: the cluster, and the settings that vary."""
    return row.cell.cluster, *(str(setting(row)) for setting in varied.values())


def _cell(top: Point | None, mine: Sequence[Point]) -> str:
    if top is not None and top.minutes is not None:
        return f"{top.minutes:.3g}" if top.minutes < 999.5 else f"{top.minutes:,.0f}"
    if not mine:
        return ""
    return {"oom": "x", "no-plan": "-"}.get(mine[0].row.status, mine[0].row.status)


def markdown(table: Table) -> str:
    """Return a table for a paper, the best of each line in bold."""
    lines = [
        f"**{table.title}**",
        "",
        f"| {' | '.join(table.heads)} |",
        "|" + "---|" * len(table.heads),
    ]
    for row, mark in zip(table.rows, table.best, strict=True):
        cells = (f"**{cell}**" if place == mark else cell for place, cell in enumerate(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
