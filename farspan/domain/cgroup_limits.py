"""What control groups, version 2 and version 1, allow this process of memory: `python -m
farspan.domain.cgroup_limits` prints it.

Run through a host's or a device's `enter` command it prints what holds there, also after what ran
there was killed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

#: Beyond, a limit of version 1 means none.
UNLIMITED = 2**60
#: Files of a group by version: its limit, its use and the most of it so far.
FILES = {
    2: ("memory.max", "memory.current", "memory.peak"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes"),
}


class CgroupLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one group: its limit, what cannot be taken back of what it uses, and the most that
    it used."""

    limit: int
    used: int
    peak: int | None = None


def read_cgroup_limits() -> list[CgroupLimit]:
    """Return the groups of this process, and their parents, that have a limit."""
    limited = []
    for folder, version in _memory_groups():
        cap = _read_cgroup_limit(folder, *FILES[version])
        if cap is not None:
            limited.append(cap)
    return limited


def tightest_cgroup_limit() -> CgroupLimit | None:
    """Return the group with the least limit."""
    return min(read_cgroup_limits(), key=lambda cap: cap.limit, default=None)


def _memory_groups() -> Iterator[tuple[Path, int]]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
            version = 2
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            version = 1
        else:
            continue
        group = root / path.lstrip("/")
        while True:
            yield group, version
            if group in (root, group.parent):
                break
            group = group.parent


def _read_cgroup_limit(folder: Path, limit: str, use: str, peak: str) -> CgroupLimit | None:
    """Read one group; None where there is no limit ("max"), or the group lies outside what this
    process sees."""
    allowed = _read_number(folder / limit)
    used = _read_number(folder / use)
    if allowed is None or used is None or allowed >= UNLIMITED:
        return None
    return CgroupLimit(
        limit=allowed,
        used=max(0, used - _reclaimable_bytes(folder)),
        peak=_read_number(folder / peak),
    )


def _reclaimable_bytes(folder: Path) -> int:
    """Bytes of files that the kernel takes back before it kills anybody."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        figures = dict(line.split() for line in lines)
    except (OSError, ValueError):
        return 0
    reclaimable = 0
    for name in ("inactive_file", "active_file"):
        reclaimable += int(figures.get(f"total_{name}", figures.get(name, 0)))
    return reclaimable


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(tightest_cgroup_limit()) + b"\n")
