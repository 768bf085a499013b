"""Judges why a worker of this machine was killed: because memory ran out, or for another reason."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from farspan.domain.memory_kills import WorkerCgroup, cgroup_members, cgroup_oom_kills
from farspan.domain.worker_exit import KillCause

#: A process that holds more than this share of a limit is the largest below it, which the kernel
#: kills first.
LARGEST_SHARE = 0.5


def kill_cause(
    machine_before: int | None, machine_now: int | None, group: WorkerCgroup | None, held_bytes: int
) -> KillCause:
    """Judge by the machine's count before the worker started and now, and by that of its group.

    `group` is as it was at the worker's start, None where it is not known. `held_bytes` are those
    that the worker held at last, 0 where that is not known.
    """
    if machine_before is not None and machine_now == machine_before:
        return "other"
    if group is None:
        return "open"
    folder = Path(group.folder)
    kills_now = cgroup_oom_kills(folder)
    if kills_now is None:
        return "open"
    if kills_now <= group.kills:
        return "other"
    if held_bytes > LARGEST_SHARE * group.limit or _is_own(folder):
        return "memory"
    return "open"


def _is_own(folder: Path) -> bool:
    """Return whether a group holds no processes but this one and what it has started. That of a
    login also holds a shell."""
    try:
        members = cgroup_members(folder)
    except OSError:
        return False
    return all(_is_ours(pid) for pid in members)


def _is_ours(pid: int) -> bool:
    import psutil

    own = os.getpid()
    if pid == own:
        return True
    with suppress(psutil.NoSuchProcess):
        return any(parent.pid == own for parent in psutil.Process(pid).parents())
    return pid != 0  # It has ended since.
