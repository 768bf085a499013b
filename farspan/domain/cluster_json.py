"""cluster.json: a Cluster as JSON, with all figures of a device side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from farspan.domain.cluster import PART_OF, Cluster
from farspan.domain.struct_files import parse_json, read_bytes, save


def as_json(cluster: Cluster) -> dict[str, Any]:
    """Return the file's content, which is also what a cluster is hashed by."""
    content: dict[str, Any] = msgspec.to_builtins(cluster, str_keys=True)
    for device in _devices(content):
        for part in dict.fromkeys(PART_OF.values()):
            device |= device.pop(part)
    # What the user called it is no figure of it.
    for site in content["sites"]:
        for host in site["hosts"]:
            host.pop("cluster", None)
    return content


def save_cluster_json(cluster: Cluster, path: Path) -> None:
    """Write cluster.json, atomically."""
    save(as_json(cluster), path)


def load_cluster_json(path: Path) -> Cluster:
    """Read cluster.json. Raises Refusal for what is no cluster."""
    return parse_cluster_json(read_bytes(path), path)


def parse_cluster_json(text: bytes, where: object) -> Cluster:
    """Parse such JSON as a cluster. Raises Refusal."""
    content = parse_json(text, dict[str, Any], where)
    for device in _devices(content):
        for name in device.keys() & PART_OF.keys():
            device.setdefault(PART_OF[name], {})[name] = device.pop(name)
    return parse_json(msgspec.json.encode(content), Cluster, where)


def _devices(content: Any) -> list[dict[str, Any]]:
    """Return the tables of devices in the file's content; the reader refuses other shapes."""

    def inside(tables: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
        inner: list[dict[str, Any]] = []
        for table in tables:
            entries = table.get(key)
            if isinstance(entries, list | tuple):
                inner.extend(entry for entry in entries if isinstance(entry, dict))
        return inner

    return inside(inside(inside([content], "sites"), "hosts"), "devices")
