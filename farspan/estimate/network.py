"""What the network takes: one message between two ranks, and collectives as hops over the links
they really cross.

A wire has a one-way delay and a rate; the rate is the least of what the line carries, what the
streams' windows keep under way in a round trip (window / (RTT + overhead), RFC 7323), what loss
allows (Mathis et al. 1997: MSS / RTT x sqrt(3/2) / sqrt(loss) a stream), and what the software
moves. On a long link the windows decide.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from farspan.domain.assumed_networks import AssumedNetwork
from farspan.domain.cluster import LINK_BANDWIDTH, Cluster, Device, Link
from farspan.domain.engine import Engine
from farspan.domain.plan import PlannedDevice
from farspan.estimate.network_path import (
    NetworkPath,
    RankGroup,
    bytes_under_way,
    catalogued_rate,
    host_copies,
    interpolated_s,
    paced,
    threads_per_core,
)
from farspan.estimate.schedule import Hop
from farspan.semantics.communications import Communication, WireFlow, ring_steps

#: Between devices of one host: a copy through shared memory or a bus.
LOCAL_DELAY_S = 5e-6
#: Where nothing is known of the line between two sites.
UNKNOWN_LINK_BANDWIDTH = LINK_BANDWIDTH
#: Bytes of a TCP segment on Ethernet.
SEGMENT = 1448


class NoLink(Exception):
    """Two hosts that cannot reach each other, by the cluster's file."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(f"no link between {a} and {b}")
        self.a, self.b = a, b


