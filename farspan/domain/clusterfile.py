"""cluster.yaml: the machines as a user writes them down, to a Cluster and back.

Only the hosts must be given. Quantities are text ("57ms", "1Gbit/s", "24GB"); a bare number is SI.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from farspan.domain import catalog
from farspan.domain.cluster import (
    Cluster,
    Count,
    DataSheet,
    Device,
    DType,
    Flops,
    Host,
    HostName,
    Interconnect,
    Link,
    MatmulRate,
    Origin,
    Seconds,
    Site,
    UnitTime,
)
from farspan.domain.codec import load_yaml, write_atomically
from farspan.domain.escapes import escape_controls, key_word, shell_word, yaml_word
from farspan.domain.problems import Refusal
from farspan.domain.suggest import advise, any_of
from farspan.domain.suggest_device import advise_device, slice_of
from farspan.domain.units import (
    counted,
    is_bare,
    parse_bytes,
    parse_fraction,
    parse_program_seconds,
    parse_rate,
    parse_round_trip,
)

T = TypeVar("T")
Quantity = str | int | float
Name = str
Price = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
#: Where a host that is reached by ssh keeps runs and corpora.
FAR_FOLDER = "~/.cache/farspan"
#: Where a network ends being one: a minute of round trip, 10 Tbit/s.
MAX_RTT_S = 60.0
MAX_BANDWIDTH = 10e12 / 8
#: What a bare number of these times may mean beside seconds.
BARE_UNITS = ((parse_round_trip, "ms"), (parse_program_seconds, "h"))
#: A link that loses more is none.
MAX_LOSS = 0.99


class InterconnectEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What joins the device to others of its host; `rate` is bytes a second each way, over all of
    its links."""

    kind: Literal["nvlink", "pcie", "xgmi", "unified"]
    rate: Quantity
    p2p: bool = True


class KindEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A kind of device by its data sheet: `memory`, `bandwidth` and `flops` must be there."""

    memory: Quantity | None = None
    #: Of its memory.
    bandwidth: Quantity | None = None
    flops: dict[DType, Flops] = {}
    #: What it computes in hardware, where `flops` does not say it.
    dtypes: tuple[DType, ...] | None = None
    measured: dict[DType, Flops] = {}
    interconnect: InterconnectEntry | None = None
    watts: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    #: Dollars an hour.
    price: Price | None = None
    backend: Literal["cpu", "cuda", "mps"] | None = None


class DeviceEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """`count` devices of a kind; what is set here goes before the catalogue."""

    kind: Name
    count: int = 1
    backend: Literal["cpu", "cuda", "mps"] | None = None
    memory: Quantity | None = None
    bandwidth: Quantity | None = None
    flops: dict[DType, Flops] | None = None
    #: Best measured FLOP/s of a matrix product; where `flops` is set and this is not, the
    #: catalogue's are left out.
    measured: dict[DType, Flops] | None = None
    interconnect: InterconnectEntry | None = None
    #: What it computes in hardware, where `flops` does not say it.
    dtypes: tuple[DType, ...] | None = None
    rates: tuple[MatmulRate, ...] = ()
    units: tuple[UnitTime, ...] = ()
    watts: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    #: Dollars an hour.
    price: Price | None = None
    threads: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    #: Of those threads' time.
    share: Quantity = 1.0
    #: What a message waits for the next turn of a device with a share.
    turn: Quantity | None = None
    enter: tuple[str, ...] | None = None
    origin: Origin = "given"


class HostEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    devices: tuple[Name | DeviceEntry, ...]
    cpus: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    memory: Quantity | None = None
    #: Bytes a second between its devices.
    local_rate: Quantity | None = None
    #: Rate of its network card.
    nic: Quantity | None = None
    address: str | None = None
    interface: str | None = None
    enter: tuple[str, ...] | None = None
    python: str = "python3"
    folder: str | None = None


class SiteEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    hosts: dict[HostName, HostEntry]
    #: Dollars an hour of each device of the site; goes before the catalogue.
    price: float | None = None
    #: Dollars for 10^9 bytes that leave the site.
    egress: float = 0.0
    lease: Quantity | None = None
    #: What a job waits there before it starts.
    queue: Quantity | None = None
    #: Rate and round trip between its hosts.
    lan: Quantity | None = None
    lan_rtt: Quantity | None = None


class LinkEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    between: tuple[Name, Name]
    rtt: Quantity
    bandwidth: Quantity | None = None
    jitter: Quantity | None = None
    window: Quantity | None = None
    loss: Quantity | None = None
    in_flight: dict[Count, Count] = {}
    transfer_s: dict[Count, Seconds] = {}
    busy_s: Seconds | None = None
    origin: Origin = "given"


class ClusterFile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The whole file. `prices` are dollars an hour by device kind; `kinds` go before those of the
    catalogue."""

    sites: dict[Name, SiteEntry]
    kinds: dict[Name, KindEntry] = {}
    links: tuple[LinkEntry, ...] = ()
    prices: dict[Name, Price] = {}
    allreduce_s: dict[Count, Seconds] = {}
    version: Literal[1] = 1


