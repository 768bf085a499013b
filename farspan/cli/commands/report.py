"""What a run did: predicted and measured, the losses, and a page that opens offline; or the results
of a bench."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.app.extensions import find_extensions
from farspan.cli.arguments import find_run, takes_run
from farspan.cli.console import Console
from farspan.cli.paint import text_width

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
        for point in find_extensions("reports").values():
            if point.load()(given.run, console, predicted=given.predicted):
                return
    from farspan.app.reporting import write_report
    from farspan.cli.plan_table import print_drawing
    from farspan.report.compare_text import draw_timeline

    report = write_report(find_run(given, console).path)
    console.write_line(f"{report}\n")
    answer: dict[str, object] = {
        "run": str(report.run.folder),
        "page": str(report.page),
        "measurement": report.measurement,
    }
    if report.accounting is not None:
        answer["slurm"] = report.accounting
    if report.compared is not None:
        print_drawing(draw_timeline(report.compared, text_width()), console)
        console.write_line()
        answer["compared"] = report.compared
    console.write_line(f"page: {report.page}")
    console.answer(answer)
