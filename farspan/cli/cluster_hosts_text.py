"""`farspan cluster up`, `status` and `down`: their arguments, and what they print."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from farspan.cli.console import Console
from farspan.cli.paint import text_width
from farspan.domain.problems import Problem, command
from farspan.domain.struct_files import missing_path
from farspan.domain.units import counted, format_bytes
from farspan.launch.cluster_tidy import HostState, TidiedHost
from farspan.report.tables import table_lines


def configure_hosts(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the actions that reach the hosts of a cluster file."""
    up = actions.add_parser("up", help="install this farspan on every host")
    status = actions.add_parser("status", help="what farspan has and runs on every host")
    down = actions.add_parser("down", help="end and remove farspan on every host")
    for action in (up, status, down):
        action.add_argument("cluster", metavar="CLUSTER", help="a cluster file")
    source = up.add_mutually_exclusive_group()
    source.add_argument(
        "--index", metavar="URL", help="the package index (default: pip's own settings)"
    )
    source.add_argument(
        "--wheels", metavar="FOLDER", type=Path, help="send wheels of this folder, use no index"
    )
    down.add_argument(
        "--all", action="store_true", help="also remove the runs and corpora that lie there"
    )


def run_up(given: argparse.Namespace, console: Console) -> int:
    """Return the exit code of the first host that failed."""
    from farspan.app.cluster_hosts import set_up_cluster
    from farspan.cli.show_updates import Show
    from farspan.launch.host_wheels import WheelSource

    if given.wheels is not None and not given.wheels.is_dir():
        raise missing_path(given.wheels)
    folder = given.wheels.absolute() if given.wheels is not None else None
    with Show(console) as show:
        ends = set_up_cluster(given.cluster, WheelSource(given.index, folder), show)
    return _finish(ends, console)


def run_status(given: argparse.Namespace, console: Console) -> int:
    """Return the exit code of the first host that cannot be examined."""
    from farspan.app.cluster_hosts import examine_hosts

    ends = examine_hosts(given.cluster)
    rows = [_state_row(end) for end in ends if isinstance(end, HostState)]
    if rows:
        heads = ("host", "farspan", "Python, torch", "disk free", "GPUs", "runs")
        for line in table_lines(heads, rows, width=text_width()):
            console.write_line(line)
    for end in ends:
        if isinstance(end, HostState):
            for run in end.runs:
                pids = f", process {', '.join(map(str, run.pids))}" if run.pids else ""
                size = format_bytes(run.bytes)
                console.write_line(f"{end.host}: {run.name}: {run.state}{pids}, {size}")
    if any(isinstance(end, HostState) and not end.is_current for end in ends):
        console.write_line(f"fix: {command('cluster', 'up', given.cluster)}")
    return _finish(ends, console)


def run_down(given: argparse.Namespace, console: Console) -> int:
    """Return the exit code of the first host that could not be tidied."""
    from farspan.app.cluster_hosts import tidy_cluster

    ends = tidy_cluster(given.cluster, runs=given.all)
    has_left = False
    for end in ends:
        if not isinstance(end, TidiedHost):
            continue
        ended = f"ended {counted(len(end.ended), 'process')}, " if end.ended else ""
        kept = "no run is left"
        if end.bytes_left:
            has_left = True
            runs = counted(end.runs_left, "run")
            kept = f"{runs} and corpora of {format_bytes(end.bytes_left)} stay"
        console.write_line(f"{end.host}: {ended}removed {format_bytes(end.removed_bytes)}, {kept}")
    if has_left:
        console.write_line(
            f"to remove them too, unsaved checkpoints with them: "
            f"{command('cluster', 'down', given.cluster, '--all')}"
        )
    return _finish(ends, console)


def _state_row(state: HostState) -> tuple[str, ...]:
    farspan = "not installed"
    if state.is_current:
        farspan = state.versions.get("farspan", "")
    elif state.release is not None:
        farspan = f"{state.release} (old)"
    elif "farspan" in state.versions:
        farspan = f"{state.versions['farspan']} (not by up)"
    software = ", ".join(
        state.versions[key] for key in ("python", "torch") if key in state.versions
    )
    busy = sum(run.state == "training" for run in state.runs)
    runs = f"{len(state.runs)}, {busy} training" if busy else str(len(state.runs))
    gpus = ", ".join(state.gpus) or "none"
    return (state.host, farspan, software, format_bytes(state.disk_free), gpus, runs)


def _finish(ends: Sequence[object], console: Console) -> int:
    """Print the problems of hosts, answer for programs, and return the exit code."""
    problems = [end for end in ends if isinstance(end, Problem)]
    for problem in problems:
        console.write_line(f"\n{problem}")
    done = [end for end in ends if not isinstance(end, Problem)]
    console.answer({"hosts": done, "problems": problems})
    return problems[0].exit_code if problems else 0
