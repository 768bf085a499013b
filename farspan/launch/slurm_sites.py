"""Jobs at other Slurm sites: each holds nodes there, which the run's own job enters through the
site's login node (`ssh LOGIN srun --jobid ...`).

A site's job has a name that no other run's has, so that every start of the run's own job finds it.
A job that was requeued, or submitted again, may have other nodes: the run continues on those.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Host, Site
from farspan.domain.clusterfile import REMOTE_FOLDER
from farspan.domain.config import SlurmSite
from farspan.domain.run import SITE_JOBS_VARIABLE, RunFolder
from farspan.domain.struct_files import load, save
from farspan.launch.cluster_measurement import measure_links
from farspan.launch.hosts import enter_command
from farspan.launch.slurm_allocation import (
    JOB_OPTION,
    describe_node,
    is_site_host,
    site_host_name,
)
from farspan.launch.slurm_client import (
    QueuedJob,
    expand_nodes,
    list_jobs,
    node_facts,
)

#: Of the message whose time over a link between two sites is measured.
LINK_MESSAGE_BYTES = 2**20


class SiteNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of a site's job: what other hosts connect to, and the job's CPUs there."""

    address: str
    cpus: int


class SiteJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job that holds nodes at a site; without nodes it waits."""

    id: Annotated[str, msgspec.Meta(pattern=r"^\d+\Z")]
    nodes: tuple[SiteNode, ...]


def own_site_jobs() -> str:
    """Return the prefix of the names of the jobs that hold nodes for this job's run."""
    own = f"{os.environ.get('SLURM_JOB_NAME', '')}-{os.environ['SLURM_JOB_ID']}"
    # A comma would divide it for squeue, and a space end it for sbatch.
    return os.environ.get(SITE_JOBS_VARIABLE, re.sub(r"[^\w.-]", "-", own))


def site_job_name(site_jobs: str, site: str) -> str:
    """Return the name of the job at a site."""
    return f"{site_jobs}-{site}"


def login_command(login: str) -> tuple[str, ...]:
    """Return the words that enter a login node."""
    return enter_command(Host(name=login, devices=()))


def find_site_job(site: SlurmSite, name: str) -> tuple[QueuedJob, SiteJob] | None:
    """Return the newest job of a name at a site, as its queue shows it, and its nodes; None where
    none is in the queue. Raises Refusal."""
    queued = max(list_jobs(name, login=site.login), key=lambda job: int(job.id), default=None)
    if queued is None:
        return None
    nodes = list[SiteNode]()
    if queued.state == "RUNNING":
        node_names = expand_nodes(queued.node_list, site.login)
        # The nodes of a site are of one kind.
        cpus = max(1, queued.cpus // len(node_names))
        for node, facts in zip(node_names, node_facts(node_names, site.login), strict=True):
            nodes.append(SiteNode(address=facts.get("NodeAddr", node), cpus=cpus))
    return queued, SiteJob(id=queued.id, nodes=tuple(nodes))


def running_site_jobs(sites: Mapping[str, SlurmSite]) -> dict[str, SiteJob]:
    """Return the jobs that hold nodes for this job now, by site. Raises Refusal."""
    jobs = dict[str, SiteJob]()
    for name, site in sites.items():
        newest = find_site_job(site, site_job_name(own_site_jobs(), name))
        if newest is not None and newest[1].nodes:
            jobs[name] = newest[1]
    return jobs


def join_sites(
    cluster: Cluster, sites: Mapping[str, SlurmSite], jobs: Mapping[str, SiteJob], backend: str
) -> Cluster:
    """Return the cluster of this job with the sites that it lacks and whose jobs run, each node
    described by a process there, and the links between all sites measured. Raises Refusal."""
    known = {site.name for site in cluster.sites}
    there = []
    for name, job in jobs.items():
        if name not in known:
            there.append(_describe_site(name, sites[name], job, backend))
    if not there:
        return cluster
    joined = replace(cluster, sites=(*cluster.sites, *there))
    first_hosts = [replace(site, hosts=site.hosts[:1]) for site in joined.sites]
    links = measure_links(
        replace(joined, sites=tuple(first_hosts)), LINK_MESSAGE_BYTES, lambda text: None
    )
    # Those of a cluster file were measured before, and for longer.
    pairs = {frozenset((link.a, link.b)) for link in cluster.links}
    added = [link for link in links if frozenset((link.a, link.b)) not in pairs]
    return replace(joined, links=(*cluster.links, *added))


def _describe_site(name: str, site: SlurmSite, job: SiteJob, backend: str) -> Site:
    def describe(place: int) -> Host:
        host = Host(
            name=site_host_name(name, place),
            devices=(),
            address=job.nodes[place].address,
            enter=(*login_command(site.login), *_enter_words(job, place)),
            python=site.python,
            folder=REMOTE_FOLDER,
        )
        return describe_node(host, job.nodes[place].cpus, backend)

    with ThreadPoolExecutor(len(job.nodes)) as pool:
        return Site(name=name, hosts=tuple(pool.map(describe, range(len(job.nodes)))))


def _enter_words(job: SiteJob, place: int) -> list[str]:
    """Return the command that runs another on a node of a job, from the login node."""
    words = ["srun", f"{JOB_OPTION}{job.id}", "--overlap", "--nodes=1", "--ntasks=1"]
    words += [f"--relative={place}", f"--cpus-per-task={job.nodes[place].cpus}"]
    return [*words, "--mpi=none", "--quiet"]


def enter_site_jobs(host: Host, site: str, jobs: Mapping[str, SiteJob]) -> Host:
    """Return a host of a site as its job of now has it: entered as before, on that job's node of
    the same place. While that job waits the host stays as it was, and cannot be entered."""
    if not is_site_host(host) or host.enter is None or site not in jobs:
        return host
    job = jobs[site]
    place = int(host.name.removeprefix(site_host_name(site, 0)[:-1]))
    if place >= len(job.nodes):
        return host
    login = host.enter[: host.enter.index("srun")]
    enter = (*login, *_enter_words(job, place))
    return replace(host, address=job.nodes[place].address, enter=enter)


def waiting_hosts(cluster: Cluster, jobs: Mapping[str, SiteJob]) -> set[str]:
    """Return the hosts of sites whose jobs wait: nobody can enter them."""
    waiting = {name for name, job in jobs.items() if not job.nodes}
    hosts = set[str]()
    for site in cluster.sites:
        if site.name in waiting:
            hosts.update(host.name for host in site.hosts if is_site_host(host))
    return hosts


def enter_sites(cluster: Cluster, jobs: Mapping[str, SiteJob]) -> Cluster:
    """Return a cluster of `join_sites`, made by an earlier start, with the nodes that the sites'
    jobs have now."""
    return cluster.with_hosts(
        lambda host: enter_site_jobs(host, cluster.site_of(host.name).name, jobs)
    )


def record_site_jobs(run: RunFolder, jobs: Mapping[str, SiteJob]) -> None:
    """Keep the jobs at other sites for all readers of the run's cluster; that of a site which was
    not asked stays as it was."""
    known = recorded_site_jobs(run)
    if jobs.items() - known.items():
        save({**known, **jobs}, run.slurm_sites)


def recorded_site_jobs(run: RunFolder) -> dict[str, SiteJob]:
    path = run.slurm_sites
    return load(path, dict[str, SiteJob]) if path.exists() else {}
