"""Machines and what they can do: this machine, the hosts and links of a cluster, and all of it
measured."""

from __future__ import annotations

import platform
import shutil
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from farspan.app import clusters
from farspan.app.preflight_checks import refuse_file, require_torch, unused_file
from farspan.app.updates import Progress, ignore_update, note_reporter
from farspan.domain.cluster import Cluster, Device
from farspan.domain.device_report import DeviceReport
from farspan.domain.escapes import shell_word
from farspan.domain.notebook import html_table
from farspan.domain.problems import Finding, Problem, Refusal, command
from farspan.domain.run import cache_folder
from farspan.domain.units import counted, format_bytes
from farspan.launch.slurm_allocation import SLURM, require_allocation

if TYPE_CHECKING:
    from farspan.launch.network_examination import Examination

REPORTED_PACKAGES = ("torch", "numpy", "msgspec", "tokenizers", "tiktoken", "safetensors")
#: Streams of the bandwidths that are measured: one shows the window, several the line.
BANDWIDTH_STREAMS = (1, 8)


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """This machine as it was found: versions (None is not installed), devices, and what is
    wrong."""

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    disk_free_bytes: int
    #: Of each GPU, or of the CPU: the fast paths that it takes, and why.
    reports: tuple[DeviceReport, ...]
    #: On each GPU that is left out.
    notes: tuple[str, ...]
    #: Those that stop a run first.
    findings: tuple[Finding, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What was looked at, and what was found."""
        rows = [(name, version or "not installed") for name, version in self.versions.items()]
        for device in self.devices:
            facts = (
                f"{device.kind} ({device.backend})",
                format_bytes(device.memory),
                *device.sheet.dtypes,
                counted(device.slot.threads, "thread"),
            )
            rows.append(("device", ", ".join(facts)))
        rows += self._path_rows
        rows += [("note", note) for note in self.notes]
        return [*rows, ("disk", f"{format_bytes(self.disk_free_bytes)} free here")]

    @property
    def _path_rows(self) -> list[tuple[str, str]]:
        """The fast paths of each kind of device."""
        rows = []
        counts = Counter((report.title, report.slice, report.paths) for report in self.reports)
        for (title, part, paths), count in counts.items():
            rows.append(("fast paths", f"{count} x {title}" if count > 1 else title))
            if part:
                rows.append(("  slice", f"{part} in a cluster file"))
            rows += [(f"  {path.name}", str(path)) for path in paths]
        return rows

    def __repr__(self) -> str:
        findings = counted(len(self.findings), "finding") if self.findings else "no findings"
        return f"<Diagnosis: {counted(len(self.devices), 'device')}, {findings}>"

    def _repr_html_(self) -> str:
        rows = self.rows
        rows += [("finding", str(problem)) for problem in self.findings]
        return html_table(("", repr(self)[1:-1]), rows)


def diagnose_machine(device: str = "auto") -> Diagnosis:
    """Diagnose this machine: its devices, what is missing, and the command that mends each."""
    from farspan.launch.findings import MIN_FREE_DISK_BYTES
    from farspan.launch.probe_client import Probe, check_gpus

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in REPORTED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    # A machine with problems is described as far as it can be.
    devices: tuple[Device, ...] = ()
    reports: tuple[DeviceReport, ...] = ()
    gpu_notes: tuple[str, ...] = ()
    problems = list[Problem]()
    try:
        require_torch()
        try:
            gpu_notes = check_gpus(device)
        except Refusal as refusal:
            problems.append(refusal.problem)
        with Probe() as probe:
            devices = probe.describe_devices(device, None).devices
            reports = probe.report_devices(device)
    except Refusal as refusal:
        problems.append(refusal.problem)
    findings = [Finding.of(problem, "refused") for problem in problems]
    for number, report in enumerate(reports):
        findings += report.list_findings(f"device {number}")
    # Little space on the disks that runs and corpora are written to.
    corpora = cache_folder()
    while not corpora.exists():
        corpora = corpora.parent
    comfortable = format_bytes(MIN_FREE_DISK_BYTES)
    for what, path in (("runs", Path()), ("prepared corpora", corpora)):
        free = shutil.disk_usage(path).free
        if free < MIN_FREE_DISK_BYTES:
            little = Finding(
                severity="warned",
                code="disk-full",
                what=f"there is little disk space for {what}",
                where=str(path.absolute()),
                fact=f"{format_bytes(free)} free, {comfortable} is comfortable",
                remedy=f"du -xh {shell_word(path.absolute())} | sort -h | tail",
            )
            findings.append(little)
    return Diagnosis(
        versions=versions,
        devices=devices,
        disk_free_bytes=shutil.disk_usage(".").free,
        reports=reports,
        notes=gpu_notes,
        findings=tuple(findings),
    )


def examine_cluster(cluster: Cluster) -> tuple[Examination, tuple[Finding, ...]]:
    """Examine every host and link of a cluster: their state, and what is wrong with them."""
    from farspan.launch.findings import list_findings
    from farspan.launch.network_examination import examine_cluster as examine_hosts

    examined = examine_hosts(cluster, streams=BANDWIDTH_STREAMS)
    return examined, tuple(list_findings(cluster, examined))


def probe_cluster(
    cluster: str,
    out: Path,
    progress: Progress = ignore_update,
    *,
    model: str = "gpt2",
    seq_len: int | None = None,
) -> Cluster:
    """Measure a cluster's devices, links and collectives with a model, and write a cluster file of
    them. A device that fails is refused when the rest is written."""
    from farspan.domain.clusterfile import save_cluster
    from farspan.launch.cluster_measurement import measure_cluster
    from farspan.planning.plan_question import model_of

    require_torch()
    spec = model_of(model)
    if cluster == SLURM:
        require_allocation("--cluster slurm", clusters.probe_command(cluster, out))
    described = clusters.find_cluster(cluster)
    length = spec.context if seq_len is None else seq_len
    if not 1 <= length <= spec.context:
        raise Refusal(
            "out-of-range",
            what=f"{model} takes no sequence of {length} tokens",
            where="--seq-len",
            fact=f"its context is {spec.context}",
            remedy=f"--seq-len {spec.context:d}",
        )
    another = unused_file(out)
    refuse_file(out, clusters.probe_command(cluster, another))
    measured, failed, left_out = measure_cluster(
        described, spec, note_reporter(progress), seq_len=length
    )
    probe = command("probe", "--cluster", cluster, "--model", model, "--seq-len", length)
    comments = [f"Measured by {probe}.", *left_out]
    for (host, index), problem in failed.items():
        comments.append(f"device {index} of {host} has failed: {problem.fact}")
    save_cluster(measured, out, "\n".join(comments))
    progress(measured)
    for problem in failed.values():
        others = f"; {len(failed) - 1} more have failed" if len(failed) > 1 else ""
        fact = f"{problem.fact}{others}; the rest is in {out}"
        raise Refusal.of(replace(problem, fact=fact))
    return measured
