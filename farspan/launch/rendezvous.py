"""Where the workers of a run meet: an address and a port of rank 0's host, and each host's
interface towards it.

Hosts that cannot reach rank 0's are refused before any worker starts.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from farspan.domain.cluster import Host
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Problem, Refusal
from farspan.launch.agent import free_ports
from farspan.launch.examine import HostPath, address, agents, reach
from farspan.launch.findings import PRIVATE


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    #: Of the workers' store, and one that is free beside it, for torchrun's.
    port: int
    torchrun_port: int
    #: By which the workers know each other.
    secret: str
    #: Network interface by host; a host that is not in it lets the system choose.
    interfaces: dict[str, str] = {}


def arrange(hosts: Sequence[Host]) -> Rendezvous:
    """A free port where all hosts (the first is rank 0's) can meet. Raises Refusal
    (host-unreachable)."""
    if len(hosts) == 1 and hosts[0].enter == ():
        return _meeting("127.0.0.1", free_ports(2)["ports"])
    with agents(hosts) as (reached, unreachable):
        for problem in unreachable.values():
            raise Refusal.of(problem)
        first, *others = (reached[host.name] for host in hosts)
        ports = first.ask("free_ports", count=2)["ports"]
        if not others:
            return _meeting("127.0.0.1", ports)
        pairs = [*((agent, first) for agent in others), (first, others[0])]
        interfaces = {
            a.host.name: interface(a.host, b.host, reach(a, b, pings=1)) for a, b in pairs
        }
    return _meeting(address(first.host), ports, interfaces)


def _meeting(
    address: str, ports: Sequence[int], interfaces: dict[str, str] | None = None
) -> Rendezvous:
    port, other = ports
    return Rendezvous(
        address=address,
        port=port,
        torchrun_port=other,
        secret=secrets.token_hex(32),
        interfaces=interfaces or {},
    )


def interface(a: Host, b: Host, way: HostPath) -> str:
    """The interface of `a` towards `b`, which must have answered. Raises Refusal
    (host-unreachable)."""
    if way.failed:
        raise _lost(a, b, f"{way.failed}: {way.fact}")
    name = a.interface or way.interface
    if name is None:
        # Systems other than Linux name none, and Linux none for a second address of an interface.
        raise Refusal(
            "host-unreachable",
            what=f"{a.name} has no known way to {b.name}",
            where=f"link {a.name} -> {b.name}",
            fact=(
                "no interface that can be seen there has the address that its packets to "
                f"{address(b)} leave by"
            ),
            remedy=f"set interface: of {shell_word(a.name)} in the cluster file",
        )
    if PRIVATE.match(name):
        raise _lost(a, b, f"it would use the interface {name}, which only that machine sees")
    return name


def _lost(a: Host, b: Host, fact: str) -> Refusal:
    return Refusal.of(
        Problem(
            code="host-unreachable",
            what=f"{a.name} cannot reach {b.name}",
            where=f"link {a.name} -> {b.name}",
            fact=fact,
            remedy="farspan doctor --cluster, with the same cluster",
        )
    )
