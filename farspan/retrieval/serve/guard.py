"""Who may ask: before any request is read it is known where it comes from, that it has the token,
and how long it is.

A page of another site may make a browser send requests to a server on this machine, and may give
its own name this machine's address (DNS rebinding). Names in `Host` and `Origin` tell these from
the server's own page.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.refusals import Turned, problem_answer

#: What needs no token: nothing of the run is in it.
OPEN = ("/healthz", "/static/")
#: What another site may lead a browser to.
PAGES = ("/", "/report")
#: Bodies of the largest size that are read and thrown away before a refusal.
DRAINED = 16
#: Sent with every answer.
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """How the server can be reached: `names` that a request may call it by, None being any; the
    token, if it has one; the port, which its cookie is named by as browsers keep one jar for all
    ports of a host."""

    names: frozenset[str] | None
    token: str | None
    port: int

    @property
    def cookie(self) -> str:
        return f"farspan_{self.port}"


def loopback_names(host: str) -> frozenset[str]:
    return frozenset({"localhost", "127.0.0.1", "::1", host.lower()})


class Guard:
    """The application behind the checks. `locked` is the page for a browser without the token."""

    def __init__(self, app: ASGIApp, *, entrance: Entrance, limits: Limits, locked: bytes) -> None:
        self._app, self._entrance, self._limits, self._locked = app, entrance, limits, locked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = _with_headers(send)
        try:
            headers, path = Headers(scope=scope), scope["path"]
            self._refuse_long_head(scope)
            self._refuse_strangers(scope, headers)
            self._refuse_size(scope, headers)
            if entered := self._enter(scope):
                await entered(scope, receive, send)
                return
            if not (path in OPEN or path.startswith(OPEN[1])) and not self._knows_token(headers):
                await self._turn_away(headers, path)(scope, receive, send)
                return
            body = await self._body(receive) if scope["method"] == "POST" else b""
        except Turned as turned:
            if turned.status in (413, 431):
                await self._drain(receive)
            answer = problem_answer(turned.problem, turned.status, scope["path"], turned.headers)
            await answer(scope, receive, send)
            return
        await self._app(_without_cookies(scope), _replayed(body, receive), send)

    def _refuse_long_head(self, scope: Scope) -> None:
        lines = [(scope["raw_path"], scope["query_string"]), *scope["headers"]]
        # A colon, a space and the end of the line.
        size = sum(len(name) + len(value) + 4 for name, value in lines)
        if size > self._limits.head_bytes:
            raise head_too_large(self._limits)

    def _refuse_strangers(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        name = _host_name(host)
        names = self._entrance.names
        if not name or (names is not None and name not in names):
            raise _forbidden(
                "the server is not called by its own name",
                f"Host: {host[:80]}",
                "open its own address",
            )
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and _host(origin) != host.lower():
            raise _forbidden(
                "a page of another site asks",
                f"Origin: {origin[:80]}",
                "ask from the server's own page",
            )
        follows = (
            headers.get("sec-fetch-mode") == "navigate"
            and scope["path"] in PAGES
            and scope["method"] == "GET"
        )
        if site in ("cross-site", "same-site") and not follows:
            raise _forbidden(
                "a page of another site asks",
                f"Sec-Fetch-Site: {site}",
                "ask from the server's own page",
            )

    def _refuse_size(self, scope: Scope, headers: Headers) -> None:
        limits, length = self._limits, headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limits.body_bytes:
            raise _body_too_large(int(length), limits)
        if (
            scope["method"] == "POST"
            and headers.get("content-type", "").split(";")[0].strip() != "application/json"
        ):
            raise Turned(
                415,
                "usage",
                what="the body is not said to be JSON",
                where=f"POST {scope['path'][:80]}",
                fact=f"content-type: {headers.get('content-type', 'none')[:80]}",
                remedy="send the header content-type: application/json",
            )

    def _enter(self, scope: Scope) -> Response | None:
        """The page's address with the token: the browser gets it as a cookie, and the address
        without it."""
        if scope["path"] != "/" or self._entrance.token is None:
            return None
        asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in asked if name == "token"]
        if not given or not self._is_token(given[0]):
            return None
        rest = urlencode([pair for pair in asked if pair[0] != "token"])
        answer = RedirectResponse(f"/?{rest}" if rest else "/", 303)
        answer.set_cookie(self._entrance.cookie, given[0], httponly=True, samesite="strict")
        return answer

    def _knows_token(self, headers: Headers) -> bool:
        if self._entrance.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._is_token(given.strip())
        kept = cookie_values(headers.getlist("cookie"), self._entrance.cookie)
        return any(self._is_token(value) for value in kept)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._entrance.token or "").encode())

    def _turn_away(self, headers: Headers, path: str) -> Response:
        said = {"www-authenticate": "Bearer"}
        if "text/html" in headers.get("accept", ""):
            return Response(
                self._locked, 401, {**said, "content-security-policy": PAGE_POLICY}, "text/html"
            )
        turned = Turned(
            401,
            "usage",
            what="the server wants its token",
            where=path[:80],
            fact="there is none, or another",
            remedy="send the header Authorization: Bearer TOKEN",
        )
        return problem_answer(turned.problem, 401, path, said)

    async def _body(self, receive: Receive) -> bytes:
        """All of the body: at most so much, within its time."""
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise Turned(
                            400,
                            "usage",
                            what="the request broke off",
                            where="body",
                            fact="the client has gone",
                            remedy="send it again",
                        )
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._limits.body_bytes:
                        raise _body_too_large(size, self._limits)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Turned(
                408,
                "usage",
                what="the body did not come",
                where="body",
                remedy="send it again",
                fact=f"{size:,} bytes came within {self._limits.body_s:g} s",
                headers={"connection": "close"},
            ) from None

    async def _drain(self, receive: Receive) -> None:
        """Take what still comes of a body that is too large, within limits: who sends does not hear
        otherwise."""
        left = DRAINED * self._limits.body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.body_s):
                message: Message = {"more_body": True}
                while message.get("more_body") and left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))


#: What the page may load and do: its own files and nothing else.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src "
    "'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
#: The report holds its style and script, and may reach nothing: neither this server nor what the
#: page knows.
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; "
    "frame-ancestors 'none'; sandbox allow-scripts allow-downloads"
)


def cookie_values(headers: Iterable[str], name: str) -> Iterator[str]:
    """Every value of one cookie in `Cookie` headers.

    `http.cookies` of Python before 3.11.10 takes quadratic time: 80 kB of backslashes cost it 12 s.
    A token needs none of the quoting that it undoes.
    """
    for header in headers:
        for pair in header.split(";"):
            key, _, value = pair.partition("=")
            if key.strip() == name:
                yield value.strip()


def _without_cookies(scope: Scope) -> Scope:
    """The request as the application gets it. FastAPI parses every cookie, with `http.cookies`,
    and the application reads none."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"cookie"]
    return {**scope, "headers": headers}


