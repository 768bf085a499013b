"""Whether runs are running or how they ended, and how far they are: a line each, or all of one that
is named."""

from __future__ import annotations

import argparse
import time

from farspan.cli.arguments import find_runs
from farspan.cli.console import Console
from farspan.domain.problems import Refusal

HELP = "show whether runs go on, and how far they are"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help="run directories (default: all under runs/)"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    runs = find_runs(given)
    from farspan.app.jobs import read_status
    from farspan.cli.status_text import describe_run, list_runs

    if len(given.runs) == 1:
        statuses = [read_status(runs[0])]
        for line in describe_run(statuses[0], time.time()):
            console.write_line(line)
    else:
        statuses = []
        problems = []
        for folder in runs:
            try:
                statuses.append(read_status(folder))
            except Refusal as refusal:  # One that is damaged hides no other.
                problem = refusal.problem
                problems.append(f"{folder.path}: {problem.what} ({problem.where})")
        for line in list_runs(statuses, json=console.json):
            console.write_line(line, painted=True)
        for line in problems:
            console.write_line(line)
    console.answer({"runs": statuses})