def load_cluster(path: Path) -> Cluster:
    """Return the cluster that a file describes; refuses what it leaves open, contradicts or cannot
    mean."""
    return _Reader(load_yaml(path, ClusterFile), str(path)).cluster()


class _Reader:
    """One file on its way to a Cluster; `where` names it in refusals."""

    def __init__(self, file: ClusterFile, where: str) -> None:
        self._file = file
        self._where = where
        self._kinds = catalog.devices()
        self._own = {name: self._kind(name, entry) for name, entry in file.kinds.items()}

    def cluster(self) -> Cluster:
        file = self._file
        hosts = Counter(name for site in file.sites.values() for name in site.hosts)
        # A site may be called like its only host; more would make links to that name unclear.
        clear = {name for name, site in file.sites.items() if list(site.hosts) == [name]}
        twice = [
            name for name, count in hosts.items() if count > 1 or name in file.sites.keys() - clear
        ]
        if twice:
            raise self._invalid(
                f"the name {twice[0]!r} is used twice",
                "sites",
                "hosts and sites share one space of names",
                f"rename one {shell_word(twice[0])}",
            )
        for kind in file.prices:
            self._check_kind(kind, "prices")
        sites = tuple(self._site(name, entry) for name, entry in file.sites.items())
        cluster = Cluster(
            sites=sites,
            links=self._links(set(hosts), set(file.sites)),
            allreduce_s=file.allreduce_s,
        )
        if not cluster.devices:
            raise self._invalid(
                "the cluster has no devices",
                "sites",
                f"none of {counted(len(hosts), 'host')} has any",
                "give a host its devices: hosts: {gpu1: {devices: [a30, a30]}}",
            )
        return cluster

    def _site(self, name: str, entry: SiteEntry) -> Site:
        where = f"sites.{name}"
        for key, number in (("price", entry.price), ("egress", entry.egress)):
            if number is not None and not 0 <= number <= 1e6:
                raise self._out_of_range(f"{where}.{key}", f"{number} is not a price in dollars")
        lease = self._quantity(parse_program_seconds, entry.lease, f"{where}.lease", 1, 1e9)
        hosts = tuple(
            self._host(host, host_entry, where, entry.price)
            for host, host_entry in entry.hosts.items()
        )
        queue = self._quantity(parse_program_seconds, entry.queue, f"{where}.queue", 0, 1e9) or 0.0
        return Site(
            name=name,
            hosts=hosts,
            egress_usd_per_byte=entry.egress / 1e9,
            lease_s=lease,
            queue_s=queue,
            lan_bandwidth=self._quantity(parse_rate, entry.lan, f"{where}.lan", 1e2, MAX_BANDWIDTH),
            lan_rtt_s=self._quantity(
                parse_round_trip, entry.lan_rtt, f"{where}.lan_rtt", 1e-7, MAX_RTT_S
            ),
        )

    def _kind(self, name: str, entry: KindEntry) -> Device:
        """Return a kind that the file declares, as a device of it."""
        where = f"kinds.{name}"
        memory = self._quantity(parse_bytes, entry.memory, f"{where}.memory", 2**20, 2**50)
        bandwidth = self._quantity(parse_rate, entry.bandwidth, f"{where}.bandwidth", 1e6, 1e15)
        needed = {
            "memory: 24GB": memory,
            "bandwidth: 900GB/s": bandwidth,
            "flops: {bf16: 150e12}": entry.flops,
        }
        for example, value in needed.items():
            if not value:
                lacking = example.partition(":")[0]
                raise self._invalid(
                    f"the kind {name} has no {lacking}",
                    where,
                    "a kind needs memory, bandwidth and flops",
                    f"add its {lacking} to {key_word(where)}, such as {example}",
                )
        assert memory is not None
        sheet = DataSheet(
            flops=entry.flops,
            dtypes=entry.dtypes or tuple(entry.flops),
            bandwidth=bandwidth,
            watts=entry.watts,
            measured=entry.measured,
            interconnect=self._interconnect(entry.interconnect, f"{where}.interconnect"),
        )
        backend = entry.backend or ("cpu" if name.startswith("cpu") else "cuda")
        return Device(
            kind=name,
            backend=backend,
            memory=memory,
            sheet=sheet,
            usd_per_hour=entry.price,
            origin="given",
        )

    def _host(self, name: str, entry: HostEntry, site: str, price: float | None) -> Host:
        where = f"{site}.hosts.{name}"
        local = name in ("localhost", platform.node())
        if entry.folder is not None and not entry.folder.startswith(("/", "~/")):
            raise self._out_of_range(
                f"{where}.folder", f"{entry.folder!r} begins neither with / nor with ~/"
            )
        # A host behind ssh has a disk of its own, unless it is said to share this machine's.
        far = not local and (entry.enter is None or entry.enter[:1] == ("ssh",))
        devices: list[Device] = []
        for index, written in enumerate(entry.devices):
            given = DeviceEntry(kind=written) if isinstance(written, str) else written
            if not 1 <= given.count <= 64:
                fact = f"{given.count} is not between 1 and 64"
                most = 1 if given.count < 1 else 64
                raise self._out_of_range(f"{where}.devices[{index}].count", fact, f": {most:d}")
            devices += [self._device(given, f"{where}.devices[{index}]", price)] * given.count
        # A device's place in its host is its number for CUDA, which counts GPUs only.
        devices.sort(key=lambda device: device.backend != "cuda")
        return Host(
            name=name,
            devices=tuple(devices),
            cpus=entry.cpus,
            memory=self._quantity(parse_bytes, entry.memory, f"{where}.memory", 2**20, 2**50),
            local_rate=self._quantity(
                parse_rate, entry.local_rate, f"{where}.local_rate", 1e6, 1e15
            ),
            nic=self._quantity(parse_rate, entry.nic, f"{where}.nic", 1e2, MAX_BANDWIDTH),
            address=entry.address,
            interface=entry.interface,
            enter=() if local and not entry.enter else entry.enter,
            python=entry.python,
            folder=FAR_FOLDER if far and entry.folder is None else entry.folder,
        )

    def _device(self, entry: DeviceEntry, where: str, site_price: float | None) -> Device:
        memory = self._quantity(parse_bytes, entry.memory, f"{where}.memory", 2**20, 2**50)
        whole = None not in (entry.backend, entry.bandwidth, entry.flops)
        device: Device | None
        if entry.kind in self._own:
            own = self._own[entry.kind]
            device = own.but(memory=memory or own.memory)
        elif memory is not None and (
            whole or (entry.kind not in self._kinds and entry.backend == "cuda")
        ):
            # A GPU by its driver's name, of which only the file and measurements say more; or all
            # that there is to say.
            device = Device(kind=entry.kind, backend=entry.backend or "cuda", memory=memory)
        else:
            self._check_kind(entry.kind, where)
            device = self._kinds[entry.kind].device(entry.kind, memory)
        if device is None:
            raise self._invalid(
                f"{entry.kind} needs its memory",
                where,
                "its kind comes in all sizes",
                f"write {{kind: {yaml_word(entry.kind)}, memory: 8GB}}",
            )
        prices = (entry.price, site_price, self._file.prices.get(entry.kind), device.usd_per_hour)
        set_here = {
            "backend": entry.backend,
            "flops": entry.flops,
            "rates": entry.rates or None,
            "measured": {} if entry.flops and entry.measured is None else entry.measured,
            "interconnect": self._interconnect(entry.interconnect, f"{where}.interconnect"),
            "units": entry.units or None,
            "watts": entry.watts,
            "dtypes": entry.dtypes or (tuple(entry.flops) if entry.flops else None),
            "threads": entry.threads,
            "share": self._quantity(parse_fraction, entry.share, f"{where}.share", 0.001, 1),
            "turn_s": self._quantity(parse_program_seconds, entry.turn, f"{where}.turn", 0, 10),
            "enter": entry.enter,
            "bandwidth": self._quantity(
                parse_rate, entry.bandwidth, f"{where}.bandwidth", 1e6, 1e15
            ),
            "usd_per_hour": next((price for price in prices if price is not None), None),
            "origin": None
            if entry == DeviceEntry(kind=entry.kind, count=entry.count)
            else entry.origin,
        }
        merged = device.but(**{key: value for key, value in set_here.items() if value is not None})
        return _at_its_share(merged, entry)

    def _interconnect(self, entry: InterconnectEntry | None, where: str) -> Interconnect | None:
        rate = self._quantity(parse_rate, entry.rate, f"{where}.rate", 1e6, 1e15) if entry else None
        return Interconnect(kind=entry.kind, rate=rate, p2p=entry.p2p) if entry and rate else None

    def _links(self, hosts: set[str], sites: set[str]) -> tuple[Link, ...]:
        seen: set[frozenset[str]] = set()
        links = []
        names = hosts | sites
        for index, entry in enumerate(self._file.links):
            where = f"links[{index}]"
            pair = frozenset(entry.between)
            for name in sorted(pair - names):
                raise self._unknown_name(name, names, f"{where}.between", "site or host")
            if len(pair) == 1 or pair in seen:
                fact = (
                    "it joins a name to itself"
                    if len(pair) == 1
                    else "the same pair has a link above"
                )
                raise self._invalid(
                    "this link cannot exist", where, fact, f"remove {key_word(where)}"
                )
            if not (pair <= hosts or pair <= sites):
                raise self._invalid(
                    "this link cannot exist",
                    where,
                    "it joins a site to a host",
                    "name two sites, or two hosts",
                )
            seen.add(pair)
            links.append(self._link(entry, where))
        return tuple(links)

    def _link(self, entry: LinkEntry, where: str) -> Link:
        rtt = self._quantity(parse_round_trip, entry.rtt, f"{where}.rtt", 1e-7, MAX_RTT_S)
        assert rtt is not None
        return Link(
            a=entry.between[0],
            b=entry.between[1],
            rtt_s=rtt,
            bandwidth=self._quantity(
                parse_rate, entry.bandwidth, f"{where}.bandwidth", 1e2, MAX_BANDWIDTH
            ),
            jitter_s=self._quantity(
                parse_round_trip, entry.jitter, f"{where}.jitter", 0, MAX_RTT_S
            ),
            window=self._quantity(parse_bytes, entry.window, f"{where}.window", 1000, 2**40),
            loss=self._quantity(parse_fraction, entry.loss, f"{where}.loss", 0, MAX_LOSS),
            in_flight=entry.in_flight,
            transfer_s=entry.transfer_s,
            busy_s=entry.busy_s,
            origin=entry.origin,
        )

    def _quantity(
        self,
        parse: Callable[[Quantity], T],
        text: Quantity | None,
        where: str,
        low: float,
        high: float,
    ) -> T | None:
        if text is None:
            return None
        try:
            value: Any = parse(text)
        except ValueError as error:
            unit = next((unit for reader, unit in BARE_UNITS if parse is reader), None)
            if unit is None or not is_bare(text):
                raise self._out_of_range(where, str(error)) from None
            fix = f": {any_of((f'{text}{unit}', f'{text}s'))}"
            raise self._out_of_range(where, str(error), fix) from None
        if not low <= value <= high:
            fact = f"{text} is not between {low:g} and {high:g}, in SI units"
            fits = low if value < low else high
            raise self._out_of_range(where, fact, f": {fits:g}")
        return value  # type: ignore[no-any-return]

    def _check_kind(self, kind: str, where: str) -> None:
        known = {**self._kinds, **self._own}
        if kind not in known:
            divided = slice_of(kind)
            raise self._invalid(
                f"there is no device kind {kind!r}",
                where,
                f"known: {', '.join(sorted(known))}"
                if divided is None
                else f"it is a slice of a GPU (MIG): {divided.cores} of 7 of its cores",
                advise_device(kind, self._own),
            )

    def _unknown_name(self, name: str, known: Iterable[str], where: str, what: str) -> Refusal:
        names = sorted(known)
        return self._invalid(
            f"there is no {what} {name!r}",
            where,
            f"known: {', '.join(names)}",
            advise(name, names, verb="write", synonyms=()),
        )

    def _out_of_range(self, where: str, fact: str, fix: str = " to a value that fits") -> Refusal:
        return Refusal(
            "out-of-range",
            what=f"{where} has a value that farspan cannot use",
            where=self._where,
            fact=fact,
            remedy=f"set {key_word(where)}{fix}",
        )

    def _invalid(self, what: str, where: str, fact: str, remedy: str) -> Refusal:
        return Refusal(
            "cluster-invalid", what=what, where=f"{self._where}, {where}", fact=fact, remedy=remedy
        )