def _host(origin: str) -> str:
    """Host and port of an `Origin` header; empty where it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """The name in a `Host` header; empty where it is no name."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _forbidden(what: str, fact: str, remedy: str) -> Turned:
    return Turned(403, "usage", what=what, where="the request's headers", fact=fact, remedy=remedy)


def head_too_large(limits: Limits) -> Turned:
    return Turned(
        431,
        "out-of-range",
        what="the address and the headers of the request are too large",
        where="head",
        fact=f"at most {limits.head_bytes:,} bytes are read",
        remedy="send long texts as JSON: POST /api/search",
        headers={"connection": "close"},
    )


def not_http() -> Turned:
    return Turned(
        400,
        "usage",
        what="the request is not HTTP",
        where="head",
        fact="its first line, a header or a length cannot be read",
        remedy="ask with a client for HTTP/1.1",
        headers={"connection": "close"},
    )


def _body_too_large(size: int, limits: Limits) -> Turned:
    return Turned(
        413,
        "out-of-range",
        what="the body of the request is too large",
        where="body",
        fact=f"{size:,} bytes; at most {limits.body_bytes:,}",
        remedy="send it in parts",
        headers={"connection": "close"},
    )


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name for name, _ in message["headers"]}
            more = [
                (name.encode(), value.encode())
                for name, value in HEADERS.items()
                if name.encode() not in there
            ]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What the application receives: the body that was read, then what the client does."""
    given = False

    async def receiving() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving
