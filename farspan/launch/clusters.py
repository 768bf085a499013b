"""Clusters by name: a user's file, one that ships with farspan, or `here`; `:N` after it takes its
first N devices."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from farspan.domain.cluster import THIS_MACHINE, Cluster
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.clusterfile import load_cluster
from farspan.domain.config import SlurmConfig
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import missing_path
from farspan.domain.suggest import MAX_CANDIDATES, advise, any_of
from farspan.domain.units import counted
from farspan.launch.host_pythons import with_own_python
from farspan.launch.slurm_allocation import (
    SLURM,
    allocated_cluster,
    in_allocation,
    offered_cluster,
)

#: What a file that is not there may be replaced by.
FILE_REMEDY = "farspan cluster list   # how to write a file: docs/clusters.md, The cluster file"


def shipped_clusters() -> dict[str, Path]:
    """Return the files of the clusters that ship with farspan, by name (`fabric/gat-amst`)."""
    root = Path(str(resources.files("farspan.catalog") / "clusters"))
    files = sorted(root.rglob("*.yaml"))
    return {str(path.relative_to(root).with_suffix("")): path for path in files}


def find_cluster(name: str, *, as_written: bool = False) -> Cluster:
    """Load the cluster of a file, of a run's cluster.json or of a name, with `:N` its first N
    devices, this machine (`here`), the one that Ray runs at `ray:ADDRESS`, or the nodes of a Slurm
    job (`slurm`).

    Hosts have the interpreters that `farspan cluster up` has made, or those of the file
    (`as_written`).
    """
    return _load_cluster(name, as_written).named(name)


def _load_cluster(name: str, as_written: bool) -> Cluster:
    if name == SLURM:
        if in_allocation():
            return allocated_cluster("auto", None)
        return offered_cluster(SlurmConfig())
    if name.startswith("ray:"):
        from farspan.launch.launchers.ray import read_cluster

        return read_cluster(name.removeprefix("ray:"))
    count = re.search(r":(\d+)$", name)
    whole = name[: count.start()] if count else name
    if whole == THIS_MACHINE:
        cluster = this_machine()
    else:
        path = _cluster_path(whole)
        cluster = load_cluster_json(path) if path.suffix == ".json" else load_cluster(path)
    if not as_written:
        cluster = cluster.with_hosts(with_own_python)
    if not count:
        return cluster
    wanted = int(count[1])
    available = len(cluster.devices)
    if not 1 <= wanted <= available:
        too_few = f"{whole} has fewer than {count[1]} devices"
        raise Refusal(
            "device-missing",
            where="--cluster",
            fact=f"{whole} has {available}",
            what=too_few if wanted else f"{name} has no devices",
            remedy=f"--cluster {shell_word(whole)}:{len(cluster.devices)}",
        )
    return cluster.first(wanted)


def this_machine() -> Cluster:
    """Probe this machine's devices. Raises Refusal (extra-missing, device-unusable)."""
    from farspan.launch.probe_client import Probe

    with Probe() as probe:
        return probe.describe_devices("auto", None)


def _cluster_path(name: str) -> Path:
    path = Path(name).expanduser()
    shipped = shipped_clusters()
    if path.is_file():
        return path
    if path.is_dir():
        files = sorted(path.glob("*.yaml"))
        raise Refusal(
            "path-unusable",
            what="a cluster is a file, not a folder",
            where=f"--cluster {name}",
            fact=f"it holds {counted(len(files), '.yaml file')}",
            remedy=any_of(files[:MAX_CANDIDATES], "--cluster") if files else shell_line("ls", path),
        )
    if name in shipped:
        return shipped[name]
    if path.suffix in (".yaml", ".yml") or path.exists():
        raise missing_path(path, FILE_REMEDY)
    raise Refusal(
        "path-missing",
        what=f"there is no cluster {name!r}",
        where="--cluster",
        fact=f"it is neither a file nor one of {', '.join(shipped)}, {THIS_MACHINE}",
        remedy=advise(
            name, (*shipped, THIS_MACHINE), option="--cluster", fix="farspan cluster list"
        ),
    )
