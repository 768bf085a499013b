"""lab.yaml: the sites of a lab as a user writes them down, to a Lab."""

from __future__ import annotations

import re
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from farspan.domain.struct_files import load_yaml, missing_path
from farspan.domain.suggest import advise, any_of, suggest
from farspan.domain.units import parse_bytes, parse_fraction, parse_rate, parse_round_trip
from farspan_lab.lab import Device, Lab, Link, Site, out_of_range

Quantity = str | int | float
#: How each quantity is read, its least and its largest value, in SI units: beyond them it is a slip
#: of the pen.
QUANTITIES: dict[str, tuple[Any, float, float]] = {
    "rtt": (parse_round_trip, 0, 60),
    "jitter": (parse_round_trip, 0, 60),
    "loss": (parse_fraction, 0, 0.99),
    "bandwidth": (parse_rate, 1e3, 1e12),
    "window": (parse_bytes, 2**13, 2**30),
    "speed": (parse_fraction, 0.05, 1),
    "memory": (parse_bytes, 2**20, 2**50),
}
_NAME = re.compile(r"(?!localhost$)[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
#: Without `window`, one connection can fill the longest link half as much again; a link without a
#: cap counts as this fast, bytes a second. Bytes, too, are the least and the most.
_HEADROOM = 1.5
_UNCAPPED = 10e9 / 8
_LEAST = 2**22
_MOST = 2**28


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    speed: Quantity = "100%"
    cores: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    memory: Quantity | None = None


class SiteEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    devices: (
        Annotated[int, msgspec.Meta(ge=1, le=64)]
        | Annotated[tuple[DeviceEntry, ...], msgspec.Meta(min_length=1, max_length=64)]
    ) = 1


class Course(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies between two sites."""

    rtt: Quantity
    jitter: Quantity = 0
    bandwidth: Quantity | None = None
    loss: Quantity = 0


class LinkEntry(Course, frozen=True, kw_only=True, forbid_unknown_fields=True):
    between: tuple[str, str]


class LabFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sites: Annotated[dict[str, SiteEntry], msgspec.Meta(min_length=1, max_length=64)]
    name: str = "lab"
    links: tuple[LinkEntry, ...] = ()
    #: For pairs of sites that `links` leaves out, which otherwise cannot reach each other.
    default_link: Course | None = None
    #: Every kernel has reno, and every namespace may choose it.
    congestion: str = "reno"
    window: Quantity | None = None
    version: Literal[1] = 1


def named() -> dict[str, Path]:
    """Return the labs that ship with farspan, by name (`fabric/gat-amst`)."""
    root = Path(str(resources.files("farspan_lab").joinpath("labs")))
    return {
        str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.yaml"))
    }


def load_lab(name: str) -> Lab:
    """Return the lab of a file or of a name; refuses what it leaves open, contradicts or cannot
    mean."""
    path = Path(name).expanduser()
    ours = named()
    if not path.exists() and name in ours:
        path = ours[name]
    likely = () if path.exists() else suggest(name, ours)
    if likely:
        raise out_of_range(
            name,
            f"neither a file nor a lab that ships with farspan: {', '.join(ours)}",
            any_of(likely, "farspan lab up"),
        )
    if not path.exists():
        raise missing_path(path)
    return read(load_yaml(path, LabFile), str(path))


def changed(
    lab: Lab, window: Quantity | None, bandwidth: Quantity | None, memory: Quantity | None
) -> Lab:
    """Return the lab with another window, and all its links at another rate and devices with other
    memory, where given."""
    if memory is not None:
        size = quantity("memory", memory, "memory")
        lab = msgspec.structs.replace(
            lab,
            sites=tuple(
                msgspec.structs.replace(
                    site,
                    devices=tuple(
                        msgspec.structs.replace(device, memory=size) for device in site.devices
                    ),
                )
                for site in lab.sites
            ),
        )
    if window is not None:
        lab = msgspec.structs.replace(lab, window=quantity("window", window, "window"))
    if bandwidth is None:
        return lab
    rate = link_values({"bandwidth": bandwidth}, "bandwidth")
    return msgspec.structs.replace(
        lab, links=tuple(msgspec.structs.replace(link, **rate) for link in lab.links)
    )


def read(file: LabFile, where: str) -> Lab:
    """Return the Lab of a file's content; `where` names the file in refusals."""
    for name in (file.name, *file.sites):
        check_name(name, where)
    sites = tuple(
        Site(name=name, number=number, devices=_devices(entry, f"{where}: sites.{name}.devices"))
        for number, (name, entry) in enumerate(file.sites.items(), 1)
    )
    links = _links(file, where)
    longest = max(
        (2 * link.delay_s * (link.bandwidth or _UNCAPPED) for link in links.values()), default=0.0
    )
    window = min(max(round(_HEADROOM * longest), _LEAST), _MOST)
    if file.window is not None:
        window = quantity("window", file.window, where)
    apart = [" and ".join(pair) for pair in combinations(file.sites, 2) if pair not in links]
    notes = (f"without a link, so unreachable: {', '.join(apart)}",) if apart else ()
    return Lab(
        name=file.name,
        sites=sites,
        links=tuple(links.values()),
        congestion=file.congestion,
        window=window,
        notes=notes,
    )


def _devices(entry: SiteEntry, where: str) -> tuple[Device, ...]:
    entries = (DeviceEntry(),) * entry.devices if isinstance(entry.devices, int) else entry.devices
    return tuple(
        Device(
            speed=quantity("speed", device.speed, f"{where}[{index}]"),
            cores=device.cores,
            memory=quantity("memory", device.memory, f"{where}[{index}]")
            if device.memory is not None
            else None,
        )
        for index, device in enumerate(entries)
    )


def _links(file: LabFile, where: str) -> dict[tuple[str, str], Link]:
    """Both directions of every link, by the sites that they join."""
    links: dict[tuple[str, str], Link] = {}
    courses: list[tuple[str, tuple[str, str], Course]] = [
        (f"{where}: links[{index}]", entry.between, entry) for index, entry in enumerate(file.links)
    ]
    if file.default_link:
        given = {frozenset(pair) for _, pair, _ in courses}
        gaps = (pair for pair in combinations(file.sites, 2) if frozenset(pair) not in given)
        courses += [(f"{where}: default_link", pair, file.default_link) for pair in gaps]
    for at, (a, b), course in courses:
        if unknown := {a, b} - set(file.sites):
            raise out_of_range(
                f"{at}.between",
                f"no site {min(unknown)!r}; sites: {', '.join(file.sites)}",
                advise(min(unknown), file.sites, verb="write", fix="add it to sites", synonyms=()),
            )
        if a == b or (a, b) in links:
            raise out_of_range(
                f"{at}.between",
                "a site to itself" if a == b else "this pair has a link above",
                "remove it",
            )
        values = link_values(
            {key: getattr(course, key) for key in ("rtt", "jitter", "bandwidth", "loss")}, at
        )
        for source, target in ((a, b), (b, a)):
            links[source, target] = Link(source=source, target=target, **values)
    return links


def link_values(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of each direction of a Link from what was given for both; a bandwidth of
    None or `none` is no cap."""
    values: dict[str, Any] = {}
    for key, text in given.items():
        free = key == "bandwidth" and text in (None, "none")
        values[key] = None if free else quantity(key, text, where)
    if values.get("jitter", 0) > values.get("rtt", 60):
        raise out_of_range(
            f"{where}.jitter", f"{given['jitter']} is longer than the round trip", "write less"
        )
    one_way = {"rtt": "delay_s", "jitter": "jitter_s"}
    return {
        one_way.get(key, key): value / 2 if key in one_way else value
        for key, value in values.items()
    }


def quantity(key: str, text: Quantity, where: str) -> Any:
    """Return the value of a key of QUANTITIES; refuses what is none, or absurd."""
    parse, low, high = QUANTITIES[key]
    try:
        value = parse(text)
    except ValueError as error:
        raise out_of_range(f"{where}.{key}", str(error), "write a number with its unit") from None
    if not low <= value <= high:
        raise out_of_range(
            f"{where}.{key}", f"{text} is not between {low:g} and {high:g} in SI units", "mend it"
        )
    return value


def check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise out_of_range(
            where, f"{name!r} is no name: a-z, 0-9 and -, up to 32, first a letter", "rename it"
        )
