"""`farspan serve` over a real run, and `farspan search` through it: the same answers, also when the
server is gone."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farspan.domain.problems import EXIT_CODES
from farspan.retrieval.serve.server_info import SERVER_FILE, find_server
from tests.cli.conftest import Farspan
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def indexed(run: Path, tmp_path_factory: pytest.TempPathFactory, farspan: Farspan) -> Path:
    path = Path(
        shutil.copytree(
            run, tmp_path_factory.mktemp("served") / "run", ignore=shutil.ignore_patterns("index*")
        )
    )
    done = farspan("embed", str(path), "--no-eval")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def served(indexed: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "farspan", "serve", str(indexed), "--port", "0"]
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: find_server(indexed), "the server's start", process)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        process.communicate(timeout=LIMIT_S)


def found(farspan: Farspan, indexed: Path, *more: str) -> dict:
    done = farspan("search", "time school", "--run", str(indexed), "--json", *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["answer"]


@pytest.mark.parametrize("system", ["bm25", "model", "fused"])
def test_a_server_gives_the_answer_that_the_command_would_find(indexed, farspan, served, system):
    through = found(farspan, indexed, "--system", system)
    (indexed / SERVER_FILE).rename(indexed / "hidden")
    alone = found(farspan, indexed, "--system", system)
    (indexed / "hidden").rename(indexed / SERVER_FILE)
    for answer in (through, alone):
        for result in answer["results"]:
            for score in ("score", "word_score", "vector_score"):
                result[score] = round(result[score] or 0, 4)
    assert through == alone and through["results"]


def test_refusals_are_the_commands_own(indexed, farspan, served):
    done = farspan("search", "time", "--run", str(indexed), "--where", "colour=red")
    assert (
        done.returncode == EXIT_CODES["usage"]
        and "'colour'" in done.stderr
        and "title" in done.stderr
    )


def test_a_server_that_was_killed_or_hangs_is_done_without(indexed, farspan, served):
    served.send_signal(signal.SIGSTOP)
    assert found(farspan, indexed)["results"]
    served.kill()
    served.communicate(timeout=LIMIT_S)
    assert (indexed / SERVER_FILE).exists() and find_server(indexed) is None
    assert found(farspan, indexed)["results"]
    (indexed / SERVER_FILE).unlink()


def test_a_file_that_names_another_host_is_not_followed(indexed, monkeypatch):
    """A crafted run folder must not make a search call on a stranger."""
    from farspan.retrieval.serve import server_info
    from farspan.retrieval.serve.client import ask

    server_info.write_server_info(indexed, "http://192.0.2.1:80/", None)
    try:
        assert find_server(indexed) is not None, "its process lives"
        connections = []
        monkeypatch.setattr(socket.socket, "connect", lambda *given: connections.append(given))
        assert ask(indexed, "time", 3, None, {}) is None and connections == []
    finally:
        (indexed / SERVER_FILE).unlink()


def test_serve_without_an_index_is_refused_naming_the_embed_command(run, tmp_path, farspan):
    path = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("index*"))
    done = farspan("serve", str(path), "--port", "0")
    assert done.returncode == EXIT_CODES["no-index"] and "farspan embed" in done.stderr


def test_others_need_a_token(indexed, farspan):
    done = farspan("serve", str(indexed), "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == EXIT_CODES["out-of-range"] and "token" in done.stderr
