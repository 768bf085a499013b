"""The virtual clock of a link, against times of our own."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from farspan_lab.lab import Link
from farspan_lab.relay import LEAST_QUEUE, Wire, segments

GAPS = st.lists(st.tuples(st.floats(0, 0.05), st.integers(40, 65_000)), min_size=1, max_size=60)


def packet(size: int, gso: int = 0) -> bytes:
    """A packet of `size` bytes behind its virtio_net_hdr: 52 bytes of headers, segments of
    `gso`."""
    return (
        b"\x01\x01"
        + (52).to_bytes(2, "little")
        + gso.to_bytes(2, "little")
        + bytes(4)
        + bytes(size)
    )


def wire(**values: float) -> Wire:
    return Wire(
        Link(source="a", target="b", **{"delay_s": 0.02, **values}), out=-1, rng=random.Random(1)
    )


def test_a_packet_counts_as_the_segments_it_is_cut_into():
    assert segments(packet(100)) == segments(packet(52 + 1448, gso=1448)) == 1
    assert segments(packet(52 + 1449, gso=1448)) == 2
    assert segments(packet(52 + 44 * 1448, gso=1448)) == 44


def test_a_packet_waits_for_the_line_then_for_the_delay():
    link = wire(bandwidth=1e6)
    assert link.arrival(packet(1000), now=5.0) == 5.0 + 0.001 + 0.02
    assert link.arrival(packet(2000), now=5.0) == 5.0 + 0.003 + 0.02
    assert link.arrival(packet(1000), now=6.0) == 6.0 + 0.001 + 0.02


@given(GAPS, st.floats(1e4, 1e8))
def test_no_traffic_is_faster_than_the_line_or_waits_longer_than_a_full_queue(traffic, bandwidth):
    link = wire(bandwidth=bandwidth)
    now = 0.0
    taken = []
    queue_s = max(LEAST_QUEUE / bandwidth, 2 * 0.02)
    for gap, size in traffic:
        now += gap
        waiting_s = max(0.0, taken[-1][1] - 0.02 - now) if taken else 0.0
        arrival = link.arrival(packet(size), now)
        assert (arrival is None) == (waiting_s > queue_s + 1e-9) or abs(waiting_s - queue_s) < 1e-9
        if arrival is not None:
            assert abs(arrival - (now + waiting_s + size / bandwidth + 0.02)) < 1e-6
            taken.append((size, arrival))
    if taken:
        assert taken[-1][1] - taken[0][1] >= sum(size for size, _ in taken[1:]) / bandwidth - 1e-6


@given(GAPS, st.floats(0, 0.02), st.none() | st.floats(1e4, 1e8))
def test_packets_keep_their_order_whatever_the_jitter(traffic, jitter, bandwidth):
    link = wire(jitter_s=jitter, bandwidth=bandwidth)
    now = 0.0
    arrivals = []
    for gap, size in traffic:
        now += gap
        arrivals.append(link.arrival(packet(size), now))
        assert arrivals[-1] is None or arrivals[-1] >= now + 0.02 - jitter
    there = [arrival for arrival in arrivals if arrival is not None]
    assert there == sorted(there)


def test_a_full_queue_drops_what_comes_last():
    link = wire(bandwidth=1e6)
    let_in = [link.arrival(packet(49_999), now=0.0) is not None for _ in range(40)]
    # A packet is let in while no more than a million bytes wait before it.
    assert let_in == [True] * 21 + [False] * 19
    assert link.dropped == 19
    assert link.arrival(packet(50_000), now=0.1) is not None


def test_a_link_that_is_down_takes_nothing():
    link = wire(up=False)
    assert link.arrival(packet(52 + 2 * 1448, gso=1448), now=0.0) is None
    link.hand_over(packet(100))
    assert (link.dropped, link.packets, link.bytes) == (3, 0, 0)
