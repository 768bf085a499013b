"""Devices: which cores each may use, and the control groups that hold it to its speed and
memory."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from farspan_lab.lab import Device, Lab

#: Time is given out anew in each period: the shorter, the sooner goes on what has used its share
#: up. The kernel's least quota is 1 ms; the least period is a choice.
LEAST_QUOTA_US = 1_000
LEAST_PERIOD_US = 5_000
#: Which limits the groups inside one of version 2 may have.
_SWITCH = "cgroup.subtree_control"
#: A control group stays busy for some milliseconds after its last process.
EMPTY_S = 30.0


def placed(lab: Lab, cpus: list[int], parents: list[Path]) -> Lab:
    """Return the lab with cores and control groups for its devices, and with notes on what this
    machine cannot give."""
    shares = list(_shares(lab, cpus))
    notes = list(lab.notes)
    every = [device for site in lab.sites for device in site.devices]
    for cores in sorted(set(shares)):
        load = sum(
            (each.speed or 0) * each.cores
            for each, share in zip(every, shares, strict=True)
            if share == cores
        )
        if load > len(cores):
            notes.append(
                f"devices on cores {list(cores)} ask for {load:.0%} of a core together: they get "
                "less"
            )
    if len({core for share in shares for core in share}) == len(cpus):
        notes.append("no core is left for the relay alone: what it uses, devices lack")
    if not parents:
        notes.append(
            "speed shares and memory caps are not in force: control groups cannot be written here"
        )
    left = iter(shares)
    sites = []
    for site in lab.sites:
        devices = []
        for index, device in enumerate(site.devices):
            groups = [
                str(parent / f"farspan-lab-{lab.name}" / f"{site.name}-{index}")
                for parent in parents
            ]
            limits = {} if groups else {"speed": None, "memory": None}
            devices.append(
                msgspec.structs.replace(device, cpus=next(left), cgroups=tuple(groups), **limits)
            )
        sites.append(msgspec.structs.replace(site, devices=tuple(devices)))
    return msgspec.structs.replace(lab, sites=tuple(sites), notes=tuple(notes))


def _shares(lab: Lab, cpus: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the cores of each device, in order: its own where there are enough, else its site's
    own, else all."""
    own = sum(device.cores for site in lab.sites for device in site.devices) <= len(cpus)
    left = iter(cpus)
    width = len(cpus) // len(lab.sites)
    for number, site in enumerate(lab.sites):
        for device in site.devices:
            yield tuple(
                islice(left, device.cores)
                if own
                else cpus[number * width : (number + 1) * width] or cpus
            )


def parents() -> list[Path]:
    """Where this process may make control groups for time and memory; none where it may not.

    Version 2 has one folder at the top. Version 1 has one for each controller, taken below the
    group that this process is in, so that nothing escapes from limits that hold for it.
    """
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {
        controller: path for _, controllers, path in lines for controller in controllers.split(",")
    }
    paths: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        root, mount, kind, options = (line.split()[at] for at in (3, 4, -3, -1))
        if kind == "cgroup2" and "memory" in Path(mount, "cgroup.controllers").read_text():
            try:
                Path(mount, _SWITCH).write_text("+cpu +memory")
                return [Path(mount)]
            except (
                OSError
            ):  # Not ours to write, or a container's own group, which has processes in it.
                return []
        for controller in {"cpu", "memory"} & set(options.split(",")) if kind == "cgroup" else ():
            paths[controller] = Path(mount, os.path.relpath(own[controller], root))
    return (
        list(paths.values())
        if len(paths) == 2 and all(os.access(path, os.W_OK) for path in paths.values())
        else []
    )


def make_groups(lab: Lab) -> None:
    """Make every device's control groups. Raises OSError when the system refuses one, or has no
    such limits."""
    for device in (device for site in lab.sites for device in site.devices):
        limited = {
            controller
            for group in device.cgroups
            for controller in _make_group(Path(group), device)
        }
        if device.cgroups and not limited >= ({"cpu", "memory"} if device.memory else {"cpu"}):
            raise OSError(errno.ENOSYS, "control groups without limits", device.cgroups[0])


def quota_us(device: Device) -> tuple[int, int]:
    """Microseconds of processor time that a device gets in a period of so many."""
    share = (device.speed or 1) * device.cores
    period = max(LEAST_PERIOD_US, math.ceil(LEAST_QUOTA_US / share))
    return round(share * period), period


def quotas(device: Device) -> Iterator[tuple[Path, str, str]]:
    """Yield the files that hold a device to its speed, of those that are there: what each says when
    it does, and when not."""
    quota, period = quota_us(device)
    files = (
        ("cpu.max", f"{quota} {period}", f"max {period}"),
        ("cpu.cfs_quota_us", f"{quota}", "-1"),
    )
    for group in map(Path, device.cgroups):
        yield from (
            (group / name, held, free) for name, held, free in files if (group / name).exists()
        )


def turn_s(device: Device) -> float:
    """Seconds that a message which comes at any time waits in the mean until its device goes on: 0
    while the device has time left of its period, else half of the period's rest."""
    quota, period = quota_us(device)
    rest = 0.0 if device.speed is None else max(0.0, period - quota / device.cores)
    return rest / period * rest / 2 / 1e6


def _make_group(group: Path, device: Device) -> Iterator[str]:
    """Make one; yields the controllers whose limits it has. Each version and each controller has
    its own files."""
    group.parent.mkdir(exist_ok=True)
    if (group.parent / _SWITCH).exists():
        (group.parent / _SWITCH).write_text("+cpu +memory")
    group.mkdir(exist_ok=True)
    quota, period = quota_us(device)
    limits = [
        ("cpu.max", f"{quota} {period}"),
        ("cpu.cfs_period_us", period),
        ("cpu.cfs_quota_us", quota),
    ]
    if device.memory:
        limits += [("memory.max", device.memory), ("memory.swap.max", 0)]
        limits += [(f"memory.{kind}limit_in_bytes", device.memory) for kind in ("", "memsw.")]
    for file, value in limits:
        if (group / file).exists():
            (group / file).write_text(str(value))
            yield file.split(".")[0]


def groups_of(lab: Lab) -> list[Path]:
    """Every control group's folder, inner ones first."""
    inner = [
        Path(group) for site in lab.sites for device in site.devices for group in device.cgroups
    ]
    return [*inner, *{group.parent for group in inner}]


def processes_in(groups: list[Path]) -> Iterator[int]:
    for group in groups:
        if group.exists():
            yield from map(int, (group / "cgroup.procs").read_text().split())


def remove_groups(groups: list[Path]) -> None:
    """Remove control groups whose processes have ended. Raises OSError for one that stays busy."""
    deadline = time.monotonic() + EMPTY_S
    for group in groups:
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
