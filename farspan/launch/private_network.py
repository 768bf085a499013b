"""A private network of a cluster's hosts: an interface of WireGuard on each, between which all is
encrypted, and by which hosts behind address translation are reached.

Every host knows every other one. A host that routers hide calls those that it reaches, and keeps
these paths open; of two hidden hosts one has to let UDP in.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, combinations
from typing import Annotated, Any, TypeVar

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Problem, Refusal, command
from farspan.launch.hosts import Agent, with_each_host
from farspan.launch.link_measurement import HostPath, measure_paths
from farspan.launch.network_examination import host_address, start_agents
from farspan.launch.root_agents import root_agent, why_not_root
from farspan.launch.secure_agent import INTERFACE

SECURE_AGENT = "secure_agent.py"
#: 32 bytes in base64.
PUBLIC_KEY = r"^[A-Za-z0-9+/]{43}=\Z"
IPV4_ADDRESS = r"^[0-9]{1,3}(\.[0-9]{1,3}){3}\Z"
IPV4_NETWORK = r"^[0-9]{1,3}(\.[0-9]{1,3}){3}(/[0-9]{1,2})?\Z"
#: A first handshake succeeds within this: three of the 5 s after which WireGuard tries again.
HANDSHAKE_S = 15.0
#: Looking up the name of a peer may take so long.
LOOKUP_S = 10.0
#: Bytes of the message that tries packets of full size.
MESSAGE_BYTES = 200_000
MESSAGE_S = 60.0
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
PublicKey = Annotated[str, msgspec.Meta(pattern=PUBLIC_KEY)]
NetworkText = Annotated[str, msgspec.Meta(pattern=IPV4_NETWORK)]
AddressText = Annotated[str, msgspec.Meta(pattern=IPV4_ADDRESS)]
Answer = TypeVar("Answer", bound=msgspec.Struct)


class _Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The network that a host is in, by its record."""

    id: str
    address: AddressText


class _Look(msgspec.Struct, frozen=True, kw_only=True):
    #: The number of the user there; 0 is root.
    user: int
    system: str
    #: Tools that are not installed.
    missing: tuple[str, ...]
    is_up: bool
    #: None where it is in none.
    network: _Membership | None
    #: Networks to which the host has routes of others.
    routes: tuple[NetworkText, ...]


class _Key(msgspec.Struct, frozen=True, kw_only=True):
    public_key: PublicKey


class _BroughtUp(msgspec.Struct, frozen=True, kw_only=True):
    is_new: bool


class _Handshakes(msgspec.Struct, frozen=True, kw_only=True):
    public_keys: tuple[PublicKey, ...]


class _TakenDown(msgspec.Struct, frozen=True, kw_only=True):
    ended: bool


class NetworkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A network before it is made."""

    #: By which hosts know it again.
    id: str
    #: The cluster whose hosts it joins, and the same with their addresses in the network.
    cluster: Cluster
    joined: Cluster
    #: Bits of an address that are the network's.
    prefix: int
    #: The user of each host, by its name.
    users: dict[str, int]


def plan_network(
    cluster: Cluster,
    network_id: str,
    name: str,
    *,
    written: Mapping[str, str | None],
    sudo: bool,
) -> NetworkPlan:
    """Look at a cluster's hosts that have devices, and choose their addresses. Nothing is changed.

    `name`: what the user calls the cluster; `written`: addresses that its file of the network has
    already, by host. Raises Refusal (host-unreachable, path-unusable,
    extra-missing, cluster-invalid).
    """
    hosts = cluster.machines
    for host in hosts:
        if host.interface == INTERFACE:
            raise Refusal(
                "cluster-invalid",
                what=f"{name} is the file of a private network, not of hosts to join",
                where=f"host {host.name}",
                fact=f"interface: {INTERFACE}, address: {host.address}",
                remedy="farspan cluster secure, with the file that it was made from",
            )
    looks = dict[str, _Look]()
    for host, look in zip(hosts, with_each_host(hosts, _look_at), strict=True):
        if isinstance(look, Problem):
            raise Refusal.of(look)
        _require_ready(host, look)
        _require_own(host, look, network_id)
        _require_root(host, look.user, sudo, command("cluster", "secure", name, "--sudo"))
        looks[host.name] = look
    # A host keeps the address that the file has, or else the one that it has itself.
    present = dict[str, str]()
    for host in hosts:
        look = looks[host.name]
        if look.network is not None:
            present[host.name] = look.network.address
        if (address := written.get(host.name)) is not None:
            present[host.name] = address
    network = _choose_network(list(looks.values()), present.values())
    addresses = _choose_addresses([host.name for host in hosts], present, network)

    def move(host: Host) -> Host:
        if host.name not in addresses:
            return host
        return msgspec.structs.replace(host, address=addresses[host.name], interface=INTERFACE)

    return NetworkPlan(
        id=network_id,
        cluster=cluster,
        joined=cluster.with_hosts(move),
        prefix=network.prefixlen,
        users={host: look.user for host, look in looks.items()},
    )


def join_hosts(plan: NetworkPlan, *, port: int, when_made: Callable[[], None]) -> list[Problem]:
    """Make a network, or bring it up to date, and try every path in it; return what does not work.

    Raises Refusal where a host fails; those that were not in the network before leave it then.
    `when_made` is called before the paths are tried.
    """
    with ExitStack() as stack:
        agents = {}
        for host in plan.cluster.machines:
            agent = root_agent(host, SECURE_AGENT, plan.users[host.name])
            agents[host.name] = stack.enter_context(agent)
        keys = {}
        new = []
        try:
            for name, agent in agents.items():
                keys[name] = _ask(agent, _Key, "make_key").public_key
            _require_different(keys)
            for name, agent in agents.items():
                question = _membership_question(plan, name, keys, port)
                if _ask(agent, _BroughtUp, "bring_up", **question).is_new:
                    new.append(agent)
        except BaseException:
            for agent in new:
                with suppress(Refusal):
                    _ask(agent, _TakenDown, "take_down", network=plan.id)
            raise
        when_made()
        problems = list[Problem]()
        try:
            problems.extend(_try_paths(plan.joined, agents, keys, port))
        except Refusal as refusal:
            problems.append(refusal.problem)
        return problems


def part_hosts(
    hosts: Sequence[Host], network_id: str, name: str, *, sudo: bool
) -> list[tuple[str, bool] | Problem]:
    """End a network on its hosts, side by side; return whether each was in it."""
    remedy = command("cluster", "secure", name, "--undo", "--sudo")

    def part(host: Host) -> tuple[str, bool]:
        look = _look_at(host)
        # A key may be left of a network that did not come about.
        if not look.is_up and why_not_root(host, look.user, sudo):
            return host.name, False
        _require_own(host, look, network_id)
        _require_root(host, look.user, sudo, remedy)
        with root_agent(host, SECURE_AGENT, look.user) as agent:
            return host.name, _ask(agent, _TakenDown, "take_down", network=network_id).ended

    return with_each_host(hosts, part)


def joined_addresses(cluster: Cluster) -> dict[str, str | None]:
    """Return the addresses that hosts of a cluster file have in a private network, by name."""
    joined = (host for host in cluster.machines if host.interface == INTERFACE)
    return {host.name: host.address for host in joined}


def same_addresses(a: Cluster, b: Cluster) -> bool:
    """Return whether both have the same hosts, which call each other alike."""
    rows = []
    for cluster in (a, b):
        rows.append([(host.name, host.address, host.interface) for host in cluster.machines])
    return rows[0] == rows[1]


def _look_at(host: Host) -> _Look:
    with Agent(host, SECURE_AGENT) as agent:
        return _ask(agent, _Look, "look")


def _require_ready(host: Host, look: _Look) -> None:
    if look.system != "Linux":
        raise Refusal(
            "cluster-invalid",
            what=f"{host.name} cannot be in a private network",
            where=f"host {host.name}",
            fact=f"farspan makes interfaces of WireGuard on Linux alone; it has {look.system}",
            remedy="join the hosts by a VPN of yours, and set address: of each in the cluster file",
        )
    if look.missing:
        packages = [{"wg": "wireguard-tools", "ip": "iproute2"}[tool] for tool in look.missing]
        raise Refusal(
            "extra-missing",
            what=f"{host.name} lacks tools that WireGuard is set by",
            where=f"host {host.name}",
            fact=f"{' and '.join(look.missing)} is not installed there",
            remedy=(
                f"on {shell_word(host.name)}: sudo apt-get install {shell_word(packages[0])}, or "
                "the package of its system"
            ),
        )


def _require_own(host: Host, look: _Look, network_id: str) -> None:
    """Refuse a host that is in another network: one host has one."""
    if not look.is_up or (look.network is not None and look.network.id == network_id):
        return
    raise Refusal(
        "cluster-invalid",
        what=f"{host.name} is in the private network of another cluster file",
        where=f"host {host.name}, interface {INTERFACE}",
        fact="it was made by another user, on another machine, or for a file of another place",
        remedy=f"on {shell_word(host.name)}, if nobody uses it: sudo ip link delete farspan0",
    )


def _require_root(host: Host, user: int, sudo: bool, remedy: str) -> None:
    fact = why_not_root(host, user, sudo)
    if fact:
        if sudo:
            remedy = f"let ssh {shell_word(host.name)} log in as root: User root in ~/.ssh/config"
        raise Refusal(
            "path-unusable",
            what=f"no interface can be made or ended on {host.name}",
            where=f"host {host.name}",
            fact=fact,
            remedy=remedy,
        )


def _choose_network(looks: Sequence[_Look], present: Iterable[str]) -> ipaddress.IPv4Network:
    """Return the network of `present` addresses, or else the first to which no host has a route.
    Raises Refusal (cluster-invalid)."""
    taken = []
    for text in chain.from_iterable(look.routes for look in looks):
        # Not of four bytes: no network.
        with suppress(ValueError):
            network = ipaddress.IPv4Network(text, strict=False)
            if network.prefixlen >= SHORTEST_PREFIX:
                taken.append(network)
    candidates = []
    for text in present:
        with suppress(ValueError):
            address = ipaddress.IPv4Address(text)
            candidates += [network for network in NETWORKS if address in network]
    for network in [*candidates, *NETWORKS]:
        if not any(network.overlaps(other) for other in taken):
            return network
    raise Refusal(
        "cluster-invalid",
        what="no private network is free for these hosts",
        where=f"{NETWORKS[0]} to {NETWORKS[-1]}",
        fact=f"they have routes to {', '.join(map(str, sorted(set(taken))))}"[:MAX_FACT],
        remedy="join the hosts by a VPN of yours, and set address: of each in the cluster file",
    )


def _choose_addresses(
    host_names: Sequence[str], present: Mapping[str, str], network: ipaddress.IPv4Network
) -> dict[str, str]:
    """Return an address of the network for each host: the one it has, where that can be one and no
    host before has it, or else a free one. Another host's traffic goes to nobody."""
    usable = range(int(network[1]), int(network[-1]))
    addresses = dict[str, str]()
    for host in host_names:
        with suppress(ValueError):
            address = ipaddress.IPv4Address(present.get(host, ""))
            if int(address) in usable and str(address) not in addresses.values():
                addresses[host] = str(address)
    taken = set(addresses.values())
    free = (str(address) for address in network.hosts() if str(address) not in taken)
    for host in host_names:
        if host not in addresses:
            addresses[host] = next(free)
    return addresses


