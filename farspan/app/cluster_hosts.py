"""The hosts of a cluster made ready for farspan, examined, and cleared of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.app.clusters import find_cluster
from farspan.app.updates import Progress, ignore_update, note_reporter
from farspan.domain.cluster import Host
from farspan.domain.problems import Problem, Refusal
from farspan.domain.units import format_seconds

if TYPE_CHECKING:
    from farspan.launch.cluster_setup import ReadyHost
    from farspan.launch.cluster_tidy import HostState, TidiedHost
    from farspan.launch.host_wheels import WheelSource


def set_up_cluster(
    name: str, source: WheelSource | None = None, progress: Progress = ignore_update
) -> list[ReadyHost | Problem]:
    """Give every host of a cluster that has devices the farspan that runs here; return what became
    of each."""
    from farspan.launch import cluster_setup
    from farspan.launch.host_wheels import WheelSource

    report = note_reporter(progress)
    ends = cluster_setup.set_up_hosts(_hosts(name), source or WheelSource(), report)
    for end in ends:
        if not isinstance(end, Problem):
            versions = ", ".join(f"{key} {value}" for key, value in end.versions.items())
            took = f"; took {format_seconds(end.seconds)}" if end.changed else ""
            report(f"{end.host}: ready, {versions}{took}")
    return ends


def require_set_up(name: str, progress: Progress = ignore_update) -> None:
    """Set up a cluster. Raises Refusal for the first host that cannot be."""
    for end in set_up_cluster(name, progress=progress):
        if isinstance(end, Problem):
            raise Refusal.of(end)


def examine_hosts(name: str) -> list[HostState | Problem]:
    """Look at what farspan has on every host of a cluster."""
    from farspan.launch import cluster_tidy

    return cluster_tidy.examine_hosts(_hosts(name))


def tidy_cluster(name: str, *, runs: bool = False) -> list[TidiedHost | Problem]:
    """End what farspan runs on the hosts of a cluster, and remove its environments; with `runs` the
    runs and corpora there too."""
    from farspan.launch import cluster_tidy

    return cluster_tidy.tidy_hosts(_hosts(name), runs=runs)


def _hosts(name: str) -> tuple[Host, ...]:
    return find_cluster(name, as_written=True).machines
