"""What a run did: predicted beside measured, the losses, and a page that opens offline."""

from __future__ import annotations

import argparse

from farspan.cli.console import Console
from farspan.cli.paint import paint, painter, width
from farspan.cli.runs import find_run, takes_run

HELP = "show what a run did"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.cli.reports import write_report
    from farspan.report.compared_text import timeline
    from farspan.report.measure import measure
    from farspan.report.text import report

    run, found, page = write_report(find_run(given, console).path)
    console.say(f"{report(run, found)}\n")
    if found is not None:
        for line in timeline(found, width()):
            console.say("".join(paint(text, tint, painter(json=console.json)) for text, tint in line).rstrip())
        console.say()
    console.say(f"page: {page}")
    compared = {"compared": found} if found is not None else {}
    console.answer({"run": str(run.folder), "page": str(page), "measurement": measure(run), **compared})