def _at_its_share(device: Device, entry: DeviceEntry) -> Device:
    """Return a device that is held to a share of its time has that share of what its kind reaches;
    figures that are given, or were measured, are its own."""
    flops = device.sheet.flops
    measured = device.sheet.measured
    bandwidth = device.sheet.bandwidth
    if not (entry.flops or entry.rates):
        flops = {dtype: rate * device.slot.share for dtype, rate in flops.items()}
    if not (entry.flops or entry.rates or entry.measured):
        measured = {dtype: rate * device.slot.share for dtype, rate in measured.items()}
    if entry.bandwidth is None and bandwidth is not None:
        bandwidth *= device.slot.share
    return device.but(flops=flops, measured=measured, bandwidth=bandwidth)


def save_cluster(cluster: Cluster, path: Path, comment: str) -> None:
    """Write a file that reads back as the same cluster, under the lines of `comment`. Numbers are
    SI: bytes, bytes a second, FLOP/s, and seconds where no unit is said."""
    import yaml

    content = msgspec.to_builtins(to_file(cluster))
    for link in content.get("links", ()):
        link["rtt"] = f"{link['rtt']!r}s"
    text = yaml.safe_dump(content, sort_keys=False, width=120)
    units = "Numbers are SI: seconds, bytes, bytes a second, FLOP/s."
    # What hosts answer may hold line breaks, some of them YAML's alone: none ends the comment.
    comments = [f"# {escape_controls(line)}\n" for line in (*comment.split("\n"), units)]
    write_atomically(path, f"{''.join(comments)}{text}".encode())


