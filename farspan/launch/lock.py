"""One process at a time works in a folder."""

from __future__ import annotations

import fcntl
import shlex
from pathlib import Path
from typing import IO

from farspan.domain.problems import Refusal


def locked(path: Path, what: str, where: Path) -> IO[bytes]:
    """A file, held by this process alone; the lock goes with the last process that has it open, however that ends.
    Raises Refusal (run-busy) with `what` is being done at `where` already."""
    file = open(path, "ab")  # noqa: SIM115 - closed by who asks
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Refusal(
            "run-busy", what=what, where=where, fact="another process holds its lock",
            remedy=f"fuser {shlex.quote(str(path))}",
        ) from None  # fmt: skip
    return file
