"""Slices of the FABRIC testbed: VMs with GPUs at its sites and the networks between them, as they
are requested and as the testbed describes them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from farspan.domain import catalog
from farspan.domain.cluster import Device

#: fablib's component of each kind of device (`Constants.COMPONENT_MODELS` of 2.0.9), and its name
#: in summaries of resources.
GPU_MODELS = {
    "t4": "GPU_TeslaT4",
    "rtx6000": "GPU_RTX6000",
    "a30": "GPU_A30",
    "a40": "GPU_A40",
}
SUMMARY_NAMES = {
    "t4": "GPU-Tesla T4",
    "rtx6000": "GPU-RTX6000",
    "a30": "GPU-A30",
    "a40": "GPU-A40",
}
#: CUDA, PyTorch, a driver and a run fill some 30 GB; the next size of VMs below is 10 GB.
MIN_DISK_GB = 100
#: Cores and memory of a VM where the cluster file gives none: those of arXiv 2602.02632, Table I.
VM_CORES = 12
VM_RAM_GB = 32
#: Hours of a lease: fablib's default, and what the testbed grants at most (two weeks).
LEASE_HOURS = 24
MAX_LEASE_HOURS = 336


def fabric_device(kind: str) -> Device:
    """Return a GPU of the testbed, which is free for its users."""
    device = catalog.load_devices()[kind].device(kind)
    assert device is not None
    return replace(device, usd_per_hour=0.0)


class VmLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A VM that is requested; `gpus` are fablib's components."""

    name: str
    site: str
    gpus: tuple[str, ...]
    cores: int
    ram_gb: int
    disk_gb: int
    #: Its address in every network of the slice.
    address: str


class NetworkLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A network that is requested, between VMs by name."""

    name: str
    kind: Literal["L2Bridge", "L2STS"]
    vms: tuple[str, ...]


class SliceLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that is requested."""

    name: str
    image: str
    vms: tuple[VmLayout, ...]
    networks: tuple[NetworkLayout, ...]


class VmCard(msgspec.Struct, frozen=True, kw_only=True):
    """A network card of a VM, with the address that fablib gave it, if it did."""

    network: str | None = None
    mac: str = ""
    address: str | None = None


class SliceVm(msgspec.Struct, frozen=True, kw_only=True):
    """A VM as the testbed describes it; `user` logs in at `management_ip`."""

    name: str
    site: str
    state: str | None = None
    error: str = ""
    user: str | None = None
    management_ip: str | None = None
    gpus: tuple[str, ...] = ()
    cores: int | None = None
    ram_gb: int | None = None
    #: Its address in every network, where farspan made it.
    address: str | None = None
    cards: tuple[VmCard, ...] = ()


class SliceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A slice as the testbed describes it, and the keys that lead to its VMs."""

    name: str
    id: str | None = None
    state: str | None = None
    #: As `2026-12-01 10:00:00 +0000`.
    lease_end: str | None = None
    vms: tuple[SliceVm, ...] = ()
    #: The type of each network.
    networks: dict[str, str] = {}
    errors: tuple[str, ...] = ()
    bastion: str
    bastion_user: str
    bastion_key: str
    slice_key: str


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The testbed's summary, and its calendar of the next days or why there is none."""

    summary: dict[str, Any]
    calendar: dict[str, Any] | None = None
    no_calendar: dict[str, str] | None = None


class SliceCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of fablib's validation: what speaks against a slice, by VM."""

    errors: dict[str, str]
    #: When there is room for all of it; None where nothing is known.
    slot: str | None = None
    #: Whether a living slice has its name.
    taken: bool = False
    built: SliceRecord
