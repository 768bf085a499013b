"""TCP's largest buffers on the hosts of a cluster: set for the bandwidth-delay products of their
links, and put back after a time.

A stream has no more bytes under way than its buffers hold, so on a long link they decide its rate.
Of Linux's default of 4 MiB about 3.4 MB were seen under way (catalog/engines/farspan.yaml): they
fill 1 Gbit/s for a round trip of 27 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Problem, Refusal
from farspan.launch.hosts import Agent, with_each_host
from farspan.launch.network_examination import host_address
from farspan.launch.root_agents import root_agent, why_not_root

TUNE_AGENT = "tune_agent.py"
#: Bytes of a buffer for each byte under way: the kernel counts its own structures too, and
#: acknowledgements are late. ESnet's rule, fasterdata.es.net/host-tuning/background.
BUFFERS_PER_PRODUCT = 2
#: The kernel keeps these sizes in 32 bits.
MAX_BUFFER = 2**31 - 1
#: The least, the first and the largest bytes by setting (`tcp_rmem`, `tcp_wmem`).
Buffers = dict[str, tuple[int, int, int]]


class BufferNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The link of a host that has most under way."""

    #: The host at the other end.
    peer: str
    rtt_s: float
    #: Bytes a second.
    bandwidth: float

    @property
    def buffer(self) -> int:
        """Bytes of a buffer that fills the link by one stream."""
        product = self.rtt_s * self.bandwidth
        return min(MAX_BUFFER, math.ceil(BUFFERS_PER_PRODUCT * product))


class HostBuffers(msgspec.Struct, frozen=True, kw_only=True):
    """TCP's buffers of a host as they are now, and what was done."""

    host: str
    #: None where no bandwidth of a link of it is known.
    need: BufferNeed | None
    #: Empty where the system has no such settings.
    before: Buffers
    now: Buffers
    #: Unix time at which they are put back; None where they stay.
    until: float | None = None
    #: The interface by which it reaches that other host; None where no route is known.
    interface: str | None = None
    state: Literal["set", "enough", "restored", "untouched", "not Linux"]


class _Look(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a host's agent."""

    #: The number of the user there; 0 is root.
    user: int
    #: Empty where the system is not Linux.
    buffers: Buffers
    #: Where they were set: the buffers before, and the Unix time at which these are put back.
    before: Buffers | None = None
    until: float | None = None
    #: Why the system did not take them.
    refused: str = ""


def buffer_needs(cluster: Cluster) -> tuple[dict[str, BufferNeed], tuple[tuple[str, str], ...]]:
    """Return the needs of hosts, by name, and the pairs of hosts of unknown bandwidth."""
    needs = dict[str, BufferNeed]()
    unknown = []
    for a, b in combinations([host.name for host in cluster.machines], 2):
        link = cluster.link(a, b)
        if link is None or link.bandwidth is None:
            unknown.append((a, b))
            continue
        for host, peer in ((a, b), (b, a)):
            need = BufferNeed(peer=peer, rtt_s=link.rtt_s, bandwidth=link.bandwidth)
            if host not in needs or needs[host].buffer < need.buffer:
                needs[host] = need
    return needs, tuple(unknown)


def tune_hosts(
    hosts: Sequence[Host], needs: Mapping[str, BufferNeed], *, seconds: float, sudo: bool
) -> list[HostBuffers | Problem]:
    """Let TCP's buffers of all hosts grow to what they need, side by side, for `seconds`."""
    addresses = {host.name: host_address(host) for host in hosts}

    def tune(host: Host) -> HostBuffers:
        need = needs[host.name]
        return _tune_host(host, need, addresses[need.peer], seconds, sudo)

    return with_each_host(hosts, tune)


def restore_hosts(
    hosts: Sequence[Host], needs: Mapping[str, BufferNeed], *, sudo: bool
) -> list[HostBuffers | Problem]:
    """Put back TCP's buffers of all hosts, side by side."""
    return with_each_host(hosts, lambda host: _restore_host(host, needs.get(host.name), sudo))


def _tune_host(
    host: Host, need: BufferNeed, peer_address: str, seconds: float, sudo: bool
) -> HostBuffers:
    with Agent(host) as agent:
        interface = agent.ask("route", address=peer_address)["interface"]
    seen = _look_at(host)
    state: Literal["set", "enough", "not Linux"] = "enough"
    now = seen
    if not seen.buffers:
        state = "not Linux"
    # Those that were set before are set again: for as long as it is asked now.
    elif seen.until is not None or any(size[2] < need.buffer for size in seen.buffers.values()):
        state = "set"
        wanted = {}
        for name, (least, first, largest) in seen.buffers.items():
            wanted[name] = (least, first, max(largest, need.buffer))
        now = _ask_as_root(
            host, seen, wanted, sudo, do="set_buffers", largest=need.buffer, seconds=seconds
        )
    return HostBuffers(
        host=host.name,
        need=need,
        before=seen.buffers,
        now=now.buffers,
        until=now.until,
        interface=interface,
        state=state,
    )


def _restore_host(host: Host, need: BufferNeed | None, sudo: bool) -> HostBuffers:
    seen = _look_at(host)
    if seen.until is None:
        return HostBuffers(
            host=host.name, need=need, before=seen.buffers, now=seen.buffers, state="untouched"
        )
    now = _ask_as_root(host, seen, seen.before or {}, sudo, do="restore_buffers")
    return HostBuffers(
        host=host.name, need=need, before=seen.buffers, now=now.buffers, state="restored"
    )


def _look_at(host: Host) -> _Look:
    with Agent(host, TUNE_AGENT) as agent:
        return agent.ask_for(_Look, "look")


def _ask_as_root(host: Host, seen: _Look, wanted: Buffers, sudo: bool, **question: Any) -> _Look:
    """Ask a host's agent for what only root may do. Raises Refusal (path-unusable), with the line
    that sets the `wanted` buffers, where this user may not or the system refuses it."""
    fact = why_not_root(host, seen.user, sudo)
    if not fact:
        with root_agent(host, TUNE_AGENT, seen.user) as agent:
            now = agent.ask_for(_Look, **question)
        if not now.refused:
            return now
        fact = f"the system says: {now.refused}"
    settings = []
    for name, sizes in wanted.items():
        settings.append(f"net.ipv4.{name}={' '.join(map(str, sizes))}")
    raise Refusal(
        "path-unusable",
        what=f"TCP's buffers of {host.name} cannot be set",
        where=f"{host.name}, /proc/sys/net/ipv4",
        fact=fact,
        remedy=f"on {shell_word(host.name)}: {shell_line('sudo', 'sysctl', '-w', *settings)}",
    )