def to_file(cluster: Cluster) -> ClusterFile:
    """Return the cluster in the words of its file."""
    return ClusterFile(
        sites={
            site.name: SiteEntry(
                hosts={host.name: _host_entry(host) for host in site.hosts},
                egress=site.egress_usd_per_byte * 1e9,
                lease=site.lease_s,
                queue=site.queue_s or None,
                lan=site.lan_bandwidth,
                lan_rtt=site.lan_rtt_s,
            )
            for site in cluster.sites
        },
        links=tuple(
            LinkEntry(
                between=(link.a, link.b),
                rtt=link.rtt_s,
                bandwidth=link.bandwidth,
                jitter=link.jitter_s,
                window=link.window,
                loss=link.loss,
                in_flight=link.in_flight,
                transfer_s=link.transfer_s,
                busy_s=link.busy_s,
                origin=link.origin,
            )
            for link in cluster.links
        ),
        allreduce_s=cluster.allreduce_s,
    )


def _host_entry(host: Host) -> HostEntry:
    devices = tuple(map(_device_entry, host.devices))
    return HostEntry(
        devices=devices,
        cpus=host.cpus,
        memory=host.memory,
        local_rate=host.local_rate,
        nic=host.nic,
        address=host.address,
        interface=host.interface,
        enter=host.enter,
        python=host.python,
        folder=host.folder,
    )


def _device_entry(device: Device) -> DeviceEntry:
    sheet = device.sheet
    times = device.times
    slot = device.slot
    return DeviceEntry(
        kind=device.kind,
        backend=device.backend,
        memory=device.memory,
        bandwidth=sheet.bandwidth,
        flops=sheet.flops or None,
        measured=sheet.measured or None,
        rates=times.rates,
        units=times.units,
        interconnect=_interconnect_entry(sheet.interconnect),
        enter=slot.enter,
        watts=sheet.watts,
        price=device.usd_per_hour,
        dtypes=None if sheet.dtypes == tuple(sheet.flops) else sheet.dtypes,
        threads=slot.threads,
        share=slot.share,
        turn=slot.turn_s or None,
        origin=device.origin,
    )


def _interconnect_entry(joined: Interconnect | None) -> InterconnectEntry | None:
    return InterconnectEntry(kind=joined.kind, rate=joined.rate, p2p=joined.p2p) if joined else None
