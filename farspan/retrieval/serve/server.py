"""The server's process: its socket, its signals, and its end."""

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
from starlette.types import ASGIApp

from farspan.domain.problems import Refusal, command
from farspan.retrieval.serve.app import create_app
from farspan.retrieval.serve.guard import Entrance, GuardedProtocol
from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.searcher import Searcher
from farspan.retrieval.serve.server_info import remove_server_info, write_server_info
from farspan.retrieval.serve.site import MCP_PATH, Served, ServedIndex

_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,200}")
#: Seconds that an idle connection is kept.
KEEP_ALIVE_S = 20


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen, for a server of the run at `run`."""

    run: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None

    def serve_command(self, *words: object) -> str:
        return command("serve", self.run, *words)


def serve(
    address: Address,
    served: Served,
    open_searcher: Callable[[], Searcher],
    report: Callable[[str], None],
    limits: Limits = Limits(),
    *,
    mcp: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests that are in flight.

    Raises Refusal (out-of-range) for an address that others can reach without a token, and
    (port-taken).
    """
    with closing(listen(address)) as listener:
        bound, port = listener.getsockname()[:2]
        ip = ipaddress.ip_address(bound.partition("%")[0])
        _check_token(address, is_local=ip.is_loopback)
        local_names = ("localhost", "127.0.0.1", "[::1]", url_host(address.host.lower()))
        entrance = Entrance(
            host_names=local_names if ip.is_loopback else ("*",), token=address.token, port=port
        )
        every_address = "::1" if ip.version == 6 else "127.0.0.1"
        host = url_host(every_address if ip.is_unspecified else address.host)
        shown_host = url_host(socket.gethostname()) if ip.is_unspecified else host
        query = f"?token={address.token}" if address.token else ""

        @contextmanager
        def announced() -> Iterator[None]:
            info = write_server_info(address.run, f"http://{host}:{port}", address.token)
            report(f"serving {address.run} at http://{shown_host}:{port}/{query}")
            if mcp:
                report(f"MCP at http://{shown_host}:{port}{MCP_PATH}")
            report(f"Ctrl-C stops the server; requests in flight get {limits.end_s:g} s")
            try:
                yield
            finally:
                remove_server_info(address.run, info)

        with closing(ServedIndex(served, open_searcher, limits)) as site:
            app = create_app(site, entrance, announced, mcp=mcp)
            server = SearchServer(server_config(app, limits))
            server.run(sockets=[listener])
    report("ended")


def server_config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    protocol = type("Protocol", (GuardedProtocol,), {"limits": limits})
    return uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        # The same one whatever else is installed.
        loop="asyncio",
        http=protocol,
        h11_max_incomplete_event_size=limits.head_bytes,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=max(1, round(limits.end_s)),
        timeout_keep_alive=KEEP_ALIVE_S,
    )


class SearchServer(uvicorn.Server):
    """uvicorn's own raises a signal again once it has ended: this one ends in peace."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at `address`. Raises Refusal (port-taken, out-of-range)."""
    host = address.host
    port = address.port
    where = f"{host}, port {port}"
    try:
        options = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = options[0]
        return socket.create_server(place[:2], family=family, backlog=2048)
    except OSError as error:
        fact = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            raise Refusal(
                "port-taken",
                what="another program listens on this port",
                where=where,
                fact=fact,
                remedy=address.serve_command("--port", port + 1 if port < 65535 else 0),
            ) from None
        is_elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        option = ("--host", "127.0.0.1") if is_elsewhere else ("--port", 8000)
        raise Refusal(
            "out-of-range",
            what="the server cannot listen here",
            where=where,
            fact=fact,
            remedy=address.serve_command(*option),
        ) from None


def _check_token(address: Address, *, is_local: bool) -> None:
    """Refuse an open address without a token, and a token that is guessed or fits no header."""
    token = address.token
    if (token is None and is_local) or (token is not None and _TOKEN.fullmatch(token)):
        return
    what = "the token does not do"
    fact = "a token has 16 to 200 letters, digits and . _ ~ -"
    if token is None:
        what = "others can reach this address"
        fact = "everybody who can may read your documents"
    host = () if address.host == "127.0.0.1" else ("--host", address.host)
    raise Refusal(
        "out-of-range",
        what=what,
        where=f"{address.host}, port {address.port}",
        fact=fact,
        remedy=f'{address.serve_command(*host)} --token "$(openssl rand -hex 16)"',
    )


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
