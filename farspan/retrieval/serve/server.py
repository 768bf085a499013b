"""The server's process: its socket, the file that says where it is, and its end."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from farspan.domain.problems import Refusal, command
from farspan.retrieval.serve import beside
from farspan.retrieval.serve.app import create_app
from farspan.retrieval.serve.guard import (
    DRAINED,
    HEADERS,
    Entrance,
    head_too_large,
    loopback_names,
    not_http,
)
from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.refusals import problem_answer
from farspan.retrieval.serve.searcher import Searcher
from farspan.retrieval.serve.site import Served, Site

_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,200}")


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
    say: Callable[[str], None],
    limits: Limits = Limits(),
) -> None:
    """Serve until the process is asked to end (SIGINT, SIGTERM), then let requests end that run.

    Raises Refusal (out-of-range) for an address that others can reach without a token, and
    (port-taken).
    """
    with closing(_listening(address)) as listener:
        bound, port = listener.getsockname()[:2]
        ours = ipaddress.ip_address(_bare(bound)).is_loopback
        _check_token(address, ours=ours)
        with closing(Site(served, open_searcher, limits)) as site:
            names = loopback_names(address.host) if ours else None
            app = create_app(site, Entrance(names=names, token=address.token, port=port))
            shown = (
                _host(address.host, bound)
                if ours
                else _host(address.host, bound, socket.gethostname())
            )
            query = f"?token={address.token}" if address.token else ""
            server = _Server(_config(app, limits))
            with server.capture_signals():
                there = beside.write(
                    address.run, f"http://{_host(address.host, bound)}:{port}", address.token
                )
                say(f"serving {address.run} at http://{shown}:{port}/{query}")
                say("Ctrl-C ends it")
                try:
                    server.run(sockets=[listener])
                finally:
                    beside.remove(address.run, there)
    say("ended")


def _config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    bounds = limits

    class Protocol(_Protocol):
        limits = bounds

    return uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        # The same one whatever else is installed.
        loop="asyncio",
        http=Protocol,
        h11_max_incomplete_event_size=limits.head_bytes,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=max(1, round(limits.end_s)),
        timeout_keep_alive=20,
    )


class _Protocol(H11Protocol):
    """uvicorn's own waits for the end of a request's head for ever, and refuses in plain text."""

    limits: Limits
    _timer: asyncio.TimerHandle | None = None
    #: Bytes that are still read after a refusal; None before one.
    _drain_bytes: int | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start(self.limits.head_s)

    def data_received(self, data: bytes) -> None:
        if self._drain_bytes is None:
            super().data_received(data)
            self._watch_head()
            return
        self._drain_bytes -= len(data)
        if self._drain_bytes < 0:
            self.transport.close()

    def _watch_head(self) -> None:
        if self._drain_bytes is not None:
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._start(self.limits.head_s)

    def send_400_response(self, msg: str) -> None:
        """Refuse a head that is too large or not HTTP, in the form of every refusal.

        What the client still sends is read and thrown away, within limits: a client that cannot
        send does not read the answer either.
        """
        self._stop()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # The answer has begun: what cannot be read came after it.
            self.transport.close()
            return
        head, _ = self.conn.trailing_data
        too_large = len(head) > self.limits.head_bytes
        turned = head_too_large(self.limits) if too_large else not_http()
        _, _, target = head[:100].partition(b" ")
        answer = problem_answer(
            turned.problem, turned.status, target.decode("latin-1"), turned.headers
        )
        headers = {**HEADERS, **answer.headers}
        events = (
            h11.Response(status_code=answer.status_code, headers=[*headers.items()]),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        if self.cycle is not None:
            # What waits for the rest of a body is told that it will not come.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._drain_bytes = DRAINED * self.limits.body_bytes
        self._start(self.limits.body_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _start(self, seconds: float) -> None:
        """Close the connection after so long, unless `_stop` comes before."""
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """uvicorn's own raises a signal again once it has ended; to be asked to end is how this one
    ends."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listening(address: Address) -> socket.socket:
    host, port = address.host, address.port
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(where[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other = port + 1 if port < 65535 else 0
            raise Refusal(
                "port-taken",
                what="another program listens on this port",
                where=f"{host}, port {port}",
                fact=error.strerror or str(error),
                remedy=address.serve_command("--port", other),
            ) from None
        far = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise Refusal(
            "out-of-range",
            what="the server cannot listen here",
            where=f"{host}, port {port}",
            fact=error.strerror or str(error),
            remedy=address.serve_command("--host", "127.0.0.1")
            if far
            else address.serve_command("--port", 8000),
        ) from None
    return listener


def _check_token(address: Address, *, ours: bool) -> None:
    """Refuses to let others in without a token, and one that is guessed or that no header can
    hold."""
    if address.token is None and ours:
        return
    if address.token is None or not _TOKEN.fullmatch(address.token):
        remedy = (
            address.serve_command("--host", address.host)
            if address.host != "127.0.0.1"
            else address.serve_command()
        )
        raise Refusal(
            "out-of-range",
            what="the token does not do"
            if address.token is not None
            else "others can reach this address",
            where=f"{address.host}, port {address.port}",
            fact="a token has 16 to 200 letters, digits and . _ ~ -"
            if address.token is not None
            else "everybody who can may read your documents",
            remedy=f'{remedy} --token "$(openssl rand -hex 16)"',
        )


def _host(host: str, bound: str, every: str = "") -> str:
    """What the server is called in a URL; `every`: where it listens at every address of this
    host."""
    if ipaddress.ip_address(_bare(bound)).is_unspecified:
        host = every or ("::1" if ":" in bound else "127.0.0.1")
    return f"[{host}]" if ":" in host else host


def _bare(bound: str) -> str:
    """An address without the interface that it may name."""
    return bound.partition("%")[0]
