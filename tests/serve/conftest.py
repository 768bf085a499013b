"""Servers in processes of their own, on free ports of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from farspan.retrieval.serve.server_info import find_server
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


class Held:
    """A request in the background that the server is at work on until `free` is called."""

    def __init__(self, server: Server, name: str, *, writing: bool = False) -> None:
        self._run = server.run
        self._name = name
        self._answers: list[httpx.Response | httpx.HTTPError] = []

        def ask() -> None:
            try:
                if writing:
                    body = {"prompt": f"hold {name}", "tokens": 2}
                    self._answers.append(server.post("/api/generate", body))
                else:
                    query = {"q": f"hold {name} river"}
                    self._answers.append(server.get("/api/search", params=query))
            except httpx.HTTPError as error:
                self._answers.append(error)

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    @property
    def begun(self) -> bool:
        """Whether the server has begun to work on it."""
        return (self._run / f"held-{self._name}").exists()

    @property
    def answered(self) -> bool:
        return bool(self._answers)

    def wait_until_begun(self) -> Held:
        wait_for(lambda: self.begun, f"the server works on {self._name}")
        return self

    def free(self) -> None:
        (self._run / f"free-{self._name}").touch()

    def answer(self) -> httpx.Response | httpx.HTTPError:
        """What it was answered, or how the connection broke."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self._answers[0]


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
