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


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.report.history import is_complete

    folder = find_run(given, console)
    refuse_edited(folder)
    if is_complete(folder):
        console.say("this run is finished: nothing is left to train")
        measured = job.say_result(folder, console)
    else:
        measured = job.train(folder, console)
    console.answer({"run": str(folder.path), "measurement": measured})
