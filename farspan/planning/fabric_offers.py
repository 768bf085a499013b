"""GPUs that could be requested of the FABRIC testbed, now or later, as clusters in the order of the
time that a run takes there.

An offer is one machine's free GPUs, those of all machines of a site, or those of two sites. Each VM
takes the GPUs of one machine. A wait for GPUs counts as a queue.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from farspan import techniques
from farspan.domain.cluster import Cluster, Host, Link, Site
from farspan.domain.engine import Engine
from farspan.domain.fabric import (
    MIN_DISK_GB,
    SUMMARY_NAMES,
    VM_CORES,
    VM_RAM_GB,
    fabric_device,
)
from farspan.domain.model import ModelSpec
from farspan.domain.train import TrainSpec
from farspan.planning.candidate import Candidate, Refused
from farspan.planning.rank_plans import rank_plans
from farspan.planning.rent import SEARCHED

#: Sites whose pairs are offered, those with the most FLOP/s; and offers for which pipelines are
#: searched too, some 0.2 s a device.
MAX_PAIRED_SITES = 4
MAX_SEARCHED_OFFERS = 4
#: Kilometres that light goes in a fibre in a second, and how much longer paths are than the great
#: circle [measured: the mean of the four round trips of arXiv 2602.02632, Table I, is 1.51].
FIBRE_KM_PER_S = 200_000.0
DETOUR = 1.5
EARTH_RADIUS_KM = 6371.0
#: Bytes a second between GPUs of a VM: copies over PCIe 3.0 x16, as in catalog/clusters/fabric.
LOCAL_RATE = 13e9

#: Of a site; some of its machines may be in maintenance (fablib's NodeValidator).
USABLE_STATES = ("Active", "PartMaint")


class GpuHost(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the testbed with room for a VM with `gpus` of a kind."""

    name: str
    site: str
    kind: str
    gpus: int
    cores: int
    ram_gb: int
    #: Seconds until they are free.
    free_in_s: float = 0.0


class FabricOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that could be requested, and the best plan on it."""

    cluster: Cluster
    best: Candidate | Refused
    free_in_s: float

    @property
    def time_s(self) -> float:
        """Seconds until the run is done, the wait included; infinite where nothing fits."""
        return self.best.time_s if isinstance(self.best, Candidate) else math.inf


# -- what is free
#   ------------------------------------------------------------------------------------------------


def list_gpu_hosts(
    summary: Mapping[str, Any], calendar: Mapping[str, Any] | None, now: float
) -> list[GpuHost]:
    """List the machines with free GPUs, those of the calendar with the time until then; `now` is
    in seconds since 1970."""
    active = {site["name"] for site in summary["sites"] if site.get("state") in USABLE_STATES}
    sites = {host["name"]: host.get("site") for host in summary["hosts"]}
    hosts = _free_hosts(summary["hosts"], sites, 0.0)
    known = {(host.name, host.kind) for host in hosts}
    for slot in (calendar or {}).get("data") or []:
        free_in_s = max(0.0, parse_time(slot["start"]) - now)
        for host in _free_hosts(slot.get("hosts") or [], sites, free_in_s):
            if (host.name, host.kind) not in known:
                known.add((host.name, host.kind))
                hosts.append(host)
    return [host for host in hosts if host.site in active]


def _free_hosts(
    machines: Iterable[Mapping[str, Any]], sites: Mapping[str, Any], free_in_s: float
) -> list[GpuHost]:
    hosts = []
    for machine in machines:
        cores = machine.get("cores_available") or 0
        ram_gb = machine.get("ram_available") or 0
        disk_gb = machine.get("disk_available") or 0
        is_up = machine.get("state", "Active") == "Active"
        if not is_up or cores < 1 or ram_gb < 1 or disk_gb < MIN_DISK_GB:
            continue
        for kind, component in SUMMARY_NAMES.items():
            counts = (machine.get("components") or {}).get(component) or {}
            gpus = (counts.get("capacity") or 0) - (counts.get("allocated") or 0)
            gpus = counts.get("available", gpus)
            site = machine.get("site") or sites.get(machine["name"])
            if gpus > 0 and site:
                host = GpuHost(
                    name=machine["name"],
                    site=site,
                    kind=kind,
                    gpus=gpus,
                    cores=cores,
                    ram_gb=ram_gb,
                    free_in_s=free_in_s,
                )
                hosts.append(host)
    return hosts


def parse_time(text: str) -> float:
    """Return a time of the testbed in seconds since 1970: ISO 8601, or `2026-12-01 10:00:00 +0000`;
    UTC where it has no zone."""
    time = datetime.fromisoformat(text.replace(" +", "+").replace("Z", "+00:00"))
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def site_locations(summary: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return degrees north and east of each site that gives them."""
    places = {}
    for site in summary["sites"]:
        location = site.get("location")
        if isinstance(location, list | tuple) and len(location) == 2:
            places[site["name"]] = (float(location[0]), float(location[1]))
    return places


