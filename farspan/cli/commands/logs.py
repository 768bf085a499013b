"""What a run's job has printed so far, as `farspan train` prints it; with -f also what follows
until it ends."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import find_run, takes_run
from farspan.cli.console import Console
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load

HELP = "show what a run has said so far"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    parser.add_argument(
        "--rank", type=int, metavar="N", help="the log of this worker instead, as it wrote it"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    from farspan.app.jobs import read_status

    if given.rank is not None:
        _print_worker_log(folder, given.rank, console, follow=given.follow)
    else:
        _print_events(folder, console, follow=given.follow)
    standing = read_status(folder)
    if standing.heard_s is None:
        console.write_line("no worker has started yet")
    if given.rank is None and standing.problem is not None:
        console.write_line(str(standing.problem))
    console.answer(standing)


def _print_events(folder: RunFolder, console: Console, *, follow: bool) -> None:
    """Print the plain lines of training, at the pace of the run's own time."""
    from farspan.app.jobs import follow_events
    from farspan.cli.display import DisplayConsole
    from farspan.cli.progress import TrainingDisplay

    now = 0.0
    plain = DisplayConsole(stderr=console.json, force_terminal=False, color_system=None)
    forecast = load(folder.record, RunRecord).forecast
    with TrainingDisplay(folder.load_plan(), plain, lambda: now, forecast) as display:
        for event in follow_events(folder, follow=follow):
            now = event.at
            display.show(event)


def _print_worker_log(folder: RunFolder, rank: int, console: Console, *, follow: bool) -> None:
    from farspan.app.jobs import follow_lines, is_active

    log = folder.logs / f"rank-{rank}.log"
    if not log.exists():
        there = sorted(path.name for path in folder.logs.glob("rank-*.log"))
        raise Refusal(
            "path-missing",
            what="this worker has no log here",
            where=log,
            fact=f"there are {', '.join(there)}" if there else "no worker has started yet",
            remedy=command("logs", folder.path),
        )
    for line in follow_lines(log, lambda: follow and is_active(folder)):
        console.write_line(line.decode(errors="replace").removesuffix("\n"))
