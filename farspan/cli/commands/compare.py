"""Compare runs: first what was configured differently, then what came out, with its spread.

Losses a token are not put in order across tokenizers; bits a byte are.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.paint import text_width, wants_colours
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.report.compare import ComparedRow, Versus

HELP = "compare runs"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="run directories, two or more"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app.reporting import compare_runs

    comparison = compare_runs(given.runs)
    print_comparison(comparison, console)
    console.answer(comparison)


def print_comparison(comparison: Versus, console: Console) -> None:
    """Print both tables, the best of a line marked, and the notes."""
    if comparison.configuration:
        console.write_line(f"configured differently ({comparison.same} settings are the same):")
        _print_lines(comparison, comparison.configuration, console)
    else:
        console.write_line(f"configured alike in all {comparison.same} settings")
    console.write_line("\nresults:")
    _print_lines(comparison, comparison.results, console)
    for note in comparison.notes:
        console.write_line(textwrap.fill(note, text_width()))


def _print_lines(comparison: Versus, lines: Sequence[ComparedRow], console: Console) -> None:
    heads = ["", *comparison.names]
    rows = []
    for line in lines:
        cells = [line.what, *line.values]
        if line.best is not None:
            cells[line.best + 1] += " *"
        rows.append(cells)
    colours = wants_colours(json=console.json)
    for text in table_lines(heads, rows, width=text_width(), colours=colours):
        console.write_line(text, painted=True)
