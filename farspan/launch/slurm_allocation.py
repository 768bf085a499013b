"""The nodes of a Slurm job as a cluster: described inside the job, and outside of one as `sinfo`
and the catalogue have them.

Nodes are called by their place in the job, `node0` first: a job that was requeued may have others,
and the run continues on those.
"""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec.structs import replace

from farspan.domain import catalog
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.config import SlurmConfig, SlurmNodes
from farspan.domain.escapes import key_word
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load, save
from farspan.domain.suggest import MAX_CANDIDATES, any_of
from farspan.launch.probe_client import Probe
from farspan.launch.slurm_client import expand_nodes, node_facts
from farspan.launch.slurm_partitions import (
    node_tables,
    offered_nodes,
    requested_gres,
    requested_memory,
)

#: What `parallel.cluster` and `--cluster` call the nodes of the job.
SLURM = "slurm"
#: The option of srun by which a step enters a job from outside.
JOB_OPTION = "--jobid="
#: `gpu:a100:4(S:0-1)` and `gpu:4`: kind and number of GPUs in a node's GRES.
GPU_GRES = re.compile(r"^gpu(?::(?P<kind>[^:(]+))??(?::(?P<count>\d+))?(?:\(.*\))?$")


class AllocatedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of this job: its place among those of its component, and its CPUs there."""

    name: str
    place: int
    component: int | None
    cpus: int

    @property
    def enter(self) -> tuple[str, ...]:
        """The command that runs another command there. It shares the job's CPUs and GPUs with all
        other steps."""
        words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--relative={self.place}"]
        words += [f"--cpus-per-task={self.cpus}", "--mpi=none", "--quiet"]
        if self.component is not None:
            words.append(f"--het-group={self.component}")
        return tuple(words)


def in_allocation() -> bool:
    """Return whether this process belongs to a Slurm job."""
    return "SLURM_JOB_ID" in os.environ


def allocated_nodes() -> list[AllocatedNode]:
    """List the nodes of this job, this one first."""
    size = os.environ.get("SLURM_HET_SIZE")
    if size is None:
        return _component_nodes("", None)
    nodes = list[AllocatedNode]()
    for number in range(int(size)):
        nodes += _component_nodes(f"_HET_GROUP_{number}", number)
    return nodes


def _component_nodes(suffix: str, component: int | None) -> list[AllocatedNode]:
    node_names = expand_nodes(os.environ[f"SLURM_JOB_NODELIST{suffix}"])
    cpus = _expand_counts(os.environ[f"SLURM_JOB_CPUS_PER_NODE{suffix}"])
    nodes = []
    for place, (name, count) in enumerate(zip(node_names, cpus, strict=True)):
        nodes.append(AllocatedNode(name=name, place=place, component=component, cpus=count))
    return nodes


def _expand_counts(text: str) -> list[int]:
    """Expand Slurm's `4(x2),8` to a number a node."""
    counts = list[int]()
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def require_allocation(where: object, remedy: str) -> None:
    """Refuse to train outside of a job; `remedy` is the command that submits one. Raises Refusal
    (launcher-unusable)."""
    if not in_allocation():
        raise Refusal(
            "launcher-unusable",
            what="the launcher slurm works inside a Slurm job",
            where=where,
            fact="SLURM_JOB_ID is not set: this is no job",
            remedy=remedy,
        )


def allocated_cluster(backend: str, workers: int | None) -> Cluster:
    """Describe the nodes of this job, each by a process there; of one node at most `workers`
    workers. They share this node's folders."""
    nodes = allocated_nodes()
    addresses = _addresses(nodes)
    limit = workers if len(nodes) == 1 else None

    def describe(number: int) -> Host:
        host = Host(
            name=f"node{number}",
            devices=(),
            address=addresses[number],
            enter=() if number == 0 else nodes[number].enter,
            python=sys.executable,
        )
        return describe_node(host, nodes[number].cpus, backend, limit)

    with ThreadPoolExecutor(len(nodes)) as pool:
        hosts = tuple(pool.map(describe, range(len(nodes))))
    name = os.environ.get("SLURM_CLUSTER_NAME", SLURM)
    return Cluster(sites=(Site(name=name, hosts=hosts),))


def describe_node(host: Host, cpus: int, backend: str, limit: int | None = None) -> Host:
    """Return the host of a node with what a process there finds, on CPUs with at most `limit`
    workers."""
    with Probe(host) as probe:
        described = probe.describe_devices(backend, limit).hosts[0]
    # At most the job's CPUs: Slurm may not confine it to them.
    devices = [device.but(threads=min(device.slot.threads, cpus)) for device in described.devices]
    return replace(host, devices=tuple(devices), cpus=cpus, memory=described.memory)


