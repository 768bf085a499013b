"""What is here, what is missing, and the one command that fixes each finding."""

from __future__ import annotations

import argparse
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from farspan.cli import job
from farspan.cli.console import Console
from farspan.cli.runs import cache
from farspan.domain.cluster import Cluster
from farspan.domain.problems import Problem, Refusal
from farspan.domain.units import format_bytes

HELP = "say what is wrong and how to fix it"

PACKAGES = ("torch", "numpy", "msgspec", "tokenizers", "tiktoken", "safetensors")
#: A small model's checkpoints, its index and a corpus need about this much.
LITTLE_DISK = 5 * 10**9


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")


def run(given: argparse.Namespace, console: Console) -> None:
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    findings: list[Problem] = []
    cluster: Cluster | None = None
    try:
        cluster = _describe(given.device)
    except Refusal as refusal:
        findings.append(refusal.problem)
    findings += _disk_findings()
    for name, version in versions.items():
        console.say(f"{name:12} {version or 'not installed'}")
    for device in cluster.devices if cluster else ():
        console.say(
            f"{'device':12} {device.kind} ({device.backend}), {format_bytes(device.memory)}, "
            f"{', '.join(device.dtypes)}, {device.threads} threads"
        )
    free = shutil.disk_usage(".").free
    console.say(f"{'disk':12} {format_bytes(free)} free here")
    for problem in findings:
        console.say(f"\n{problem}")
    console.say("\nno findings" if not findings else f"\n{len(findings)} findings")
    console.answer(_answer(versions, cluster, free, findings))


def _answer(
    versions: dict[str, str | None], cluster: Cluster | None, free: int, findings: list[Problem]
) -> dict[str, Any]:
    return {
        "versions": versions,
        "devices": msgspec.to_builtins(cluster.devices) if cluster else [],
        "disk_free_bytes": free,
        "findings": msgspec.to_builtins(findings),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _describe(backend: str) -> Cluster:
    from farspan.launch.probe import LocalProbe

    job.require_torch()
    with LocalProbe(threads=1) as probe:
        return probe.describe(backend, None)


def _disk_findings() -> list[Problem]:
    found = []
    corpora = next(path for path in (cache(), *cache().parents) if path.exists())
    for what, path in (("runs", Path()), ("prepared corpora", corpora)):
        free = shutil.disk_usage(path).free
        if free < LITTLE_DISK:
            found.append(Problem(
                code="disk-full", what=f"little disk space for {what}", where=str(path.absolute()),
                fact=f"{format_bytes(free)} free, {format_bytes(LITTLE_DISK)} is comfortable",
                remedy=f"du -xh {path.absolute()} | sort -h | tail",
            ))  # fmt: skip
    return found
