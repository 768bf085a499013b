"""Clusters by name: a user's file, or one that ships with farspan; `:N` after either takes its
first N devices."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from farspan.domain.cluster import Cluster
from farspan.domain.clusterfile import load_cluster
from farspan.domain.codec import missing_path
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal, nearest


def named() -> dict[str, Path]:
    """The files of the clusters that ship with farspan, by name (`fabric/gat-amst`)."""
    root = Path(str(resources.files("farspan.catalog").joinpath("clusters")))
    return {
        str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.yaml"))
    }


def find(name: str) -> Cluster:
    """The cluster of a file or of a name, with `:N` its first N devices, or the one that Ray runs
    at `ray:ADDRESS`."""
    if name.startswith("ray:"):
        from farspan.launch.launchers.ray import read_cluster

        return read_cluster(name.removeprefix("ray:"))
    whole, _, count = name.rpartition(":") if re.search(r":\d+$", name) else (name, "", "")
    cluster = load_cluster(_path(whole))
    if not count:
        return cluster
    if not 1 <= int(count) <= len(cluster.devices):
        raise Refusal(
            "device-missing",
            where="--cluster",
            fact=f"{whole} has {len(cluster.devices)}",
            what=f"{whole} has fewer than {count} devices"
            if int(count)
            else f"{name} has no devices",
            remedy=f"--cluster {shell_word(whole)}:{len(cluster.devices)}",
        )
    return cluster.first(int(count))


def _path(name: str) -> Path:
    path, ours = Path(name).expanduser(), named()
    if path.is_file():
        return path
    if name in ours:
        return ours[name]
    if path.suffix in (".yaml", ".yml") or path.exists():
        raise missing_path(path)
    match = nearest(name, ours)
    raise Refusal(
        "path-missing",
        what=f"there is no cluster {name!r}",
        where="--cluster",
        fact=f"it is neither a file nor one of {', '.join(ours)}",
        remedy=f"--cluster {shell_word(match)}" if match else "farspan cluster list",
    )