def enter_allocation(cluster: Cluster) -> Cluster:
    """Return a cluster of `allocated_cluster`, made in an earlier job, with the nodes of this one.

    Outside of a job it stays as it is. Raises Refusal (device-missing) where this job has fewer.
    """
    if not in_allocation():
        return cluster
    nodes = allocated_nodes()
    hosts = [host for host in cluster.hosts if not is_site_host(host)]
    if len(nodes) < len(hosts):
        raise Refusal(
            "device-missing",
            what="the job has fewer nodes than the run was planned for",
            where=f"Slurm job {os.environ['SLURM_JOB_ID']}",
            fact=f"{len(nodes)} in the job, {len(hosts)} in the plan",
            remedy=f"set slurm.nodes: {len(hosts):d}",
            key="slurm.nodes",
        )
    addresses = dict(zip([host.name for host in hosts], _addresses(nodes), strict=False))
    by_name = dict(zip(addresses, nodes, strict=False))

    def enter(host: Host) -> Host:
        if is_site_host(host):
            return host
        is_first = host.name == hosts[0].name
        words = () if is_first else by_name[host.name].enter
        devices = tuple(device.but(enter=None) for device in host.devices)
        return replace(
            host,
            devices=devices,
            address=addresses[host.name],
            enter=words,
            python=sys.executable,
            folder=None,
        )

    return cluster.with_hosts(enter)


def is_site_host(host: Host) -> bool:
    """Return whether a host is a node of a job at another site (`slurm_sites`)."""
    return any(word.startswith(JOB_OPTION) for word in host.enter or ())


def _addresses(nodes: list[AllocatedNode]) -> list[str]:
    """Return the addresses that Slurm itself uses, which other nodes connect to."""
    facts = node_facts([node.name for node in nodes])
    return [fact.get("NodeAddr", node.name) for fact, node in zip(facts, nodes, strict=True)]


def record_job(run: RunFolder) -> None:
    """Add this job to those that have trained the run, for its report."""
    jobs = recorded_jobs(run)
    number = os.environ["SLURM_JOB_ID"]
    if number not in jobs:
        save([*jobs, number], run.slurm_jobs)


def recorded_jobs(run: RunFolder) -> list[str]:
    """List the Slurm jobs that have trained a run."""
    path = run.slurm_jobs
    return load(path, list[str]) if path.exists() else []


# -- outside of a job
#   ------------------------------------------------------------------------------------------------


def offered_cluster(config: SlurmConfig) -> Cluster:
    """Return the nodes that the jobs of this config would get, by `sinfo` and the catalogue:
    nothing is probed. Raises Refusal (launcher-unusable, host-unreachable)."""
    hosts = list[Host]()
    for key, nodes in node_tables(config):
        node = _offered_host(nodes, key, None)
        for _ in range(nodes.nodes):
            hosts.append(replace(node, name=f"node{len(hosts)}"))
    hosts[0] = replace(hosts[0], enter=())
    sites = [Site(name=SLURM, hosts=tuple(hosts))]
    for name, site in config.sites.items():
        node = _offered_host(site, f"slurm.sites.{name}", site.login)
        node = replace(node, python=site.python)
        host_names = [site_host_name(name, place) for place in range(site.nodes)]
        nodes_there = tuple(replace(node, name=host_name) for host_name in host_names)
        sites.append(Site(name=name, hosts=nodes_there))
    return Cluster(sites=tuple(sites))


def site_host_name(site: str, place: int) -> str:
    """Return the name of a node of another site, by its place in the job there."""
    return f"{site}-node{place}"


def _offered_host(nodes: SlurmNodes, key: str, login: str | None) -> Host:
    offered = offered_nodes(nodes, key, login)
    wanted = requested_gres(nodes)
    memory = requested_memory(nodes) or offered.memory
    cpus = nodes.cpus or offered.cpus
    devices: tuple[Device, ...]
    if not wanted:
        cpu = catalog.load_devices()["cpu-avx2"].device("cpu-avx2", memory)
        assert cpu is not None
        devices = (cpu.but(threads=cpus),)
    else:
        devices = _gpus_of(offered.gres, nodes, key)
    return Host(
        name="node",
        devices=devices,
        cpus=cpus,
        memory=memory,
        enter=("srun",),
        python=sys.executable,
    )


def _gpus_of(offered: str, nodes: SlurmNodes, key: str) -> tuple[Device, ...]:
    """Return the GPUs of a node by the catalogue. Raises Refusal (launcher-unusable) for a kind
    that it lacks."""
    wanted = (nodes.gres or "gpu").split(",")[0].split(":")
    asked_kind = next((word for word in wanted[1:] if not word.isdecimal()), None)
    count = next((int(word) for word in wanted[1:] if word.isdecimal()), nodes.gpus or 1)
    labels = [nodes.kind] if nodes.kind else []
    for entry in offered.split(","):
        match = GPU_GRES.match(entry)
        if match and match["kind"] and asked_kind in (None, match["kind"]):
            labels.append(match["kind"])
    catalogue = catalog.load_devices()
    like = list[str]()
    for name in labels:
        kind = catalog.find_kind_of_label(name)
        device = catalogue[kind].device(kind) if kind else None
        if device is not None:
            return (device,) * count
        like += [known for known in catalogue if known.startswith(f"{name.lower()}-")]
    known = like or list(catalogue)[:MAX_CANDIDATES]
    raise Refusal(
        "launcher-unusable",
        what="the GRES of these nodes does not name a kind of the catalogue",
        where=f"run.yaml, key {key}.kind",
        fact=f"it is {offered or 'none'}",
        remedy=f"set {key_word(key)}.kind: {any_of(known)}",
        key=f"{key}.kind",
    )
