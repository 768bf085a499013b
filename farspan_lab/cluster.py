"""A lab that is up as a cluster: its devices are shares of this machine's cores."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from farspan.domain.cluster import Cluster, DataSheet, Device, Host, Link, Site, WorkerSlot
from farspan.domain.units import parse_rate
from farspan_lab import lab, state


def find(name: str) -> Cluster:
    """Return the lab of that name, which is up, as a cluster."""
    return of_lab(state.status(name))


def of_lab(status: lab.Status) -> Cluster:
    """Return a lab that is up, as the cluster that it emulates: a host a site, whose disks only the
    first site shares."""
    sites = []
    for number, site in enumerate(status.lab.sites):
        devices = tuple(
            _device(device, tuple(state.enter(status, site.name, index)))
            for index, device in enumerate(site.devices)
        )
        host = Host(
            name=site.name,
            devices=devices,
            cpus=cpus(status.lab, site),
            address=site.address,
            enter=tuple(state.enter(status, site.name)),
            python=sys.executable,
            folder=str(state.home(status.lab.name) / site.name) if number else None,
        )
        sites.append(Site(name=site.name, hosts=(host,)))
    both = {frozenset((link.source, link.target)): link for link in status.lab.links}
    links = tuple(
        Link(
            a=link.source,
            b=link.target,
            rtt_s=max(2 * link.delay_s, 5e-5),
            bandwidth=link.bandwidth,
            jitter_s=link.jitter_s,
            loss=link.loss,
            window=status.lab.window,
        )
        for link in both.values()
    )
    return Cluster(sites=tuple(sites), links=links)


def cpus(whole: lab.Lab, site: lab.Site) -> int:
    """Cores that a site's workers, a thread for each of their own, would share as they share those
    they run on."""
    used = {core for device in site.devices for core in device.cpus}
    sharing = [
        device for other in whole.sites for device in other.devices if used & set(device.cpus)
    ]
    wanted = sum(
        device.cores * (1.0 if device.speed is None else device.speed) for device in sharing
    )
    crowd = max(1.0, wanted / max(1, len({core for device in sharing for core in device.cpus})))
    return max(1, round(sum(device.cores for device in site.devices) / crowd))


def _device(device: lab.Device, enter: tuple[str, ...]) -> Device:
    """Return a device of a lab: its share of cores of this machine's kind."""
    from farspan.domain import catalog
    from farspan_lab.devices import turn_s

    flags = _cpu_flags()
    kind = "cpu-amx" if "amx_bf16" in flags else "cpu-avx512" if "avx512f" in flags else "cpu-avx2"
    core = catalog.load_devices()[kind]
    share = device.speed if device.speed is not None else 1.0
    flops = {dtype: rate * share * device.cores for dtype, rate in core.flops.items()}
    bandwidth = parse_rate(core.bandwidth) * share * device.cores if core.bandwidth else None
    return Device(
        kind=kind,
        backend="cpu",
        memory=device.memory or _machine_memory(),
        sheet=DataSheet(
            flops=flops,
            bandwidth=bandwidth,
            dtypes=("fp32", "bf16") if flags & {"amx_bf16", "avx512_bf16"} else ("fp32",),
        ),
        slot=WorkerSlot(threads=device.cores, share=share, turn_s=turn_s(device), enter=enter),
    )


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
