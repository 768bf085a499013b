"""`farspan mcp` over a real run, by the protocol's official client."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client.client import Client
from mcp.client.stdio import stdio_client

from tests.cli.conftest import Farspan
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_client_searches_a_run_without_pytorch_and_settings_name_it(
    run: Path, farspan: Farspan, desk: Path, environment: dict[str, str]
):
    assert farspan("embed", str(run)).returncode == 0
    found = json.loads(farspan("search", "school family", str(run), "--json", "-k", "3").stdout)
    wanted = [result["id"] for result in found["answer"]["results"]]
    log = desk / "mcp.log"

    async def talk() -> None:
        words = ["-X", "importtime", "-m", "farspan", "mcp", str(run)]
        parameters = StdioServerParameters(
            command=sys.executable,
            args=words,
            env={**environment, "PYTHONPATH": str(ROOT)},
            cwd=desk,
        )
        with anyio.fail_after(LIMIT_S), log.open("w") as errors:
            async with Client(stdio_client(parameters, errlog=errors)) as client:
                answer = await client.call_tool("search", {"query": "school family", "k": 3})
                results = answer.structured_content["results"]
                assert [result["id"] for result in results] == wanted
                opened = await client.call_tool("passage", {"id": wanted[0], "after": 2})
                assert opened.structured_content["passage"]["text"] == results[0]["text"]
                assert 1 <= len(opened.structured_content["after"]) <= 2
                listed = await client.call_tool("documents", {"k": 200})
                assert listed.structured_content["total"] >= 40
                near = await client.call_tool("similar", {"id": wanted[0], "k": 2})
                assert len(near.structured_content["results"]) == 2

    anyio.run(talk)
    if found["answer"]["system"] == "bm25":
        assert not [line for line in log.read_text().splitlines() if line.endswith(" torch")]
    settings = json.loads(farspan("mcp", str(run), "--config", "--json").stdout)["clients"]
    assert all(str(run) in setting["setting"] for setting in settings)
