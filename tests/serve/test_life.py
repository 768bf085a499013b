"""A server's life: where it is found, a new index, its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest

from farspan.domain.problems import EXIT_CODES
from farspan.retrieval.serve import server_info
from farspan.retrieval.serve.server_info import find_server
from tests.serve.conftest import Held, make_run
from tests.serve.library import Text, put
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_server_is_found_while_it_runs_and_removes_its_file_at_the_end(start, number):
    server = start(token="a-token-of-24-characters")
    path = server.run / "serve.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_server(server.run) == (server.url, "a-token-of-24-characters")
    said = json.loads(path.read_text())
    assert said["pid"] == server.process.pid
    server.process.send_signal(number)
    out, error = server.process.communicate(timeout=LIMIT_S)
    assert server.process.returncode == 0 and error == ""
    assert "/?token=a-token-of-24-characters" in out and "ended" in out and "closed 29" in out
    assert not path.exists() and find_server(server.run) is None
    assert [entry.name for entry in server.run.iterdir() if "serve" in entry.name] == []


def test_server_file_left_by_a_killed_server_is_ignored(start):
    server = start()
    server.process.kill()
    server.process.wait(LIMIT_S)
    assert (server.run / "serve.json").exists() and find_server(server.run) is None
    # Its pid may be another's by now.
    said = json.loads((server.run / "serve.json").read_text())
    for change in (
        {"pid": os.getpid()},
        {"pid": os.getpid(), "began": ""},
        {"host": "elsewhere"},
        {"more": 1},
    ):
        (server.run / "serve.json").write_text(json.dumps({**said, **change}))
        assert find_server(server.run) is None
    for nonsense in ("", "[]", "null", "{", "\x00"):
        (server.run / "serve.json").write_text(nonsense)
        assert find_server(server.run) is None
    assert find_server(server.run / "nowhere") is None


def test_finding_a_server_needs_the_standard_library_only():
    code = (
        "import sys; before = {*sys.modules}; import farspan.retrieval.serve.server_info; "
        "print(*{*sys.modules} - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names == {
        "farspan"
    }


def test_server_removes_its_server_file_only_if_not_overwritten_by_another(tmp_path):
    mine = server_info.write_server_info(tmp_path, "http://127.0.0.1:1", None)
    assert find_server(tmp_path) == ("http://127.0.0.1:1", None)
    server_info.write_server_info(tmp_path, "http://127.0.0.1:2", None)
    server_info.remove_server_info(tmp_path, mine)
    assert find_server(tmp_path) == ("http://127.0.0.1:2", None)


def test_running_request_is_finished_at_the_end(start):
    server = start(limits={"end_s": LIMIT_S})
    held = Held(server, "last").wait_until_begun()
    server.process.terminate()
    held.free()
    server.process.communicate(timeout=LIMIT_S)
    assert server.process.returncode == 0 and held.answer().json()["total"] > 0


@pytest.mark.parametrize("writing", [False, True])
def test_request_that_outlasts_the_end_is_left(start, writing):
    server = start(limits={"end_s": 1.0})
    held = Held(server, "last", writing=writing).wait_until_begun()
    server.process.terminate()
    server.process.communicate(timeout=LIMIT_S)
    assert server.process.returncode == 0
    assert not (server.run / "serve.json").exists()
    held.answer()


def total(server, word: str) -> int:
    return server.get("/api/search", params={"q": word}).json()["total"]


def test_a_new_index_is_taken_up_while_it_serves(start):
    server = start(limits={"look_s": 0.1, "searching": 2})
    assert total(server, "zeppelin") == 0
    held = Held(server, "old").wait_until_begun()
    put(server.run, [Text(title="Zeppelin", text="A zeppelin flies.", origin="z.txt")])
    wait_for(lambda: total(server, "zeppelin") == 1, "the new index is taken up")
    assert not held.answered, "the old one is still in use"
    held.free()
    assert held.answer().json()["total"] > 20, "it ends with the index that it began with"
    assert server.get("/api/documents").json()["total"] == 1
    server.process.terminate()
    out, _ = server.process.communicate(timeout=LIMIT_S)
    assert [line for line in out.splitlines() if line.startswith("closed")] == [
        "closed 29",
        "closed 1",
    ]


def test_every_request_is_answered_while_indices_change(start):
    server = start(limits={"look_s": 0.02})
    done = threading.Event()
    statuses = []

    def ask() -> None:
        while not done.is_set():
            statuses.append(server.get("/api/search?q=river").status_code)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(15):
        put(
            server.run,
            [Text(title=f"{n}", text=f"river {n}", origin="r") for n in range(number + 1)],
        )
        wait_for(lambda: len(statuses) > 3 * number, "requests are answered")  # noqa: B023
    wait_for(lambda: total(server, "river") == 15, "the last index is taken up")
    done.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert {*statuses} == {200} and len(statuses) > 30


def test_an_index_that_cannot_be_opened_leaves_the_old_one(start):
    server = start(limits={"look_s": 0.1, "retry_s": 0.3})
    index = server.run / "index" / "index.json"
    whole = index.read_bytes()
    index.write_text("{")
    wait_for(
        lambda: (server.get("/api/about").json()["trouble"] or {}).get("code") == "out-of-range",
        "trouble",
    )
    assert total(server, "river") > 20
    index.unlink()
    assert total(server, "river") > 20
    index.write_bytes(whole)
    wait_for(lambda: server.get("/api/about").json()["trouble"] is None, "the end of the trouble")


def refused(run, **setting) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.serve.serving", str(run), json.dumps(setting)]
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)


def test_a_port_that_is_taken_is_refused_with_the_next(tmp_path):
    run = make_run(tmp_path / "papers")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = refused(run, port=port)
    assert done.returncode == EXIT_CODES["port-taken"] == 49
    assert (
        f"fix:   farspan serve {run} --port {port + 1}" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert not (run / "serve.json").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"host": "0.0.0.0"}, "others can reach this address"),
        ({"host": "::"}, "others can reach this address"),
        ({"host": "0.0.0.0", "token": "short"}, "a token has 16 to 200"),
        ({"token": "with spaces in it, it cannot be"}, "a token has 16 to 200"),
        ({"host": "203.0.113.7"}, "cannot listen here"),
        ({"host": "no.such.host.invalid"}, "cannot listen here"),
    ],
)
def test_an_address_that_does_not_do_is_refused(tmp_path, setting, words):
    run = make_run(tmp_path / "papers")
    done = refused(run, **setting)
    assert done.returncode == EXIT_CODES["out-of-range"], done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert "fix:   farspan serve" in done.stderr
    assert ("openssl rand" in done.stderr) == ("token" in words or "others" in words)


def test_the_command_in_the_remedy_makes_a_token_that_does():
    made = subprocess.run(
        ["openssl", "rand", "-hex", "16"], capture_output=True, text=True, check=True
    ).stdout.strip()
    from farspan.retrieval.serve.server import _TOKEN

    assert _TOKEN.fullmatch(made)
