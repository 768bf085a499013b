"""The server's process: its socket, the file that says where it is, and its end."""

from __future__ import annotations

import errno
import ipaddress
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from farspan.domain.problems import Refusal, command
from farspan.retrieval.serve import beside
from farspan.retrieval.serve.app import create_app
from farspan.retrieval.serve.guard import Entrance, loopback_names
from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.searcher import Searcher
from farspan.retrieval.serve.site import Served, Site

#: Bytes of the first line and the headers that are read: a query that is too long is told so.
_HEAD_BYTES = 2**21
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,200}")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen, for a server of the run at `run`."""

    run: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None

    def again(self, *words: object) -> str:
        return command("serve", self.run, *words)


def serve(
    address: Address, served: Served, open_searcher: Callable[[], Searcher], say: Callable[[str], None],
    limits: Limits | None = None,
) -> None:  # fmt: skip
    """Serve until the process is asked to end (SIGINT, SIGTERM), then let requests end that run.

    Raises Refusal (out-of-range) for an address that others can reach without a token, and (port-taken).
    """
    limits = limits or Limits()
    with closing(_listening(address)) as listener:
        bound, port = listener.getsockname()[:2]
        ours = _is_loopback(bound)
        _check_token(address, ours=ours)
        with closing(Site(served, open_searcher, limits)) as site:
            names = loopback_names(address.host) if ours else None
            app = create_app(site, Entrance(names=names, token=address.token, port=port))
            config = uvicorn.Config(
                app, log_level="warning", access_log=False, server_header=False, ws="none", lifespan="off", http="h11",
                h11_max_incomplete_event_size=_HEAD_BYTES, limit_concurrency=limits.connections,
                timeout_graceful_shutdown=max(1, round(limits.end_s)), timeout_keep_alive=20,
            )  # fmt: skip
            url = f"http://{_reached(address.host, bound)}:{port}"
            there = beside.write(address.run, url, address.token)
            shown = url if ours or not _is_any(bound) else f"http://{socket.gethostname()}:{port}"
            say(f"serving {address.run} at {shown}/{f'?token={address.token}' if address.token else ''}")
            say("Ctrl-C ends it")
            try:
                _Server(config).run(sockets=[listener])
            finally:
                beside.remove(address.run, there)
    say("ended")


class _Server(uvicorn.Server):
    """uvicorn's own raises a signal again once it has ended; to be asked to end is how this one ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listening(address: Address) -> socket.socket:
    host, port = address.host, address.port
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(where[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other = port + 1 if port < 65535 else 0
            raise Refusal(
                "port-taken", what="another program listens on this port", where=f"{host}, port {port}",
                fact=error.strerror or str(error), remedy=address.again("--port", other),
            ) from None  # fmt: skip
        far = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise Refusal(
            "out-of-range", what="the server cannot listen here", where=f"{host}, port {port}",
            fact=error.strerror or str(error),
            remedy=address.again("--host", "127.0.0.1") if far else address.again("--port", 8000),
        ) from None  # fmt: skip
    return listener


def _is_loopback(bound: str) -> bool:
    return ipaddress.ip_address(bound.partition("%")[0]).is_loopback


def _is_any(bound: str) -> bool:
    """Whether this is every address of the host."""
    return ipaddress.ip_address(bound.partition("%")[0]).is_unspecified


def _check_token(address: Address, *, ours: bool) -> None:
    """Refuses to let others in without a token, and one that is guessed or that no header can hold."""
    if address.token is None and ours:
        return
    if address.token is None or not _TOKEN.fullmatch(address.token):
        where = address.again("--host", address.host) if address.host != "127.0.0.1" else address.again()
        raise Refusal(
            "out-of-range",
            what="the token does not do" if address.token is not None else "others can reach this address",
            where=f"{address.host}, port {address.port}",
            fact="a token has 16 to 200 letters, digits and . _ ~ -" if address.token is not None
            else "whoever does may read your documents",
            remedy=f'{where} --token "$(openssl rand -hex 16)"',
        )  # fmt: skip


def _reached(host: str, bound: str) -> str:
    """How a program on this host reaches the server."""
    name = ("::1" if ":" in bound else "127.0.0.1") if _is_any(bound) else host
    return f"[{name}]" if ":" in name else name
