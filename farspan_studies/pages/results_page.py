"""The page of a bench: every figure and table on one HTML file that opens offline, each as SVG and
its data as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from farspan.domain.struct_files import write_atomically
from farspan.report.charts import RIGHT_MARGIN, Chart
from farspan.report.page import TEMPLATES as REPORT_TEMPLATES
from farspan.report.page import chart_style, template_environment
from farspan.report.plan_page import drawing_words
from farspan_studies.bench.matrix import Row
from farspan_studies.pages import bars, results
from farspan_studies.pages.drawn import Drawn, clusters

TEMPLATES = Path(__file__).parents[1] / "template"


def write_results(
    rows: Sequence[Row],
    folder: Path,
    title: str,
    *,
    predicted: bool = False,
    kind: str = "Bench",
    drawn: Sequence[Drawn] = (),
    more: Sequence[Chart] = (),
) -> tuple[Path, Path]:
    """Write `report.html` and, for papers, `tables.md` into a folder, of what was measured or, with
    `predicted`, of what was foretold, with the clusters that are `drawn` and `more` charts; returns
    their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "predicted" if predicted else "report"
    page = folder / f"{name}.html"
    tables = folder / f"{name}-tables.md"
    html = results_page(rows, title, predicted=predicted, kind=kind, drawn=drawn, more=more)
    write_atomically(page, html.encode())
    printed = [clusters(drawn), *results.tables(results.points(rows, predicted=predicted))]
    write_atomically(
        tables,
        "\n".join(results.markdown(table) for table in printed if table is not None).encode(),
    )
    return page, tables


def results_page(
    rows: Sequence[Row],
    title: str,
    *,
    predicted: bool = False,
    kind: str = "Bench",
    drawn: Sequence[Drawn] = (),
    more: Sequence[Chart] = (),
) -> str:
    """Return the page as HTML; the same rows give the same bytes."""
    points = results.points(rows, predicted=predicted)
    jinja = template_environment(TEMPLATES)
    shown = (
        bars.bar_scale,
        bars.places,
        bars.dot_scales,
        bars.short,
        bars.lines,
        bars.tint,
        bars.tinted,
        bars.bars_csv,
        bars.dots_csv,
    )
    jinja.globals |= {function.__name__: function for function in shown}
    jinja.globals |= drawing_words() | {"right": RIGHT_MARGIN}
    return jinja.get_template("results.html").render(
        title=title,
        kind=kind,
        predicted=predicted,
        rows=rows,
        clusters=clusters(drawn),
        drawn=[drawing for drawing in drawn if drawing.picture is not None],
        more=more,
        plan_style=chart_style(REPORT_TEMPLATES / "plan.css"),
        tables=results.tables(points),
        studies=results.studies(points),
        crowded=results.crowded(points),
        prices=results.prices(points),
        budgets=results.budgets(points),
        latency=results.latency(points),
        truth=results.truth(rows),
        frontier=results.frontier(points),
        facts=facts(rows),
        counts=counts(rows, predicted=predicted),
        chart_style=chart_style(TEMPLATES / "results.css"),
    )


def counts(rows: Sequence[Row], *, predicted: bool = False) -> str:
    """`36 ok, 3 oom, 1 no-plan`: as it came out or, with `predicted`, as it was foretold."""

    def status(row: Row) -> str:
        if not predicted:
            return row.status
        return "ok" if row.predicted_s is not None else "oom" if row.status == "ok" else row.status

    return ", ".join(f"{count} {what}" for what, count in Counter(map(status, rows)).items())


def facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what has to be known of all rows: when, where and by what they were measured, and how
    well they were foretold."""
    errors = [
        abs(row.predicted_s / row.step_s - 1) for row in rows if row.step_s and row.predicted_s
    ]
    stated = {
        "measured": " to ".join(
            dict.fromkeys((min(row.at for row in rows)[:10], max(row.at for row in rows)[:10]))
        ),
        "machine": ", ".join(dict.fromkeys(row.machine for row in rows if row.machine)),
        "farspan": ", ".join(
            dict.fromkeys(f"{row.farspan} {row.commit or ''}".strip() for row in rows)
        ),
        "torch, Python": ", ".join(
            dict.fromkeys(f"{row.torch}, {row.python}" for row in rows if row.torch)
        ),
        "seed": ", ".join(dict.fromkeys(str(row.seed) for row in rows)),
        "predictions": ""
        if not errors
        else (
            f"median error {median(errors):.0%}, worst {max(errors):.0%}, of {len(errors)} "
            "measured steps"
        ),
    }
    return [(name, value) for name, value in stated.items() if value]
