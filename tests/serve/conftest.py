"""Servers in processes of their own, on free ports of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from farspan.retrieval.serve.beside import find_server
from tests.serve import library
from tests.waiting import LIMIT_S, wait_for


@dataclass
class Server:
    """A server of the run at `run`, and a client that has its token."""

    run: Path
    process: subprocess.Popen[str]
    url: str = ""
    client: httpx.Client = field(default_factory=httpx.Client)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(self.url + path, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **more)


@contextmanager
def running(run: Path, **setting: Any) -> Iterator[Server]:
    """A server, until the block ends."""
    words = [sys.executable, "-m", "tests.serve.serving", str(run), json.dumps(setting)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    server = Server(run, process)
    try:
        server.url, token = wait_for(lambda: find_server(run), "the server's start", process)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        server.client = httpx.Client(headers=headers, timeout=LIMIT_S, trust_env=False)
        yield server
    finally:
        server.client.close()
        process.terminate()
        try:
            process.communicate(timeout=LIMIT_S)
        except (subprocess.TimeoutExpired, ValueError):
            process.kill()
            process.wait(LIMIT_S)


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    library.put(folder, library.texts())
    (folder / "report.html").write_text("<!doctype html><title>the report</title><p>it went well")
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that no test changes or ends."""
    with running(make_run(tmp_path_factory.mktemp("serve") / "papers")) as server:
        yield server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server of its own for a test."""
    with ExitStack() as stack:

        def started(**setting: Any) -> Server:
            run = tmp_path / "papers"
            return stack.enter_context(running(run if run.exists() else make_run(run), **setting))

        yield started
