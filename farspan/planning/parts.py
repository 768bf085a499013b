"""The parts of a cluster that a plan may do with: the papers' runs show that fewer machines are
often faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from farspan.domain.cluster import Cluster, Device, Host, Site

#: Up to so many sites each is also left out in turn; of more, the half with the most FLOP/s is
#: tried.
MOST_LEFT_OUT = 4


class ClusterPart(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a cluster's devices, by their places in it, and what to call them."""

    name: str
    places: tuple[int, ...]


class _At(msgspec.Struct, frozen=True):
    """One device and where it is."""

    place: int
    device: Device
    host: Host
    site: Site


def whole(cluster: Cluster) -> ClusterPart:
    """All devices."""
    return ClusterPart(name="all devices", places=tuple(range(len(cluster.devices))))


def all_parts(cluster: Cluster) -> list[ClusterPart]:
    """The whole; each site; all sites but one, or the faster half; each host; each kind; one
    device. Of parts that are alike the first."""
    spots = [
        (device, host, site)
        for site in cluster.sites
        for host in site.hosts
        for device in host.devices
    ]
    everything = [_At(place, *spot) for place, spot in enumerate(spots)]
    parts = [whole(cluster)]
    seen, alike = {parts[0].places}, set()
    for name, inside in _groups(cluster, everything):
        chosen = [at for at in everything if inside(at)]
        places, key = tuple(at.place for at in chosen), _likeness(cluster, chosen)
        if chosen and places not in seen and key not in alike:
            seen.add(places)
            alike.add(key)
            parts.append(ClusterPart(name=name, places=places))
    return parts


def _groups(
    cluster: Cluster, everything: Sequence[_At]
) -> Iterator[tuple[str, Callable[[_At], bool]]]:
    """Names of parts, and what belongs to each."""
    sites = [site.name for site in cluster.sites]
    for name in sites:
        yield name, lambda at, name=name: at.site.name == name  # type: ignore[misc]
    if 2 < len(sites) <= MOST_LEFT_OUT:
        for name in sites:
            yield f"all but {name}", lambda at, name=name: at.site.name != name  # type: ignore[misc]
    elif len(sites) > MOST_LEFT_OUT:
        fast = sorted(cluster.sites, key=_flops, reverse=True)[: len(sites) // 2]
        best = {site.name for site in fast}
        yield f"the fastest {len(best)} sites", lambda at: at.site.name in best
    for name in (host.name for host in cluster.hosts):
        yield name, lambda at, name=name: at.host.name == name  # type: ignore[misc]
    kinds = dict.fromkeys(at.device.kind for at in everything)
    for kind in kinds:
        yield f"every {kind}", lambda at, kind=kind: at.device.kind == kind  # type: ignore[misc]
    for kind in kinds:
        first = next(at for at in everything if at.device.kind == kind)
        yield f"one {kind} of {first.host.name}", lambda at, place=first.place: at.place == place  # type: ignore[misc]


def _flops(site: Site) -> float:
    devices = [device for host in site.hosts for device in host.devices]
    return sum(
        max(
            (
                *device.sheet.flops.values(),
                *(f for r in device.times.rates for f in r.flops.values()),
            ),
            default=0.0,
        )
        for device in devices
    )


def _likeness(cluster: Cluster, chosen: Sequence[_At]) -> object:
    """What makes two parts of one site equal: their hosts with the devices that are used of each,
    and the site's terms. Others are unique, and so are hosts with links of their own."""
    sites = {at.site.name: at.site for at in chosen}
    if len(sites) != 1 or any(
        {link.a, link.b} <= {at.host.name for at in chosen} for link in cluster.links
    ):
        return tuple(at.place for at in chosen)
    hosts: dict[str, list[Any]] = {}
    for at in chosen:
        figures = msgspec.json.encode(at.device.but(enter=None))
        own = [at.host.memory or 0, at.host.cpus or 0, at.host.local_rate or 0, at.host.nic or 0]
        hosts.setdefault(at.host.name, own).append(figures)
    (site,) = sites.values()
    lan = (site.lan_bandwidth, site.lan_rtt_s)
    return (
        tuple(sorted(map(tuple, hosts.values()))),
        site.lease_s,
        site.queue_s,
        site.egress_usd_per_byte,
        lan,
    )
