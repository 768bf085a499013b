"""A private network of a cluster's hosts: an interface of WireGuard on each, between which all is
encrypted, and which hosts behind address translation reach the others by.

Every host knows every other one. A host that routers hide calls those that it reaches, and keeps
these paths open; of two hidden hosts one has to let UDP in.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import combinations
from typing import Annotated, Any

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.decoding import convert_value
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Problem, Refusal
from farspan.launch.hosts import Agent, with_each_host
from farspan.launch.link_measurement import HostPath, measure_paths
from farspan.launch.network_examination import host_address, start_agents
from farspan.launch.root_agents import root_agent, why_not_root

SECURE_AGENT = "secure_agent.py"
#: 32 bytes in base64.
PUBLIC_KEY = re.compile(r"[A-Za-z0-9+/]{43}=\Z")
#: A first handshake succeeds within this: three of the 5 s after which WireGuard tries again.
HANDSHAKE_S = 15.0
#: WireGuard's usual port.
PORT = 51820
#: Networks that are tried: private ones (RFC 1918), then those of RFC 6598, which sites with all of
#: 10.0.0.0/8 leave free.
NETWORKS = [ipaddress.IPv4Network(f"10.{number}.0.0/16") for number in range(213, 255)]
NETWORKS += [ipaddress.IPv4Network(f"100.{number}.0.0/16") for number in range(64, 128)]
#: Routes to half of the internet, as VPNs set them, say nothing of one network.
SHORTEST_PREFIX = 8
#: At most this much of a list stands in a refusal.
MAX_FACT = 400


Ipv4Text = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){3}(/[0-9]{1,2})?\Z")]


class NetworkMember(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the network."""

    host: str
    interface: str
    #: In the network.
    address: str
    public_key: str


class PrivateNetwork(msgspec.Struct, frozen=True, kw_only=True):
    members: tuple[NetworkMember, ...]
    #: The same hosts, which call each other by their addresses in the network.
    cluster: Cluster
    #: The paths in it that do not work.
    problems: tuple[Problem, ...]


class _Look(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a host's agent."""

    #: The number of the user there; 0 is root.
    user: int
    #: Tools that are not installed.
    missing: tuple[str, ...]
    #: Those that farspan has made.
    interfaces: tuple[str, ...]
    #: To which the host has routes.
    networks: tuple[Ipv4Text, ...]


def join_hosts(cluster: Cluster, *, port: int, sudo: bool) -> PrivateNetwork:
    """Make the network of a cluster's hosts that have devices, or bring it up to date, and try
    every path in it.

    Raises Refusal (host-unreachable, path-unusable, extra-missing, cluster-invalid) before it
    changes anything.
    """
    hosts = cluster.machines
    looks = {}
    for host, look in zip(hosts, with_each_host(hosts, _look_at), strict=True):
        if isinstance(look, Problem):
            raise Refusal.of(look)
        _require_ready(host, look, sudo)
        looks[host.name] = look
    network = _choose_network(looks.values())
    with ExitStack() as stack:
        agents = {}
        for host in hosts:
            agent = root_agent(host, SECURE_AGENT, looks[host.name].user)
            agents[host.name] = stack.enter_context(agent)
        members = []
        for number, host in enumerate(hosts, 1):
            interface = f"farspan{number}"
            key = _require_key(agents[host.name], interface)
            address = str(network[number])
            members.append(
                NetworkMember(host=host.name, interface=interface, address=address, public_key=key)
            )
        for member in members:
            _ask(
                agents[member.host],
                "bring_up",
                interface=member.interface,
                address=f"{member.address}/{network.prefixlen}",
                port=port,
                peers=_list_peers(hosts, members, member, port),
            )
    by_name = {member.host: member for member in members}

    def move(host: Host) -> Host:
        member = by_name.get(host.name)
        if member is None:
            return host
        return msgspec.structs.replace(host, address=member.address, interface=member.interface)

    joined = cluster.with_hosts(move)
    problems = tuple(_try_paths(joined, port))
    return PrivateNetwork(members=tuple(members), cluster=joined, problems=problems)


def is_joined(cluster: Cluster, hosts_of: Cluster) -> bool:
    """Return whether a cluster has the same hosts, each by an interface of such a network."""
    for host in cluster.machines:
        if not (host.interface or "").startswith("farspan"):
            return False
    return [host.name for host in cluster.machines] == [host.name for host in hosts_of.machines]


def same_addresses(a: Cluster, b: Cluster) -> bool:
    """Return whether hosts call each other alike in both."""
    ways = [[(host.address, host.interface) for host in cluster.machines] for cluster in (a, b)]
    return ways[0] == ways[1]


def _list_peers(
    hosts: Sequence[Host], members: Sequence[NetworkMember], own: NetworkMember, port: int
) -> list[dict[str, Any]]:
    """Return the other members, as an agent gets them."""
    peers = []
    for host, member in zip(hosts, members, strict=True):
        if member is not own:
            peers.append(
                {
                    "public_key": member.public_key,
                    "address": member.address,
                    "host": host_address(host),
                    "port": port,
                }
            )
    return peers


def part_hosts(hosts: Sequence[Host], *, sudo: bool) -> list[tuple[str, tuple[str, ...]] | Problem]:
    """End farspan's interfaces on all hosts, side by side; return which ended on each."""

    def part(host: Host) -> tuple[str, tuple[str, ...]]:
        look = _look_at(host)
        if not look.interfaces:
            return host.name, ()
        _require_root(host, look.user, sudo)
        with root_agent(host, SECURE_AGENT, look.user) as agent:
            return host.name, tuple(_ask(agent, "take_down")["ended"])

    return with_each_host(hosts, part)


def _choose_network(looks: Iterable[_Look]) -> ipaddress.IPv4Network:
    """Return the first network to which no host has a route. Raises Refusal (cluster-invalid)."""
    taken = []
    for look in looks:
        for text in look.networks:
            # Not of four bytes: no network.
            with suppress(ValueError):
                network = ipaddress.IPv4Network(text, strict=False)
                if network.prefixlen >= SHORTEST_PREFIX:
                    taken.append(network)
    for network in NETWORKS:
        if not any(network.overlaps(other) for other in taken):
            return network
    raise Refusal(
        "cluster-invalid",
        what="no private network is free for these hosts",
        where=f"{NETWORKS[0]} to {NETWORKS[-1]}",
        fact=f"they have routes to {', '.join(map(str, sorted(set(taken))))}"[:MAX_FACT],
        remedy="join the hosts by a VPN of yours, and set address: of each in the cluster file",
    )


def _require_ready(host: Host, look: _Look, sudo: bool) -> None:
    if look.missing:
        raise Refusal(
            "extra-missing",
            what=f"{host.name} lacks WireGuard's tools",
            where=f"host {host.name}",
            fact=f"{' and '.join(look.missing)} is not installed there",
            remedy=(
                f"on {shell_word(host.name)}: "
                "sudo apt-get install wireguard-tools wireguard-go iproute2"
            ),
        )
    _require_root(host, look.user, sudo)


def _look_at(host: Host) -> _Look:
    with Agent(host, SECURE_AGENT) as agent:
        return convert_value(agent.ask("look"), _Look)


def _require_root(host: Host, user: int, sudo: bool) -> None:
    fact = why_not_root(host, user, sudo)
    if fact:
        remedy = "farspan cluster secure --sudo, with the same cluster"
        if sudo:
            remedy = f"let ssh {shell_word(host.name)} log in as root: User root in ~/.ssh/config"
        raise Refusal(
            "path-unusable",
            what=f"no interface can be made or ended on {host.name}",
            where=f"host {host.name}",
            fact=fact,
            remedy=remedy,
        )


def _require_key(agent: Agent, interface: str) -> str:
    """Return a host's public key. It goes into the configuration of the others: nothing but a key
    may stand there."""
    key = str(_ask(agent, "make_key", interface=interface)["public_key"])
    if not PUBLIC_KEY.match(key):
        raise Refusal(
            "host-unreachable",
            what=f"{agent.host.name} answers what is no key of WireGuard",
            where=f"host {agent.host.name}",
            fact=repr(key[:80]),
            remedy=f"on {shell_word(agent.host.name)}: wg genkey | wg pubkey",
        )
    return key


def _ask(agent: Agent, do: str, **values: Any) -> dict[str, Any]:
    """Ask an agent that is root. Raises Refusal (path-unusable) where the system refuses it."""
    answer = agent.ask(do, **values)
    if "refused" in answer:
        host_word = shell_word(agent.host.name)
        remedy = f"on {host_word}: sudo dmesg | tail"
        if "wireguard-go" in answer["refused"]:
            remedy = f"on {host_word}: sudo apt-get install wireguard-go"
        raise Refusal(
            "path-unusable",
            what=f"{agent.host.name} has no interface of WireGuard",
            where=f"host {agent.host.name}",
            fact=answer["refused"],
            remedy=remedy,
        )
    return answer


def _try_paths(cluster: Cluster, port: int) -> Iterator[Problem]:
    """Connect every two hosts over the network; yield what does not work.

    The first handshake may meet a host that is not up yet: WireGuard tries again after 5 s.
    """
    with start_agents(cluster.machines) as (reached, unreachable):
        yield from unreachable.values()
        for a, b in combinations(sorted(reached), 2):
            deadline = time.monotonic() + HANDSHAKE_S
            path, _ = measure_paths(reached[a], reached[b], ())
            while path.failed and time.monotonic() < deadline:
                path, _ = measure_paths(reached[a], reached[b], ())
            if path.failed:
                yield _closed_path(path, port)


def _closed_path(path: HostPath, port: int) -> Problem:
    return Problem(
        code="host-unreachable",
        what=f"{path.a} and {path.b} do not reach each other over the private network",
        where=f"link {path.a} -> {path.b}",
        fact=f"{path.failed}: {path.fact}; neither lets UDP port {port} in",
        remedy=(
            f"on {shell_word(path.b)}: sudo ufw allow {shell_word(port)}/udp, and so at its router"
        ),
    )
