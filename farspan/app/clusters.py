"""A cluster as a user names it: a file, a name of `farspan cluster list`, or `PREFIX:NAME` such as
a lab's."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from farspan.app.extensions import find_extensions
from farspan.domain.cluster import THIS_MACHINE, Cluster, Link
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.config import ParallelConfig, RunConfig, SlurmConfig
from farspan.domain.plan import PlannedDevice
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, load_yaml
from farspan.domain.units import parse_round_trip
from farspan.launch.slurm_allocation import SLURM
from farspan.planning.quantities import parse_positive

#: The least and the most of a round trip.
ROUND_TRIPS = ("1us", "60s")


def find_cluster(name: str, *, as_written: bool = False) -> Cluster:
    """Return the cluster that `--cluster` means; `as_written` without the interpreters that
    `farspan cluster up` has made."""
    from farspan.launch import clusters

    prefix, _, rest = name.partition(":")
    if is_external(name):
        cluster: Cluster = find_extensions("clusters")[prefix].load()(rest)
        return cluster.named(name)
    return clusters.find_cluster(name, as_written=as_written)


def cluster_of_run(run: RunFolder) -> Cluster:
    """Return the cluster that a run is trained on, as it is now."""
    return _read_cluster(run, run.cluster)


def whole_cluster_of_run(run: RunFolder) -> Cluster:
    """Return the same with the hosts and devices that the run has lost."""
    path = run.whole_cluster if run.whole_cluster.exists() else run.cluster
    return _read_cluster(run, path)


def _read_cluster(run: RunFolder, path: Path) -> Cluster:
    name = load_yaml(run.config, RunConfig).parallel.cluster or ""
    if is_external(name):
        return find_cluster(name)
    cluster = load_cluster_json(path)
    # By what `launch.trust` looks at, too.
    if load(run.record, RunRecord).launcher == SLURM:
        from farspan.launch.slurm_allocation import enter_allocation
        from farspan.launch.slurm_sites import enter_sites, recorded_site_jobs

        cluster = enter_sites(enter_allocation(cluster), recorded_site_jobs(run))
        return cluster.named(SLURM)
    return cluster.named(str(run.cluster))


def is_here(parallel: ParallelConfig) -> bool:
    """Return whether a run is asked for on this machine: by name, or without a cluster."""
    return parallel.cluster in (None, THIS_MACHINE) and find_launcher(parallel) != SLURM


def is_external(name: str) -> bool:
    """Return whether a cluster of such a name is another package's, which may have made it again:
    its processes are others then, and all else is as it was."""
    prefix, colon, _ = name.partition(":")
    return bool(colon) and prefix.isidentifier() and prefix in find_extensions("clusters")


def exclusive_launcher(name: str) -> str | None:
    """Return the launcher that alone reaches a cluster of such a name; None where any does."""
    return name if name.startswith("ray:") or name == SLURM else None


def find_launcher(parallel: ParallelConfig) -> str:
    """Return the launcher that starts the workers: the only one that reaches the cluster, or the
    one that is asked for."""
    return exclusive_launcher(parallel.cluster or "") or parallel.launcher


def given_cluster(config: RunConfig, *, reach: bool) -> Cluster | None:
    """Return the cluster that the run asks for, with its first `workers` devices; None is this
    machine. With `reach`, refuses one whose first host cannot be reached."""
    from farspan.launch.launchers import split_launcher

    split_launcher(config.parallel.launcher)
    name = config.parallel.cluster
    if find_launcher(config.parallel) == SLURM:
        cluster = _slurm_cluster(config).named(SLURM)
    elif name is None or name == THIS_MACHINE:
        return None
    else:
        cluster = find_cluster(name)
    if reach:
        require_installed(cluster, name or SLURM)
    workers = config.parallel.workers
    if workers == "auto":
        return cluster
    available = len(cluster.devices)
    if workers > available:
        raise Refusal(
            "device-missing",
            what=f"the cluster has fewer than {workers} devices",
            where="run.yaml, key parallel.workers",
            fact=f"it has {available}",
            remedy=f"set parallel.workers: {available:d}",
            key="parallel.workers",
        )
    return cluster.first(workers)


def require_installed(cluster: Cluster, name: str) -> None:
    """Refuse a cluster whose first host cannot be reached, or that has a host without farspan.

    Other hosts that cannot be reached are the launcher's to wait for.
    """
    from farspan.launch.network_examination import start_agents

    first = cluster.machines[0].name
    hosts = cluster.machines
    if exclusive_launcher(name):
        # Ray and Slurm have the same farspan on all nodes: one speaks for those of a site.
        by_site = {cluster.site_of(host.name).name: host for host in reversed(hosts)}
        hosts = tuple(by_site.values()) if name == SLURM else hosts[:1]
    with start_agents(hosts) as (reached, unreachable):
        if first in unreachable:
            raise Refusal.of(unreachable[first])
        versions = {host: agent.ask("versions") for host, agent in reached.items()}
    for host, answer in versions.items():
        missing = [package for package in ("farspan", "torch") if not answer["packages"][package]]
        if missing:
            raise Refusal(
                "extra-missing",
                what=f"{host} lacks {' and '.join(missing)}",
                where=f"host {host}",
                fact=f"Python {answer['python']} there has none",
                remedy=command("cluster", "up", name),
            )


def probe_command(name: str, out: object) -> str:
    """Write the command that measures a cluster: that of Slurm is measured by a job."""
    if name == SLURM:
        return command("slurm", "run.yaml", "--probe", out)
    return command("probe", "--cluster", name, "-o", out)


def _slurm_cluster(config: RunConfig) -> Cluster:
    """Return the nodes of this Slurm job, and of those that run for it at other sites, with the
    figures of a cluster file if one is given; outside of a job those that it would get."""
    from farspan.launch import slurm_allocation, slurm_sites

    parallel = config.parallel
    is_inside = slurm_allocation.in_allocation()
    if parallel.cluster in (None, SLURM) and not is_inside:
        cluster = slurm_allocation.offered_cluster(config.slurm)
        return replace(cluster, links=_given_links(config.slurm))
    sites = config.slurm.sites if is_inside else {}
    jobs = slurm_sites.running_site_jobs(sites)
    if parallel.cluster not in (None, SLURM):
        cluster = slurm_allocation.enter_allocation(find_cluster(parallel.cluster))
        cluster = slurm_sites.enter_sites(cluster, jobs)
    else:
        limit = None if parallel.workers == "auto" else parallel.workers
        cluster = slurm_allocation.allocated_cluster(parallel.device, limit)
    return slurm_sites.join_sites(cluster, sites, jobs, parallel.device)


def _given_links(config: SlurmConfig) -> tuple[Link, ...]:
    """Return the links to other sites whose round trips run.yaml gives. Raises Refusal
    (out-of-range)."""
    links = []
    for name, site in config.sites.items():
        if site.rtt is not None:
            key = f"slurm.sites.{name}.rtt"
            rtt_s = parse_positive(parse_round_trip, site.rtt, key, "20ms", within=ROUND_TRIPS)
            links.append(Link(a=SLURM, b=name, rtt_s=rtt_s, origin="given"))
    return tuple(links)


def first_device(cluster: Cluster) -> PlannedDevice:
    """Return the first host's first device, as a plan names it."""
    host = cluster.machines[0]
    device = cluster.devices[0]
    return PlannedDevice(
        host=host.name,
        backend=device.backend,
        index=0,
        threads=device.slot.threads,
        kind=device.kind,
    )
