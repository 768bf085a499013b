"""Where the server of a run is to be found: `serve.json` in the run's folder. Only the standard library is needed.

A server writes the file when it starts, for this user alone as it holds the token, and removes it when it ends.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "serve.json"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What the file says. `began` tells a process from a later one that got the same pid."""

    pid: int
    began: str
    host: str
    url: str
    token: str | None


def find_server(run: Path) -> tuple[str, str | None] | None:
    """The URL of the run's server on this host and its token; None where none lives."""
    found = _read(run / NAME)
    here = found is not None and found.host == socket.gethostname() and found.began == process_began(found.pid)
    return (found.url, found.token) if found is not None and here else None


def write(run: Path, url: str, token: str | None) -> Beside:
    """Say that this process serves the run."""
    pid = os.getpid()
    beside = Beside(pid=pid, began=process_began(pid), host=socket.gethostname(), url=url, token=token)
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


def process_began(pid: int) -> str:
    """When a process began, as the system says it; empty where it has ended."""
    if Path("/proc/self/stat").exists():
        # proc(5): state and start are the third field and the 22nd.
        with suppress(OSError):
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return "" if state in "ZX" else fields[18]
        return ""
    told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10)
    return told.stdout.strip()
