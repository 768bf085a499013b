"""What is here, what is missing, and the one command that fixes each finding; with --cluster of all hosts and links."""

from __future__ import annotations

import argparse
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farspan.cli import job
from farspan.cli.console import Console
from farspan.domain.cluster import Cluster
from farspan.domain.gpus import judge
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import cache_folder
from farspan.domain.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from farspan.launch.examine import Examination, Way

HELP = "say what is wrong and how to fix it"

PACKAGES = ("torch", "numpy", "msgspec", "tokenizers", "tiktoken", "safetensors")
#: Streams of the bandwidths that are measured: one shows the window, several the line.
STREAMS = (1, 8)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--cluster", metavar="CLUSTER", help="look at every host and link of a cluster file")


def run(given: argparse.Namespace, console: Console) -> None:
    if given.cluster:
        return _cluster(given.cluster, console)
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    findings: list[Problem] = []
    cluster, notes, wrong = _describe(given.device)
    findings += wrong
    findings += _disk_findings()
    for name, version in versions.items():
        console.say(f"{name:12} {version or 'not installed'}")
    for device in cluster.devices if cluster else ():
        console.say(
            f"{'device':12} {device.kind} ({device.backend}), {format_bytes(device.memory)}, "
            f"{', '.join(device.dtypes)}, {device.threads} threads"
        )
    for note in notes:
        console.say(f"{'note':12} {note}")
    free = shutil.disk_usage(".").free
    console.say(f"{'disk':12} {format_bytes(free)} free here")
    _say_findings(findings, console)
    console.answer({
        "versions": versions, "devices": cluster.devices if cluster else [], "disk_free_bytes": free,
        "notes": notes, "findings": findings,
    })  # fmt: skip
    return None


def _cluster(name: str, console: Console) -> None:
    from farspan.cli.clusters import find
    from farspan.launch.examine import examine
    from farspan.launch.findings import findings

    cluster = find(name)
    console.say(f"looking at {len(cluster.hosts)} hosts and the links between them")
    found = examine(cluster, streams=STREAMS)
    _say_hosts(cluster, found, console)
    if found.ways:
        console.say(f"\n{_table(cluster, found)}\n")
        console.say(f"from row to column: round trip, bandwidth with {STREAMS[0]} and {STREAMS[1]} streams, interface")
    problems = findings(cluster, found)
    _say_findings(problems, console)
    console.answer({**msgspec.to_builtins(found, str_keys=True), "findings": msgspec.to_builtins(problems)})


def _say_hosts(cluster: Cluster, found: Examination, console: Console) -> None:
    for host in cluster.hosts:
        if host.name in found.unreachable:
            console.say(f"{host.name:12} cannot be reached")
            continue
        facts = found.hosts[host.name]
        packages = ", ".join(f"{name} {version}" for name, version in facts.packages.items() if version)
        devices = ", ".join(device.kind for device in host.devices)
        console.say(
            f"{host.name:12} Python {facts.python}, {packages or 'no packages'}; {devices}; "
            f"{facts.cpus} cores, {format_bytes(facts.memory)}, {format_bytes(facts.disk_free)} free on disk"
        )
        for note in judge(facts.nvidia, facts.wheel, host.name).notes if facts.wheel else ():
            console.say(f"{'note':12} {note}")


def _table(cluster: Cluster, found: Examination) -> str:
    """Hosts by hosts. A cell that could not be measured names what failed."""
    names = [host.name for host in cluster.hosts if host.name in found.hosts]
    ways = {(way.a, way.b): way for way in found.ways}
    cells = [[_cell(ways[a, b]) if a != b else "-" for b in names] for a in names]
    width = max(len(text) for text in (*names, *(cell for row in cells for cell in row))) + 2
    head = " " * 12 + "".join(f"{name:>{width}}" for name in names)
    return "\n".join([head, *(f"{name:12}" + "".join(f"{cell:>{width}}" for cell in row)
                              for name, row in zip(names, cells, strict=True))])  # fmt: skip


def _cell(way: Way) -> str:
    if way.failed:
        return f"fails: {way.failed}"
    if not way.bandwidth:
        return format_seconds(way.rtt_s or 0.0)
    rates = " / ".join(format_rate(rate) for rate in way.bandwidth.values())
    return f"{format_seconds(way.rtt_s or 0.0)}, {rates}, {way.interface}"


def _say_findings(problems: Any, console: Console) -> None:
    for problem in problems:
        console.say(f"\n{problem}")
    count = len(problems)
    console.say(f"\n{count or 'no'} finding{'s' * (count != 1)}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _describe(backend: str) -> tuple[Cluster | None, tuple[str, ...], list[Problem]]:
    """This machine's devices, a note on each GPU that is left out, and what is wrong with them."""
    from farspan.launch.probe import Probe, check_gpus

    notes: tuple[str, ...] = ()
    wrong = list[Problem]()
    try:
        job.require_torch()
        try:
            notes = check_gpus(backend)
        except Refusal as refusal:
            wrong.append(refusal.problem)
        with Probe() as probe:
            return probe.describe(backend, None), notes, wrong
    except Refusal as refusal:
        return None, notes, [*wrong, refusal.problem]


def _disk_findings() -> list[Problem]:
    from farspan.launch.findings import LITTLE_DISK

    found = []
    corpora = next(path for path in (cache_folder(), *cache_folder().parents) if path.exists())
    for what, path in (("runs", Path()), ("prepared corpora", corpora)):
        free = shutil.disk_usage(path).free
        if free < LITTLE_DISK:
            found.append(Problem(
                code="disk-full", what=f"little disk space for {what}", where=str(path.absolute()),
                fact=f"{format_bytes(free)} free, {format_bytes(LITTLE_DISK)} is comfortable",
                remedy=f"du -xh {path.absolute()} | sort -h | tail",
            ))  # fmt: skip
    return found
