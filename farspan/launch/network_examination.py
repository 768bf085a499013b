"""Looks at every host of a cluster and at every path between two of them, and reports what is
wrong.

Every question has a deadline. Disjoint pairs are looked at side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.decoding import convert_value
from farspan.domain.gpus import Nvidia, Wheel
from farspan.domain.problems import Problem, Refusal
from farspan.launch.agent import IMPORT_S
from farspan.launch.hosts import Agent
from farspan.launch.link_measurement import HostPath, find_answering, measure_paths

#: Interfaces that only this machine sees: loopback, and the bridges of Docker, libvirt and LXC.
PRIVATE_INTERFACE = re.compile(r"(lo\d*|docker\d*|br-[0-9a-f]{12}|virbr\d*|lxcbr\d*|cni\d*)$")
#: Addresses of its own that a host is tried at, where it does not answer at that of the file.
MAX_ADDRESSES = 4


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
            there, back = measure_paths(reached[a], reached[b], streams)
            return (
                _find_own_address(reached[a], reached[b], there, facts),
                _find_own_address(reached[b], reached[a], back, facts),
            )

        for pairs in pair_rounds(sorted(reached)):
            with ThreadPoolExecutor(max(1, len(pairs))) as pool:
                for both in pool.map(examine_pair, pairs):
                    ways += both
    return Examination(hosts=facts, unreachable=unreachable, ways=tuple(ways))


def _find_own_address(a: Agent, b: Agent, path: HostPath, facts: dict[str, HostFacts]) -> HostPath:
    """Return a path, with an address of the host's own where it answers, if it failed at an address
    that is none of those."""
    interfaces = facts[path.b].interfaces
    if not path.failed or not path.ip or path.ip in interfaces.values():
        return path
    own = [address for name, address in interfaces.items() if not PRIVATE_INTERFACE.match(name)]
    return find_answering(a, b, path, own[:MAX_ADDRESSES])


def facts_of(agent: Agent) -> HostFacts:
    """Return a host's report of itself and, where it has GPUs, its PyTorch's report of them."""
    facts = convert_value(agent.ask("facts"), HostFacts)
    if not facts.nvidia.gpus:
        return facts
    answer = agent.ask("wheel", deadline_s=IMPORT_S + 10)
    wheel = convert_value(answer["wheel"], Wheel | None)
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


def host_address(host: Host) -> str:
    return host.address or host.name
