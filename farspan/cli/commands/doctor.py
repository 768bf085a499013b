"""What is here, what is missing, and the one command that fixes each finding; with --cluster of all
hosts and links."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from farspan.cli.console import Console
from farspan.cli.paint import text_width
from farspan.domain.cluster import Cluster
from farspan.domain.gpus import judge_gpus
from farspan.domain.problems import Finding, exit_code_of
from farspan.domain.units import counted, format_bytes, format_rate, format_seconds
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.launch.link_measurement import HostPath
    from farspan.launch.network_examination import Examination

HELP = "say what is wrong and how to fix it"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="what to look at (default: auto)",
    )
    parser.add_argument(
        "--cluster", metavar="CLUSTER", help="look at every host and link of a cluster file"
    )


def run(given: argparse.Namespace, console: Console) -> int:
    """Return the exit code of the first finding that would stop a run; warnings leave it 0."""
    from farspan.app.examine_machines import diagnose_machine

    if given.cluster:
        return _diagnose_cluster(given.cluster, console)
    diagnosis = diagnose_machine(given.device)
    for name, fact in diagnosis.rows:
        console.write_line(f"{name:12} {fact}")
    _print_findings(diagnosis.findings, console)
    console.answer(diagnosis)
    return exit_code_of(diagnosis.findings)


def _diagnose_cluster(name: str, console: Console) -> int:
    from farspan.app.clusters import find_cluster
    from farspan.app.examine_machines import BANDWIDTH_STREAMS, examine_cluster

    cluster = find_cluster(name)
    hosts = len(cluster.hosts)
    links = " and the links between them" if hosts > 1 else ""
    console.write_line(f"looking at {counted(hosts, 'host')}{links}")
    examined, problems = examine_cluster(cluster)
    _print_hosts(cluster, examined, console)
    if examined.ways:
        # Hosts by hosts. A cell that could not be measured names what failed.
        reached = [host.name for host in cluster.hosts if host.name in examined.hosts]
        rows = {host: [host, *("-" for _ in reached)] for host in reached}
        heads = ["", *reached]
        for path in examined.ways:
            rows[path.a][heads.index(path.b)] = _path_text(path)
        right = range(1, len(heads))
        table = table_lines(heads, list(rows.values()), right=right, width=text_width())
        console.write_line("\n".join(["", *table, ""]))
        few, many = BANDWIDTH_STREAMS
        console.write_line(
            f"from row to column: round trip, bandwidth with {few} and {many} streams, interface"
        )
    _print_findings(problems, console)
    answer = msgspec.to_builtins(examined, str_keys=True)
    console.answer({**answer, "findings": msgspec.to_builtins(problems)})
    return exit_code_of(problems)


def _print_hosts(cluster: Cluster, examination: Examination, console: Console) -> None:
    for host in cluster.hosts:
        if host.name in examination.unreachable:
            console.write_line(f"{host.name:12} cannot be reached")
            continue
        facts = examination.hosts[host.name]
        packages = [f"{name} {version}" for name, version in facts.packages.items() if version]
        software = f"Python {facts.python}, {', '.join(packages) or 'no packages'}"
        devices = ", ".join(device.kind for device in host.devices)
        machine = f"{counted(facts.cpus, 'core')}, {format_bytes(facts.memory)}"
        disk = f"{format_bytes(facts.disk_free)} free on disk"
        console.write_line(f"{host.name:12} {software}; {devices}; {machine}, {disk}")
        if facts.wheel:
            for note in judge_gpus(facts.nvidia, facts.wheel, host.name).notes:
                console.write_line(f"{'note':12} {note}")


def _path_text(path: HostPath) -> str:
    if path.failed:
        return f"fails: {path.failed}"
    rtt = format_seconds(path.rtt_s or 0.0)
    if not path.bandwidth:
        return rtt
    rates = " / ".join(map(format_rate, path.bandwidth.values()))
    return f"{rtt}, {rates}, {path.interface}"


def _print_findings(problems: Sequence[Finding], console: Console) -> None:
    for problem in problems:
        console.write_line(f"\n{problem}")
    console.write_line(f"\n{counted(len(problems), 'finding') if problems else 'no findings'}")
