"""Checks that the web framework has no part for.

A page of another site may make a browser send requests to a server on this machine: `Origin` and
`Sec-Fetch-Site` distinguish these from the server's own page. A client may send its head slowly, or
one that is too large: uvicorn waits for ever, and refuses in plain text. `http.cookies` of Python
before 3.11.10 takes quadratic time: 80 kB of backslashes cost it 12 s.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.refusals import HttpRefusal

#: What another site may lead a browser to.
LINKED_PAGES = ("/", "/report")
#: Bodies of the largest size that are read and thrown away before a refusal.
DRAINED_BODIES = 16
#: The key of a request's scope with the values of the server's own cookie.
TOKENS_KEY = "farspan.tokens"
#: Sent with every answer.
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}
#: What the page may load and do: its own files and nothing else.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
#: The report holds its style and script, and may reach neither this server nor what the page knows.
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; frame-ancestors 'none'; sandbox allow-scripts allow-downloads"
)


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """How the server can be reached.

    `host_names`: the values of `Host` that are accepted, `*` for any. The cookie's name has the
    port, since browsers keep one jar for all ports of a host.
    """

    host_names: tuple[str, ...]
    token: str | None
    port: int

    @property
    def cookie(self) -> str:
        return f"farspan_{self.port}"

    def is_token(self, value: str) -> bool:
        return hmac.compare_digest(value.encode(), (self.token or "").encode())


class Guard:
    """ASGI middleware: refuse requests of other sites' pages and large heads; add
    SECURITY_HEADERS."""

    def __init__(self, app: ASGIApp, *, entrance: Entrance, limits: Limits) -> None:
        self._app = app
        self._cookie = entrance.cookie
        self._names = entrance.host_names
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            refuse_long_head(scope, self._limits)
            await refuse_other_names(scope, receive, self._names)
            refuse_other_sites(scope)
        except HttpRefusal as refusal:
            await refusal.response(scope["path"])(scope, receive, send_with_headers)
            return
        # FastAPI parses every cookie with `http.cookies`: it gets none.
        cookies = Headers(scope=scope).getlist("cookie")
        headers = [pair for pair in scope["headers"] if pair[0] != b"cookie"]
        tokens = cookie_values(cookies, self._cookie)
        scope = {**scope, "headers": headers, TOKENS_KEY: tokens}
        await self._app(scope, receive, send_with_headers)


def refuse_long_head(scope: Scope, limits: Limits) -> None:
    lines = [(scope["raw_path"], scope["query_string"]), *scope["headers"]]
    # A colon, a space and the end of the line.
    size = sum(len(name) + len(value) + 4 for name, value in lines)
    if size > limits.head_bytes:
        raise head_too_large(limits)


async def refuse_other_names(scope: Scope, receive: Receive, host_names: tuple[str, ...]) -> None:
    """Refuse a request to another name than the server's own, which may lead here (DNS rebinding).

    Starlette's middleware decides. Its own refusal is plain text.
    """
    accepted = []

    async def accept(scope: Scope, receive: Receive, send: Send) -> None:
        accepted.append(scope)

    async def ignore(message: Message) -> None:
        pass

    trusted_host = TrustedHostMiddleware(accept, host_names, www_redirect=False)
    await trusted_host(scope, receive, ignore)
    if not accepted:
        host = Headers(scope=scope).get("host", "")
        raise HttpRefusal(
            403,
            "usage",
            what="the server is not called by its own name",
            where="the request's headers",
            fact=f"Host: {host[:80]}",
            remedy="open its own address",
        )


def refuse_other_sites(scope: Scope) -> None:
    """Refuse what a page of another site asks for, except a link to a page."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None and origin_host(origin) != headers.get("host", "").lower():
        raise cross_site(f"Origin: {origin[:80]}")
    site = headers.get("sec-fetch-site")
    if site not in ("cross-site", "same-site"):
        return
    navigates = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
    if not navigates or scope["path"] not in LINKED_PAGES:
        raise cross_site(f"Sec-Fetch-Site: {site}")


def origin_host(origin: str) -> str:
    """Return host and port of an `Origin` header; empty where it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def cookie_values(headers: list[str], name: str) -> list[str]:
    """Return every value of one cookie. A token needs none of the quoting of cookies."""
    values = []
    for header in headers:
        for pair in header.split(";"):
            key, _, value = pair.partition("=")
            if key.strip() == name:
                values.append(value.strip())
    return values


def cross_site(header: str) -> HttpRefusal:
    return HttpRefusal(
        403,
        "usage",
        what="a page of another site asks",
        where="the request's headers",
        fact=header,
        remedy="ask from the server's own page",
    )


def head_too_large(limits: Limits) -> HttpRefusal:
    return HttpRefusal(
        431,
        "out-of-range",
        what="the address and the headers of the request are too large",
        where="head",
        fact=f"at most {limits.head_bytes:,} bytes are read",
        remedy="send long texts as JSON: POST /api/search",
        headers={"connection": "close"},
    )


def not_http() -> HttpRefusal:
    return HttpRefusal(
        400,
        "usage",
        what="the request is not HTTP",
        where="head",
        fact="its first line, a header or a length cannot be read",
        remedy="ask with a client for HTTP/1.1",
        headers={"connection": "close"},
    )


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP with a time limit for the head of a request, and refusals as JSON."""

    #: A subclass sets the server's own.
    limits = Limits()
    _timer: asyncio.TimerHandle | None = None
    #: Bytes that are still read after a refusal; None before one.
    _drain_bytes: int | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_after(self.limits.head_s)

    def data_received(self, data: bytes) -> None:
        if self._drain_bytes is not None:
            self._drain_bytes -= len(data)
            if self._drain_bytes < 0:
                self.transport.close()
            return
        super().data_received(data)
        if self._drain_bytes is not None:
            return
        if self.conn.their_state is not h11.IDLE:
            self._cancel_timer()
        elif self._timer is None:
            self._close_after(self.limits.head_s)

    def send_400_response(self, msg: str) -> None:
        """Refuse a head that is too large or not HTTP, in the form of every refusal.

        What the client still sends is read and thrown away, within limits: a client that cannot
        send does not read the answer either.
        """
        self._cancel_timer()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # The answer has begun: what cannot be read came after it.
            self.transport.close()
            return
        head, _ = self.conn.trailing_data
        is_too_large = len(head) > self.limits.head_bytes
        refusal = head_too_large(self.limits) if is_too_large else not_http()
        _, _, path = head[:100].partition(b" ")
        response = refusal.response(path.decode("latin-1"))
        headers = {**SECURITY_HEADERS, **response.headers}
        events = (
            h11.Response(status_code=response.status_code, headers=[*headers.items()]),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        if self.cycle is not None:
            # A route that waits for the rest of a body gets ClientDisconnect.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._drain_bytes = DRAINED_BODIES * self.limits.body_bytes
        self._close_after(self.limits.body_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def _close_after(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
