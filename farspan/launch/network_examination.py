"""Looks at every host of a cluster and at every path between two of them, and reports what is
wrong.

Every question has a deadline. Disjoint pairs are looked at side by side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.gpus import Nvidia, Wheel
from farspan.domain.problems import Problem, Refusal
from farspan.launch.agent import IMPORT_S
from farspan.launch.hosts import Agent

#: A connection that has not come about by then will not: three SYNs, sent after 0, 1 and 3 s.
REACH_S = 4.0
#: A datagram that has not come by then will not.
DATAGRAM_S = 3.0
QUICK_PINGS = 12
#: Seconds that a stream gets to grow, in addition to GROW_RTTS round trips; then it is timed for
#: TIMED_S, or TIMED_RTTS if longer.
GROW_S = 0.5
GROW_RTTS = 16
STREAM_S = 1.0
TIMED_RTTS = 20


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A host's report of itself."""

    hostname: str
    python: str
    system: str
    packages: dict[str, str | None]
    #: IPv4 address by interface.
    interfaces: dict[str, str]
    cpus: int
    memory: int
    disk_free: int
    nvidia: Nvidia
    #: None where no GPU is listed, or no PyTorch can tell.
    wheel: Wheel | None = None


class HostPath(msgspec.Struct, frozen=True, kw_only=True):
    """From one host to another. `failed` is name, route, port, timeout or None; rates are bytes a
    second."""

    a: str
    b: str
    failed: str | None = None
    fact: str = ""
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


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    hosts: dict[str, HostFacts]
    unreachable: dict[str, Problem]
    ways: tuple[HostPath, ...]


@contextmanager
def start_agents(hosts: Iterable[Host]) -> Iterator[tuple[dict[str, Agent], dict[str, Problem]]]:
    """Start agents on all hosts, side by side; yield those reached, and why the others are not."""
    hosts = tuple(hosts)
    with ExitStack() as stack, ThreadPoolExecutor(max(1, len(hosts))) as pool:

        def start(host: Host) -> Agent | Problem:
            try:
                return Agent(host).__enter__()
            except Refusal as refusal:
                return refusal.problem

        reached = dict[str, Agent]()
        unreachable = dict[str, Problem]()
        for host, agent in zip(hosts, pool.map(start, hosts), strict=True):
            if isinstance(agent, Problem):
                unreachable[host.name] = agent
            else:
                reached[host.name] = stack.push(agent)
        yield reached, unreachable


def examine_cluster(cluster: Cluster, *, streams: Sequence[int]) -> Examination:
    """Examine every host and every pair of hosts, with rates over each number of streams."""
    with start_agents(cluster.hosts) as (reached, unreachable):
        facts = {name: facts_of(agent) for name, agent in reached.items()}
        ways: list[HostPath] = []

        def examine_pair(pair: tuple[str, str]) -> tuple[HostPath, HostPath]:
            a, b = pair
            return measure_paths(reached[a], reached[b], streams)

        for pairs in pair_rounds(sorted(reached)):
            with ThreadPoolExecutor(max(1, len(pairs))) as pool:
                for both in pool.map(examine_pair, pairs):
                    ways += both
    return Examination(hosts=facts, unreachable=unreachable, ways=tuple(ways))


def facts_of(agent: Agent) -> HostFacts:
    """Return a host's report of itself and, where it has GPUs, its PyTorch's report of them."""
    facts = msgspec.convert(agent.ask("facts"), HostFacts)
    if not facts.nvidia.gpus:
        return facts
    answer = agent.ask("wheel", deadline_s=IMPORT_S + 10)
    wheel = msgspec.convert(answer["wheel"], Wheel | None)
    return msgspec.structs.replace(facts, wheel=wheel)


def pair_rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """List every pair once, in rounds in which no host comes twice (the circle method of
    round-robin tournaments)."""
    circle: list[str | None] = list(hosts)
    if len(hosts) % 2:
        circle.append(None)
    half = len(circle) // 2
    schedule = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        schedule.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return schedule


def measure_paths(a: Agent, b: Agent, streams: Sequence[int]) -> tuple[HostPath, HostPath]:
    """Measure both paths between two hosts: first whether they work, then how fast, never two
    measurements at a time."""
    with ThreadPoolExecutor(2) as pool:
        there, back = pool.map(measure_round_trip, (a, b), (b, a))
    if there.failed or back.failed:
        return one_way(a, b, there), one_way(b, a, back)
    return with_rates(a, b, there, streams), with_rates(b, a, back, streams)


def with_rates(a: Agent, b: Agent, path: HostPath, streams: Sequence[int]) -> HostPath:
    """Return the path with the bytes a second that arrive over each number of streams."""
    rates = {count: measure_bandwidth(a, b, count, path.rtt_s or 0.0).rate for count in streams}
    return msgspec.structs.replace(path, bandwidth=rates)


def host_address(host: Host) -> str:
    return host.address or host.name


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


def require_reached(path: HostPath) -> HostPath:
    """Return the path; refuse one that has failed (host-unreachable)."""
    if path.failed:
        raise unreachable_link(path.a, path.b, f"{path.failed}: {path.fact}")
    return path


def unreachable_link(a: str, b: str, fact: str) -> Refusal:
    return Refusal(
        "host-unreachable",
        what=f"{a} cannot reach {b}",
        where=f"link {a} -> {b}",
        fact=fact,
        remedy="farspan doctor --cluster, with the same cluster",
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
