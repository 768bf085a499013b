"""One process at a time works in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from farspan.domain.escapes import shell_word
from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder

#: A process that only asks holds a lock for less than this.
MAX_ASKING_S = 0.2
#: flock on a file system that has no locks, or whose lock server does not answer.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def lock_file(path: Path, what: str, where: Path, remedy: str = "") -> IO[bytes]:
    """Lock a file for this process alone; the lock goes with the last process that has it open,
    however that ends. Raises Refusal (run-busy) with `what` is being done at `where` already,
    and (path-unusable) where there are no locks. `remedy` names the holder; by default the
    programs that have the file open."""
    file = open_own(path, "ab")
    deadline = time.monotonic() + MAX_ASKING_S
    while not _try_lock(file, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            file.close()
            raise Refusal(
                "run-busy",
                what=what,
                where=where,
                fact="another process holds its lock",
                remedy=remedy or f"fuser -v {shell_word(path)}",
            )
        time.sleep(MAX_ASKING_S / 10)
    return file


def lock_run(run: RunFolder) -> IO[bytes]:
    """Lock a run for this process alone. Raises Refusal (run-busy)."""
    remedy = f"{command('status', run.path)}   # to end it: {command('stop', run.path)}"
    return lock_file(run.lock, "this run is being trained already", run.path, remedy)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file, which may not exist. To ask is to take it
    for a moment."""
    if not path.exists():
        return False
    with open(path, "rb") as file:
        return not _try_lock(file, fcntl.LOCK_SH)


def lock_holders(path: Path) -> list[int]:
    """List processes of this user that have a file open, as each holder of a lock has; none where
    the system does not list them (Linux does)."""
    pids = set[int]()
    with suppress(OSError):
        lock = path.stat()
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):  # It has ended, or is another user's.
                if os.path.samestat(descriptor.stat(), lock):
                    pids.add(int(descriptor.parts[2]))
    return sorted(pids)


def _try_lock(file: IO[bytes], operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise Refusal(
            "path-unusable",
            what="files cannot be locked there",
            where=file.name,
            fact=f"{error.strerror}: the file system is mounted without locks, as NFS may be",
            remedy="--run FOLDER on a disk with locks (NFS: mounted without nolock)",
        ) from None
    return True
