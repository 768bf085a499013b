"""Measures the path between two hosts: whether it works, round trip, bandwidth, loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from farspan.domain.cluster import Host, Link
from farspan.domain.clusterfile import MAX_LOSS
from farspan.domain.problems import Refusal, command
from farspan.launch.hosts import Agent

#: A connection that has not come about by then will not: three SYNs, sent after 0, 1 and 3 s.
REACH_S = 4.0
#: A datagram that has not come by then will not.
DATAGRAM_S = 3.0
QUICK_PINGS = 12
#: Seconds that a stream gets to grow, in addition to GROW_RTTS round trips; then it is timed for
#: STREAM_S, or TIMED_RTTS if longer.
GROW_S = 0.5
GROW_RTTS = 16
STREAM_S = 1.0
TIMED_RTTS = 20
STREAMS = (1, 2, 4, 8, 16)
NUM_PINGS = 40
#: Datagrams that loss is counted on, and the pause between two.
DATAGRAMS = 2000
GAP_S = 0.0005
#: A single stream is window-limited where several get this much more.
LIMITED = 1.5


class HostPath(msgspec.Struct, frozen=True, kw_only=True):
    """From one host to another. `failed` is name, route, port, timeout or None; rates are bytes a
    second."""

    a: str
    b: str
    failed: str | None = None
    fact: str = ""
    #: The address of `b` that no connection came about to; empty where one did.
    ip: str = ""
    #: An address of an interface of `b` where it answers, where it does not at `ip`.
    answers_at: str = ""
    #: Whether datagrams arrived, which need no return path; asked only where `failed`.
    one_way: bool | None = None
    rtt_s: float | None = None
    jitter_s: float | None = None
    #: The other clock less this one.
    clock_offset_s: float | None = None
    #: The interface that `a` uses for `b`.
    interface: str | None = None
    #: By number of streams.
    bandwidth: dict[int, float] = {}


def measure_paths(a: Agent, b: Agent, streams: Sequence[int]) -> tuple[HostPath, HostPath]:
    """Measure both paths between two hosts: first whether they work, then how fast, never two
    measurements at a time."""
    with ThreadPoolExecutor(2) as pool:
        there, back = pool.map(measure_round_trip, (a, b), (b, a))
    if there.failed or back.failed:
        return one_way(a, b, there), one_way(b, a, back)
    return with_rates(a, b, there, streams), with_rates(b, a, back, streams)


def find_answering(a: Agent, b: Agent, path: HostPath, addresses: Sequence[str]) -> HostPath:
    """Return a path that failed with the first of these addresses of `b` where it answers `a`."""
    for address in addresses:
        target = {**b.target, "address": address}
        answer = a.ask("reach", **target, deadline=REACH_S, pings=1, deadline_s=3 * REACH_S)
        if answer["failed"] is None:
            return msgspec.structs.replace(path, answers_at=address)
    return path


def with_rates(a: Agent, b: Agent, path: HostPath, streams: Sequence[int]) -> HostPath:
    """Return the path with the bytes a second that arrive over each number of streams."""
    rates = {count: measure_bandwidth(a, b, count, path.rtt_s or 0.0).rate for count in streams}
    return msgspec.structs.replace(path, bandwidth=rates)


def measure_round_trip(a: Agent, b: Agent, pings: int = QUICK_PINGS) -> HostPath:
    """Try whether `a` can connect to `b`, and time its round trips: median, and half the spread of
    the middle half as jitter."""
    answer = a.ask("reach", **b.target, deadline=REACH_S, pings=pings, deadline_s=3 * REACH_S)
    interface = a.ask("route", address=b.address)["interface"]
    path = HostPath(
        a=a.host.name,
        b=b.host.name,
        failed=answer["failed"],
        fact=answer.get("fact", ""),
        ip=answer.get("ip", ""),
        interface=interface,
    )
    if path.failed:
        return path
    # The first ping pays for the connection's buffers and for threads that have to wake.
    rtts = sorted(answer["rtts"][1:] or answer["rtts"])
    jitter_s = 0.0
    if len(rtts) > 1:
        first_quartile, _, third_quartile = statistics.quantiles(rtts, n=4)
        jitter_s = (third_quartile - first_quartile) / 2
    return msgspec.structs.replace(
        path,
        rtt_s=statistics.median(rtts),
        jitter_s=jitter_s,
        clock_offset_s=answer["clock_offset"],
    )


def require_reached(path: HostPath, host: Host) -> HostPath:
    """Return the path of `host`; refuse one that has failed (host-unreachable)."""
    if path.failed:
        raise unreachable_link(host, path.b, f"{path.failed}: {path.fact}")
    return path


def unreachable_link(a: Host, b: str, fact: str) -> Refusal:
    return Refusal(
        "host-unreachable",
        what=f"{a.name} cannot reach {b}",
        where=f"link {a.name} -> {b}",
        fact=fact,
        remedy=command("doctor", "--cluster", a.cluster_name),
    )


def one_way(a: Agent, b: Agent, path: HostPath) -> HostPath:
    """Return the path with whether single datagrams arrive: that shows which direction is cut."""
    tag = f"{a.host.name}-{time.monotonic_ns()}"
    try:
        a.ask("send_datagrams", **b.target, tag=tag, count=5, gap=0.02)
    except Refusal:
        return msgspec.structs.replace(path, one_way=False)
    deadline = time.monotonic() + DATAGRAM_S
    while not (arrived := b.ask("datagrams", tag=tag)["count"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return msgspec.structs.replace(path, one_way=arrived > 0)


class Streamed(NamedTuple):
    """Bytes a second that arrived, and seconds that one of them kept the cores of either end busy,
    on average."""

    rate: float
    busy_s: float | None


def measure_bandwidth(a: Agent, b: Agent, streams: int, rtt_s: float) -> Streamed:
    """Time the bytes that arrive at `b` over a number of streams from `a`, after they have grown.

    A lost packet holds back what follows it for a round trip: some twenty round trips make that a
    small share.
    """
    grow = GROW_S + GROW_RTTS * rtt_s
    timed = max(STREAM_S, TIMED_RTTS * rtt_s)
    a.ask("stream", **b.target, streams=streams, seconds=grow + timed + 0.1)
    time.sleep(grow)
    a_before = a.ask("received")
    b_before = b.ask("received")
    time.sleep(timed)
    a_after = a.ask("received")
    b_after = b.ask("received")
    a.ask("settle")
    size = b_after["bytes"] - b_before["bytes"]
    rate = float(size / (b_after["at"] - b_before["at"]))
    if not size or a_before["busy"] is None or b_before["busy"] is None:
        return Streamed(rate, None)
    busy_s = a_after["busy"] - a_before["busy"]
    busy_s += b_after["busy"] - b_before["busy"]
    return Streamed(rate, busy_s / 2 / size)


def measure_link(a: Agent, b: Agent, activation_bytes: int) -> Link:
    there = require_reached(measure_round_trip(a, b, NUM_PINGS), a.host)
    back = require_reached(measure_round_trip(b, a, NUM_PINGS), b.host)
    rtt_s = min(there.rtt_s or 0.0, back.rtt_s or 0.0)
    jitter_s = max(there.jitter_s or 0.0, back.jitter_s or 0.0)
    streamed = {count: measure_bandwidth(a, b, count, rtt_s) for count in STREAMS}
    rates = {count: sent.rate for count, sent in streamed.items()}
    # The path back is timed where the bandwidth decides; the slower path counts.
    back_streamed = measure_bandwidth(b, a, STREAMS[-1], rtt_s)
    bandwidth = min(max(rates.values()), back_streamed.rate)
    in_flight = {count: round(rate * rtt_s) for count, rate in rates.items()}
    window = in_flight[1] if bandwidth > LIMITED * rates[1] else None
    busy = [sent.busy_s for sent in (*streamed.values(), back_streamed) if sent.busy_s is not None]
    busy_s = statistics.median(busy) if busy else None
    transfer_s = _time_transfer(a, b, activation_bytes, rtt_s)
    return Link(
        a=a.host.name,
        b=b.host.name,
        rtt_s=rtt_s,
        jitter_s=jitter_s,
        bandwidth=bandwidth,
        window=window,
        in_flight=in_flight,
        transfer_s={activation_bytes: transfer_s},
        loss=_measure_loss(a, b),
        busy_s=busy_s,
        origin="measured",
    )


def _time_transfer(a: Agent, b: Agent, size: int, rtt_s: float) -> float:
    """Time from the first byte sent to the last one received: the answer's path back is taken
    off."""
    times = a.ask("transfer", **b.target, size=size, repeats=5, deadline_s=120)["seconds"]
    return float(max(0.0, statistics.median(times) - rtt_s / 2))


def _measure_loss(a: Agent, b: Agent) -> float | None:
    tag = f"loss-{a.host.name}"
    before = b.ask("datagrams", tag=tag)["count"]
    a.ask("send_datagrams", **b.target, tag=tag, count=DATAGRAMS, gap=GAP_S)
    # A question over the control connection takes longer than what is still under way.
    a.ask("reach", **b.target, deadline=5, pings=3)
    return loss_share(b.ask("datagrams", tag=tag)["count"] - before)


def loss_share(arrived: int) -> float | None:
    """Return the share of DATAGRAMS that is missing, or None where not one arrived.

    The same path has just carried streams, so datagrams are filtered, and nothing is known. What
    the network doubles may make more of them arrive than were sent.
    """
    return min(MAX_LOSS, max(0.0, 1 - arrived / DATAGRAMS)) if arrived else None
