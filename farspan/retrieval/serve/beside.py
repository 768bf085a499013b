"""Where the server of a run is to be found: `serve.json` in the run's folder. It imports nothing
heavy.

A server writes the file when it starts, for this user alone as it holds the token, and removes it
when it ends.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from farspan.launch.process_began import process_began

NAME = "serve.json"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What the file says. `began` tells a process from a later one that got the same pid."""

    pid: int
    began: float | None
    host: str
    url: str
    token: str | None


def find_server(run: Path) -> tuple[str, str | None] | None:
    """The URL of the run's server on this host and its token; None where none lives."""
    found = _read(run / NAME)
    here = found is not None and found.host == socket.gethostname() and _lives(found)
    return (found.url, found.token) if found is not None and here else None


def write(run: Path, url: str, token: str | None) -> Beside:
    """Say that this process serves the run."""
    pid = os.getpid()
    beside = Beside(
        pid=pid, began=process_began(pid), host=socket.gethostname(), url=url, token=token
    )
    temporary = run / f"{NAME}.{pid}.tmp"
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(beside), file)
    temporary.replace(run / NAME)
    return beside


def remove(run: Path, beside: Beside) -> None:
    """Take back what `write` said, unless a later server has said otherwise."""
    if _read(run / NAME) == beside:
        (run / NAME).unlink(missing_ok=True)


def _read(path: Path) -> Beside | None:
    """None where there is no such file, or nothing of use in it."""
    with suppress(OSError, ValueError, TypeError):
        return Beside(**json.loads(path.read_text()))
    return None


def _lives(beside: Beside) -> bool:
    return beside.began is not None and beside.began == process_began(beside.pid)
