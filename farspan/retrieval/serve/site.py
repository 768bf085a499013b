"""One server: what it serves, and the functions that its routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from farspan.domain.problems import Refusal
from farspan.domain.struct_files import parse_json
from farspan.retrieval.llm_endpoint import Endpoint
from farspan.retrieval.serve import forms
from farspan.retrieval.serve.guard import DRAINED_BODIES
from farspan.retrieval.serve.index_swap import Current
from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.refusals import HttpRefusal
from farspan.retrieval.serve.request_queue import WorkThreads
from farspan.retrieval.serve.searcher import Searcher

T = TypeVar("T")
#: Where the Model Context Protocol is served.
MCP_PATH = "/mcp"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A run as it is served: `name` is also its model's; `created` is the model's, in seconds since
    the epoch."""

    name: str
    created: int
    #: The report of a run; None of an index that belongs to none.
    report: Path | None
    model: forms.ModelAbout | None = None
    text: forms.TextAbout | None = None
    #: The language model that answers questions; None where the user named none.
    llm: Endpoint | None = None


class ServedIndex:
    """What the routes work with. Close it after use."""

    def __init__(
        self, served: Served, open_searcher: Callable[[], Searcher], limits: Limits
    ) -> None:
        self.served = served
        self.limits = limits
        self.current = Current(open_searcher, look_s=limits.look_s, retry_s=limits.retry_s)
        #: Sets of threads, so that a search does not wait for a text that is written.
        self.searching = WorkThreads(
            threads=limits.searching, waiting=limits.searching_waiting, limit_s=limits.search_s
        )
        self.writing = WorkThreads(
            threads=limits.writing, waiting=limits.writing_waiting, limit_s=limits.write_s
        )
        # An endpoint's own limit ends its work a little earlier, with its own refusal.
        self.asking = WorkThreads(
            threads=limits.asking, waiting=limits.asking_waiting, limit_s=2 * limits.ask_s
        )

    async def ask(self, work: Callable[[Searcher], T], threads: WorkThreads | None = None) -> T:
        """Run `work` on today's index, on one of `threads` (searching)."""

        def lease() -> T:
            with self.current.lease() as searcher:
                return work(searcher)

        return await (threads or self.searching).run(lease)

    def close(self) -> None:
        self.current.close()

    async def parse_body(self, request: Request, kind: type[T]) -> T:
        """Return the body of a request as a `kind`. Raises HttpRefusal and Refusal."""
        place = f"{request.method} {request.url.path}"
        content_type = request.headers.get("content-type", "none")
        if content_type.split(";")[0].strip() != "application/json":
            raise HttpRefusal(
                415,
                "usage",
                what="the body is not JSON",
                where=place,
                fact=f"content-type: {content_type[:80]}",
                remedy="send the header content-type: application/json",
            )
        body = await read_body(request, self.limits)
        try:
            return parse_json(body, kind, place)
        except Refusal as refusal:
            what = refusal.problem.what.replace("the file", "the body")
            raise Refusal.of(msgspec.structs.replace(refusal.problem, what=what)) from None


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body, of at most `limits.body_bytes`, that comes within `limits.body_s`."""
    length = request.headers.get("content-length", "0")
    announced = int(length) if length.isdecimal() else 0
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            if announced <= limits.body_bytes:
                async for part in request.stream():
                    body += part
                    if len(body) > limits.body_bytes:
                        break
    except TimeoutError:
        raise HttpRefusal(
            408,
            "usage",
            what="the body did not come",
            where="body",
            fact=f"{len(body):,} bytes came within {limits.body_s:g} s",
            remedy="send it again",
            headers={"connection": "close"},
        ) from None
    size = max(announced, len(body))
    if size > limits.body_bytes:
        await drain_body(request, limits)
        raise HttpRefusal(
            413,
            "out-of-range",
            what="the body of the request is too large",
            where="body",
            fact=f"{size:,} bytes; at most {limits.body_bytes:,}",
            remedy="send it in parts",
            headers={"connection": "close"},
        )
    return bytes(body)


async def drain_body(request: Request, limits: Limits) -> None:
    """Read the rest of a body, within limits: a client that still sends does not read an answer."""
    remaining = DRAINED_BODIES * limits.body_bytes
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(limits.body_s):
            message: Any = {"more_body": True}
            while message.get("more_body") and remaining > 0:
                message = await request.receive()
                remaining -= len(message.get("body", b""))


def refuse_above(value: int, limit: int, what: str, place: str) -> None:
    if value > limit:
        raise HttpRefusal(
            422,
            "out-of-range",
            what=f"too many {what} at once",
            where=place,
            fact=f"{value:,}; at most {limit:,}",
            remedy=f"ask for {limit:,} at a time",
        )
