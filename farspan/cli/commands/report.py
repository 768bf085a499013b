"""What a run did: predicted beside measured, the losses, and a page that opens offline."""

from __future__ import annotations

import argparse

from farspan.cli.console import Console
from farspan.cli.runs import find_run, takes_run

HELP = "show what a run did"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.report.history import open_run
    from farspan.report.measure import measure
    from farspan.report.page import write_page
    from farspan.report.text import report

    run = open_run(find_run(given, console).path)
    page = write_page(run)
    console.say(f"{report(run)}\n\npage: {page}")
    console.answer({"run": str(run.folder), "page": str(page), "measurement": measure(run)})
