"""The address of the Model Context Protocol on the server: behind its guard and its token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from farspan.retrieval.serve.access import Check
from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.mcp_server import create_manager
from farspan.retrieval.serve.mcp_tools import ToolAnswer
from farspan.retrieval.serve.refusals import HttpRefusal
from farspan.retrieval.serve.searcher import Searcher
from farspan.retrieval.serve.site import MCP_PATH, ServedIndex, read_body

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

METHODS = ("GET", "POST", "DELETE")


class McpEndpoint:
    """The ASGI application at MCP_PATH. `manager.run()` lasts as long as it answers."""

    def __init__(
        self, manager: StreamableHTTPSessionManager, check_token: Check, limits: Limits
    ) -> None:
        self.manager = manager
        self._check_token = check_token
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            await self._check_token(request)
            body = await read_body(request, self._limits)
        except HttpRefusal as refusal:
            await refusal.response(MCP_PATH)(scope, receive, send)
            return
        await self.manager.handle_request(scope, replay(body, receive), send)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read, and then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def mcp_route(site: ServedIndex, check_token: Check) -> tuple[Route, McpEndpoint]:
    """Return the route of the protocol, and its application."""

    async def ask(work: Callable[[Searcher], ToolAnswer]) -> ToolAnswer:
        return await site.ask(work)

    manager = create_manager(site.served.name, ask, site.limits)
    endpoint = McpEndpoint(manager, check_token, site.limits)
    return Route(MCP_PATH, endpoint, methods=list(METHODS)), endpoint