def estimate_rtt(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Return the seconds of a round trip between two places: light in a fibre, with detours."""
    north_a, east_a, north_b, east_b = map(math.radians, (*a, *b))
    half_north = math.sin((north_b - north_a) / 2) ** 2
    half_east = math.sin((east_b - east_a) / 2) ** 2
    chord = half_north + math.cos(north_a) * math.cos(north_b) * half_east
    km = 2 * EARTH_RADIUS_KM * math.asin(math.sqrt(chord))
    return 2 * km * DETOUR / FIBRE_KM_PER_S


# -- offers
#   ------------------------------------------------------------------------------------------------


def rank_offers(
    hosts: Sequence[GpuHost],
    places: Mapping[str, tuple[float, float]],
    model: ModelSpec,
    train_for: Callable[[ModelSpec, Cluster], TrainSpec],
    engine: Engine,
    allow: Sequence[str] = (),
) -> list[FabricOffer]:
    """Price a run on every offer; the fastest come first, waits included."""

    def price(group: Sequence[GpuHost], considered: Sequence[str]) -> FabricOffer:
        cluster = cluster_of_hosts(group, places)
        train = train_for(model, cluster)
        ranking = rank_plans(model, cluster, train, engine, allow=considered, parts=False)
        wait_s = max(host.free_in_s for host in group)
        return FabricOffer(cluster=cluster, best=ranking.listed[0], free_in_s=wait_s)

    allowed = tuple(allow) or techniques.technique_names()
    quick = tuple(name for name in allowed if name != SEARCHED) or allowed
    groups = group_hosts(hosts, places)
    order = [(price(group, quick), group) for group in groups]
    order.sort(key=lambda pair: _offer_order(pair[0]))
    if quick != allowed:
        for place, (_, group) in enumerate(order[:MAX_SEARCHED_OFFERS]):
            order[place] = (price(group, allowed), group)
    offers = [offer for offer, _ in order]
    return sorted(offers, key=_offer_order)


def _offer_order(offer: FabricOffer) -> tuple[float, int]:
    return offer.time_s, len(offer.cluster.devices)


def group_hosts(
    hosts: Sequence[GpuHost], places: Mapping[str, tuple[float, float]]
) -> list[tuple[GpuHost, ...]]:
    """Return the machines of each offer: one, all that are free in a site now, or in two sites.
    Machines that differ by name alone are offered once."""
    groups: list[tuple[GpuHost, ...]] = [(host,) for host in hosts]
    by_site: dict[str, list[GpuHost]] = {}
    for host in hosts:
        if not host.free_in_s:
            by_site.setdefault(host.site, []).append(host)
    groups += [tuple(group) for group in by_site.values() if len(group) > 1]
    located = [site for site in by_site if site in places]
    located.sort(key=lambda site: -sum(_flops(host) for host in by_site[site]))
    for a, b in itertools.combinations(located[:MAX_PAIRED_SITES], 2):
        groups.append((*by_site[a], *by_site[b]))
    alike: dict[object, tuple[GpuHost, ...]] = {}
    for group in groups:
        key = tuple((host.site, host.kind, host.gpus, host.free_in_s > 0) for host in group)
        alike.setdefault(key, group)
    return list(alike.values())


def _flops(host: GpuHost) -> float:
    return host.gpus * max(fabric_device(host.kind).sheet.flops.values())


def cluster_of_hosts(
    hosts: Sequence[GpuHost], places: Mapping[str, tuple[float, float]]
) -> Cluster:
    """Return the VMs that an offer would have as a cluster, with round trips by distance."""
    vms: dict[str, list[Host]] = {}
    waits: dict[str, float] = dict.fromkeys((host.site.lower() for host in hosts), 0.0)
    for host in hosts:
        site = host.site.lower()
        others = vms.setdefault(site, [])
        ram_gb = min(host.ram_gb, VM_RAM_GB)
        rate = LOCAL_RATE if host.gpus > 1 else None
        vm = Host(
            name=f"{site}{len(others) + 1}",
            devices=(fabric_device(host.kind),) * host.gpus,
            cpus=min(host.cores, VM_CORES),
            memory=ram_gb * 10**9,
            local_rate=rate,
        )
        others.append(vm)
        waits[site] = max(waits[site], host.free_in_s)
    sites = [
        Site(name=name, hosts=tuple(group), queue_s=waits[name]) for name, group in vms.items()
    ]
    links = []
    for a, b in itertools.combinations(vms, 2):
        rtt_s = estimate_rtt(places[a.upper()], places[b.upper()])
        links.append(Link(a=a, b=b, rtt_s=rtt_s, origin="derived"))
    return Cluster(sites=tuple(sites), links=tuple(links))
