"""What a run did: predicted beside measured, the losses, and a page that opens offline; or the results of a bench."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.cli.arguments import find_run, takes_run
from farspan.cli.console import Console
from farspan.cli.paint import paint, painter, width
from farspan.domain.problems import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.domain.bench import Row
    from farspan.report.charts import Chart
    from farspan.report.drawn import Drawn

HELP = "show what a run did, or what a bench measured"
#: More tables than this are only on the page.
SHOWN = 8


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument("--predicted", action="store_true", help="of a bench: what was foretold, not what was measured")


def run(given: argparse.Namespace, console: Console) -> None:
    if given.run is not None and (Path(given.run) / "rows.jsonl").exists():
        bench(Path(given.run), console, predicted=given.predicted)
        return
    if given.run is not None and not Path(given.run).exists() and paper(given.run, console, predicted=given.predicted):
        return
    from farspan.app.reporting import write_report
    from farspan.report.compared_text import timeline

    report = write_report(find_run(given, console).path)
    console.say(f"{report}\n")
    if report.compared is not None:
        for line in timeline(report.compared, width()):
            console.say("".join(paint(text, tint, painter(json=console.json)) for text, tint in line).rstrip())
        console.say()
    console.say(f"page: {report.page}")
    compared = {"compared": report.compared} if report.compared is not None else {}
    console.answer({
        "run": str(report.run.folder), "page": str(report.page), "measurement": report.measurement, **compared,
    })  # fmt: skip


def bench(folder: Path, console: Console, *, predicted: bool) -> None:
    """The tables of a bench, and its page."""
    from farspan.cli.benching import Results
    from farspan.cli.drawing import drawn_bench

    rows = Results(folder).read()
    if not rows:
        raise Refusal(
            "not-a-run", what="the bench has nothing to report yet", where=folder, fact="no cell was measured",
            remedy="farspan bench, with the same matrix",
        )  # fmt: skip
    show(
        rows, folder, rows[0].matrix, console, predicted=predicted, drawn=drawn_bench(rows, folder, predicted=predicted)
    )


def paper(name: str, console: Console, *, predicted: bool) -> bool:
    """A paper's tables and figures, as printed or as predicted; whether there is such a paper."""
    from farspan.cli.drawing import drawn_slices
    from farspan.planning.paper_rows import SOURCES, as_plotted, rows, sizes
    from farspan.planning.size import fitted_shape
    from farspan.report import results

    if name in SOURCES:
        title, fabric = f"{name}, {SOURCES[name]}", name == "fabric"
        found = rows(name) if fabric or predicted else as_plotted(rows(name))
        show(
            found, Path(f"{name}-report"), title, console, predicted=predicted, kind="Paper",
            drawn=drawn_slices(predicted=predicted) if fabric else (),
            more=() if fabric else results.sizes(sizes(), fitted_shape),
        )  # fmt: skip
    return name in SOURCES


def show(
    rows: list[Row], folder: Path, title: str, console: Console, *, predicted: bool, kind: str = "Bench",
    drawn: Sequence[Drawn] = (), more: Sequence[Chart] = (),
) -> None:  # fmt: skip
    """Tables as text, the page and the tables for a paper as files."""
    from farspan.report import results
    from farspan.report.results_page import counts, write_results
    from farspan.report.text import table

    page, tables = write_results(rows, folder, title, predicted=predicted, kind=kind, drawn=drawn, more=more)
    found = results.tables(results.points(rows, predicted=predicted))
    for one in found if len(found) <= SHOWN else ():
        marked = [
            tuple(f"{cell} *" if place == best else cell for place, cell in enumerate(row))
            for row, best in zip(one.rows, one.best, strict=True)
        ]
        console.say(f"{one.title} (* the best, x out of memory, - no plan)")
        for line in table([one.heads, *marked]):
            console.say(line)
        console.say()
    console.say(f"{len(rows)} cells: {counts(rows, predicted=predicted)}")
    console.say(f"page: {page}; tables for a paper: {tables}")
    console.answer({"folder": str(folder), "page": str(page), "tables": found, "rows": rows})
