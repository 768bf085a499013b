"""The clusters of a bench: its labs up while it measures, the same figures by the same name on
another day."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from farspan.app import clusters
from farspan.domain.cluster import THIS_MACHINE, Cluster, Device, Host
from farspan.semantics.identity import cluster_hash
from farspan_studies.bench.matrix import Matrix

#: A lab of a matrix, by its process: several are up at once, and one of the file's own name may be
#: the user's.
LAB = "bench-{}-{}"
#: Clusters by their names in the matrix, with the hashes of their figures.
There = Mapping[str, tuple[Cluster, str]]


@contextlib.contextmanager
def clusters_of(matrix: Matrix, labels: Iterable[str]) -> Iterator[There]:
    """Clusters of the matrix, all up for as long as the `with` lasts, with the hashes of their
    figures."""
    remove_orphans(matrix)
    with contextlib.ExitStack() as stack:
        up = {label: stack.enter_context(cluster_of(matrix, label)) for label in labels}
        yield {label: (cluster, figures_hash(cluster)) for label, cluster in up.items()}


@contextlib.contextmanager
def cluster_of(matrix: Matrix, label: str) -> Iterator[Cluster]:
    """Return a cluster of the matrix, its lab up for as long as the `with` lasts."""
    entry = matrix.clusters[label]
    if entry == THIS_MACHINE:
        from farspan.launch.probe_client import Probe, check_gpus

        check_gpus("auto")
        with Probe() as probe:
            cluster = probe.describe_devices("auto", None)
            # A worker a core, with its share of all memory: what is free just now is another
            # cluster each time.
            if cluster.devices[0].backend == "cpu" and (cores := cluster.hosts[0].cpus):
                cluster = probe.describe_devices("cpu", cores)
                cluster = cluster.with_devices(
                    lambda host, index: msgspec.structs.replace(
                        host.devices[index],
                        memory=(host.memory or host.devices[index].memory) // cores,
                    )
                )
        yield priced(cluster, matrix)
        return
    if isinstance(entry, str):
        yield priced(clusters.find_cluster(entry), matrix)
        return
    from farspan_lab import spec, state
    from farspan_lab.cluster import of_lab

    name = LAB.format(os.getpid(), list(matrix.clusters).index(label))
    lab = spec.changed(spec.load_lab(entry.lab), entry.window, entry.bandwidth, entry.memory)
    status = state.up(msgspec.structs.replace(lab, name=name))
    try:
        yield priced(of_lab(status), matrix)
    finally:
        state.down(name)


def remove_orphans(matrix: Matrix) -> None:
    """Remove the labs of matrices whose process was killed before it could."""
    if all(isinstance(entry, str) for entry in matrix.clusters.values()):
        return
    from farspan_lab import state

    for name in state.names():
        owner = re.fullmatch(LAB.format(r"(\d+)", r"\d+"), name)
        if owner and not Path("/proc", owner[1]).exists():
            state.down(name)


def priced(cluster: Cluster, matrix: Matrix) -> Cluster:
    """Return the cluster with the matrix's prices where it has none of its own."""

    def device_of(host: Host, index: int) -> Device:
        device = host.devices[index]
        known = device.usd_per_hour is not None
        price = matrix.prices.get(device.kind, matrix.prices.get("any"))
        return device if known else msgspec.structs.replace(device, usd_per_hour=price)

    return cluster.with_devices(device_of)


def bare(cluster: Cluster) -> Cluster:
    """Return a cluster's figures, without ways to enter it and prices, which change no step: what
    stays the same where it is made anew each time, and all that is written down of it."""
    return cluster.with_hosts(
        lambda host: msgspec.structs.replace(
            host,
            folder=None,
            address=None,
            interface=None,
            python="python3",
            enter=None,
            devices=tuple(device.but(enter=None, usd_per_hour=None) for device in host.devices),
        )
    )


def figures_hash(cluster: Cluster) -> str:
    """Return the name of a cluster's figures, the same on another day."""
    return cluster_hash(bare(cluster))
