"""The device catalogue: data-sheet figures by device name, each with its source."""

from __future__ import annotations

from importlib import resources

import msgspec


class CatalogDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device kind. `match` are substrings of the name that the driver reports; `flops` are dense peaks by dtype."""

    match: tuple[str, ...]
    flops: dict[str, float]
    source: str
    checked: str


def devices() -> dict[str, CatalogDevice]:
    """Every device kind of `catalog/devices.yaml`, by its short name."""
    text = resources.files("farspan.catalog").joinpath("devices.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, CatalogDevice])


def peak_flops(device_name: str, precision: str, count: int) -> float | None:
    """Dense peak FLOP/s of `count` devices of this name at this precision, or None where no data sheet is known."""
    for device in devices().values():
        if any(pattern in device_name for pattern in device.match):
            peak = device.flops.get(precision)
            return peak * count if peak else None
    return None
