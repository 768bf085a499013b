"""Carries packets between the TUN devices of the sites, each direction of a link with its delay,
rate and loss.

A packet is a virtio_net_hdr (linux/virtio_net.h) and an IP packet. TCP's come unsegmented, up to 64
KB at once, and leave as they came: so one Python process carries several Gbit/s.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import time
from contextlib import suppress

from farspan_lab.lab import Link

_OFFSET = 10
_LARGEST = _OFFSET + 2**16
#: Packets that are read from one site before the others get their turn.
_BATCH = 32
#: A router's queue holds one bandwidth-delay product (Villamizar and Song 1994), but at least these
#: bytes.
LEAST_QUEUE = 10**6


def segments(packet: bytes) -> int:
    """How many packets it is on a wire with an MTU of 1500."""
    headers = int.from_bytes(packet[2:4], "little")
    size = int.from_bytes(packet[4:6], "little")
    return -(-(len(packet) - _OFFSET - headers) // size) if size else 1


class Wire:
    """One direction of a link: what it is now, when its line is free again, what it has carried."""

    def __init__(self, link: Link, out: int, rng: random.Random) -> None:
        self.link = link
        self._out = out
        self._rng = rng
        self._free_at = self._last_arrival = 0.0
        self.bytes = self.packets = self.dropped = 0

    def arrival(self, packet: bytes, now: float) -> float | None:
        """When a packet that is sent now arrives, None if it does not. A virtual clock tells when
        the line is free."""
        link = self.link
        departs = max(now, self._free_at)
        queue = max(LEAST_QUEUE, 2 * link.delay_s * (link.bandwidth or 0))
        full = link.bandwidth is not None and (departs - now) * link.bandwidth > queue
        if full or not link.up or (link.loss and self._rng.random() < link.loss):
            self.dropped += segments(packet)
            return None
        if link.bandwidth:
            departs = self._free_at = departs + (len(packet) - _OFFSET) / link.bandwidth
        varies = self._rng.uniform(-link.jitter_s, link.jitter_s) if link.jitter_s else 0.0
        self._last_arrival = max(self._last_arrival, departs + link.delay_s + varies)
        return self._last_arrival

    def hand_over(self, packet: bytes) -> None:
        """Give a packet to the site at the other end, unless the link was cut while it was under
        way."""
        with suppress(OSError):  # Who is in a site may take its interface down.
            if self.link.up:
                os.write(self._out, packet)
                self.bytes += len(packet) - _OFFSET
                self.packets += segments(packet)
                return
        self.dropped += segments(packet)


class Relay:
    """All wires of a lab, by the TUN device they begin at and the number of the site they lead
    to."""

    def __init__(self, wires: dict[tuple[int, int], Wire]) -> None:
        self._wires = wires
        self._under_way: list[tuple[float, int, Wire, bytes]] = []
        self._order = itertools.count()

    def receive(self, tun: int) -> None:
        """Read what a site has sent. What is not IPv4, or leads nowhere, is dropped as by a
        router."""
        for _ in range(_BATCH):
            try:
                packet = os.read(tun, _LARGEST)
            except BlockingIOError:
                return
            wire = self._wires.get((tun, packet[_OFFSET + 18]))  # N of 10.77.N.1, the destination
            if wire is None or packet[_OFFSET] >> 4 != 4:
                continue
            if (arrival := wire.arrival(packet, time.monotonic())) is not None:
                heapq.heappush(self._under_way, (arrival, next(self._order), wire, packet))

    def deliver(self) -> float | None:
        """Hand over all that has arrived; seconds until the next arrival, None when nothing is
        under way."""
        while self._under_way:
            if (remaining := self._under_way[0][0] - time.monotonic()) > 0:
                return remaining
            _, _, wire, packet = heapq.heappop(self._under_way)
            wire.hand_over(packet)
        return None
