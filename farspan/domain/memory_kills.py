"""How many processes the kernel has killed because memory ran out: in a control group, and on the
machine.

The machine's count is no evidence of one process: another program's may have been killed. A group
of version 2 counts its own processes. Version 1 is not read: its count leaves out parent groups.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from farspan.domain.cgroup_limits import read_cgroup_limits

#: Files that count: of the machine, and of a group alone or, on older kernels, with its children.
MACHINE_COUNTER = Path("/proc/vmstat")
GROUP_COUNTERS = ("memory.events.local", "memory.events")


class WorkerCgroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The control group of a worker when it started: `kills` of its processes until then, and
    `limit`, the least number of bytes that it, its parents or the machine allow."""

    folder: str
    kills: int
    limit: int


def own_cgroup(
    proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")
) -> WorkerCgroup | None:
    """Find the group of this process; None where memory is not counted by a group of version 2."""
    import psutil

    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folder = root / path.lstrip("/")
        if controllers == "" and (kills := cgroup_oom_kills(folder)) is not None:
            limit = min(
                [psutil.virtual_memory().total, *(cap.limit for cap in read_cgroup_limits())]
            )
            return WorkerCgroup(folder=str(folder), kills=kills, limit=limit)
    return None


def cgroup_oom_kills(folder: Path) -> int | None:
    """Count the processes of a group of version 2 that were killed for memory; None where it
    counts none of them."""
    for name in GROUP_COUNTERS:
        if (count := _read_oom_kills(folder / name)) is not None:
            return count
    return None


def cgroup_members(folder: Path) -> list[int]:
    """List the processes in a group; 0 stands for one that cannot be seen from here.

    Raises OSError.
    """
    return [int(line) for line in (folder / "cgroup.procs").read_text().split()]


def machine_oom_kills(path: Path = MACHINE_COUNTER) -> int | None:
    """Count the processes of this machine that were killed for memory; None where it does not."""
    return _read_oom_kills(path)


def _read_oom_kills(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
