"""Give other programs' models a search in a run's documents, by the Model Context Protocol (MCP).

Such a program starts `farspan mcp` itself and talks to it on standard input and output. --config
prints what to give to which program. With --http it is a server at an address, as farspan serve is.
"""

from __future__ import annotations

import argparse
import os

from farspan.cli.arguments import compute_on_one_thread, find_home, takes_run
from farspan.cli.commands.serve import takes_address, takes_llm
from farspan.cli.console import Console

HELP = "search the documents from Claude, Cursor, VS Code and others (MCP)"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--http", action="store_true", help="serve at an address instead, with the page and the API"
    )
    parser.add_argument(
        "--config", action="store_true", help="print how the common programs are set up for it"
    )
    takes_address(parser)
    takes_llm(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    compute_on_one_thread()
    if given.config:
        from farspan.app.mcp_clients import client_settings, describe_settings
        from farspan.app.serving import TOKEN_VARIABLE

        folder = find_home(given, Console(json=True))
        token = given.token or os.environ.get(TOKEN_VARIABLE)
        settings = client_settings(
            folder.path,
            url=f"http://{given.host}:{given.port}/mcp" if given.http else None,
            has_token=bool(token),
        )
        console.write_line(describe_settings(settings))
        console.answer({"run": str(folder.path), "clients": settings})
        return
    if given.http:
        from farspan.app.serving import serve_index

        folder = find_home(given, console)
        serve_index(
            folder,
            lambda update: console.write_line(str(update)),
            host=given.host,
            port=given.port,
            token=given.token,
            mcp=True,
            llm=given.llm,
            llm_model=given.llm_model,
        )
        console.answer({"run": str(folder.path)})
        return
    from farspan.app.serving import serve_mcp

    # Standard output is the protocol's: what people read goes to standard error.
    messages = Console(json=True)
    folder = find_home(given, messages)
    serve_mcp(folder, lambda update: messages.write_line(str(update)))
