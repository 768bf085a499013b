"""The parts of a cluster that a plan may do with: the papers' runs show that fewer machines are
often faster."""

from __future__ import annotations

import itertools
from collections import defaultdict

import msgspec
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Site

#: Up to these sites each is also left out in turn; of more, the half with the most FLOP/s is tried.
MOST_LEFT_OUT = 4


class ClusterPart(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a cluster's devices, by their places in it, and what to call them."""

    name: str
    places: tuple[int, ...]


def whole_cluster(cluster: Cluster) -> ClusterPart:
    """Return all devices."""
    return ClusterPart(name="all devices", places=tuple(range(len(cluster.devices))))


def all_parts(cluster: Cluster) -> list[ClusterPart]:
    """Return the whole; each site; all sites but one, or the faster half; each host; each kind; one
    device. Of parts that are alike the first."""
    parts: dict[object, ClusterPart] = {}
    for name, places in _group_devices(cluster):
        if places:
            part = ClusterPart(name=name, places=tuple(places))
            parts.setdefault(_interchange_key(cluster, part.places), part)
    return list(parts.values())


def _group_devices(cluster: Cluster) -> list[tuple[str, list[int]]]:
    """Return names of parts, and the places of each."""
    by_site = defaultdict[str, list[int]](list)
    by_host = defaultdict[str, list[int]](list)
    by_kind = defaultdict[str, list[int]](list)
    host_names: list[str] = []
    for site in cluster.sites:
        for host in site.hosts:
            for device in host.devices:
                place = len(host_names)
                host_names.append(host.name)
                by_site[site.name].append(place)
                by_host[host.name].append(place)
                by_kind[device.kind].append(place)
    everything = range(len(host_names))
    sites = cluster.sites
    groups = [("all devices", list(everything)), *by_site.items()]
    if 2 < len(sites) <= MOST_LEFT_OUT:
        for site in sites:
            others = [place for place in everything if place not in by_site[site.name]]
            groups.append((f"all but {site.name}", others))
    elif len(sites) > MOST_LEFT_OUT:
        fastest = sorted(sites, key=_sum_flops, reverse=True)[: len(sites) // 2]
        places = itertools.chain.from_iterable(by_site[site.name] for site in fastest)
        groups.append((f"the fastest {len(fastest)} sites", sorted(places)))
    groups += by_host.items()
    groups += [(f"every {kind}", places) for kind, places in by_kind.items()]
    for kind, alike in by_kind.items():
        groups.append((f"one {kind} of {host_names[alike[0]]}", alike[:1]))
    return groups


def _sum_flops(site: Site) -> float:
    total = 0.0
    for host in site.hosts:
        for device in host.devices:
            rates = [*device.sheet.flops.values()]
            for rate in device.times.rates:
                rates += rate.flops.values()
            total += max(rates, default=0.0)
    return total


def _interchange_key(cluster: Cluster, places: tuple[int, ...]) -> object:
    """Return the key by which two parts of one site are equal: their hosts with the used devices of
    each, and the site's terms. Others are unique, and so are hosts with links of their own."""
    part = cluster.only(places)
    if len(part.sites) > 1 or part.links:
        return places
    hosts = []
    for host in part.hosts:
        devices = [device.but(enter=None) for device in host.devices]
        terms = [host.memory, host.cpus, host.local_rate, host.nic, *devices]
        hosts.append(msgspec.json.encode(terms))
    return tuple(sorted(hosts)), replace(part.sites[0], name="", hosts=())