def _require_different(keys: Mapping[str, str]) -> None:
    """Refuse a host that answers with another's key: that one would be cut off."""
    owners = dict[str, str]()
    for host, key in keys.items():
        other = owners.setdefault(key, host)
        if other != host:
            raise Refusal(
                "cluster-invalid",
                what=f"{other} and {host} have the same key of WireGuard",
                where=f"hosts {other}, {host}",
                fact="they are one machine, or one of them answers with the other's key",
                remedy=f"leave {shell_word(host)} out of the cluster file",
            )


def _membership_question(
    plan: NetworkPlan, name: str, keys: Mapping[str, str], port: int
) -> dict[str, Any]:
    """Return the question that brings a host's interface up."""
    peers = []
    own_address = ""
    for host, joined in zip(plan.cluster.machines, plan.joined.machines, strict=True):
        if host.name == name:
            own_address = host_address(joined)
            continue
        peers.append(
            {
                "public_key": keys[host.name],
                "address": host_address(joined),
                "host": host_address(host),
            }
        )
    return {
        "network": plan.id,
        "address": own_address,
        "prefix": plan.prefix,
        "port": port,
        "peers": peers,
        "deadline_s": MESSAGE_S + LOOKUP_S * len(peers),
    }


def _ask(agent: Agent, kind: type[Answer], do: str, **values: Any) -> Answer:
    """Ask an agent. Raises Refusal (path-unusable) where the system refuses it, (host-unreachable)
    for an answer of another form: what a host answers goes into the settings of others."""
    answer = agent.ask(do, **values)
    host_word = shell_word(agent.host.name)
    if "refused" in answer:
        refused = str(answer["refused"])
        remedy = f"on {host_word}: sudo dmesg | tail"
        if "wireguard-go" in refused:
            remedy = f"on {host_word}: sudo apt-get install wireguard-go"
        raise Refusal(
            "path-unusable",
            what=f"{agent.host.name} has no interface of WireGuard",
            where=f"host {agent.host.name}",
            fact=refused,
            remedy=remedy,
        )
    return agent.convert_answer(answer, kind, do)


