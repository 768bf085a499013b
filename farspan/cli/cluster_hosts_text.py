"""`farspan cluster up`, `status`, `tune`, `secure`, `export` and `down`: their arguments, and
what they print."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from farspan.app.clusters import probe_command
from farspan.cli.arguments import parse_port
from farspan.cli.console import Console
from farspan.cli.paint import text_width
from farspan.domain.problems import Problem, command
from farspan.domain.struct_files import missing_path
from farspan.domain.units import (
    counted,
    format_bytes,
    format_rate,
    format_seconds,
    parse_duration,
    short_time,
)
from farspan.launch.cluster_tidy import HostState, TidiedHost
from farspan.launch.tcp_buffers import HostBuffers
from farspan.report.tables import table_lines


def configure_hosts(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the actions that reach the hosts of a cluster file."""
    up = actions.add_parser("up", help="install this farspan on every host")
    status = actions.add_parser("status", help="what farspan has and runs on every host")
    tune = actions.add_parser("tune", help="let TCP fill the cluster's links, for a time")
    secure = actions.add_parser("secure", help="join the hosts by a private network (WireGuard)")
    export = actions.add_parser("export", help="write the hosts down for another tool")
    down = actions.add_parser("down", help="end and remove farspan on every host")
    for action in (up, status, tune, secure, export, down):
        action.add_argument("cluster", metavar="CLUSTER", help="a cluster file")
    source = up.add_mutually_exclusive_group()
    source.add_argument(
        "--index", metavar="URL", help="the package index (default: pip's own settings)"
    )
    source.add_argument(
        "--wheels", metavar="FOLDER", type=Path, help="send wheels of this folder, use no index"
    )
    until = tune.add_mutually_exclusive_group()
    until.add_argument(
        "--for",
        dest="duration",
        metavar="TIME",
        default="24h",
        help="put the buffers back after this time (default: 24h)",
    )
    until.add_argument("--undo", action="store_true", help="put the buffers back now")
    tune.add_argument("--sudo", action="store_true", help="use sudo where ssh is not root's")
    secure.add_argument(
        "-o",
        dest="out",
        metavar="FILE",
        type=Path,
        help="the cluster file of the network to write (default: CLUSTER-secure.yaml)",
    )
    secure.add_argument(
        "--port", type=parse_port, metavar="UDP", help="port to listen on (default: 51820)"
    )
    secure.add_argument("--undo", action="store_true", help="end the private network")
    secure.add_argument("--sudo", action="store_true", help="use sudo where ssh is not root's")
    export.add_argument("--to", required=True, metavar="TOOL", help="ray or skypilot")
    export.add_argument(
        "-o",
        dest="out",
        metavar="FOLDER",
        type=Path,
        default=Path(),
        help="where to write its files (default: here)",
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


def run_tune(given: argparse.Namespace, console: Console) -> int:
    """Return the exit code of the first host that failed."""
    from farspan.app.cluster_hosts import tune_cluster
    from farspan.planning.quantities import parse_positive

    seconds = parse_positive(parse_duration, given.duration, "--for", "24h")
    ends, unknown = tune_cluster(given.cluster, seconds=seconds, sudo=given.sudo, undo=given.undo)
    tuned = [end for end in ends if not isinstance(end, Problem)]
    heads = ("host", "longest link", "by", "needs", "receive, send", "")
    rows = [_buffers_row(host) for host in tuned]
    if rows:
        for line in table_lines(heads, rows, width=text_width()):
            console.write_line(line)
    for a, b in unknown:
        console.write_line(f"the bandwidth of {a} - {b} is unknown, and was left out")
    measured = "tuned.yaml" if Path(given.cluster).name == "measured.yaml" else "measured.yaml"
    probe = probe_command(given.cluster, measured)
    if unknown:
        console.write_line(f"{probe} measures it")
    elif any(host.state in ("set", "restored") for host in tuned):
        console.write_line(f"{probe} measures the links again, for plans")
    return _finish(ends, console, unknown=unknown)


def _buffers_row(host: HostBuffers) -> tuple[str, ...]:
    link = needs = ""
    if host.need is not None:
        rtt = short_time(host.need.rtt_s)
        link = f"{host.need.peer}, {rtt}, {format_rate(host.need.bandwidth)}"
        needs = format_bytes(host.need.buffer)
    sizes = ", ".join(format_bytes(largest) for _, _, largest in host.now.values())
    state: str = host.state
    if host.state == "set" and host.until is not None:
        state = f"for {format_seconds(host.until - time.time())}"
    elif host.state == "untouched":
        state = "nothing to put back"
    return (host.host, link, host.interface or "", needs, sizes or "unknown", state)


def run_secure(given: argparse.Namespace, console: Console) -> int:
    """Return the exit code of the first path that does not work, or host that fails."""
    from farspan.app.cluster_hosts import part_cluster, secure_cluster

    if given.undo:
        ends = part_cluster(given.cluster, sudo=given.sudo)
        for end in ends:
            if not isinstance(end, Problem):
                host, was_in = end
                console.write_line(f"{host}: {'left the network' if was_in else 'was in none'}")
        return _finish(ends, console)
    out = given.out or Path(f"{Path(given.cluster).stem}-secure.yaml")
    cluster, problems = secure_cluster(given.cluster, out, port=given.port, sudo=given.sudo)
    rows = [(host.name, host.address or "") for host in cluster.machines]
    for line in table_lines(("host", "address"), rows, width=text_width()):
        console.write_line(line)
    probe = command("probe", "--cluster", out, "-o", "measured.yaml")
    console.write_line(f"{out} is the cluster file of the network; first measure its links:")
    console.write_line(probe)
    joined = [{"host": host, "address": address} for host, address in rows]
    return _finish([*joined, *problems], console)


def run_export(given: argparse.Namespace, console: Console) -> int:
    """Write the cluster's hosts down for another tool."""
    from farspan.app.cluster_hosts import export_cluster

    exported = export_cluster(given.cluster, given.to, given.out)
    paths = [str(given.out / name) for name in exported.files]
    console.write_line(f"wrote {' and '.join(paths)}, for {exported.version}")
    for note in exported.notes:
        console.write_line(note)
    console.answer({"paths": paths, "exported": exported})
    return 0


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


def _finish(ends: Sequence[object], console: Console, **more: object) -> int:
    """Print the problems of hosts, answer for programs, with `more`, and return the exit code."""
    problems = [end for end in ends if isinstance(end, Problem)]
    for problem in problems:
        console.write_line(f"\n{problem}")
    done = [end for end in ends if not isinstance(end, Problem)]
    console.answer({"hosts": done, "problems": problems, **more})
    return problems[0].exit_code if problems else 0
