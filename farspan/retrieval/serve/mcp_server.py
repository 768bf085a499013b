"""The tools over the Model Context Protocol, by its official SDK: on standard input and output for
a program that starts farspan, and over HTTP on the server's own address."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from farspan._version import __version__
from farspan.domain.problems import Problem, Refusal
from farspan.retrieval.serve.index_swap import Current
from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.mcp_tools import (
    INSTRUCTIONS,
    TOOLS,
    ToolAnswer,
    call_tool,
    find_tool,
    refused,
)
from farspan.retrieval.serve.request_queue import QueueFull, TooSlow, WorkThreads
from farspan.retrieval.serve.searcher import Searcher

T = TypeVar("T")
#: Runs work on the index of today, in a thread.
Ask = Callable[[Callable[[Searcher], ToolAnswer]], Awaitable[ToolAnswer]]


def create_server(name: str, ask: Ask) -> Server[Any]:
    """Return a server of the tools, which `ask` runs."""
    listed = []
    for tool in TOOLS:
        hints = types.ToolAnnotations(
            read_only_hint=True, idempotent_hint=True, open_world_hint=False
        )
        entry = types.Tool(
            name=tool.name,
            title=tool.title,
            description=tool.description,
            input_schema=tool.input_schema,
            output_schema=tool.output_schema,
            annotations=hints,
        )
        listed.append(entry)

    async def list_tools(
        context: ServerRequestContext[Any], parameters: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed)

    async def run_tool(
        context: ServerRequestContext[Any], parameters: types.CallToolRequestParams
    ) -> types.CallToolResult:
        answer = await answer_call(ask, parameters.name, parameters.arguments)
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=answer.text)],
            structured_content=answer.structured,
            is_error=answer.is_error,
        )

    return Server(
        f"farspan: {name}",
        version=__version__,
        title=f"Search in {name}",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=run_tool,
    )


async def answer_call(ask: Ask, name: str, arguments: object) -> ToolAnswer:
    """Return the answer of a tool; each way it can fail is an error of the tool, with a code."""
    try:
        find_tool(name)
        return await ask(lambda searcher: call_tool(searcher, name, arguments))
    except Refusal as refusal:
        return refused(refusal.problem)
    except QueueFull as full:
        fact = "as many requests wait already as may"
        return refused(busy(name, fact, f"call it again in {full.retry_s:d} s"))
    except TooSlow as slow:
        fact = f"there was no answer after {slow.limit_s:g} s"
        return refused(busy(name, fact, "ask for less, or again later"))


def busy(name: str, fact: str, remedy: str) -> Problem:
    return Problem(
        code="run-busy", what="the server is busy", where=f"tool {name}", fact=fact, remedy=remedy
    )


def serve_stdio(
    name: str, open_searcher: Callable[[], Searcher], limits: Limits = Limits()
) -> None:
    """Answer on standard input and output until the client closes them.

    Raises Refusal where the index cannot be opened. Nothing else is written to standard output.
    """
    current = Current(open_searcher, look_s=limits.look_s, retry_s=limits.retry_s)
    with closing(current):
        anyio.run(_run_stdio, name, current, limits)


async def _run_stdio(name: str, current: Current, limits: Limits) -> None:
    threads = WorkThreads(
        threads=limits.searching, waiting=limits.searching_waiting, limit_s=limits.search_s
    )

    async def ask(work: Callable[[Searcher], ToolAnswer]) -> ToolAnswer:
        def lease() -> ToolAnswer:
            with current.lease() as searcher:
                return work(searcher)

        return await threads.run(lease)

    server = create_server(name, ask)
    async with anyio.create_task_group() as group:
        group.start_soon(_end_at_signal, current)
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())
        group.cancel_scope.cancel()


async def _end_at_signal(current: Current) -> None:
    """End the process at SIGINT or SIGTERM. The thread that waits for standard input cannot be
    cancelled, so the process does not wait for it."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            current.close()
            os._exit(0)


def create_manager(name: str, ask: Ask, limits: Limits) -> StreamableHTTPSessionManager:
    """Return the manager of requests over HTTP. No session outlives its request: each answer is
    JSON."""
    return StreamableHTTPSessionManager(
        create_server(name, ask),
        json_response=True,
        stateless=True,
        max_request_body_size=limits.body_bytes,
    )
