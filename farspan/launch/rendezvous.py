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
from farspan.domain.problems import Refusal
from farspan.launch.agent import free_ports
from farspan.launch.agent_pool import AgentPool
from farspan.launch.link_measurement import (
    HostPath,
    measure_round_trip,
    require_reached,
    unreachable_link,
)
from farspan.launch.network_examination import PRIVATE_INTERFACE, host_address


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    #: Of the workers' store, and one that is free beside it, for torchrun's.
    port: int
    torchrun_port: int
    #: Authenticates the workers to each other.
    secret: str
    #: Network interface by host; a host that is not in it lets the system choose.
    interfaces: dict[str, str] = {}


def arrange_rendezvous(hosts: Sequence[Host], agents: AgentPool) -> Rendezvous:
    """Find a free port where all hosts (the first is rank 0's) can meet. Raises Refusal
    (host-unreachable)."""
    where = "127.0.0.1"
    interfaces = dict[str, str]()
    if len(hosts) == 1 and hosts[0].enter == ():
        port, torchrun_port = free_ports(2)["ports"]
    else:
        reached = agents.require(hosts)
        first, *others = (reached[host.name] for host in hosts)
        port, torchrun_port = first.ask("free_ports", count=2)["ports"]
        if others:
            where = host_address(first.host)
            pairs = [(agent, first) for agent in others]
            for a, b in (*pairs, (first, others[0])):
                interfaces[a.host.name] = interface_towards(
                    a.host, b.host, measure_round_trip(a, b, pings=1)
                )
    return Rendezvous(
        address=where,
        port=port,
        torchrun_port=torchrun_port,
        secret=secrets.token_hex(32),
        interfaces=interfaces,
    )


def interface_towards(a: Host, b: Host, path: HostPath) -> str:
    """Return the interface of `a` towards `b`, which must have answered. Raises Refusal
    (host-unreachable)."""
    require_reached(path, a)
    name = a.interface or path.interface
    if name is None:
        # Systems other than Linux name none, and Linux none for a second address of an interface.
        raise Refusal(
            "host-unreachable",
            what=f"{a.name} has no known way to {b.name}",
            where=f"link {a.name} -> {b.name}",
            fact=(
                "no interface that can be seen there has the address that its packets to "
                f"{host_address(b)} leave by"
            ),
            remedy=f"set interface: of {shell_word(a.name)} in the cluster file",
        )
    if PRIVATE_INTERFACE.match(name):
        fact = f"it would use the interface {name}, which only that machine sees"
        raise unreachable_link(a, b.name, fact)
    return name
