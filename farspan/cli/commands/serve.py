"""Serve a run's index: a page to search in, and an API for programs, with vectors in OpenAI's
form."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import compute_on_one_thread, find_home, parse_port, takes_run
from farspan.cli.console import Console

HELP = "search the documents in a browser, and an API"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    takes_address(parser)
    takes_llm(parser)


def takes_address(parser: argparse.ArgumentParser) -> None:
    """Add where a server listens, and its token."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (default: 127.0.0.1, this machine)",
    )
    parser.add_argument(
        "--port",
        type=parse_port,
        default=8000,
        help="port to listen on, 0 for any (default: 8000)",
    )
    parser.add_argument(
        "--token", help="who asks must know it; others on the network need one (or $FARSPAN_TOKEN)"
    )


def takes_llm(parser: argparse.ArgumentParser) -> None:
    """Add what answers questions."""
    parser.add_argument(
        "--llm",
        metavar="URL",
        help="a language model that answers questions from what is found, in the form of OpenAI's\n"
        "API: http://127.0.0.1:11434/v1 (or serve.llm in run.yaml; its key in $FARSPAN_LLM_KEY)",
    )
    parser.add_argument(
        "--llm-model", metavar="NAME", help="its name there (or serve.llm_model in run.yaml)"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    compute_on_one_thread()
    folder = find_home(given, console)
    from farspan.app.serving import serve_index

    serve_index(
        folder,
        lambda update: console.write_line(str(update)),
        host=given.host,
        port=given.port,
        token=given.token,
        llm=given.llm,
        llm_model=given.llm_model,
    )
    console.answer({"run": str(folder.path)})