def _try_paths(
    joined: Cluster, agents: Mapping[str, Agent], keys: Mapping[str, str], port: int
) -> Iterator[Problem]:
    """Connect every two hosts over the network, both ways, and send packets of full size; yield
    what does not work.

    The first handshake may meet a host that is not up yet: WireGuard tries again after 5 s.
    """
    with start_agents(joined.machines) as (reached, unreachable):
        yield from unreachable.values()
        for a, b in combinations(reached, 2):
            deadline = time.monotonic() + HANDSHAKE_S
            while True:
                both = measure_paths(reached[a], reached[b], ())
                failed = [path for path in both if path.failed]
                if not failed or time.monotonic() > deadline:
                    break
            if not failed:
                yield from _try_full_packets(reached[a], reached[b])
            elif keys[b] in _ask(agents[a], _Handshakes, "handshakes").public_keys:
                for path in failed:
                    yield _filtered_path(path)
            else:
                yield _closed_path(failed[0], port)


def _try_full_packets(a: Agent, b: Agent) -> Iterator[Problem]:
    for sender, receiver in ((a, b), (b, a)):
        message = {**receiver.target, "size": MESSAGE_BYTES, "repeats": 1}
        try:
            sender.ask("transfer", **message, deadline_s=MESSAGE_S)
        except Refusal as refusal:
            yield _narrow_path(sender.host.name, receiver.host.name, refusal.problem.fact)


def _narrow_path(a: str, b: str, fact: str) -> Problem:
    return Problem(
        code="host-unreachable",
        what=f"large packets of {a} do not reach {b}",
        where=f"link {a} -> {b}",
        fact=fact,
        remedy=f"on {shell_word(a)}: sudo ip link set mtu 1280 dev farspan0",
    )


def _filtered_path(path: HostPath) -> Problem:
    return Problem(
        code="host-unreachable",
        what=f"{path.b} lets nothing of {path.a} in from the private network",
        where=f"link {path.a} -> {path.b}",
        fact=f"{path.failed}: {path.fact}; WireGuard itself works between them",
        remedy=f"on {shell_word(path.b)}: sudo ufw allow in on farspan0",
    )


def _closed_path(path: HostPath, port: int) -> Problem:
    return Problem(
        code="host-unreachable",
        what=f"{path.a} and {path.b} do not reach each other by WireGuard",
        where=f"link {path.a} -> {path.b}",
        fact=f"no UDP packet to port {port} of either arrives; a router before it may drop it too",
        remedy=f"on {shell_word(path.b)}: sudo ufw allow {shell_word(port)}/udp",
    )
