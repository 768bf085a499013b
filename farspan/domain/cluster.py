"""A cluster: devices in hosts, hosts in sites, links between them. SI units; rates in bytes a
second."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Annotated, Any, Literal

import msgspec

from farspan.domain.assumed_networks import (
    UNKNOWN_LINK,
    UNKNOWN_SITE,
    AssumedNetwork,
    known_network,
)
from farspan.domain.notebook import html_table
from farspan.domain.train import Precision
from farspan.domain.units import counted, format_bytes, format_rate, short_time

#: tf32 is fp32 numbers multiplied on the matrix units, to ten bits after the point (AMD: xf32).
DType = Precision
#: Bounds of a figure: more than any count here, more FLOP/s than there are on earth, the seconds of
#: a day.
Count = Annotated[int, msgspec.Meta(ge=1, le=10**15)]
Flops = Annotated[float, msgspec.Meta(gt=0, le=1e24)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
#: Where a figure comes from: a data sheet, the user's file, a measurement, or other figures of the
#: same cluster.
Origin = Literal["catalogue", "given", "measured", "derived"]

#: What a pair of hosts of one site, and a link between two sites, are taken to have where nothing
#: is known of them.
SITE_RTT_S = UNKNOWN_SITE.rtt_s
SITE_BANDWIDTH = UNKNOWN_SITE.rate
LINK_BANDWIDTH = UNKNOWN_LINK.rate
#: What `--cluster` calls this machine as it is.
THIS_MACHINE = "here"
#: What stands in commands for a cluster that nobody has named.
UNNAMED = "CLUSTER"

#: Variables of a worker's environment, for `WorkerSlot.enter`: STARTING is set where the worker may
#: start unconfined; READY then names a file a line and what to write there, `FILE=TEXT`, once it
#: has started.
STARTING_VARIABLE = "FARSPAN_STARTING"
READY_VARIABLE = "FARSPAN_READY"
#: As STARTING, where the process is a spare that may never be that device's worker; TAKEN then
#: names, as READY does, what to write when it becomes one.
SPARE = "FARSPAN_SPARE"
TAKEN = "FARSPAN_TAKEN"
#: The number of a worker's GPU among those that it sees, where a launcher hides the others; else
#: the plan's holds.
GIVEN_GPU_VARIABLE = "FARSPAN_GIVEN_GPU"


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
    #: Whether it was of compiled blocks; unset where they were not.
    compiled: bool | msgspec.UnsetType = msgspec.UNSET


class Interconnect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links of a kind of device to others of its host, by the data sheet."""

    #: `unified`: nothing, as it shares the host's memory and comes once a host.
    kind: Literal["nvlink", "pcie", "xgmi", "unified"]
    #: Bytes a second in each direction of one device, all of its links together.
    rate: Flops
    #: Whether devices read each other's memory; else messages go through the host's memory.
    p2p: bool = True


class DataSheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak figures of a kind of device. Unknown ones are None or absent, never guessed."""

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
    #: Compute capability of an NVIDIA card, as 8.6; unset of other makers' devices, and where
    #: nothing knows it.
    capability: float | msgspec.UnsetType = msgspec.UNSET

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """`dtypes` without tf32, which is only used where a training asks for it: its numbers are
        fp32."""
        precisions: list[Precision] = [
            "fp32" if dtype == "tf32" else dtype for dtype in self.dtypes
        ]
        return tuple(dict.fromkeys(precisions))


class DeviceTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times that a probe measured on the device itself."""

    #: Matrix products; they go before the data sheet's FLOP/s where they exist.
    rates: tuple[MatmulRate, ...] = ()
    #: Units of a model; they go before `rates` where they are of the model at hand.
    units: tuple[UnitTime, ...] = ()
    #: Seconds of the host to launch one small kernel after another on a GPU; they go before the
    #: engine's.
    launch_s: Seconds | msgspec.UnsetType = msgspec.UNSET


class LearnedPace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Corrections that trials of the model at hand showed."""

    #: Measured over predicted compute time; 1 where there was no trial.
    pace: float = 1.0
    #: Measured bytes of a worker in addition to its tensors; None takes the engine's figure.
    framework: int | None = None
    #: Measured factor on the activations that a worker keeps: what its allocator does not give
    #: back. Unset takes the engine's figure.
    slack: float | msgspec.UnsetType = msgspec.UNSET


class WorkerSlot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the device's worker runs: the CPU that it gets, and how it is confined."""

    #: CPU threads.
    threads: int = 1
    #: Share of those threads' time, where the device is throttled to one: launching operators takes
    #: 1 / `share` times as long. The data sheet's FLOP/s and bandwidth are already scaled by it.
    share: float = 1.0
    #: Mean seconds that a message waits until a device that is throttled to a share has its next
    #: time slice.
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
        """Return the same device with other figures, by the names of its parts' fields (`PART_OF`)
        or of its own."""
        own: dict[str, Any] = {}
        by_part: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            fields = by_part.setdefault(PART_OF[name], {}) if name in PART_OF else own
            fields[name] = value
        for part, fields in by_part.items():
            own[part] = msgspec.structs.replace(getattr(self, part), **fields)
        return msgspec.structs.replace(self, **own)


