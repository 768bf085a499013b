"""Go on with a run that was stopped, from its newest whole checkpoint."""

from __future__ import annotations

import argparse

from farspan.cli import job
from farspan.cli.console import Console
from farspan.cli.runs import find_run

HELP = "go on with a stopped run"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="run directory (default: the newest under runs/)")


def run(given: argparse.Namespace, console: Console) -> None:
    job.require_torch()
    folder = find_run(given.run, console)
    measured = job.train(folder, console)
    job.say_result(folder, console)
    console.answer({"run": str(folder.path), "measurement": measured})
