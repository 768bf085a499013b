"""What machines there are: devices in hosts, hosts in sites, links between them. SI units; rates in
bytes a second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container
from typing import Annotated, Any, Literal

import msgspec

from farspan.domain.machines import UNKNOWN_LINE, UNKNOWN_SITE, AssumedNetwork, known_network
from farspan.domain.notebook import html_table
from farspan.domain.train import Precision
from farspan.domain.units import counted, format_bytes, format_rate, short_time

#: tf32 is fp32 numbers multiplied on the matrix units, to ten bits after the point (AMD: xf32).
DType = Precision
#: What a figure may be: as many as anything here can be, more FLOP/s than there are on earth,
#: seconds of a day at most.
Count = Annotated[int, msgspec.Meta(ge=1, le=10**15)]
Flops = Annotated[float, msgspec.Meta(gt=0, le=1e24)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
#: Where a figure comes from: a data sheet, the user's file, a measurement, or other figures of the
#: same cluster.
Origin = Literal["catalogue", "given", "measured", "derived"]

#: What a pair of hosts of one site, and a line between two sites, are taken to have where nothing
#: is known of them.
SITE_RTT_S = UNKNOWN_SITE.rtt_s
SITE_BANDWIDTH = UNKNOWN_SITE.rate
LINE_BANDWIDTH = UNKNOWN_LINE.rate

#: Variables of a worker's environment, for `WorkerSlot.enter`: STARTING is set where the worker may
#: start unconfined; READY then names a file a line and what to write there, `FILE=TEXT`, once it
#: has started.
STARTING = "FARSPAN_STARTING"
READY = "FARSPAN_READY"
#: As STARTING, where the process is a spare that may never be that device's worker; TAKEN then
#: names, as READY does, what to write when it becomes one.
SPARE = "FARSPAN_SPARE"
TAKEN = "FARSPAN_TAKEN"
#: The number of a worker's GPU among those that it sees, where a launcher hides the others; else
#: the plan's holds.
GIVEN = "FARSPAN_GIVEN_GPU"


class MatmulRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured FLOP/s of `[m, k] @ [k, n]`, by dtype."""

    m: Count
    k: Count
    n: Count
    flops: dict[DType, Flops]


class UnitTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured seconds of passes over one unit of a model, by our own runtime on the device: of
    `rows` sequences of `seq_len` tokens."""

    #: `OpGraph.units_hash` of the model.
    model: str
    unit: Literal["embedding", "block", "head"]
    dtype: DType
    rows: Count
    seq_len: Count
    forward_s: Seconds
    backward_s: Seconds
    #: Devices of the host that did the same at the same time.
    together: Count = 1


class Interconnect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins a kind of device to others of its host, by the data sheet."""

    #: `unified`: nothing, as it shares the host's memory and comes once a host.
    kind: Literal["nvlink", "pcie", "xgmi", "unified"]
    #: Bytes a second each way of one device, all of its links together.
    rate: Flops
    #: Whether devices read one another's memory; else what one sends another goes through the
    #: host's memory.
    p2p: bool = True


class DataSheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a kind of device can do at its best. Unknown figures are None or absent, never
    guessed."""

    #: Peak dense FLOP/s by dtype.
    flops: dict[DType, float] = {}
    #: Best published measured dense FLOP/s of one matrix product, by dtype.
    measured: dict[DType, float] = {}
    #: Dtypes that the device computes in hardware.
    dtypes: tuple[DType, ...] = ("fp32",)
    #: Bytes a second between the device and its memory.
    bandwidth: float | None = None
    interconnect: Interconnect | None = None
    watts: float | None = None

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """`dtypes` without tf32, which is only used where a training asks for it: its numbers are
        fp32."""
        return tuple(dict.fromkeys("fp32" if dtype == "tf32" else dtype for dtype in self.dtypes))


class DeviceTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a probe timed on the device itself."""

    #: Matrix products; they go before the data sheet's FLOP/s where they exist.
    rates: tuple[MatmulRate, ...] = ()
    #: Units of a model; they go before `rates` where they are of the model at hand.
    units: tuple[UnitTime, ...] = ()


