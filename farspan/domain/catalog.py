"""The device catalogue: data-sheet figures and list prices by device kind, each with its source and
its date."""

from __future__ import annotations

import functools
import math
from importlib import resources
from typing import Annotated, Literal

import msgspec

from farspan.domain.cluster import DataSheet, Device, DType, Flops, Interconnect
from farspan.domain.decoding import decode_yaml
from farspan.domain.units import parse_bytes, parse_rate


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    usd_per_hour: float
    source: str
    checked: str


class MeasuredRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best published FLOP/s of a dense product `[m, k] @ [k, n]`; `shape` is (m, n, k), None
    where not printed."""

    flops: Flops
    source: str
    checked: str
    shape: tuple[int, int, int] | None = None


class CatalogInterconnect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The interconnect of one host's devices, with its rate as text: bytes a second in each
    direction of one device."""

    kind: Literal["nvlink", "pcie", "xgmi", "unified"]
    rate: str
    p2p: bool = True

    def interconnect(self) -> Interconnect:
        return Interconnect(kind=self.kind, rate=parse_rate(self.rate), p2p=self.p2p)


class CatalogDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device kind. `match` are names that the driver reports, whole; `labels` what Ray calls
    it; `flops` are dense peaks by dtype, `measured` what was reached of them."""

    match: tuple[str, ...]
    flops: dict[DType, float]
    source: str
    checked: str
    backend: Literal["cpu", "cuda", "mps"] = "cuda"
    labels: tuple[str, ...] = ()
    memory: str | None = None
    bandwidth: str | None = None
    watts: float | None = None
    #: Of NVIDIA cards.
    capability: float | msgspec.UnsetType = msgspec.UNSET
    measured: dict[DType, MeasuredRate] = {}
    interconnect: CatalogInterconnect | None = None
    price: Price | None = None

    def device(self, kind: str, memory: int | None = None) -> Device | None:
        """Return this kind as a device of a cluster; None where neither the catalogue nor the
        caller knows its memory."""
        size = memory or (parse_bytes(self.memory) if self.memory else None)
        if size is None:
            return None
        measured = {dtype: best.flops for dtype, best in self.measured.items()}
        sheet = DataSheet(
            flops=self.flops,
            measured=measured,
            dtypes=tuple(self.flops),
            bandwidth=parse_rate(self.bandwidth) if self.bandwidth else None,
            interconnect=self.interconnect.interconnect() if self.interconnect else None,
            watts=self.watts,
            capability=self.capability,
        )
        return Device(
            kind=kind,
            backend=self.backend,
            memory=size,
            sheet=sheet,
            usd_per_hour=self.price.usd_per_hour if self.price else None,
            origin="catalogue",
        )


def load_devices() -> dict[str, CatalogDevice]:
    """Every device kind of `catalog/devices.yaml`, by its short name."""
    text = resources.files("farspan.catalog").joinpath("devices.yaml").read_bytes()
    return decode_yaml(text, dict[str, CatalogDevice])


def find_kind(device_name: str) -> str | None:
    """Find the catalogue's kind for a name that a driver reports; None where no entry fits."""
    for kind, device in load_devices().items():
        # Drivers before about R465 leave the maker out.
        if device_name in device.match or f"NVIDIA {device_name}" in device.match:
            return kind
    return None


def find_kind_of_label(label: str) -> str | None:
    """Find the catalogue's kind for what Ray calls an accelerator; None where no entry fits. A
    label that leaves the memory or the form open, such as V100 or A100, fits none."""
    name = label.lower()
    for kind, device in load_devices().items():
        # Ray joins the words of a driver's name that it has no label for.
        joined = [driver.removeprefix("NVIDIA ").replace(" ", "-") for driver in device.match]
        if name == kind or name in device.labels or name in map(str.lower, joined):
            return kind
    return None


def peak_flops(device_name: str, precision: DType, count: int) -> float | None:
    """Dense peak FLOP/s of `count` devices of this name at this precision, or None where no data
    sheet is known."""
    kind = find_kind(device_name)
    peak = load_devices()[kind].flops.get(precision) if kind else None
    return peak * count if peak else None


class RingShare(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share of an interconnect's rate that ring collectives of NCCL or RCCL reach: bus bandwidth of
    all_reduce_perf for large messages, over the rate of one device in each direction."""

    kind: Literal["nvlink", "pcie", "xgmi"]
    rate: str
    source: str
    checked: str
    p2p: bool = True
    #: By number of devices.
    shares: dict[Annotated[int, msgspec.Meta(ge=2)], Annotated[float, msgspec.Meta(gt=0, le=1)]]
    #: As `shares`, for all_reduce alone, where the switch sums (NVLink SHARP): it passes 1, as each
    #: byte goes out once.
    switch_sums: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None


@functools.cache
def load_interconnects() -> dict[str, RingShare]:
    """Every interconnect of `catalog/interconnects.yaml`, by its short name."""
    text = resources.files("farspan.catalog").joinpath("interconnects.yaml").read_bytes()
    return decode_yaml(text, dict[str, RingShare])


@functools.cache
def ring_rate(joined: Interconnect, devices: int) -> float | None:
    """Bytes a second that ring collectives over `devices` devices of one host reach: the share of
    the entry of the interconnect's kind, with or without p2p, that is nearest in rate, for the
    nearest number of devices. None where no entry fits."""
    entries = []
    for entry in load_interconnects().values():
        if entry.kind == joined.kind and entry.p2p == joined.p2p:
            entries.append(entry)
    if not entries:
        return None

    def rate_distance(entry: RingShare) -> float:
        return abs(math.log(parse_rate(entry.rate) / joined.rate))

    def count_distance(count: int) -> tuple[float, int]:
        return abs(math.log(count / devices)), count

    shares = min(entries, key=rate_distance).shares
    return shares[min(shares, key=count_distance)] * joined.rate
