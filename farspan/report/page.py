"""One HTML file that shows a whole run and opens without a network: charts, tables, samples, how it
ended."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.domain.run import RunFolder
from farspan.domain.run_events import Environment
from farspan.domain.struct_files import content_hash, write_atomically
from farspan.domain.units import counted, format_bytes, format_count, format_seconds, short_time
from farspan.report import charts, compare_text, losses, plan_terminal, text
from farspan.report.charts import COLOURS, Chart, thin
from farspan.report.compare import Comparison
from farspan.report.figures import run_charts
from farspan.report.history import RunHistory
from farspan.report.measurement import measure_run
from farspan.report.run_endings import ending

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "template"
#: Marks of a timeline narrower than this share of it have no number.
MIN_NUMBERED_SHARE = 0.045


def write_page(run: RunHistory, comparison: Comparison | None = None) -> Path:
    """Write the page as `report.html` into the run directory, and return its path."""
    path = RunFolder(run.folder).report
    write_atomically(path, render_page(run, comparison).encode())
    return path


def render_page(run: RunHistory, comparison: Comparison | None = None) -> str:
    """Return the whole page as HTML, with the comparison of a run of several devices.

    The same events give the same bytes.
    """
    measured = measure_run(run)
    template = template_environment().get_template("page.html")
    loss_notes = losses.loss_notes(run, measured) if measured else []
    values = {
        "run": run,
        "history": run.history,
        "measured": measured,
        "found": comparison,
        "figures": run_charts(run),
        "name": run.folder.resolve().name,
        "chart_style": chart_style(),
        "loss_notes": loss_notes,
        "compared": compare_text.comparison_tables(run, measured, comparison),
        "references": text.entropy_rows(run, measured),
        "timeline": event_rows(run),
        "environments": _environment_rows(run),
        "config_hash": content_hash(run.config),
        "gloss": text.UNIGRAM_GLOSS,
    }
    return template.render(values)


def chart_svg(chart: Chart) -> str:
    """Draw a chart as an SVG file of its own."""
    # With context: the macro's own imports need what `template_environment` gives.
    template = template_environment().from_string(
        '{% from "chart.svg" import drawing with context %}{{ drawing(chart, text, style) }}'
    )
    return template.render(chart=thin(chart), text=chart.text, style=chart_style()).strip()


def template_environment(*more: Path) -> jinja2.Environment:
    """Build the environment of the templates, those of `more` folders too. All text is escaped."""
    import jinja2

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader([TEMPLATES, *more]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {
        "bytes": format_bytes,
        "count": format_count,
        "seconds": format_seconds,
        "thousands": "{:,}".format,
        "collapsed": partial(re.sub, r"\n\s*\n", "\n\n"),
        "capitalised": lambda words: words[:1].upper() + words[1:],
    }
    functions = (
        compare_text.traced_line,
        ending,
        charts.scales,
        charts.ticks,
        charts.label,
        charts.caption,
        charts.named,
        charts.thin,
        charts.to_csv,
        losses.exact,
        losses.read_on,
        counted,
        text.gap,
        text.maybe,
        text.model_line,
        text.tokens_line,
        text.money,
        short_time,
        zip,
    )
    jinja.globals |= {function.__name__: function for function in functions}
    jinja.globals |= {
        "width": charts.CHART_WIDTH,
        "height": charts.HEIGHT,
        "left": charts.LEFT_MARGIN,
    }
    jinja.globals |= {
        "tints": COLOURS,
        "numbered": MIN_NUMBERED_SHARE,
        "words": plan_terminal.WORDS,
    }
    return jinja


def chart_style(*more: Path) -> str:
    """chart.css, and more styles, without variables: programs that take SVG files do not know
    them."""
    style = "".join(path.read_text() for path in (TEMPLATES / "chart.css", *more))
    colours = dict(reversed(re.findall(r"--([\w-]+):\s*([^;]+);", style)))
    return re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], style)


def event_rows(run: RunHistory) -> list[tuple[str, str, str]]:
    """Return (when, what, more) of starts, saves and ends, oldest first."""
    history = run.history
    rows = list[tuple[float, str, str]]()
    for started, before_s in history.starts:
        what = "started"
        facts = counted(started.world, "worker")
        if before_s:
            what = "resumed"
            facts += f" · after step {started.step:,}, {format_seconds(before_s)} of work"
        rows.append((started.at, what, facts))
    for again in history.recoveries:
        lost = f"{counted(again.lost, 'step')} and {format_seconds(again.down_s)} lost"
        plan = ", by another plan" if again.replanned else ""
        rows.append((again.at, "recovered", f"{again.fault.what} · {lost}{plan}"))
    for saved in history.saves:
        size = f"{format_bytes(saved.size_bytes)} in {format_seconds(saved.seconds)}"
        rows.append((saved.at, "saved", f"step {saved.step:,} · {size} · {saved.path}"))
    for end in history.ends:
        how = ending(end.reason, end.step)
        rows.append((end.at, "ended", f"step {end.step:,} · {how}"))
    for change in history.rescheduled:
        rows.append((change.at, "rescheduled", f"step {change.step:,} · {change}"))
    for warning in history.warnings:
        rows.append((warning.at, "warned", warning.message))
    rows.sort(key=lambda row: row[0])
    dated = []
    for at, what, more in rows:
        when = datetime.fromtimestamp(at, UTC)
        dated.append((f"{when:%Y-%m-%d %H:%M:%S}", what, more))
    return dated


def _environment_rows(run: RunHistory) -> list[tuple[str, list[str]]]:
    """Return rows (name, value in each different environment that the run had)."""
    environments = dict.fromkeys(started.environment for started, _ in run.history.starts)
    rows = []
    for name in Environment.__struct_fields__:
        values = [getattr(each, name) for each in environments]
        if any(value is not None for value in values):
            show = format_bytes if name == "memory_bytes" else str
            rows.append((name.removesuffix("_bytes"), list(map(show, values))))
    return rows
