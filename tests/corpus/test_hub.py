"""A hub that cannot be reached: refused at once, unless the cache has what is asked for."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farspan.corpus import _hub
from farspan.corpus import tokenizer as tokenizers
from farspan.corpus._hub import _find_fault
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

#: A hub of these tests answers late where the machine is busy.
PATIENT = f"from farspan.corpus import _hub; _hub._CONNECT_S = _hub._ANSWER_S = {LIMIT_S}; "
LOAD = (
    f"{PATIENT}from farspan.corpus import tokenizer; "
    "print(tokenizer.load_tokenizer('somebody/words').vocab_size)"
)
READ = (
    f"{PATIENT}from farspan.corpus.sources import open_source; "
    "print(list(open_source('hf:somebody/text').documents()))"
)


@pytest.fixture
def closed() -> Iterator[str]:
    """A URL at which nothing answers: its port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def run(code: str, endpoint: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        **more,
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("code", [LOAD, READ])
def test_hub_out_of_reach_is_tried_once_and_refused(closed: str, tmp_path: Path, code: str) -> None:
    done = run(code, closed, tmp_path)
    # The hub's own library tries again for half a minute, and says so.
    assert "Retrying" not in done.stderr
    assert f"{closed.removeprefix('http://')} cannot be reached (Connection refused)" in done.stderr
    assert "hf download" in done.stderr


class Away(http.server.BaseHTTPRequestHandler):
    """A hub, or a proxy that leads to it, which says that it cannot answer."""

    status = 503
    #: Requests so far.
    asked = 0

    def do_HEAD(self) -> None:
        Away.asked += 1
        self.send_response(self.status)
        self.end_headers()

    def do_CONNECT(self) -> None:
        self.do_HEAD()

    def log_message(self, *words: object) -> None:
        pass


class Here(Away):
    status = 404


@contextmanager
def answering(kind: type[Away]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("code", [LOAD, READ])
@pytest.mark.parametrize("how", ["hub", "proxy"])
def test_a_hub_that_cannot_answer_now_is_asked_once(tmp_path: Path, code: str, how: str) -> None:
    Away.asked = 0
    with answering(Away) as url:
        more = {"https_proxy": url, "no_proxy": ""} if how == "proxy" else {}
        done = run(code, "https://huggingface.co" if how == "proxy" else url, tmp_path, **more)
    assert Away.asked == 1
    assert (
        "cannot be reached" in done.stderr
        and "503" in done.stderr
        and "Retrying" not in done.stderr
    )


@pytest.mark.parametrize("offline", ["0", "1"])
def test_cached_tokenizer_loads_without_the_hub(closed: str, tmp_path: Path, offline: str) -> None:
    stored = tmp_path / "hub" / "models--somebody--words"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("0" * 40)
    words = tokenizers.train_bpe_tokenizer(["a cached text"] * 9, 300)
    (stored / "snapshots" / ("0" * 40)).mkdir(parents=True)
    words.save(stored / "snapshots" / ("0" * 40) / "tokenizer.json")
    done = run(LOAD, closed, tmp_path, HF_HUB_OFFLINE=offline)
    assert done.stdout.split() == [str(words.vocab_size)], done.stderr


def test_a_hub_is_asked_for_where_a_proxy_leads_to_it(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_hub, "_CONNECT_S", LIMIT_S)
    monkeypatch.setattr(_hub, "_ANSWER_S", LIMIT_S)
    with answering(Here) as open_url:
        for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert _find_fault(open_url) is None and _find_fault(closed)
        with answering(Away) as away:
            assert "HTTP 503" in str(_find_fault(away))
        with monkeypatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as silent:
            patch.setattr(_hub, "_ANSWER_S", 0.5)
            assert "nothing answers" in str(
                _find_fault(f"http://127.0.0.1:{silent.getsockname()[1]}")
            )
        assert _find_fault("http://no-such-host.invalid")
        monkeypatch.setenv("http_proxy", open_url)
        assert _find_fault("http://no-such-host.invalid") is None
        monkeypatch.setenv("http_proxy", closed)
        assert _find_fault("http://no-such-host.invalid")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert _find_fault(open_url) is None


FIND = (
    f"{PATIENT}from farspan.corpus.hub_models import find_model_folder; "
    "print(find_model_folder('somebody/model', weights=True))"
)


def test_model_to_continue_is_found_in_the_cache_or_refused(tmp_path: Path, closed: str):
    refused = run(FIND, closed, tmp_path / "home")
    assert refused.returncode and "neither a folder of this name nor a model" in refused.stderr
    assert "hf download somebody/model --local-dir DIR" in refused.stderr
    cached = tmp_path / "home" / "hub" / "models--somebody--model"
    snapshot = cached / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abc")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    found = run(FIND, closed, tmp_path / "home")
    assert found.stdout.strip() == str(snapshot), found.stderr
