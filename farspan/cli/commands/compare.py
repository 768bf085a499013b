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
from farspan.cli.paint import paint, painter, width
from farspan.domain.problems import Refusal, command

if TYPE_CHECKING:
    from farspan.report.versus import Line, Versus

HELP = "compare runs"
#: The most columns that a setting's name takes.
NAME = 34


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directories, two or more")


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.report.history import open_run
    from farspan.report.versus import versus

    folders = list(dict.fromkeys(path.resolve() for path in given.runs))
    if len(folders) < 2:
        raise Refusal(
            "usage", what="one run cannot be compared", where="farspan compare", fact="name two runs or more",
            remedy=command("report", given.runs[0]),
        )  # fmt: skip
    comparison = versus([open_run(path) for path in dict.fromkeys(given.runs)])
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
    """Columns to the left; long cells go on below."""
    colours = painter(json=console.json)
    first = min(NAME, max(len(line.what) for line in lines))
    each = max(12, (width() - first - 2 * len(comparison.names)) // len(comparison.names))
    each = min(each, 2 + max(len(cell) for line in lines for cell in (*line.values, *comparison.names)))
    rows = [("", comparison.names, None), *((line.what, line.values, line.best) for line in lines)]
    for number, (name, values, best) in enumerate(rows):
        cells = [
            textwrap.wrap(f"{cell} *" if place == best else cell, each) or [""] for place, cell in enumerate(values)
        ]
        names = textwrap.wrap(name, first) or [""]
        for line in range(max(len(names), *map(len, cells))):
            parts = [(cell[line] if line < len(cell) else "").ljust(each) for cell in cells]
            text = "  ".join([(names[line] if line < len(names) else "").ljust(first), *parts]).rstrip()
            console.say(paint(text, "" if number else "soft", colours))
