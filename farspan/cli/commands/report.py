"""What a run did: predicted and measured, the losses, and a page that opens offline; or the results
of a bench."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.app.extensions import extensions
from farspan.cli.arguments import find_run, takes_run
from farspan.cli.console import Console
from farspan.cli.paint import width

HELP = "show what a run did, or what a bench measured"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--predicted",
        action="store_true",
        help="of a bench: the predictions, not what was measured",
    )


def run(given: argparse.Namespace, console: Console) -> None:
    if given.run is not None and not (Path(given.run) / "plan.json").exists():
        for point in extensions("reports").values():
            if point.load()(given.run, console, predicted=given.predicted):
                return
    from farspan.app.reporting import write_report
    from farspan.cli.plan_table import say_drawing
    from farspan.report.compare_text import timeline

    report = write_report(find_run(given, console).path)
    console.say(f"{report}\n")
    answer: dict[str, object] = {
        "run": str(report.run.folder),
        "page": str(report.page),
        "measurement": report.measurement,
    }
    if report.compared is not None:
        say_drawing(timeline(report.compared, width()), console)
        console.say()
        answer["compared"] = report.compared
    console.say(f"page: {report.page}")
    console.answer(answer)
