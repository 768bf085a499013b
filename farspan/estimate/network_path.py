"""One way through a network: what decides how long a message takes over it, and what devices of a
host do to each other's rates."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from farspan.domain.catalog import ring_rate
from farspan.domain.cluster import Cluster, Device, Link
from farspan.domain.engine import GpuEngine


class NetworkPath(msgspec.Struct, frozen=True):
    """Between two ranks, one way: seconds before the first byte arrives, bytes a second
    afterwards."""

    delay_s: float
    rate: float
    #: What the line itself carries; concurrent messages share it, while windows are each message's
    #: own.
    line: float
    #: Hosts at its ends, the same where both ranks are in one host.
    hosts: tuple[str, str]
    sites: tuple[str, str]
    #: Measured seconds by bytes, where `farspan probe` timed messages of this kind.
    timed: tuple[tuple[int, float], ...] = ()
    #: Seconds a byte of the copies between the devices and their hosts' memory, before and after.
    copy_byte_s: float = 0.0

    @property
    def local(self) -> bool:
        return self.hosts[0] == self.hosts[1]

    def shared(self, concurrent: int) -> float:
        """Return the rate of each of `concurrent` messages."""
        return self.rate if concurrent == 1 else min(self.rate, self.line / concurrent)


class RankGroup(NamedTuple):
    """Ranks of a collective by what decides its time: their hosts in order, and bytes a second
    inside each host that has several of them."""

    hosts: tuple[str, ...]
    rates: tuple[tuple[str, float], ...]


def catalogued_rate(devices: Sequence[Device]) -> float | None:
    """Bytes a second that the catalogue knows of a ring over these devices of one host: that of
    the slowest interconnect; None where one is unknown."""
    slowest = math.inf
    for device in devices:
        joined = device.sheet.interconnect
        rate = None if joined is None else ring_rate(joined, len(devices))
        if rate is None:
            return None
        slowest = min(slowest, rate)
    return slowest


def host_copies(device: Device, gpu: GpuEngine) -> float:
    """Return bytes a second of copies between a GPU and its host: by the generation of PCI Express
    that its data sheet names, or that cards of its compute capability have."""
    joined = device.sheet.interconnect
    if joined is not None and joined.kind == "pcie":
        rate = joined.rate
        nearest = min(gpu.host_links, key=lambda link: abs(math.log(link.pcie_rate / rate)))
        return nearest.copies
    capability = device.sheet.capability or 0.0
    known = [link for link in gpu.host_links if link.capability <= capability]
    return known[-1].copies if known else gpu.host_links[0].copies


def threads_per_core(
    cluster: Cluster, devices: Sequence[Device], hosts: Sequence[str]
) -> dict[str, float]:
    """Return the CPU workers' threads for each core of their host, at least 1: they share its
    speed."""
    cpus, threads = {host.name: host.cpus for host in cluster.hosts}, dict.fromkeys(hosts, 0)
    for device, host in zip(devices, hosts, strict=True):
        threads[host] += device.slot.threads if device.backend == "cpu" else 0
    return {
        host: max(1.0, used / cores) if (cores := cpus[host]) else 1.0
        for host, used in threads.items()
    }


def paced(link: Link) -> Link:
    """Return the link whose round trips and bytes take what they took in trials; what is under way
    in a round trip stays."""
    if link.pace == 1.0:
        return link
    return msgspec.structs.replace(
        link,
        pace=1.0,
        rtt_s=link.rtt_s * link.pace,
        bandwidth=None if link.bandwidth is None else link.bandwidth / link.pace,
        transfer_s={size: seconds * link.pace for size, seconds in link.transfer_s.items()},
    )


def bytes_under_way(link: Link, streams: int, window: int) -> float:
    """Return the bytes under way over `streams`: measured where they were, else the streams'
    windows."""
    if streams in link.in_flight:
        return link.in_flight[streams]
    if link.in_flight:
        # More streams carry no less than fewer did, and of more that were measured their share.
        return max(
            under_way * min(1.0, streams / count) for count, under_way in link.in_flight.items()
        )
    return streams * (link.window or window)


@functools.lru_cache(maxsize=1024)
def interpolated_s(timed: tuple[tuple[int, float], ...], size: float) -> float:
    """Seconds for `size` bytes on the broken line through measured points, its ends prolonged;
    never below 0."""
    place = min(max(1, bisect_left(timed, (size, 0.0))), len(timed) - 1)
    (x0, y0), (x1, y1) = timed[place - 1], timed[place]
    return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))
