"""Go on with a run that was stopped, from its newest whole checkpoint."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import find_run, takes_run
from farspan.cli.console import Console
from farspan.cli.detach import detached, takes_detach

HELP = "go on with a stopped run"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the commands of its cluster.json also where you did not make the run here",
    )
    takes_detach(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    if given.detach:
        detached(["resume", folder.path, *(["--trust"] if given.trust else [])], folder, console)
        return
    from farspan.app.training import resume
    from farspan.cli.report_text import say_result
    from farspan.cli.show import Show

    with Show(console) as show:
        report = resume(folder, show, trust=given.trust)
    say_result(report, console)
    console.answer({"run": str(folder.path), "measurement": report.measurement})