class LearnedPace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What trials of the model at hand showed."""

    #: Measured over predicted compute time; 1 where there was no trial.
    pace: float = 1.0
    #: Measured bytes of a worker beside its tensors; None takes the engine's figure.
    framework: int | None = None


class WorkerSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the device's worker runs: the CPU that it gets, and how it is confined."""

    #: CPU threads.
    threads: int = 1
    #: Share of those threads' time, where the device is held to one: launching operators takes so
    #: much longer. The data sheet's FLOP/s and bandwidth are what is left of them.
    share: float = 1.0
    #: Seconds that a message waits in the mean until a device that is held to a share has its next
    #: turn.
    turn_s: float = 0.0
    #: The command that runs another command confined to this device; None is the host's.
    enter: tuple[str, ...] | None = None


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator, or the share of a CPU that one worker gets."""

    kind: str
    backend: Literal["cpu", "cuda", "mps"]
    #: Bytes that a worker may use.
    memory: int
    sheet: DataSheet = DataSheet()
    times: DeviceTimes = DeviceTimes()
    learned: LearnedPace = LearnedPace()
    slot: WorkerSlot = WorkerSlot()
    usd_per_hour: float | None = None
    origin: Origin = "given"

    def but(self, **changes: Any) -> Device:
        """The same device with other figures, by the names of its parts' fields (`PART_OF`) or of
        its own."""
        for part in dict.fromkeys(PART_OF[name] for name in changes if name in PART_OF):
            fields = {
                name: changes.pop(name) for name in list(changes) if PART_OF.get(name) == part
            }
            changes[part] = msgspec.structs.replace(getattr(self, part), **fields)
        return msgspec.structs.replace(self, **changes)


#: The part of a Device that holds a figure, by the figure's name: no two parts share a name.
PART_OF = {
    name: part
    for part, kind in (
        ("sheet", DataSheet),
        ("times", DeviceTimes),
        ("learned", LearnedPace),
        ("slot", WorkerSlot),
    )
    for name in kind.__struct_fields__
}


#: It stands in commands such as ssh's, which take what begins with - for an option.
HostName = Annotated[
    str, msgspec.Meta(pattern=r"^(?!-)\S*\Z", description="a host name, without spaces")
]


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine, by its name in the user's ssh config."""

    name: HostName
    devices: tuple[Device, ...]
    cpus: int | None = None
    memory: int | None = None
    #: Measured bytes a second of a collective between its devices, all taking part.
    local_rate: float | None = None
    #: Bytes a second of its network card: what leaves or enters it at most.
    nic: float | None = None
    #: What other hosts connect to; None is the name itself.
    address: str | None = None
    #: The network interface that workers use; None lets the route to the other hosts decide.
    interface: str | None = None
    #: The command that runs another command there; None is `ssh NAME`, and nothing at all is this
    #: machine.
    enter: tuple[str, ...] | None = None
    #: The interpreter that has farspan.
    python: str = "python3"
    #: Where the host keeps its runs and corpora; None shares this machine's folders.
    folder: str | None = None


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    hosts: tuple[Host, ...]
    #: Dollars for a byte that leaves the site.
    egress_usd_per_byte: float = 0.0
    #: Seconds until the machines are taken away; None is never.
    lease_s: float | None = None
    #: Seconds that a job waits in the site's queue before it starts.
    queue_s: float = 0.0
    #: Bytes a second, and the round trip, between its hosts; None takes the slower card of two
    #: hosts whose cards are known, or what is assumed of them (`Cluster.assumed_network`), and
    #: SITE_RTT_S.
    lan_bandwidth: float | None = None
    lan_rtt_s: float | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between two sites, or between two hosts, the same both ways. None is unknown."""

    a: str
    b: str
    rtt_s: float
    #: Line rate, bytes a second.
    bandwidth: float | None = None
    jitter_s: float | None = None
    #: Bytes that one TCP stream has under way at most: on a long link this, not the line rate,
    #: decides.
    window: int | None = None
    #: Measured bytes under way in one round trip, by number of streams.
    in_flight: dict[int, int] = {}
    #: Measured seconds to send so many bytes one way, first byte to last.
    transfer_s: dict[int, float] = {}
    #: Share of packets lost.
    loss: float | None = None
    #: Measured seconds that a byte over it, in or out, keeps all cores of a host at its end busy.
    busy_s: float | None = None
    #: Round trips and bytes over it take so many times as long as the figures say, by what trials
    #: have shown.
    pace: float = 1.0
    origin: Origin = "given"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sites: tuple[Site, ...]
    links: tuple[Link, ...] = ()
    #: Measured seconds of an all-reduce of so many bytes over all devices.
    allreduce_s: dict[int, float] = {}

    @property
    def summary(self) -> str:
        """`3 a30 + 1 t4 in 2 hosts at 1 site`."""
        kinds = [device.kind for device in self.devices]
        devices = " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        hosts = counted(len(self.hosts), "host")
        sites = counted(len(self.sites), "site")
        return f"{devices} in {hosts} at {sites}"

    def __repr__(self) -> str:
        return f"<Cluster: {self.summary}>"

    def _repr_html_(self) -> str:
        devices = [
            (site.name, host.name, device.kind, format_bytes(device.memory), device.origin)
            for site in self.sites
            for host in site.hosts
            for device in host.devices
        ]
        links = []
        for a, b in itertools.combinations([host.name for host in self.hosts], 2):
            link = self.link(a, b)
            if link is None:
                links.append((a, b, "unknown", "unknown", ""))
                continue
            rate = "unknown" if link.bandwidth is None else format_rate(link.bandwidth)
            links.append((a, b, short_time(link.rtt_s), rate, link.origin))
        heads = ("host", "host", "round trip", "bandwidth", "origin")
        network = html_table(heads, links, right=(2, 3)) if links else ""
        heads = ("site", "host", "device", "memory", "origin")
        return html_table(heads, devices, caption=self.summary, right=(3,)) + network

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device, in rank order: site by site, host by host."""
        return tuple(device for host in self.hosts for device in host.devices)

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(host for site in self.sites for host in site.hosts)

    @property
    def machines(self) -> tuple[Host, ...]:
        """The hosts that have devices: a head node has none."""
        return tuple(host for host in self.hosts if host.devices)

    def site_of(self, host: str) -> Site:
        return next(site for site in self.sites if any(other.name == host for other in site.hosts))

    def with_hosts(self, change: Callable[[Host], Host]) -> Cluster:
        """The same cluster with every host changed."""
        sites = tuple(
            msgspec.structs.replace(site, hosts=tuple(map(change, site.hosts)))
            for site in self.sites
        )
        return msgspec.structs.replace(self, sites=sites)

    def with_devices(self, change: Callable[[Host, int], Device]) -> Cluster:
        """The same cluster with another device in every place of every host."""
        return self.with_hosts(
            lambda host: msgspec.structs.replace(
                host, devices=tuple(change(host, index) for index in range(len(host.devices)))
            )
        )

    def lacking(self, precision: Precision) -> list[str]:
        """The kinds that do not compute a precision in hardware. tf32 is fp32 on devices that lack
        it, if others have it."""
        has_tf32 = any("tf32" in device.sheet.dtypes for device in self.devices)
        asked = "fp32" if precision == "tf32" and has_tf32 else precision
        return sorted({device.kind for device in self.devices if asked not in device.sheet.dtypes})

    def first(self, devices: int) -> Cluster:
        """The same cluster with its first so many devices only, in rank order."""
        return self.only(range(devices))

    def only(self, places: Container[int]) -> Cluster:
        """The same cluster with the devices at these places only, in rank order."""
        place = itertools.count()
        sites = []
        for site in self.sites:
            hosts = []
            for host in site.hosts:
                taken = tuple(device for device in host.devices if next(place) in places)
                if taken:
                    hosts.append(msgspec.structs.replace(host, devices=taken))
            if hosts:
                sites.append(msgspec.structs.replace(site, hosts=tuple(hosts)))
        names = {site.name for site in sites} | {host.name for site in sites for host in site.hosts}
        links = tuple(link for link in self.links if link.a in names and link.b in names)
        kept = msgspec.structs.replace(self, sites=tuple(sites), links=links)
        joined = {frozenset((link.a, link.b)) for link in links}
        # Ways between two sites over one that goes stay, as links.
        over = (
            _joined(way, a.name, b.name)
            for a, b in itertools.combinations(sites, 2)
            if {a.name, b.name} not in joined
            and (way := self._shortest(a.name, b.name)) != kept._shortest(a.name, b.name)
        )
        return msgspec.structs.replace(kept, links=(*links, *over))

    def link(self, a: str, b: str) -> Link | None:
        """The network between two hosts: theirs, their sites', or derived from others; None where
        nothing is known.

        Derived: inside a site its local network; between sites the way over other sites with the
        shortest round trip, whose round trips add up and whose slowest part, pace and losses count.
        Between sites no more goes over than the hosts' cards let through; inside one, a link of the
        hosts' own goes before cards and local network.
        """
        site_a = self.site_of(a)
        site_b = self.site_of(b)
        cards = [nic for nic in (_card(site_a, a), _card(site_b, b)) if nic is not None]
        link = self._given(a, b, {a, b}) or self._given(a, b, {site_a.name, site_b.name})
        if site_a.name == site_b.name:
            return link or _inside(site_a, a, b, cards)
        if link is None:
            way = self._shortest(site_a.name, site_b.name)
            link = _joined(way, a, b) if way else None
        if link is None or not cards or min(cards) >= (link.bandwidth or LINE_BANDWIDTH):
            return link
        return msgspec.structs.replace(link, bandwidth=min(cards))

    def assumed_network(self, a: str, b: str) -> AssumedNetwork | None:
        """What the network between two hosts is taken to carry where neither the file nor a
        measurement says it; None where they do, or where nothing leads from one to the other.

        Inside a site it is that of the known machines whose shape both hosts have; else it is that
        of hosts of which nothing is known.
        """
        site_a = self.site_of(a)
        site_b = self.site_of(b)
        link = self._given(a, b, {a, b}) or self._given(a, b, {site_a.name, site_b.name})
        if site_a.name != site_b.name:
            joined = self.link(a, b)
            return None if joined is None or joined.bandwidth is not None else UNKNOWN_LINE
        if link is None:
            cards = [nic for nic in (_card(site_a, a), _card(site_a, b)) if nic is not None]
            assumed = _assumed_lan(site_a, a, b)
            known = site_a.lan_bandwidth is not None or len(cards) == 2
            return None if known or min(cards, default=math.inf) <= assumed.rate else assumed
        guessed = link.bandwidth is None or link.origin == "derived"
        return _assumed_lan(site_a, a, b) if guessed else None

    def _given(self, a: str, b: str, pair: set[str]) -> Link | None:
        """The first link that joins a pair of names, as one of two hosts."""
        found = (link for link in self.links if {link.a, link.b} == pair)
        return next((msgspec.structs.replace(link, a=a, b=b) for link in found), None)

    def _shortest(self, start: str, goal: str) -> list[Link]:
        """Dijkstra's shortest way over site links, by round trip, of such the widest; empty where
        there is none."""
        # Round trip, and the rate of the slowest link so far with its sign turned: less is better
        # of both.
        best: dict[str, tuple[tuple[float, float], list[Link]]] = {start: ((0.0, -math.inf), [])}
        open_sites = [start]
        while open_sites:
            current = min(open_sites, key=lambda name: best[name][0])
            open_sites.remove(current)
            (rtt, rate), way = best[current]
            if current == goal:
                return way
            for link in self.links:
                if current not in (link.a, link.b):
                    continue
                neighbour = link.b if link.a == current else link.a
                cost = (
                    rtt + link.rtt_s,
                    max(rate, -math.inf if link.bandwidth is None else -link.bandwidth),
                )
                if neighbour not in best or cost < best[neighbour][0]:
                    best[neighbour] = cost, [*way, link]
                    open_sites += [neighbour] if neighbour not in open_sites else []
        return []