#: The part of a Device that holds a figure, by the figure's name: no two parts share a name.
PART_OF = {
    **dict.fromkeys(DataSheet.__struct_fields__, "sheet"),
    **dict.fromkeys(DeviceTimes.__struct_fields__, "times"),
    **dict.fromkeys(LearnedPace.__struct_fields__, "learned"),
    **dict.fromkeys(WorkerSlot.__struct_fields__, "slot"),
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
    #: A shell command there that succeeds once the host is about to be taken away.
    notice: str | None = None
    #: As of Site; they go before the site's.
    lease_s: float | msgspec.UnsetType = msgspec.UNSET
    preemptions_per_s: float | msgspec.UnsetType = msgspec.UNSET
    #: Whether its interpreter has Triton, PyTorch's compiler for GPUs; unset where nobody looked.
    triton: bool | msgspec.UnsetType = msgspec.UNSET
    #: What `--cluster` takes for its cluster, for the commands of remedies; no file has it.
    cluster: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def cluster_name(self) -> str:
        """What `--cluster` takes for its cluster, or a word in its place."""
        return UNNAMED if self.cluster is msgspec.UNSET else self.cluster

    def __eq__(self, other: object) -> bool:
        """Compare all but `cluster`: a host is the same wherever it was read from."""
        return isinstance(other, Host) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def _facts(self) -> tuple[object, ...]:
        return msgspec.structs.astuple(msgspec.structs.replace(self, cluster=msgspec.UNSET))


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    hosts: tuple[Host, ...]
    #: Dollars for a byte that leaves the site.
    egress_usd_per_byte: float = 0.0
    #: Seconds until the machines are taken away; None is never.
    lease_s: float | None = None
    #: Times a second that one of its hosts is taken away without notice, in the mean; unset is
    #: never.
    preemptions_per_s: float | msgspec.UnsetType = msgspec.UNSET
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
    #: Measured seconds to send a number of bytes in one direction, first byte to last.
    transfer_s: dict[int, float] = {}
    #: Share of packets lost.
    loss: float | None = None
    #: Measured seconds that a byte over it, in or out, keeps all cores of a host at its end busy.
    busy_s: float | None = None
    #: Measured over predicted time of round trips and bytes over it, as trials have shown.
    pace: float = 1.0
    origin: Origin = "given"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sites: tuple[Site, ...]
    links: tuple[Link, ...] = ()
    #: Measured seconds of an all-reduce over all devices, by its bytes.
    allreduce_s: dict[int, float] = {}

    @property
    def name(self) -> str:
        """What `--cluster` takes for it, or a word in its place."""
        return self.hosts[0].cluster_name if self.hosts else UNNAMED

    def named(self, name: str) -> Cluster:
        """Return the same cluster as one that `--cluster` calls `name`."""
        return self.with_hosts(lambda host: msgspec.structs.replace(host, cluster=name))

    @property
    def summary(self) -> str:
        """`3 a30 + 1 t4 in 2 hosts at 1 site`."""
        kinds = Counter(device.kind for device in self.devices)
        devices = [f"{count} {kind}" for kind, count in kinds.items()]
        hosts = counted(len(self.hosts), "host")
        sites = counted(len(self.sites), "site")
        return f"{' + '.join(devices)} in {hosts} at {sites}"

    def __repr__(self) -> str:
        return f"<Cluster: {self.summary}>"

    def _repr_html_(self) -> str:
        devices = []
        for site in self.sites:
            for host in site.hosts:
                for device in host.devices:
                    memory = format_bytes(device.memory)
                    devices.append((site.name, host.name, device.kind, memory, device.origin))
        links = []
        for a, b in itertools.combinations([host.name for host in self.hosts], 2):
            link = self.link(a, b)
            if link is None:
                links.append((a, b, "unknown", "unknown", ""))
                continue
            rtt = short_time(link.rtt_s)
            rate = "unknown" if link.bandwidth is None else format_rate(link.bandwidth)
            links.append((a, b, rtt, rate, link.origin))
        heads = ("host", "host", "round trip", "bandwidth", "origin")
        network = html_table(heads, links, right=(2, 3)) if links else ""
        heads = ("site", "host", "device", "memory", "origin")
        return html_table(heads, devices, caption=self.summary, right=(3,)) + network

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device, in rank order: site by site, host by host."""
        return tuple(itertools.chain.from_iterable(host.devices for host in self.hosts))

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(itertools.chain.from_iterable(site.hosts for site in self.sites))

    @property
    def machines(self) -> tuple[Host, ...]:
        """The hosts that have devices: a head node has none."""
        return tuple(host for host in self.hosts if host.devices)

    def site_of(self, host: str) -> Site:
        return next(site for site in self.sites if any(other.name == host for other in site.hosts))

    def preemptions_per_s(self, hosts: Iterable[str]) -> float:
        """Return the times a second that any of these hosts is taken away."""
        total = 0.0
        # In their order: sums of floats depend on it.
        for name in dict.fromkeys(hosts):
            site = self.site_of(name)
            host = next(host for host in site.hosts if host.name == name)
            rates = (host.preemptions_per_s, site.preemptions_per_s, 0.0)
            total += next(rate for rate in rates if rate is not msgspec.UNSET)
        return total

    def lease_s(self, hosts: Iterable[str]) -> float:
        """Return the seconds until the first of these hosts is taken back; infinite where none
        is."""
        leases = [math.inf]
        for name in set(hosts):
            site = self.site_of(name)
            host = next(host for host in site.hosts if host.name == name)
            lease = site.lease_s if host.lease_s is msgspec.UNSET else host.lease_s
            leases.append(math.inf if lease is None else lease)
        return min(leases)

    def with_hosts(self, change: Callable[[Host], Host]) -> Cluster:
        """Return the same cluster with every host changed."""
        sites = []
        for site in self.sites:
            hosts = tuple(map(change, site.hosts))
            sites.append(msgspec.structs.replace(site, hosts=hosts))
        return msgspec.structs.replace(self, sites=tuple(sites))

    def with_devices(self, change: Callable[[Host, int], Device]) -> Cluster:
        """Return the same cluster with another device in every place of every host."""

        def change_devices(host: Host) -> Host:
            devices = [change(host, index) for index in range(len(host.devices))]
            return msgspec.structs.replace(host, devices=tuple(devices))

        return self.with_hosts(change_devices)

    def lacking(self, precision: Precision) -> list[str]:
        """Return the kinds that do not compute a precision in hardware.

        tf32 is fp32 on devices that lack it, if others have it.
        """
        devices = self.devices
        has_tf32 = any("tf32" in device.sheet.dtypes for device in devices)
        needed = "fp32" if precision == "tf32" and has_tf32 else precision
        kinds = {device.kind for device in devices if needed not in device.sheet.dtypes}
        return sorted(kinds)

    def first(self, devices: int) -> Cluster:
        """Return the same cluster with its first `devices` devices only, in rank order."""
        return self.only(range(devices))

    def only(self, places: Container[int]) -> Cluster:
        """Return the same cluster with the devices at these places only, in rank order."""
        place = itertools.count()
        sites = []
        site_names = []
        host_names = []
        for site in self.sites:
            hosts = []
            for host in site.hosts:
                devices = [device for device in host.devices if next(place) in places]
                if devices:
                    hosts.append(msgspec.structs.replace(host, devices=tuple(devices)))
                    host_names.append(host.name)
            if hosts:
                sites.append(msgspec.structs.replace(site, hosts=tuple(hosts)))
                site_names.append(site.name)
        ends = {*site_names, *host_names}
        links = [link for link in self.links if link.a in ends and link.b in ends]
        kept = msgspec.structs.replace(self, sites=tuple(sites), links=tuple(links))
        # A path between two sites over one that is removed stays, as a link.
        joined = [{link.a, link.b} for link in links]
        for a, b in itertools.combinations(site_names, 2):
            if {a, b} in joined:
                continue
            path = self._shortest_path(a, b)
            if path != kept._shortest_path(a, b):
                links.append(_join_path(path, a, b))
        return msgspec.structs.replace(kept, links=tuple(links))

    def link(self, a: str, b: str) -> Link | None:
        """Return the network between two hosts: theirs, their sites', or derived from others; None
        where nothing is known.

        Derived: inside a site its local network; between sites the path over other sites with the
        shortest round trip, whose round trips add up and whose slowest part, pace and losses count.
        Between sites no more goes over than the hosts' cards let through; inside one, a link of the
        hosts' own goes before cards and local network.
        """
        site_a = self.site_of(a)
        site_b = self.site_of(b)
        cards = _known_cards((site_a, a), (site_b, b))
        link = self._find_link(a, b, site_a, site_b)
        if site_a.name == site_b.name:
            return link or _derive_lan(site_a, a, b, cards)
        if link is None:
            path = self._shortest_path(site_a.name, site_b.name)
            link = _join_path(path, a, b) if path else None
        if link is not None and cards:
            card_rate = min(cards)
            if card_rate < (link.bandwidth or LINK_BANDWIDTH):
                return msgspec.structs.replace(link, bandwidth=card_rate)
        return link

    def assumed_network(self, a: str, b: str) -> AssumedNetwork | None:
        """Return the assumed network between two hosts where neither the file nor a
        measurement has it; None where they do, or where nothing leads from one to the other.

        Inside a site it is that of the known machines whose shape both hosts have; else it is that
        of unknown hosts.
        """
        site_a = self.site_of(a)
        site_b = self.site_of(b)
        link = self._find_link(a, b, site_a, site_b)
        if site_a.name != site_b.name:
            joined = self.link(a, b)
            return None if joined is None or joined.bandwidth is not None else UNKNOWN_LINK
        if link is None:
            cards = _known_cards((site_a, a), (site_a, b))
            card_rate = min(cards, default=math.inf)
            assumed = _assumed_lan(site_a, a, b)
            is_known = site_a.lan_bandwidth is not None or len(cards) == 2
            return None if is_known or card_rate <= assumed.rate else assumed
        guessed = link.bandwidth is None or link.origin == "derived"
        return _assumed_lan(site_a, a, b) if guessed else None

    def _find_link(self, a: str, b: str, site_a: Site, site_b: Site) -> Link | None:
        """Return the first link that joins two hosts, or else their sites, as one of the hosts."""
        for pair in ({a, b}, {site_a.name, site_b.name}):
            for link in self.links:
                if {link.a, link.b} == pair:
                    return msgspec.structs.replace(link, a=a, b=b)
        return None

    def _shortest_path(self, start: str, goal: str) -> list[Link]:
        """Find Dijkstra's shortest path over site links, by round trip, of such the widest; empty
        where there is none."""
        # Round trip, and the rate of the slowest link so far with its sign turned: less is better
        # of both.
        best: dict[str, tuple[tuple[float, float], list[Link]]] = {start: ((0.0, -math.inf), [])}
        open_sites = [start]
        while open_sites:
            current = min(open_sites, key=lambda name: best[name][0])
            open_sites.remove(current)
            (rtt, rate), path = best[current]
            if current == goal:
                return path
            for link in self.links:
                if current not in (link.a, link.b):
                    continue
                neighbour = link.b if link.a == current else link.a
                link_rate = -math.inf if link.bandwidth is None else -link.bandwidth
                cost = (rtt + link.rtt_s, max(rate, link_rate))
                if neighbour not in best or cost < best[neighbour][0]:
                    best[neighbour] = cost, [*path, link]
                    if neighbour not in open_sites:
                        open_sites.append(neighbour)
        return []


def _known_cards(*ends: tuple[Site, str]) -> list[float]:
    """Return bytes a second of hosts' network cards, of those that are known."""
    cards = []
    for site, name in ends:
        nic = next((host.nic for host in site.hosts if host.name == name), None)
        if nic is not None:
            cards.append(nic)
    return cards


def _assumed_lan(site: Site, a: str, b: str) -> AssumedNetwork:
    """Return the assumed network of two hosts of a site: the slower of their known machines'
    networks; and UNKNOWN_SITE unless both are known."""
    networks = []
    for host in site.hosts:
        if host.name not in (a, b):
            continue
        kinds = [device.kind for device in host.devices]
        interconnects = [device.sheet.interconnect for device in host.devices]
        joined = [interconnect.kind if interconnect else "" for interconnect in interconnects]
        network = known_network(kinds, joined)
        if network is None:
            return UNKNOWN_SITE
        networks.append(network)
    return min(networks, default=UNKNOWN_SITE)


def _derive_lan(site: Site, a: str, b: str, cards: list[float]) -> Link:
    """Return the local network of a site between two of its hosts, whose `cards` are those that
    are known."""
    rate = site.lan_bandwidth
    if not rate and len(cards) == 2:
        # A switch carries what both cards do, where nothing else is known of it.
        rate = min(cards)
    assumed = UNKNOWN_SITE if rate else _assumed_lan(site, a, b)
    rtt_s = assumed.rtt_s if site.lan_rtt_s is None else site.lan_rtt_s
    bandwidth = min([rate or assumed.rate, *cards])
    origin: Origin = "derived" if site.lan_bandwidth is None else "given"
    return Link(a=a, b=b, rtt_s=rtt_s, bandwidth=bandwidth, origin=origin)


def _join_path(path: list[Link], a: str, b: str) -> Link:
    """Return one link for a path of several."""
    rates = [link.bandwidth for link in path if link.bandwidth is not None]
    windows = [link.window for link in path if link.window is not None]
    losses = [link.loss for link in path if link.loss is not None]
    received = math.prod(1 - loss for loss in losses)
    rtt_s = sum(link.rtt_s for link in path)
    pace = max(link.pace for link in path)
    return Link(
        a=a,
        b=b,
        rtt_s=rtt_s,
        bandwidth=min(rates, default=None),
        window=min(windows, default=None),
        loss=1 - received if losses else None,
        pace=pace,
        origin="derived",
    )
