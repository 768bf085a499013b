"""Looks at every host of a cluster and at every way between two of them, and says what is wrong.

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
PINGS = 12
#: Seconds that a stream gets to grow, beside GROW_RTTS round trips; then it is timed so long, or
#: TIMED_RTTS if longer.
GROW_S = 0.5
GROW_RTTS = 16
TIMED_S = 1.0
TIMED_RTTS = 20


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself."""

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
    #: None where no GPU is listed, or no PyTorch can say.
    wheel: Wheel | None = None


class HostPath(msgspec.Struct, frozen=True, kw_only=True):
    """From one host to another. `failed` is name, route, port, timeout or None; rates are bytes a
    second."""

    a: str
    b: str
    failed: str | None = None
    fact: str = ""
    #: Whether datagrams arrived, which need no way back; asked only where `failed`.
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
def agents(hosts: Iterable[Host]) -> Iterator[tuple[dict[str, Agent], dict[str, Problem]]]:
    """An agent on every host that can be reached, and why not on the others; started side by
    side."""
    hosts = tuple(hosts)
    with ExitStack() as stack, ThreadPoolExecutor(max(1, len(hosts))) as pool:

        def start(host: Host) -> Agent | Problem:
            try:
                return Agent(host).__enter__()
            except Refusal as refusal:
                return refusal.problem

        started = dict(zip((host.name for host in hosts), pool.map(start, hosts), strict=True))
        reached = {name: agent for name, agent in started.items() if isinstance(agent, Agent)}
        for agent in reached.values():
            stack.push(agent)
        yield (
            reached,
            {name: problem for name, problem in started.items() if isinstance(problem, Problem)},
        )


def examine(cluster: Cluster, *, streams: Sequence[int]) -> Examination:
    """Every host and every pair of hosts, rates with so many streams each."""
    with agents(cluster.hosts) as (reached, unreachable):
        facts = {name: facts_of(agent) for name, agent in reached.items()}
        ways: list[HostPath] = []
        for pairs in rounds(sorted(reached)):
            with ThreadPoolExecutor(max(1, len(pairs))) as pool:
                for both in pool.map(
                    lambda pair: between(reached[pair[0]], reached[pair[1]], streams), pairs
                ):
                    ways += both
    return Examination(hosts=facts, unreachable=unreachable, ways=tuple(ways))


def facts_of(agent: Agent) -> HostFacts:
    """Return what a host says of itself and, where it has GPUs, its PyTorch of them."""
    facts = msgspec.convert(agent.ask("facts"), HostFacts)
    if not facts.nvidia.gpus:
        return facts
    answer = agent.ask("wheel", deadline_s=IMPORT_S + 10)
    return msgspec.structs.replace(facts, wheel=msgspec.convert(answer["wheel"], Wheel | None))


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair once, in rounds in which no name comes twice (the circle method of round-robin
    tournaments)."""
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    schedule = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        schedule.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule


def between(a: Agent, b: Agent, streams: Sequence[int]) -> tuple[HostPath, HostPath]:
    """Both ways between two hosts: first whether, then how fast, never two measurements at a
    time."""
    with ThreadPoolExecutor(2) as pool:
        there, back = pool.map(lambda pair: reach(*pair), ((a, b), (b, a)))
    if there.failed or back.failed:
        return one_way(a, b, there), one_way(b, a, back)
    return with_rates(a, b, there, streams), with_rates(b, a, back, streams)


def with_rates(a: Agent, b: Agent, way: HostPath, streams: Sequence[int]) -> HostPath:
    """The same way, with the bytes a second that arrive over so many streams each."""
    rates = {count: stream(a, b, count, way.rtt_s or 0.0).rate for count in streams}
    return msgspec.structs.replace(way, bandwidth=rates)


def address(host: Host) -> str:
    return host.address or host.name


def reach(a: Agent, b: Agent, pings: int = PINGS) -> HostPath:
    """Whether `a` can connect to `b`, and its round trips: median, and half the spread of the
    middle half as jitter."""
    answer = a.ask("reach", **b.target, deadline=REACH_S, pings=pings, deadline_s=3 * REACH_S)
    interface = a.ask("route", address=b.address)["interface"]
    way = HostPath(
        a=a.host.name,
        b=b.host.name,
        failed=answer["failed"],
        fact=answer.get("fact", ""),
        interface=interface,
    )
    if way.failed:
        return way
    # The first ping pays for the connection's buffers and for threads that have to wake.
    rtts = sorted(answer["rtts"][1:] or answer["rtts"])
    quarters = statistics.quantiles(rtts, n=4) if len(rtts) > 1 else [rtts[0]] * 3
    return msgspec.structs.replace(
        way,
        rtt_s=statistics.median(rtts),
        jitter_s=(quarters[2] - quarters[0]) / 2,
        clock_offset_s=answer["clock_offset"],
    )


def one_way(a: Agent, b: Agent, way: HostPath) -> HostPath:
    """The same way, with whether single datagrams arrive: that tells which direction is cut."""
    tag = f"{a.host.name}-{time.monotonic_ns()}"
    try:
        a.ask("say", **b.target, tag=tag, count=5, gap=0.02)
    except Refusal:
        return msgspec.structs.replace(way, one_way=False)
    until = time.monotonic() + DATAGRAM_S
    while not (came := b.ask("datagrams", tag=tag)["count"] > 0) and time.monotonic() < until:
        time.sleep(0.1)
    return msgspec.structs.replace(way, one_way=came)


class Streamed(NamedTuple):
    """Bytes a second that arrived, and seconds that one of them kept the cores of either end busy,
    on average."""

    rate: float
    busy_s: float | None


def stream(a: Agent, b: Agent, streams: int, rtt_s: float) -> Streamed:
    """As many bytes as arrive at `b` over so many streams from `a`, after they have grown. A lost
    packet holds back what follows it for a round trip: some twenty of them make that a small
    share."""
    grow = GROW_S + GROW_RTTS * rtt_s
    timed = max(TIMED_S, TIMED_RTTS * rtt_s)
    a.ask("stream", **b.target, streams=streams, seconds=grow + timed + 0.1)
    time.sleep(grow)
    first = [agent.ask("received") for agent in (a, b)]
    time.sleep(timed)
    last = [agent.ask("received") for agent in (a, b)]
    a.ask("settle")
    size = last[1]["bytes"] - first[1]["bytes"]
    known = None not in (answer["busy"] for answer in first)
    busy = (
        sum(after["busy"] - before["busy"] for before, after in zip(first, last, strict=True))
        if known
        else 0.0
    )
    return Streamed(
        float(size / (last[1]["at"] - first[1]["at"])), busy / 2 / size if known and size else None
    )
