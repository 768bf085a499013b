"""What the nodes of a Slurm partition have, by `sinfo`, against what a job asks of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from farspan.domain.config import SlurmConfig, SlurmNodes
from farspan.domain.escapes import key_word, shell_line
from farspan.domain.problems import Refusal
from farspan.domain.suggest import any_of
from farspan.launch.slurm_client import PartitionNodes, list_partition_nodes

#: A number of sbatch's `--mem`, and its unit: MB where there is none.
MEMORY = re.compile(r"(\d+)([KMGT]?)", re.IGNORECASE)
MEMORY_UNITS = {"K": 2**10, "M": 2**20, "": 2**20, "G": 2**30, "T": 2**40}


def require_offered(config: SlurmConfig) -> None:
    """Refuse what the nodes here do not have. Raises Refusal (launcher-unusable)."""
    for key, nodes in node_tables(config):
        offered_nodes(nodes, key)


def node_tables(config: SlurmConfig) -> Iterator[tuple[str, SlurmNodes]]:
    """Yield the nodes of each component of the job here, with their key in run.yaml."""
    yield "slurm", config
    for number, component in enumerate(config.components):
        yield f"slurm.components[{number}]", component


def offered_nodes(nodes: SlurmNodes, key: str, login: str | None = None) -> PartitionNodes:
    """Return the kind of nodes that a job would get, here or at a login node. Raises Refusal
    (launcher-unusable) with the key that no node meets, or too few."""
    kinds = list_partition_nodes(nodes.partition, login)
    if not kinds:
        raise _unknown_partition(nodes, key, login)
    if nodes.partition is None:
        kinds = [kind for kind in kinds if kind.is_default] or kinds
    where = f"partition {kinds[0].partition}"
    kinds = _with_gres(kinds, nodes, key, login)
    most_cpus = max(kind.cpus for kind in kinds)
    if nodes.cpus is not None and nodes.cpus > most_cpus:
        raise _unmet(
            f"{key}.cpus",
            what=f"no node of {where} has {nodes.cpus} CPUs",
            fact=f"sinfo: {most_cpus} CPUs at most",
            remedy=f"set {key_word(key)}.cpus: {most_cpus:d}",
        )
    kinds = [kind for kind in kinds if kind.cpus >= (nodes.cpus or 0)]
    memory = requested_memory(nodes)
    most_memory = max(kind.memory for kind in kinds)
    if memory is not None and memory > most_memory:
        most_mib = most_memory // 2**20
        raise _unmet(
            f"{key}.memory",
            what=f"no node of {where} has {nodes.memory} of memory",
            fact=f"sinfo: {most_mib}M at most",
            remedy=f"set {key_word(key)}.memory: {most_mib:d}M",
        )
    kinds = [kind for kind in kinds if kind.memory >= (memory or 0)]
    count = sum(kind.count for kind in kinds)
    if nodes.nodes > count:
        raise _unmet(
            f"{key}.nodes",
            what=f"{where} has fewer than {nodes.nodes} such nodes",
            fact=f"sinfo: {count}",
            remedy=f"set {key_word(key)}.nodes: {count:d}",
        )
    return kinds[0]


def requested_memory(nodes: SlurmNodes) -> int | None:
    """Return the bytes of memory that a job asks for on each node; None where it asks for all, or
    in a form that Slurm refuses."""
    match = MEMORY.fullmatch(nodes.memory or "")
    if match is None or int(match[1]) == 0:
        return None
    return int(match[1]) * MEMORY_UNITS[match[2].upper()]


def requested_gres(nodes: SlurmNodes) -> str:
    """Return the GRES that a job asks for on each node; empty where it asks for none."""
    if nodes.gres is not None:
        return nodes.gres
    return f"gpu:{nodes.gpus}" if nodes.gpus else ""


def _with_gres(
    kinds: Sequence[PartitionNodes], nodes: SlurmNodes, key: str, login: str | None
) -> list[PartitionNodes]:
    wanted = requested_gres(nodes)
    fitting = [kind for kind in kinds if has_gres(kind.gres, wanted)]
    if fitting:
        return fitting
    own_key = f"{key}.gres" if nodes.gres is not None else f"{key}.gpus"
    listed = ", ".join(f"{kind.partition}: {kind.gres or 'none'}" for kind in kinds)
    raise _unmet(
        own_key,
        what=f"no node of the partition has {wanted}",
        fact=f"GRES by sinfo: {listed}",
        remedy=f"{_listing(login, '--format=%P %G')}, then set {key_word(own_key)}",
    )


def has_gres(offered: str, wanted: str) -> bool:
    """Return whether a node's GRES holds those of a `--gres`, by name, kind and number."""
    counts = dict[str, int]()
    # Without the sockets that they belong to: gpu:a100:4(S:0-1).
    for name, count in _gres_entries(re.sub(r"\([^)]*\)", "", offered)):
        for part in {name, name.split(":")[0]}:
            counts[part] = counts.get(part, 0) + count
    return all(counts.get(name, 0) >= count for name, count in _gres_entries(wanted))


def _gres_entries(text: str) -> Iterator[tuple[str, int]]:
    """Yield the names of GRES, with their kind if it is given, and their numbers."""
    for entry in filter(None, text.split(",")):
        name, _, count = entry.rpartition(":")
        yield (name, int(count)) if count.isdecimal() else (entry, 1)


def _unknown_partition(nodes: SlurmNodes, key: str, login: str | None) -> Refusal:
    known = list(dict.fromkeys(kind.partition for kind in list_partition_nodes(None, login)))
    if nodes.partition is None or not known:
        return _unmet(
            f"{key}.partition",
            what="no partition has a node",
            fact="sinfo lists none",
            remedy=_listing(login),
        )
    return _unmet(
        f"{key}.partition",
        what=f"there is no partition {nodes.partition}",
        fact=f"sinfo: {', '.join(known)}",
        remedy=f"set {key_word(key)}.partition: {any_of(known)}",
    )


def _listing(login: str | None, *options: str) -> str:
    words = ["sinfo", *options]
    return shell_line(*words) if login is None else shell_line("ssh", login, shell_line(*words))


def _unmet(key: str, *, what: str, fact: str, remedy: str) -> Refusal:
    where = f"run.yaml, key {key}"
    return Refusal("launcher-unusable", what=what, where=where, fact=fact, remedy=remedy, key=key)