def _card(site: Site, name: str) -> float | None:
    """Bytes a second of a host's network card, where that is known."""
    return next((host.nic for host in site.hosts if host.name == name), None)


def _assumed_lan(site: Site, a: str, b: str) -> AssumedNetwork:
    """What two hosts of a site are taken to have: the slower of their known machines' networks; and
    UNKNOWN_SITE unless both are known."""
    known = [
        known_network(
            [device.kind for device in host.devices],
            [
                device.sheet.interconnect.kind if device.sheet.interconnect else ""
                for device in host.devices
            ],
        )
        for host in site.hosts
        if host.name in (a, b)
    ]
    both = [network for network in known if network is not None]
    return min(both) if both and len(both) == len(known) else UNKNOWN_SITE


def _inside(site: Site, a: str, b: str, cards: list[float]) -> Link:
    """The local network of a site between two of its hosts, whose `cards` are those that are
    known."""
    # A switch carries what both cards do, where nothing else is said of it.
    known = site.lan_bandwidth or (min(cards) if len(cards) == 2 else None)
    assumed = UNKNOWN_SITE if known else _assumed_lan(site, a, b)
    return Link(
        a=a,
        b=b,
        rtt_s=assumed.rtt_s if site.lan_rtt_s is None else site.lan_rtt_s,
        bandwidth=min([known or assumed.rate, *cards]),
        origin="derived" if site.lan_bandwidth is None else "given",
    )


def _joined(way: list[Link], a: str, b: str) -> Link:
    rates = [link.bandwidth for link in way if link.bandwidth is not None]
    windows = [link.window for link in way if link.window is not None]
    arrives = 1.0
    for link in way:
        arrives *= 1 - (link.loss or 0.0)
    known_loss = any(link.loss is not None for link in way)
    return Link(
        a=a,
        b=b,
        rtt_s=sum(link.rtt_s for link in way),
        bandwidth=min(rates) if rates else None,
        window=min(windows) if windows else None,
        loss=1 - arrives if known_loss else None,
        pace=max(link.pace for link in way),
        origin="derived",
    )
