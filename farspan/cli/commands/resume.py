"""Go on with a run that was stopped, from its newest whole checkpoint."""

from __future__ import annotations

import argparse

from farspan.cli import job
from farspan.cli.console import Console
from farspan.cli.edited import refuse_edited
from farspan.cli.runs import find_run, takes_run

HELP = "go on with a stopped run"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the commands of its cluster.json also where you did not make the run here",
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.launch import trust
    from farspan.report.history import is_complete

    folder = find_run(given, console)
    refuse_edited(folder)
    if is_complete(folder):
        console.say("this run is finished: nothing is left to train")
        measured = job.say_result(folder, console)
    else:
        if given.trust:
            trust.seal(folder)
        trust.require(folder)
        measured = job.train(folder, console)
    console.answer({"run": str(folder.path), "measurement": measured})
