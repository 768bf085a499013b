"""The Hugging Face hub, asked only where it answers: its libraries try for minutes to reach one
that does not."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: What a connection may take: ten round trips around the world, or a name that is looked up twice.
_CONNECT_S = 4.0
#: What an answer may take once it is connected, and the statuses with which a hub says that it
#: cannot answer now.
_ANSWER_S = 10.0
_AWAY = (500, 502, 503, 504)


@contextmanager
def use_cache_if_unreachable() -> Iterator[str | None]:
    """Let the hub's libraries use only their cache within, if the hub cannot be reached.

    Yields why it cannot, or None. HF_ENDPOINT is the hub's address; HF_HUB_OFFLINE forbids asking
    it.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    fault = find_fault()
    if fault is not None and not before:
        fault += ", and the cache does not have it"
    constants.HF_HUB_OFFLINE = before or fault is not None
    try:
        yield fault
    finally:
        constants.HF_HUB_OFFLINE = before


def find_fault() -> str | None:
    """Return why the hub cannot be asked; None where it can."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _find_fault(constants.ENDPOINT)


def _find_fault(endpoint: str) -> str | None:
    """Return why nothing answers at a URL, or at its proxy; None where something does."""
    url = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host = url.hostname or ""
    port = url.port or (80 if url.scheme == "http" else 443)
    fault = _fault_in_time(
        lambda: socket.create_connection((host, port), timeout=_CONNECT_S).close(), _CONNECT_S
    )
    if fault is None and not url.scheme.startswith("socks"):  # Which urllib does not speak.
        fault = _fault_in_time(lambda: _send_head(endpoint), _ANSWER_S)
    return f"{host}:{port} cannot be reached ({fault})" if fault else None


def _fault_in_time(attempt: Callable[[], None], seconds: float) -> str | None:
    """Return why an attempt fails, or does not end in time; None where it succeeds."""
    faults = [f"nothing answers within {seconds:g} s"]

    def run() -> None:
        try:
            attempt()
            faults.clear()
        except TimeoutError:  # The attempt has the same limit: either may be the first to reach it.
            return
        except (OSError, http.client.HTTPException) as error:
            faults[:] = [getattr(error, "strerror", None) or str(error)]

    # Looking up a name has no time limit of its own, and a host with many addresses would be waited
    # for at each.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return next(iter(faults), None)


def _send_head(endpoint: str) -> None:
    """Ask a URL for anything; raises OSError where nothing answers, or only that it cannot now."""
    question = urllib.request.Request(endpoint, method="HEAD")
    try:
        # Of its own, as urlopen keeps for ever what the environment's proxies were at its first
        # call.
        urllib.request.build_opener().open(question, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError as error:
        if error.code in _AWAY:
            raise OSError(f"HTTP {error.code}, {error.reason}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise error.reason from None
        # Whose certificates count is for the hub's libraries to say.
        if not isinstance(error.reason, ssl.SSLError):
            raise OSError(getattr(error.reason, "strerror", None) or str(error.reason)) from None
