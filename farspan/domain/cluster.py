"""What machines there are: devices in hosts, hosts in sites."""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal["fp32", "bf16", "fp16"]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator, or the share of a CPU that one worker gets. Unknown figures are None, never guessed."""

    kind: str
    backend: Literal["cpu", "cuda", "mps"]
    #: Bytes that a worker may use.
    memory: int
    #: Peak dense FLOP/s by dtype, from the data sheet.
    flops: dict[str, float] = {}
    #: Dtypes that the device computes in hardware.
    dtypes: tuple[DType, ...] = ("fp32",)
    usd_per_hour: float | None = None
    watts: float | None = None
    #: CPU threads for the worker of this device.
    threads: int = 1


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    devices: tuple[Device, ...]
    cpus: int
    memory: int


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    hosts: tuple[Host, ...]


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sites: tuple[Site, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device, in rank order: site by site, host by host."""
        return tuple(device for site in self.sites for host in site.hosts for device in host.devices)
