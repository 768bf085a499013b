"""The hosts of a cluster made ready for farspan, examined, tuned, joined by a private network, and
cleared of all that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farspan.app.clusters import find_cluster, probe_command
from farspan.app.updates import Progress, ignore_update, note_reporter
from farspan.domain.cluster import Cluster, Host
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.struct_files import content_hash
from farspan.domain.units import format_seconds

if TYPE_CHECKING:
    from farspan.launch.cluster_exporter import ClusterExporter, ExportedCluster
    from farspan.launch.cluster_setup import ReadyHost
    from farspan.launch.cluster_tidy import HostState, TidiedHost
    from farspan.launch.host_wheels import WheelSource
    from farspan.launch.tcp_buffers import HostBuffers

#: Buffers of TCP are put back after this time.
TUNED_S = 24 * 3600.0


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
    """Set up a cluster. Raises Refusal for the first host that cannot be: nothing is begun where
    one is not reached."""
    from farspan.launch.network_examination import start_agents

    with start_agents(_hosts(name)) as (_, unreachable):
        for problem in unreachable.values():
            raise Refusal.of(problem)
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


def tune_cluster(
    name: str, *, seconds: float = TUNED_S, sudo: bool = False, undo: bool = False
) -> tuple[list[HostBuffers | Problem], tuple[tuple[str, str], ...]]:
    """Let TCP's buffers on the hosts of a cluster grow to what their links need, for `seconds`;
    with `undo` put them back. Also return the pairs of hosts of unknown bandwidth.

    Raises Refusal (cluster-invalid) where no link's is known.
    """
    from farspan.launch import tcp_buffers

    cluster = find_cluster(name, as_written=True)
    needs, unknown = tcp_buffers.buffer_needs(cluster)
    if undo:
        return tcp_buffers.restore_hosts(cluster.machines, needs, sudo=sudo), ()
    if len(cluster.machines) < 2:
        raise Refusal(
            "cluster-invalid",
            what="a cluster of one host has no link that buffers could be set for",
            where=name,
            fact=cluster.summary,
            remedy=command("cluster", "show", name),
        )
    hosts = [host for host in cluster.machines if host.name in needs]
    if not hosts:
        host_names = ", ".join(host.name for host in cluster.machines)
        raise Refusal(
            "cluster-invalid",
            what="no link of the cluster has a bandwidth, which buffers could be set for",
            where=name,
            fact=f"its hosts: {host_names}",
            remedy=probe_command(name, "measured.yaml"),
        )
    return tcp_buffers.tune_hosts(hosts, needs, seconds=seconds, sudo=sudo), unknown


def export_cluster(name: str, tool: str, to: Path) -> ExportedCluster:
    """Write a cluster's hosts as another tool's files into a folder. Raises Refusal (run-exists)
    where one of them is there, (cannot-export) where the tool cannot have these hosts."""
    from farspan.app.extensions import load_extension
    from farspan.app.preflight_checks import refuse_existing
    from farspan.domain.struct_files import write_atomically
    from farspan.launch.hosts import enter_command
    from farspan.launch.ssh_settings import find_ssh_access

    what = f"farspan writes no cluster for {tool!r}"
    exporter: ClusterExporter = load_extension(
        "cluster_exports", tool, what, option="--to", code="out-of-range"
    )
    cluster = find_cluster(name)
    hosts = cluster.machines
    accesses = {host.name: find_ssh_access(host.name, enter_command(host)) for host in hosts}
    exported = exporter.export(Path(name).stem, cluster, accesses)
    for file in exported.files:
        refuse_existing(
            to / file, command("cluster", "export", name, "--to", tool, "-o", to / tool)
        )
    to.mkdir(parents=True, exist_ok=True)
    for file, text in exported.files.items():
        write_atomically(to / file, text.encode())
    return exported


def secure_cluster(
    name: str, to: Path, *, port: int | None = None, sudo: bool = False
) -> tuple[Cluster, list[Problem]]:
    """Join the hosts of a cluster by a private network, and write the cluster file of it; return
    that cluster, and the paths that do not work.

    Hosts keep the addresses that the file has. A file of the same hosts stays as it is, with what
    was measured since. Raises Refusal (run-exists) for any other, before anything is changed.
    """
    from farspan.app.preflight_checks import refuse_file
    from farspan.domain.clusterfile import load_cluster, save_cluster
    from farspan.launch import private_network

    cluster = find_cluster(name, as_written=True)
    written = load_cluster(to) if to.is_file() else None
    plan = private_network.plan_network(
        cluster,
        _network_id(name),
        name,
        written=private_network.joined_addresses(written) if written else {},
        sudo=sudo,
    )
    is_written = written is not None and private_network.same_addresses(written, plan.joined)
    options = [*(["--sudo"] if sudo else []), *(["--port", port] if port else [])]
    other = to.with_name(f"{to.stem}-2.yaml")
    if not is_written:
        refuse_file(to, command("cluster", "secure", name, *options, "-o", other))

    def save() -> None:
        if not is_written:
            save_cluster(plan.joined, to, f"{name}, by a private network: farspan cluster secure")

    port = port or private_network.PORT
    return plan.joined, private_network.join_hosts(plan, port=port, when_made=save)


def part_cluster(name: str, *, sudo: bool = False) -> list[tuple[str, bool] | Problem]:
    """End the private network of a cluster's hosts; return whether each was in it."""
    from farspan.launch import private_network

    return private_network.part_hosts(_hosts(name), _network_id(name), name, sudo=sudo)


def _network_id(name: str) -> str:
    """Return by what hosts know the network of a cluster file again: no other user, machine or file
    changes it."""
    from farspan.launch.trust import load_own_key

    return content_hash(load_own_key().hex(), str(Path(name).resolve()))


def _hosts(name: str) -> tuple[Host, ...]:
    return find_cluster(name, as_written=True).machines
