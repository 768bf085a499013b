"""The device catalogue: data-sheet figures and list prices by device kind, each with its source and its date."""

from __future__ import annotations

from importlib import resources

import msgspec

from farspan.domain.cluster import DataSheet, Device, DType
from farspan.domain.units import parse_bytes, parse_rate


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    usd_per_hour: float
    source: str
    checked: str


class CatalogDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device kind. `match` are names that the driver reports, whole; `flops` are dense peaks by dtype."""

    match: tuple[str, ...]
    flops: dict[DType, float]
    source: str
    checked: str
    memory: str | None = None
    bandwidth: str | None = None
    watts: float | None = None
    price: Price | None = None

    def device(self, kind: str, memory: int | None = None) -> Device | None:
        """This kind as a device of a cluster; None where neither the catalogue nor the caller knows its memory."""
        size = memory or (parse_bytes(self.memory) if self.memory else None)
        if size is None:
            return None
        return Device(
            kind=kind,
            backend="cpu" if kind.startswith("cpu") else "cuda",
            memory=size,
            sheet=DataSheet(
                flops=self.flops,
                dtypes=tuple(self.flops),
                bandwidth=parse_rate(self.bandwidth) if self.bandwidth else None,
                watts=self.watts,
            ),
            usd_per_hour=self.price.usd_per_hour if self.price else None,
            origin="catalogue",
        )


def devices() -> dict[str, CatalogDevice]:
    """Every device kind of `catalog/devices.yaml`, by its short name."""
    text = resources.files("farspan.catalog").joinpath("devices.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, CatalogDevice])


def kind_of(device_name: str) -> str | None:
    """The catalogue's kind for a name that a driver reports; None where no entry fits."""
    for kind, device in devices().items():
        # Drivers before about R465 leave the maker out.
        if device_name in device.match or f"NVIDIA {device_name}" in device.match:
            return kind
    return None


def peak_flops(device_name: str, precision: DType, count: int) -> float | None:
    """Dense peak FLOP/s of `count` devices of this name at this precision, or None where no data sheet is known."""
    kind = kind_of(device_name)
    peak = devices()[kind].flops.get(precision) if kind else None
    return peak * count if peak else None
