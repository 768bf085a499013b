"""What a run did: predicted beside measured, the losses, and a page that opens offline."""

from __future__ import annotations

import argparse

from farspan.cli.console import Console
from farspan.cli.runs import find_run

HELP = "show what a run did"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="run directory (default: the newest under runs/)")


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.report.measure import measure
    from farspan.report.page import write_page
    from farspan.report.text import report

    folder = find_run(given.run, console)
    page = write_page(folder.path)
    console.say(report(folder.path))
    console.say(f"\npage: {page}")
    console.answer({"run": str(folder.path), "page": str(page), "measurement": measure(folder.path)})
