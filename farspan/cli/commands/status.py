"""Whether runs are running or how they ended, and how far they are: a line each, or all of one that
is named."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from farspan.cli.arguments import find_runs
from farspan.cli.console import Console
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder

if TYPE_CHECKING:
    from farspan.app.jobs import Status
    from farspan.app.slurm_jobs import QueuedRun

#: A look at runs waits for Slurm's queue no longer than this, twice at most. A choice.
QUEUE_TIMEOUT_S = 10.0
HELP = "show whether runs go on, and how far they are"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help="run directories (default: all under runs/)"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app.jobs import read_status
    from farspan.cli.status_text import describe_queued_run, describe_run, list_runs

    unbegun = _find_unbegun(given, console)
    known = {queued.run for queued in unbegun}
    is_one = len(given.runs) == 1
    named = [run for run in given.runs if str(Path(run)) not in known]
    runs = []
    if named or not unbegun or (not given.runs and any(Path("runs").glob("*/plan.json"))):
        runs = find_runs(named)
    statuses = []
    problems = []
    for folder in runs:
        try:
            statuses.append(read_status(folder))
        except Refusal as refusal:  # One that is damaged hides no other.
            if is_one:
                raise
            problem = refusal.problem
            problems.append(f"{folder.path}: {problem.what} ({problem.where})")
    queued = [*unbegun, *_find_queued(statuses, console)]
    if is_one:
        for status in statuses:
            for line in describe_run(status, time.time(), queued[0] if queued else None):
                console.write_line(line)
    elif statuses:
        for line in list_runs(statuses, json=console.json):
            console.write_line(line, painted=True)
    for waiting in queued:
        if not (is_one and statuses):
            for line in describe_queued_run(waiting):
                console.write_line(line)
    for line in problems:
        console.write_line(line)
    console.answer({"runs": statuses, **({"queued": queued} if queued else {})})


def _find_unbegun(given: argparse.Namespace, console: Console) -> list[QueuedRun]:
    """Return the runs that were named, or all under runs/, which have a Slurm job and no folder
    yet."""
    runs = [RunFolder(Path(run)) for run in given.runs]
    unbegun = [run for run in runs if not run.plan.exists()]
    if not given.runs and which("sbatch"):
        from farspan.app.slurm_jobs import submitted_runs

        unbegun = submitted_runs(Path("runs"))
    return _ask_queue(unbegun, console)


def _find_queued(statuses: Sequence[Status], console: Console) -> list[QueuedRun]:
    """Return those runs that are neither trained now nor finished and have a Slurm job. Of a job on
    another host that was killed only the queue knows: it waits there again."""
    runs = []
    may_run = set[str]()
    for status in statuses:
        run = RunFolder(Path(status.run))
        elsewhere = status.job is not None and not status.job.here
        if status.state == "running" and elsewhere:
            may_run.add(status.run)
        if (status.state not in ("running", "finished") or elsewhere) and run.is_of_slurm():
            runs.append(run)
    queued = _ask_queue(runs, console)
    return [each for each in queued if each.job.state == "PENDING" or each.run not in may_run]


def _ask_queue(runs: Sequence[RunFolder], console: Console) -> list[QueuedRun]:
    """Return those of some runs that have a Slurm job. Where Slurm does not answer, report that:
    what lies here is shown all the same."""
    if not runs or not which("sbatch"):
        return []
    from farspan.app.slurm_jobs import queued_runs

    try:
        return queued_runs(runs, QUEUE_TIMEOUT_S)
    except Refusal as refusal:
        console.write_line(f"Slurm's queue is not known: {refusal.problem.fact}")
        return []
