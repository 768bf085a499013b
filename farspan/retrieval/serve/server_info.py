"""Where the server of a run is found: `serve.json` in the run's folder. Imports nothing heavy.

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

SERVER_FILE = "serve.json"


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """The file's content. `began` distinguishes a process from a later one with the same pid."""

    pid: int
    began: float | None
    host: str
    url: str
    token: str | None


def find_server(run: Path) -> tuple[str, str | None] | None:
    """Return URL and token of the run's server on this host; None where none is alive."""
    info = _read_info(run / SERVER_FILE)
    if info is None or info.host != socket.gethostname():
        return None
    is_alive = info.began is not None and info.began == process_began(info.pid)
    return (info.url, info.token) if is_alive else None


def write_server_info(run: Path, url: str, token: str | None) -> ServerInfo:
    """Record that this process serves the run."""
    pid = os.getpid()
    began = process_began(pid)
    info = ServerInfo(pid=pid, began=began, host=socket.gethostname(), url=url, token=token)
    temporary = run / f"{SERVER_FILE}.{pid}.tmp"
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(info), file)
    temporary.replace(run / SERVER_FILE)
    return info


def remove_server_info(run: Path, info: ServerInfo) -> None:
    """Remove the file, unless a later server has written it."""
    if _read_info(run / SERVER_FILE) == info:
        (run / SERVER_FILE).unlink(missing_ok=True)


def _read_info(path: Path) -> ServerInfo | None:
    """Return the file's content; None where there is no such file, or nothing of use in it."""
    with suppress(OSError, ValueError, TypeError):
        return ServerInfo(**json.loads(path.read_text()))
    return None
