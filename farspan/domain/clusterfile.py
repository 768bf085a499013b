"""Read cluster.yaml, the machines as a user writes them down, as a Cluster, and write it.

Only the hosts must be given. Quantities are text ("57ms", "1Gbit/s", "24GB"); a bare number is SI.
"""

from __future__ import annotations

import itertools
import platform
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from farspan.domain import catalog
from farspan.domain.cluster import (
    PART_OF,
    Cluster,
    Count,
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
from farspan.domain.escapes import escape_controls, key_word, shell_word, yaml_word
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load_yaml, write_atomically
from farspan.domain.suggest import advise, any_of
from farspan.domain.suggest_device import advise_device, slice_of
from farspan.domain.units import (
    counted,
    is_bare,
    parse_bytes,
    parse_fraction,
    parse_frequency,
    parse_program_seconds,
    parse_rate,
    parse_round_trip,
)

Entry = TypeVar("Entry", bound=msgspec.Struct)
Quantity = str | int | float
Name = str
Price = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
#: NVIDIA's compute capability, as 8.6.
Capability = Annotated[float, msgspec.Meta(ge=1, le=99)]
#: The folder of runs and corpora at a host that is reached by ssh.
REMOTE_FOLDER = "~/.cache/farspan"


class Bounds(NamedTuple):
    """How a quantity is read, and its least and its largest value in SI units."""

    parse: Callable[[Quantity], float]
    low: float
    high: float
    #: The unit that a bare number may mean instead of seconds.
    bare_unit: str | None = None


MEMORY_SIZE = Bounds(parse_bytes, 2**20, 2**50)
MEMORY_BANDWIDTH = Bounds(parse_rate, 1e6, 1e15)
#: Up to 10 Tbit/s.
NETWORK_BANDWIDTH = Bounds(parse_rate, 1e2, 10e12 / 8)
MAX_LOSS = 0.99
#: The quantities of all entries by their keys, but for `bandwidth` of a link.
QUANTITIES = {
    "memory": MEMORY_SIZE,
    "bandwidth": MEMORY_BANDWIDTH,
    "rate": MEMORY_BANDWIDTH,
    "local_rate": MEMORY_BANDWIDTH,
    "nic": NETWORK_BANDWIDTH,
    "lan": NETWORK_BANDWIDTH,
    "rtt": Bounds(parse_round_trip, 1e-7, 60, bare_unit="ms"),
    "lan_rtt": Bounds(parse_round_trip, 1e-7, 60, bare_unit="ms"),
    "jitter": Bounds(parse_round_trip, 0, 60, bare_unit="ms"),
    "window": Bounds(parse_bytes, 1000, 2**40),
    "loss": Bounds(parse_fraction, 0, MAX_LOSS),
    "lease": Bounds(partial(parse_program_seconds, unit="h"), 1, 1e9, bare_unit="h"),
    "preemption": Bounds(parse_frequency, 0, 1),
    "queue": Bounds(partial(parse_program_seconds, unit="h"), 0, 1e9, bare_unit="h"),
    "turn": Bounds(partial(parse_program_seconds, unit="ms"), 0, 10, bare_unit="ms"),
    "share": Bounds(parse_fraction, 0.001, 1),
}
#: The keys that have another name in a Cluster.
CLUSTER_NAMES = {
    "rtt": "rtt_s",
    "jitter": "jitter_s",
    "lease": "lease_s",
    "preemption": "preemptions_per_s",
    "queue": "queue_s",
    "turn": "turn_s",
    "lan": "lan_bandwidth",
    "lan_rtt": "lan_rtt_s",
    "price": "usd_per_hour",
}
#: Dollars, and devices of one entry.
MAX_PRICE = 1e6
MAX_DEVICES = 64


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
    #: Of an NVIDIA card, as 8.6.
    capability: Capability | msgspec.UnsetType = msgspec.UNSET
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
    #: Of the host, to launch a kernel on a GPU.
    launch_s: Seconds | msgspec.UnsetType = msgspec.UNSET
    watts: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    #: Of an NVIDIA card, as 8.6.
    capability: Capability | msgspec.UnsetType = msgspec.UNSET
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
    notice: str | None = None
    #: As of a site; they go before the site's.
    lease: Quantity | msgspec.UnsetType = msgspec.UNSET
    preemption: Quantity | msgspec.UnsetType = msgspec.UNSET
    #: Whether that interpreter has Triton, PyTorch's compiler for GPUs.
    triton: bool | msgspec.UnsetType = msgspec.UNSET


class SiteEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    hosts: dict[HostName, HostEntry]
    #: Dollars an hour of each device of the site; goes before the catalogue.
    price: float | None = None
    #: Dollars for 10^9 bytes that leave the site.
    egress: float = 0.0
    lease: Quantity | None = None
    #: How often one of its hosts is taken away without notice, as 0.1/h.
    preemption: Quantity | msgspec.UnsetType = msgspec.UNSET
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
    """Read a cluster from its file. Raises Refusal for contradictions and impossible values."""
    return _Reader(load_yaml(path, ClusterFile), str(path)).read_cluster()


class _Reader:
    """Converts the content of one file to a Cluster; `where` names the file in refusals."""

    def __init__(self, file: ClusterFile, where: str) -> None:
        self._file = file
        self._where = where
        self._kinds = catalog.load_devices()
        self._own = {name: self._read_kind(name, entry) for name, entry in file.kinds.items()}

    def read_cluster(self) -> Cluster:
        file = self._file
        hosts = Counter(itertools.chain.from_iterable(site.hosts for site in file.sites.values()))
        # A site may have the name of its only host; with more, links to that name are unclear.
        unclear = {name for name, site in file.sites.items() if list(site.hosts) != [name]}
        repeated = [name for name, count in hosts.items() if count > 1 or name in unclear]
        if repeated:
            raise self._invalid(
                f"the name {repeated[0]!r} is used twice",
                "sites",
                "hosts and sites share one space of names",
                f"rename one {shell_word(repeated[0])}",
            )
        for kind in file.prices:
            self._check_kind(kind, "prices")
        sites = tuple(self._read_site(name, entry) for name, entry in file.sites.items())
        links = self._read_links(set(hosts), set(file.sites))
        cluster = Cluster(sites=sites, links=links, allreduce_s=file.allreduce_s)
        if not cluster.devices:
            raise self._invalid(
                "the cluster has no devices",
                "sites",
                f"none of {counted(len(hosts), 'host')} has any",
                "give a host its devices: hosts: {gpu1: {devices: [a30, a30]}}",
            )
        return cluster

    def _read_site(self, name: str, entry: SiteEntry) -> Site:
        where = f"sites.{name}"
        for key, number in (("price", entry.price), ("egress", entry.egress)):
            if number is not None and not 0 <= number <= MAX_PRICE:
                raise self._out_of_range(f"{where}.{key}", f"{number} is not a price in dollars")
        hosts = []
        for host, host_entry in entry.hosts.items():
            hosts.append(self._read_host(host, host_entry, where, entry.price))
        fields = self._read_fields(entry, where)
        fields["queue_s"] = fields["queue_s"] or 0.0
        fields["hosts"] = tuple(hosts)
        # Prices are its devices'.
        del fields["usd_per_hour"]
        egress = fields.pop("egress")
        return Site(name=name, egress_usd_per_byte=egress / 1e9, **fields)

    def _read_kind(self, name: str, entry: KindEntry) -> Device:
        """Return a device of a kind that the file declares."""
        where = f"kinds.{name}"
        fields = self._read_fields(entry, where)
        examples = {"memory": "24GB", "bandwidth": "900GB/s", "flops": "{bf16: 150e12}"}
        for key, example in examples.items():
            if not fields[key]:
                raise self._invalid(
                    f"the kind {name} has no {key}",
                    where,
                    "a kind needs memory, bandwidth and flops",
                    f"add its {key} to {key_word(where)}, such as {key}: {example}",
                )
        fields["dtypes"] = entry.dtypes or tuple(entry.flops)
        fields["backend"] = entry.backend or ("cpu" if name.startswith("cpu") else "cuda")
        device = Device(kind=name, backend="cuda", memory=fields["memory"])
        return device.but(**fields)

    def _read_host(self, name: str, entry: HostEntry, site: str, price: float | None) -> Host:
        where = f"{site}.hosts.{name}"
        folder = entry.folder
        if folder is not None and not folder.startswith(("/", "~/")):
            fact = f"{folder!r} begins neither with / nor with ~/"
            raise self._out_of_range(f"{where}.folder", fact)
        # A host behind ssh has a disk of its own, unless the file gives it this machine's folder.
        is_local = name in ("localhost", platform.node())
        enter = () if is_local and not entry.enter else entry.enter
        is_remote = not is_local and (enter is None or enter[:1] == ("ssh",))
        if folder is None and is_remote:
            folder = REMOTE_FOLDER

        devices: list[Device] = []
        for index, written in enumerate(entry.devices):
            place = f"{where}.devices[{index}]"
            device_entry = DeviceEntry(kind=written) if isinstance(written, str) else written
            count = device_entry.count
            if not 1 <= count <= MAX_DEVICES:
                fact = f"{count} is not between 1 and {MAX_DEVICES}"
                nearest = 1 if count < 1 else MAX_DEVICES
                raise self._out_of_range(f"{place}.count", fact, f": {nearest:d}")
            devices += [self._read_device(device_entry, place, price)] * count
        # A device's place in its host is its number for CUDA, which counts GPUs only.
        devices.sort(key=lambda device: device.backend != "cuda")
        fields = self._read_fields(entry, where)
        fields["devices"] = tuple(devices)
        fields["enter"] = enter
        fields["folder"] = folder
        return Host(name=name, **fields)

    def _read_device(self, entry: DeviceEntry, where: str, site_price: float | None) -> Device:
        """Return a device of an entry, whose figures replace those of its kind."""
        kind = entry.kind
        fields = self._read_fields(entry, where)
        device = self._device_of_kind(entry, fields["memory"], where)
        prices = (entry.price, site_price, self._file.prices.get(kind), device.usd_per_hour)
        fields["usd_per_hour"] = next((price for price in prices if price is not None), None)
        if entry.flops:
            fields["dtypes"] = entry.dtypes or tuple(entry.flops)
            # The catalogue's measured rates do not belong to these.
            fields["measured"] = entry.measured or {}
        if entry == DeviceEntry(kind=kind, count=entry.count):
            del fields["origin"]
        for key in ("kind", "count", "memory"):
            del fields[key]
        unset = (None, (), msgspec.UNSET)
        changes = {key: value for key, value in fields.items() if value not in unset}
        return _scale_to_share(device.but(**changes), entry)

    def _device_of_kind(self, entry: DeviceEntry, memory: int | None, where: str) -> Device:
        """Return a device of the file's own kinds, of the catalogue, or of a kind that only the
        entry describes."""
        kind = entry.kind
        if kind in self._own:
            own = self._own[kind]
            return own.but(memory=memory or own.memory)
        is_complete = None not in (entry.backend, entry.bandwidth, entry.flops)
        # A GPU by its driver's name: measurements give the rest.
        is_cuda_name = kind not in self._kinds and entry.backend == "cuda"
        if memory is not None and (is_complete or is_cuda_name):
            return Device(kind=kind, backend=entry.backend or "cuda", memory=memory)
        self._check_kind(kind, where)
        device = self._kinds[kind].device(kind, memory)
        if device is None:
            raise self._invalid(
                f"{kind} needs its memory",
                where,
                "its kind comes in all sizes",
                f"write {{kind: {yaml_word(kind)}, memory: 8GB}}",
            )
        return device

    def _read_links(self, hosts: set[str], sites: set[str]) -> tuple[Link, ...]:
        seen: set[frozenset[str]] = set()
        links = []
        for index, entry in enumerate(self._file.links):
            where = f"links[{index}]"
            pair = frozenset(entry.between)
            for name in sorted(pair - hosts - sites):
                raise self._unknown_name(name, hosts | sites, f"{where}.between", "site or host")
            fact = ""
            remedy = f"remove {key_word(where)}"
            if len(pair) == 1:
                fact = "it joins a name to itself"
            elif pair in seen:
                fact = "the same pair has a link above"
            elif not (pair <= hosts or pair <= sites):
                fact = "it joins a site to a host"
                remedy = "name two sites, or two hosts"
            if fact:
                raise self._invalid("this link cannot exist", where, fact, remedy)
            seen.add(pair)
            links.append(self._read_link(entry, where))
        return tuple(links)

    def _read_link(self, entry: LinkEntry, where: str) -> Link:
        a, b = entry.between
        fields = self._read_fields(entry, where)
        del fields["between"]
        return Link(a=a, b=b, **fields)

    def _read_fields(self, entry: msgspec.Struct, where: str) -> dict[str, Any]:
        """Return the fields of an entry by their names in a Cluster, quantities in SI units."""
        fields: dict[str, Any] = {}
        for key, value in msgspec.structs.asdict(entry).items():
            place = f"{where}.{key}"
            if isinstance(value, InterconnectEntry):
                value = Interconnect(**self._read_fields(value, place))
            elif key == "bandwidth" and isinstance(entry, LinkEntry):
                value = self._quantity(NETWORK_BANDWIDTH, value, place)
            elif key in QUANTITIES and value is not msgspec.UNSET:
                value = self._quantity(QUANTITIES[key], value, place)
            fields[CLUSTER_NAMES.get(key, key)] = value
        return fields

    def _quantity(self, bounds: Bounds, text: Quantity | None, where: str) -> float | None:
        """Return a quantity in SI units. Raises Refusal for one that is malformed, or outside its
        bounds."""
        if text is None:
            return None
        try:
            value = bounds.parse(text)
        except ValueError as error:
            remedy = " to a value that fits"
            if bounds.bare_unit and is_bare(text):
                remedy = f": {any_of((f'{text}{bounds.bare_unit}', f'{text}s'))}"
            raise self._out_of_range(where, str(error), remedy) from None
        if not bounds.low <= value <= bounds.high:
            fact = f"{text} is not between {bounds.low:g} and {bounds.high:g}, in SI units"
            nearest = bounds.low if value < bounds.low else bounds.high
            raise self._out_of_range(where, fact, f": {nearest:g}")
        return value

    def _check_kind(self, kind: str, where: str) -> None:
        known = {**self._kinds, **self._own}
        if kind not in known:
            fact = f"none of {counted(len(self._kinds), 'kind')} of the catalogue has that name"
            if self._own:
                fact += f"; the file's own: {', '.join(sorted(self._own))}"
            mig = slice_of(kind)
            if mig is not None:
                fact = f"it is a slice of a GPU (MIG): {mig.cores} of 7 of its cores"
            remedy = advise_device(kind, self._own)
            raise self._invalid(f"there is no device kind {kind!r}", where, fact, remedy)

    def _unknown_name(self, name: str, known: Iterable[str], where: str, what: str) -> Refusal:
        choices = sorted(known)
        remedy = advise(name, choices, verb="write", synonyms=())
        fact = f"known: {', '.join(choices)}"
        return self._invalid(f"there is no {what} {name!r}", where, fact, remedy)

    def _out_of_range(
        self, where: str, fact: str, remedy: str = " to a value that fits"
    ) -> Refusal:
        return Refusal(
            "out-of-range",
            what=f"{where} has a value that farspan cannot use",
            where=self._where,
            fact=fact,
            remedy=f"set {key_word(where)}{remedy}",
        )

    def _invalid(self, what: str, where: str, fact: str, remedy: str) -> Refusal:
        return Refusal(
            "cluster-invalid", what=what, where=f"{self._where}, {where}", fact=fact, remedy=remedy
        )


def _scale_to_share(device: Device, entry: DeviceEntry) -> Device:
    """Scale a kind's figures to the device's share of its time; given and measured ones stay."""
    share = device.slot.share
    flops = device.sheet.flops
    measured = device.sheet.measured
    bandwidth = device.sheet.bandwidth
    if not (entry.flops or entry.rates):
        flops = {dtype: rate * share for dtype, rate in flops.items()}
        if not entry.measured:
            measured = {dtype: rate * share for dtype, rate in measured.items()}
    if entry.bandwidth is None and bandwidth is not None:
        bandwidth *= share
    return device.but(flops=flops, measured=measured, bandwidth=bandwidth)


def save_cluster(cluster: Cluster, path: Path, comment: str) -> None:
    """Write a file that reads back as the same cluster, under the lines of `comment`.

    Numbers are SI: bytes, bytes a second, FLOP/s, and seconds where there is no unit.
    """
    import yaml

    content = msgspec.to_builtins(to_file(cluster))
    for link in content.get("links", ()):
        link["rtt"] = f"{link['rtt']!r}s"
    text = yaml.safe_dump(content, sort_keys=False, width=120)
    units = "Numbers are SI: seconds, bytes, bytes a second, FLOP/s."
    # Answers of hosts may have line breaks, some of them YAML's alone: none ends the comment.
    lines = [*comment.split("\n"), units]
    head = "".join(f"# {escape_controls(line)}\n" for line in lines)
    write_atomically(path, f"{head}{text}".encode())


def to_file(cluster: Cluster) -> ClusterFile:
    """Return the cluster as the content of its file."""
    sites = {}
    for site in cluster.sites:
        hosts = {}
        for host in site.hosts:
            devices = tuple(map(_device_entry, host.devices))
            often = _frequency(host.preemptions_per_s)
            hosts[host.name] = _entry(HostEntry, host, devices=devices, preemption=often)
        sites[site.name] = _entry(
            SiteEntry,
            site,
            hosts=hosts,
            price=None,
            preemption=_frequency(site.preemptions_per_s),
            egress=site.egress_usd_per_byte * 1e9,
            queue=site.queue_s or None,
        )
    links = [_entry(LinkEntry, link, between=(link.a, link.b)) for link in cluster.links]
    return ClusterFile(sites=sites, links=tuple(links), allreduce_s=cluster.allreduce_s)


def _frequency(per_s: float | msgspec.UnsetType) -> str | msgspec.UnsetType:
    return msgspec.UNSET if per_s is msgspec.UNSET else f"{per_s!r}/s"


def _device_entry(device: Device) -> DeviceEntry:
    sheet = device.sheet
    interconnect = None
    if sheet.interconnect is not None:
        interconnect = _entry(InterconnectEntry, sheet.interconnect)
    is_default = sheet.dtypes == tuple(sheet.flops)
    return _entry(
        DeviceEntry,
        device,
        count=1,
        flops=sheet.flops or None,
        measured=sheet.measured or None,
        dtypes=None if is_default else sheet.dtypes,
        interconnect=interconnect,
        turn=device.slot.turn_s or None,
    )


def _entry(kind: type[Entry], source: msgspec.Struct, **changes: Any) -> Entry:
    """Return an entry with the fields of a struct of the cluster, but for `changes`."""
    fields = {}
    for key in kind.__struct_fields__:
        if key not in changes:
            name = CLUSTER_NAMES.get(key, key)
            part = source
            if isinstance(source, Device) and name in PART_OF:
                part = getattr(source, PART_OF[name])
            fields[key] = getattr(part, name)
    return kind(**fields, **changes)
