"""The Hugging Face hub, asked only where it answers: its libraries try for half a minute to reach one that does not."""

from __future__ import annotations

import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

#: What a connection may take: ten round trips around the world, or a name that is looked up twice.
_CONNECT_S = 4.0


@contextmanager
def hub() -> Iterator[str | None]:
    """Within, the hub's libraries use only what they have in their cache if the hub cannot be reached.

    Gives why it cannot, or None. HF_ENDPOINT says where the hub is, HF_HUB_OFFLINE that it is not to be asked.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    fault = "HF_HUB_OFFLINE is set" if before else _unreachable(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = before or fault is not None
    try:
        yield fault
    finally:
        constants.HF_HUB_OFFLINE = before


def _unreachable(endpoint: str) -> str | None:
    """Why nothing answers at a URL, or at the proxy that leads there; None where something does."""
    url = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    faults = [f"nothing answers within {_CONNECT_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            faults.clear()
        except OSError as error:
            faults[:] = [error.strerror or str(error)]

    # Looking up a name has no time limit of its own, and a host with many addresses would be waited for at each.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(_CONNECT_S)
    return f"{host}:{port} cannot be reached ({faults[0]}), and the cache does not have it" if faults else None
