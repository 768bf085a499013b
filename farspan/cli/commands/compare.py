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
from farspan.cli.paint import painter, width
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.report.compare import Line, Versus

HELP = "compare runs"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="run directories, two or more"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app.reporting import compare_runs

    comparison = compare_runs(given.runs)
    say(comparison, console)
    console.answer(comparison)


def say(comparison: Versus, console: Console) -> None:
    """Both tables, the best of a line marked, and what has to be known."""
    if comparison.configuration:
        console.say(f"configured differently ({comparison.same} settings are the same):")
        _say_lines(comparison, comparison.configuration, console)
    else:
        console.say(f"configured alike in all {comparison.same} settings")
    console.say("\nresults:")
    _say_lines(comparison, comparison.results, console)
    for note in comparison.notes:
        console.say(textwrap.fill(note, width()))


def _say_lines(comparison: Versus, lines: Sequence[Line], console: Console) -> None:
    rows = [
        (
            line.what,
            *(
                f"{cell} *" if place == line.best else cell
                for place, cell in enumerate(line.values)
            ),
        )
        for line in lines
    ]
    for text in table_lines(
        ("", *comparison.names), rows, width=width(), colours=painter(json=console.json)
    ):
        console.say(text, painted=True)
