"""Ask a run's job to save and end, and wait until it has."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import find_run, takes_run
from farspan.cli.console import Console

HELP = "let a run save and end"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--now", action="store_true", help="end at once: what is not saved by now is lost"
    )
    parser.add_argument(
        "--timeout", default="10m", help="wait for the end for so long (default: 10m)"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    from farspan.app.jobs import stop_job
    from farspan.cli.status_text import describe_stop
    from farspan.domain.units import parse_duration
    from farspan.planning.quantities import parse_positive

    timeout_s = parse_positive(parse_duration, given.timeout, "--timeout", "10m")
    standing = stop_job(folder, console.write_line, now=given.now, timeout_s=timeout_s)
    console.write_line(describe_stop(standing))
    if standing.state != "finished":
        console.write_line(f"go on with it: {folder.resume_command()}")
    console.answer(standing)
