"""Reports of a bench, or of a paper: tables and figures as they were measured, printed or
predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from farspan.cli.console import Console
from farspan.domain.problems import Refusal
from farspan.report.charts import Chart
from farspan_studies.bench.matrix import Row
from farspan_studies.pages.drawn import Drawn

#: More tables than this are only on the page.
SHOWN = 8


def report(name: str, console: Console, *, predicted: bool) -> bool:
    """Return the report of a bench's folder, or of a paper where no such folder is; whether it is
    either."""
    if (Path(name) / "rows.jsonl").exists():
        bench(Path(name), console, predicted=predicted)
        return True
    return not Path(name).exists() and paper(name, console, predicted=predicted)


def bench(folder: Path, console: Console, *, predicted: bool) -> None:
    """Return the tables of a bench, and its page."""
    from farspan_studies.bench.measuring import Results
    from farspan_studies.pages.drawing import drawn_bench

    rows = Results(folder).read()
    if not rows:
        raise Refusal(
            "not-a-run",
            what="the bench has nothing to report yet",
            where=folder,
            fact="no cell was measured",
            remedy="farspan bench, with the same matrix",
        )
    show(
        rows,
        folder,
        rows[0].matrix,
        console,
        predicted=predicted,
        drawn=drawn_bench(rows, folder, predicted=predicted),
    )


def paper(name: str, console: Console, *, predicted: bool) -> bool:
    """Return a paper's tables and figures, as printed or as predicted; whether there is such a
    paper."""
    from farspan.planning.size import fitted_shape
    from farspan_studies.pages import results
    from farspan_studies.pages.drawing import drawn_slices
    from farspan_studies.pages.paper_rows import SOURCES, as_plotted, rows, sizes

    if name in SOURCES:
        title = f"{name}, {SOURCES[name]}"
        fabric = name == "fabric"
        shown_rows = rows(name) if fabric or predicted else as_plotted(rows(name))
        show(
            shown_rows,
            Path(f"{name}-report"),
            title,
            console,
            predicted=predicted,
            kind="Paper",
            drawn=drawn_slices(predicted=predicted) if fabric else (),
            more=() if fabric else results.sizes(sizes(), fitted_shape),
        )
    return name in SOURCES


def show(
    rows: list[Row],
    folder: Path,
    title: str,
    console: Console,
    *,
    predicted: bool,
    kind: str = "Bench",
    drawn: Sequence[Drawn] = (),
    more: Sequence[Chart] = (),
) -> None:
    """Tables as text, the page and the tables for a paper as files."""
    from farspan.report.text import align_table
    from farspan_studies.pages import results
    from farspan_studies.pages.results_page import counts, write_results

    page, tables = write_results(
        rows, folder, title, predicted=predicted, kind=kind, drawn=drawn, more=more
    )
    text_tables = results.tables(results.points(rows, predicted=predicted))
    for text_table in text_tables if len(text_tables) <= SHOWN else ():
        marked = [
            tuple(f"{cell} *" if place == best else cell for place, cell in enumerate(row))
            for row, best in zip(text_table.rows, text_table.best, strict=True)
        ]
        console.write_line(f"{text_table.title} (* the best, x out of memory, - no plan)")
        for line in align_table([text_table.heads, *marked]):
            console.write_line(line)
        console.write_line()
    console.write_line(f"{len(rows)} cells: {counts(rows, predicted=predicted)}")
    console.write_line(f"page: {page}; tables for a paper: {tables}")
    console.answer({"folder": str(folder), "page": str(page), "tables": text_tables, "rows": rows})