class Network:
    """The wires between the devices of a plan, under an engine."""

    def __init__(self, cluster: Cluster, devices: Sequence[PlannedDevice], engine: Engine) -> None:
        self.cluster, self.engine = cluster, engine.on(device.backend for device in devices)
        self.planned = tuple(devices)
        self.hosts = [device.host for device in devices]
        by_name = {host.name: host for host in cluster.hosts}
        sites = {host.name: site for site in cluster.sites for host in site.hosts}
        self.devices: list[Device] = [
            by_name[device.host].devices[device.index] for device in devices
        ]
        self.sites = [sites[host].name for host in self.hosts]
        self.core_load = threads_per_core(cluster, self.devices, self.hosts)
        gpu = self.engine.gpu
        #: Seconds a byte that each rank's copies from or to its host's memory take.
        self._copy_byte_s = [
            1 / host_copies(device, gpu) if gpu and device.backend == "cuda" else 0.0
            for device in self.devices
        ]
        self._by_name = by_name
        self._ring_rates: dict[tuple[int, ...], float] = {}
        self._groups: dict[tuple[int, ...], RankGroup] = {}
        #: Bytes a second of a ring over all devices of a host that are here.
        self.local_rate = {
            name: self.ring_rate([rank for rank, host in enumerate(self.hosts) if host == name])
            for name in self.core_load
        }
        self._site_of = {name: site.name for name, site in sites.items()}
        self._own = {frozenset((link.a, link.b)) for link in cluster.links}
        #: Hosts whose network cards have rates of their own.
        self._cards = {host.name for host in cluster.hosts if host.nic is not None}
        self._links: dict[tuple[str, str], Link] = {}
        self._wires: dict[tuple[str, str, bool, int], NetworkPath] = {}
        self._rings: dict[tuple[RankGroup, int, int], tuple[float, float]] = {}
        self._ranges: dict[frozenset[str], tuple[float, float] | None] = {}

    def _used(self) -> Iterator[tuple[Device, str]]:
        """Each device of the plan with its host."""
        return zip(self.devices, self.hosts, strict=True)

    def ring_rate(self, ranks: Sequence[int]) -> float:
        """Bytes a second of a ring over these devices of one host, or of a message between two:
        measured, or the catalogue's for a ring of their number on their slowest
        interconnect, or the engine's."""
        key = tuple(ranks)
        if key not in self._ring_rates:
            self._ring_rates[key] = self._ring_rate(key)
        return self._ring_rates[key]

    def _ring_rate(self, ranks: tuple[int, ...]) -> float:
        host = self._by_name[self.hosts[ranks[0]]]
        used = [self.devices[rank] for rank in ranks]
        known = catalogued_rate(used)
        if host.local_rate is not None:
            # It was measured with all devices of the host: fewer may be joined by fewer links.
            whole = catalogued_rate(host.devices)
            return host.local_rate * (known / whole if known and whole else 1.0)
        if known is not None:
            return known
        # A processor that is shared or held back does its part of the engine's.
        parts = [
            device.slot.share / self.core_load[host.name]
            for device in used
            if device.backend == "cpu"
        ]
        return self._unknown_local_rate(used) * min(parts, default=1.0)

    def _unknown_local_rate(self, used: Sequence[Device]) -> float:
        """Return the engine's rate between devices of a host, which gloo carries where one of them
        is a CPU and others of the plan are GPUs."""
        by_gloo = any(device.backend == "cpu" for device in used)
        if self.engine.gpu and by_gloo and any(self._copy_byte_s):
            return self.engine.gpu.loopback_rate
        return self.engine.local_rate

    def _group(self, ranks: Sequence[int]) -> RankGroup:
        """Where the ranks of a group are, and the rates inside the hosts where several are."""
        key = tuple(ranks)
        if key not in self._groups:
            by_host: dict[str, list[int]] = {}
            for rank in key:
                by_host.setdefault(self.hosts[rank], []).append(rank)
            rates = tuple(
                (host, self.ring_rate(inside))
                for host, inside in by_host.items()
                if len(inside) > 1
            )
            self._groups[key] = RankGroup(tuple(self.hosts[rank] for rank in key), rates)
        return self._groups[key]

    def link(self, a: str, b: str) -> Link:
        """Return the link between two hosts, as it is given; that of their sites where they have
        none of their own. Raises NoLink where nothing leads from one to the other."""
        pair = (a, b)
        if frozenset(pair) not in self._own and not self._cards.intersection(pair):
            pair = (self._site_of[a], self._site_of[b])
        if pair not in self._links:
            link = self.cluster.link(a, b)
            if link is None:
                raise NoLink(a, b)
            self._links[pair] = link
        return self._links[pair]

    @functools.cached_property
    def probed(self) -> bool:
        """Whether all that lies between the devices was measured: links, and rates inside hosts."""
        counts = Counter(self.hosts)
        by_name = {host.name: host for host in self.cluster.machines}
        inside = all(
            by_name[host].local_rate is not None for host, count in counts.items() if count > 1
        )
        return inside and all(
            self.link(a, b).origin == "measured" for a, b in itertools.combinations(counts, 2)
        )

    def assumed(self, hosts: Iterable[str]) -> dict[tuple[str, str], AssumedNetwork]:
        """Return the assumed networks between these hosts: by a pair of each sort of
        hosts, since all of a site that have the same card and devices have the same."""
        sorts: dict[object, list[str]] = {}
        own = {name for pair in self._own for name in pair}
        for name in dict.fromkeys(hosts):
            host = self._by_name[name]
            kinds = tuple(device.kind for device in host.devices)
            sort = name if name in own else (self._site_of[name], host.nic, kinds)
            sorts.setdefault(sort, []).append(name)
        # Two of a sort stand for all of it.
        few = [name for alike in sorts.values() for name in alike[:2]]
        pairs = {
            pair: self.cluster.assumed_network(*pair) for pair in itertools.combinations(few, 2)
        }
        return {pair: assumed for pair, assumed in pairs.items() if assumed is not None}

    def assumed_range(self, hosts: frozenset[str]) -> tuple[float, float] | None:
        """Factors on the time of collectives between these hosts, by the range of unknown networks.

        None where all networks are known, or the software's own rate decides.
        """
        if hosts not in self._ranges:
            assumed_networks = self.assumed(sorted(hosts)) if self.engine.host_rate is None else {}
            low = high = 1.0
            for (a, b), network in assumed_networks.items():
                rate, least, most = (
                    self._make(a, b, True, self.engine.streams, carries).rate
                    for carries in (network.rate, network.least, network.most)
                )
                low, high = min(low, rate / most), max(high, rate / least)
            self._ranges[hosts] = (low, high) if assumed_networks else None
        return self._ranges[hosts]

    def site(self, host: str) -> str:
        """Return the site of a host."""
        return self._site_of[host]

    def by_site(self, group: Sequence[int]) -> dict[str, list[int]]:
        """Return the ranks of a group by their site."""
        ranks: dict[str, list[int]] = {}
        for rank in group:
            ranks.setdefault(self.sites[rank], []).append(rank)
        return ranks

    def byte_s(self, site: str) -> float:
        """Seconds that a byte through a host's sockets, in or out of its site, keeps busy all that
        its devices have of its cores: measured, or the engine's."""
        measured = [
            link.busy_s
            for link in self.cluster.links
            if site in (link.a, link.b) and link.busy_s is not None
        ]
        if measured or not self.engine.socket_s:
            return max(measured, default=0.0)
        cores = {host: 0.0 for host in self.hosts if self._site_of[host] == site}
        for device, host in self._used():
            if host in cores:
                cores[host] += device.slot.threads * device.slot.share / self.core_load[host]
        return self.engine.socket_s / min(cores.values())

    def rtt_s(self, a: int, b: int) -> float:
        """Return the round trip between two ranks' hosts; 0 inside one."""
        hosts = self.hosts[a], self.hosts[b]
        return 0.0 if hosts[0] == hosts[1] else paced(self.link(*hosts)).rtt_s

    def wire(self, a: int, b: int, *, collective: bool, streams: int | None = None) -> NetworkPath:
        """Return the wire from rank `a` to rank `b` for a collective's messages, or for sends over
        `streams`.

        Messages of GPUs that are no collectives go through their hosts' memory and sockets, also
        inside a host (`runtime.comm.messages`).
        """
        copy_byte_s = 0.0 if collective else self._copy_byte_s[a] + self._copy_byte_s[b]
        if self.hosts[a] == self.hosts[b]:
            gpu = self.engine.gpu
            rate = (
                gpu.loopback_rate
                if gpu and copy_byte_s
                else self.ring_rate((a, b) if a != b else (a,))
            )
            wire = self._inside(self.hosts[a], rate)
        else:
            wire = self.between(
                self.hosts[a], self.hosts[b], collective, streams or self.engine.streams
            )
        return msgspec.structs.replace(wire, copy_byte_s=copy_byte_s) if copy_byte_s else wire

    def _inside(self, host: str, rate: float) -> NetworkPath:
        """Return the way between devices of one host that exchange bytes a second."""
        site = self._site_of[host]
        return NetworkPath(LOCAL_DELAY_S, rate, rate, (host, host), (site, site))

    def between(self, a: str, b: str, collective: bool, streams: int) -> NetworkPath:
        """Return the wire from one host to another."""
        key = (a, b, collective, streams)
        if key not in self._wires:
            self._wires[key] = self._make(a, b, collective, streams)
        return self._wires[key]

    def _make(
        self, a: str, b: str, collective: bool, streams: int, carries: float | None = None
    ) -> NetworkPath:
        """Return the wire between two hosts, or what it were if its line carried so much."""
        engine, sites = self.engine, (self._site_of[a], self._site_of[b])
        link = paced(self.link(a, b))
        line = link.bandwidth if carries is None else carries
        if line is None:
            assumed = self.cluster.assumed_network(a, b)
            line = UNKNOWN_LINK_BANDWIDTH if assumed is None else assumed.rate
        if engine.host_rate is not None:
            line = engine.host_rate if link.bandwidth is None else min(line, engine.host_rate)
        round_trip_s = link.rtt_s + engine.message_s
        most = engine.collective_bytes if collective else engine.send_bytes
        under_way = bytes_under_way(link, streams, engine.window)
        rate = min(line, (under_way if most is None else min(most, under_way)) / round_trip_s)
        if link.loss and not link.in_flight:
            rate = min(rate, streams * SEGMENT / link.rtt_s * math.sqrt(1.5 / link.loss))
        timed = () if collective or streams > 1 else tuple(sorted(link.transfer_s.items()))
        return NetworkPath(link.rtt_s / 2, rate, line, (a, b), sites, timed)

    def send_s(self, wire: NetworkPath, size: float) -> float:
        """Seconds that a message of `size` bytes keeps a wire busy, without its delay and the
        software's time."""
        if len(wire.timed) > 1:
            return max(size / wire.line, interpolated_s(wire.timed, size) - wire.delay_s)
        return size / wire.rate

    def flows_s(self, flows: Sequence[WireFlow], streams: int) -> Hop:
        """Return the time of messages that leave together: each on its own wire, all that
        share a line after another, and the software of each sender one after another."""
        # Of each pair of hosts the largest message; of each device what goes out and comes in
        # inside its host, by the rate that it goes at.
        largest: dict[tuple[str, str], float] = {}
        lines: defaultdict[object, float] = defaultdict(float)
        ports: defaultdict[tuple[int, bool], dict[float, float]] = defaultdict(dict)
        posted = Counter(flow.source for flow in flows)
        downloads: defaultdict[int, float] = defaultdict(float)
        uploads: defaultdict[int, float] = defaultdict(float)
        busy = delay = 0.0
        for source, target, size in flows:
            downloads[source] += size * self._copy_byte_s[source]
            uploads[target] += size * self._copy_byte_s[target]
            pair = self.hosts[source], self.hosts[target]
            if pair[0] == pair[1]:
                wire = self.wire(source, target, collective=False, streams=streams)
                for moved in (ports[source, True], ports[target, False]):
                    moved[wire.rate] = moved.get(wire.rate, 0.0) + size
                delay = max(delay, wire.delay_s)
            else:
                largest[pair] = max(size, largest.get(pair, 0.0))
                lines[self._line(*pair)] += size
        for pair, size in largest.items():
            wire = self.between(*pair, False, streams)
            took = max(lines[self._line(*pair)] / wire.line, self.send_s(wire, size))
            busy, delay = max(busy, took), max(delay, wire.delay_s)
        for moved in ports.values():
            busy = max(busy, sum(size / rate for rate, size in moved.items()))
        delay += max(downloads.values(), default=0.0) + max(uploads.values(), default=0.0)
        return Hop(busy + max(posted.values(), default=0) * self.engine.message_s, delay)

    def leaving(self, flows: Iterable[WireFlow]) -> dict[str, float]:
        """Bytes that leave each site."""
        sent: dict[str, float] = {}
        for source, target, size in flows:
            site = self.sites[source]
            if site != self.sites[target] and size:
                sent[site] = sent.get(site, 0.0) + size
        return sent

    def seconds(self, exchange: Communication) -> float:
        """Seconds that a communication takes each time: those of its slowest group."""
        return max(self._group_s(exchange, group) for group in exchange.groups)

    def _group_s(self, exchange: Communication, group: Sequence[int]) -> float:
        size, messages, concurrent = exchange.size, exchange.messages, exchange.concurrent
        if exchange.way == "sites" and len({self.sites[rank] for rank in group}) > 1:
            return self._hierarchical_s(group, size, messages, concurrent, exchange.inside)
        if exchange.way == "straight":
            part = size / len(group) if exchange.kind == "reduce_scatter" else size
            return self.direct_s(
                group, part, messages=messages, concurrent=concurrent, ahead=exchange.ahead
            )
        steps = ring_steps(exchange.kind, len(group))
        return self._ring_s(group, size, steps, messages, concurrent, exchange.at_once)

    # -- collectives over a group of ranks, `size` bytes being the whole tensor
    #   --------------------------------------

    def all_gather_s(
        self,
        group: Sequence[int],
        size: float,
        *,
        messages: float = 1,
        concurrent: int = 1,
        at_once: int | None = None,
    ) -> float:
        """Return the seconds of a ring: n - 1 steps of a part each, with at most `at_once` messages
        under way."""
        return self._ring_s(group, size, len(group) - 1, messages, concurrent, at_once)

    def reduce_scatter_s(
        self, group: Sequence[int], size: float, *, messages: float = 1, concurrent: int = 1
    ) -> float:
        """Return a ring like an all-gather's; or every part straight to its owner, where the engine
        sends so."""
        if self.engine.scatters_straight:
            return self.direct_s(
                group, size / max(1, len(group)), messages=messages, concurrent=concurrent
            )
        return self._ring_s(group, size, len(group) - 1, messages, concurrent)

    def direct_s(
        self,
        group: Sequence[int],
        part: float,
        *,
        messages: float = 1,
        concurrent: int = 1,
        connections: int = 1,
        ahead: bool = False,
    ) -> float:
        """Every rank sends `part` bytes to each other one, all at once: messages of one series
        share the round trip that they begin with, or half of one where receives are posted `ahead`,
        and the line between two sites; each pair has its own connections. A GPU copies its part to
        its host's memory, and the others' from there."""
        if len(group) < 2:
            return 0.0
        round_trip_s = busy = 0.0
        inside = dict(self._group(group).rates)
        copied = part * len(group) * max(self._copy_byte_s[rank] for rank in group)
        pairs = Counter((self.hosts[a], self.hosts[b]) for a in group for b in group if a != b)
        lines: Counter[tuple[str, ...]] = Counter()
        for (a, b), count in pairs.items():
            lines[self._line(a, b)] += count
        for a, b in pairs:
            sharing = lines[self._line(a, b)] * concurrent
            if a == b:
                gpu = self.engine.gpu
                wire = self._inside(a, gpu.loopback_rate if gpu and copied else inside[a])
            else:
                wire = self.between(a, b, False, self.engine.streams)
            rate = wire.rate if wire.local else min(wire.line / sharing, wire.rate * connections)
            # Else a message waits until its receiver has said that it is ready for it.
            trips = 1 if ahead and self.engine.receives_ahead else 2
            round_trip_s = max(
                round_trip_s,
                trips * wire.delay_s + (0.0 if wire.local else messages * self.engine.message_s),
            )
            busy = max(busy, part * (max(1, len(group) - 1) if wire.local else 1) / rate)
        # The next message is copied while one is sent.
        hidden = min(busy, copied) * (1 - 1 / max(1.0, messages))
        return round_trip_s + busy + (copied - hidden)

    def _line(self, a: str, b: str) -> tuple[str, ...]:
        """Return the line that messages between two ranks' hosts share: the host, a link of their
        own, the line between their sites, or the way out of the first."""
        sites = self._site_of[a], self._site_of[b]
        if a == b or frozenset((a, b)) in self._own:
            return a, b
        return sites if sites[0] != sites[1] else (a,)

    def all_reduce_s(
        self,
        group: Sequence[int],
        size: float,
        *,
        messages: float = 1,
        concurrent: int = 1,
        topology: str = "flat",
        bits: int = 32,
    ) -> float:
        """Return the seconds of a ring of 2 (n - 1) steps; or inside each site first, then once
        between the sites, and back. `size` is of numbers of `bits`; an engine that sends straight
        rounds between sites only, and to everyone at once."""
        if topology == "hierarchical" and len({self.sites[rank] for rank in group}) > 1:
            inside = size * 32 / bits if self.engine.direct else size
            return self._hierarchical_s(group, size, messages, concurrent, inside)
        if bits < 32 and self.engine.direct:
            return self.direct_s(group, size, messages=messages, concurrent=concurrent, ahead=True)
        return self._ring_s(group, size, 2 * (len(group) - 1), messages, concurrent)

    def inside_s(self, group: Sequence[int], size: float, steps: int) -> float:
        """Return the seconds of a ring's `steps` between devices of one host; 0 where no two of the
        group share one."""
        rates = (rate for _, rate in self._group(group).rates)
        return max((steps * size / len(group) / rate for rate in rates), default=0.0)

    def all_to_all_s(
        self, group: Sequence[int], size: float, *, messages: float = 1, concurrent: int = 1
    ) -> float:
        """Every rank sends 1/n of its part, `size` / n, to each other rank."""
        return self._ring_s(group, size / max(1, len(group)), len(group) - 1, messages, concurrent)

    def _ring_s(
        self,
        group: Sequence[int],
        size: float,
        steps: int,
        messages: float,
        concurrent: int,
        at_once: int | None = None,
    ) -> float:
        n = len(group)
        if n < 2:
            return 0.0
        places = self._group(group)
        if self.engine.ring_answered:
            return self._answered_s(
                places, size / n, steps, messages, concurrent, at_once or self.engine.collectives
            )
        latency, slowest = self._ring(places, steps, concurrent)
        # Streams are channels that each work through messages of their own, one after another.
        return math.ceil(messages / self.engine.streams) * latency + steps * size / n * slowest

    def _answered_s(
        self,
        group: RankGroup,
        part: float,
        steps: int,
        messages: float,
        concurrent: int,
        at_once: float,
    ) -> float:
        """Return the seconds of a ring whose every step waits for an answer, of messages that are
        `part` bytes a step together. A step takes one round trip, or several where only some bytes
        may be under way."""
        wires = self._ring_wires(group)
        crossing = Counter(wire.sites for wire in wires if wire.sites[0] != wire.sites[1])
        at_once = max(1.0, min(at_once, messages))
        each, slowest = part / max(1.0, messages), 0.0
        for wire in wires:
            line = wire.line / (1 if wire.local else concurrent * max(1, crossing[wire.sites]))
            round_trip_s = 2 * wire.delay_s + (0.0 if wire.local else self.engine.message_s)
            slowest = max(
                slowest, round_trip_s + each / line, each / wire.rate, at_once * each / line
            )
        return max(1.0, messages) / at_once * steps * slowest

    def _ring_wires(self, group: RankGroup) -> list[NetworkPath]:
        """Return the wires of a ring over a group, from each rank to the next."""
        inside = {host: self._inside(host, rate) for host, rate in group.rates}
        pairs = zip(group.hosts, group.hosts[1:] + group.hosts[:1], strict=True)
        return [
            inside[a] if a == b else self.between(a, b, True, self.engine.streams) for a, b in pairs
        ]

    def _ring(self, group: RankGroup, steps: int, concurrent: int) -> tuple[float, float]:
        """Return the latency of the longest path of a part in `steps`, and the seconds a byte on
        the slowest wire."""
        key = (group, steps, concurrent)
        if key not in self._rings:
            n, wires = len(group.hosts), self._ring_wires(group)
            hops = [wire.delay_s + (0.0 if wire.local else self.engine.message_s) for wire in wires]
            rounds, rest = divmod(steps, n)
            part = (
                max(sum(hops[(i + k) % n] for k in range(rest)) for i in range(n)) if rest else 0.0
            )
            # Hops of one ring between the same two sites go over the same line.
            crossing = Counter(wire.sites for wire in wires if wire.sites[0] != wire.sites[1])
            slowest = max(
                1 / wire.shared(1 if wire.local else concurrent * max(1, crossing[wire.sites]))
                for wire in wires
            )
            self._rings[key] = (rounds * sum(hops) + part, slowest)
        return self._rings[key]

    def _hierarchical_s(
        self, group: Sequence[int], size: float, messages: float, concurrent: int, inside: float
    ) -> float:
        """Return the time of a sum by one rank of each site, another for each message; between
        these straight; and spread again. `inside` are the bytes that a site's own sum is made
        of."""
        sites = self.by_site(group)
        within = max(
            self._ring_s(ranks, inside, len(ranks) - 1, messages, concurrent)
            for ranks in sites.values()
        )
        connections = max(1, min(math.floor(messages), *(len(ranks) for ranks in sites.values())))
        leaders = [ranks[0] for ranks in sites.values()]
        across = self.direct_s(
            leaders,
            size,
            messages=messages,
            concurrent=concurrent,
            connections=connections,
            ahead=True,
        )
        if not self.engine.direct:
            return 2 * within + across
        # Each message goes through three phases, and another one through each phase meanwhile.
        return (2 * within + across) / max(1.0, messages) + (1 - 1 / max(1.0, messages)) * max(
            within, across
        )
