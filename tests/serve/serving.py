"""A server process: `python -m tests.serve.serving RUN JSON`, the JSON being host, port, token and
limits."""

from __future__ import annotations

import http.cookies
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from farspan.domain.problems import Refusal
from farspan.retrieval.llm_endpoint import find_endpoint
from farspan.retrieval.serve.forms import ModelAbout, TextAbout
from farspan.retrieval.serve.limits import Limits
from farspan.retrieval.serve.server import Address, serve
from farspan.retrieval.serve.site import Served
from tests.serve.library import ListSearcher


class Setting(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    limits: Limits = Limits()
    #: Opening an index takes so long.
    opening_s: float = 0.0
    #: By the Model Context Protocol: also at an address, or on standard input and output alone.
    #: The address of a language model, called `stand-in` there.
    llm: str = ""
    mcp: Literal["", "http", "stdio"] = ""


def forbid_cookie_parser() -> None:
    """Make it a fault to parse a cookie with Python's library, in quadratic time before 3.11.10."""

    def parse(*_: object) -> str:
        raise AssertionError("the library has parsed a cookie")

    http.cookies._unquote = http.cookies.BaseCookie.load = parse


def main(run: Path, setting: Setting) -> int:
    def opened() -> ListSearcher:
        time.sleep(setting.opening_s)
        searcher = ListSearcher(run)
        close = searcher.close
        if setting.mcp != "stdio":
            closed = f"closed {len(searcher.texts)}"
            searcher.close = lambda: (close(), print(closed, flush=True))[0]
        return searcher

    if setting.mcp == "stdio":
        from farspan.retrieval.serve.mcp_server import serve_stdio

        serve_stdio(run.name, opened, setting.limits)
        return 0
    served = Served(
        name=run.name,
        created=1,
        report=run / "report.html",
        model=ModelAbout(
            line="llama-like, 2 layers x 32, 0.1 M parameters", parameters=100_000, context=64
        ),
        text=TextAbout(source="papers", documents=29, bytes=12_345),
        llm=find_endpoint(setting.llm, "stand-in", limit_s=setting.limits.ask_s)
        if setting.llm
        else None,
    )
    address = Address(run=run, host=setting.host, port=setting.port, token=setting.token)
    try:
        serve(
            address,
            served,
            opened,
            lambda line: print(line, flush=True),
            setting.limits,
            mcp=setting.mcp == "http",
        )
    except Refusal as refusal:
        print(refusal.problem, file=sys.stderr)
        return refusal.problem.exit_code
    return 0


if __name__ == "__main__":
    forbid_cookie_parser()
    sys.exit(main(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Setting)))
