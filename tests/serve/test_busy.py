"""A queue of a fixed length, and a time limit."""

from __future__ import annotations

import threading
import time

import pytest

from tests.serve.test_api import problem

pytestmark = pytest.mark.slow


def in_background(*calls) -> list[threading.Thread]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    return threads


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_full_queue_gets_503_with_when_to_come_again(start):
    server = start(limits={"searching_waiting": 1, "writing_waiting": 0})
    answers = []

    def sleep():
        found = server.get("/api/search", params={"q": "sleep 1.5 river"})
        answers.append(found.status_code)

    threads = in_background(sleep, sleep)
    full = server.get("/api/search?q=river")
    assert full.status_code == 503 and int(full.headers["retry-after"]) >= 1
    assert "busy" in problem(full)["what"]
    # What takes long has threads of its own, and what needs none is answered.
    assert server.post("/api/generate", {"tokens": 2}).status_code == 200
    assert server.get("/healthz").status_code == 200 and server.get("/").status_code == 200
    joined(threads)
    assert answers == [200, 200]
    assert server.get("/api/search?q=river").status_code == 200

    threads = in_background(lambda: server.post("/api/generate", {"prompt": "slow", "tokens": 12}))
    assert server.post("/v1/embeddings", {"model": "papers", "input": "a"}).status_code == 503
    assert server.get("/api/search?q=river").status_code == 200
    joined(threads)


def test_what_takes_too_long_gets_504_and_the_next_is_served(start):
    server = start(limits={"search_s": 0.5, "write_s": 0.5})
    began = time.monotonic()
    answer = server.get("/api/search", params={"q": "sleep 1 river"})
    assert answer.status_code == 504 and "too long" in problem(answer)["what"]
    assert time.monotonic() - began < 0.95
    # It waits for the thread in vain, then has it.
    time.sleep(0.6)
    assert server.get("/api/search?q=river").status_code == 200
    # The model stops writing once nobody waits.
    assert server.post("/api/generate", {"prompt": "slow", "tokens": 500}).status_code == 504
    time.sleep(0.3)
    assert server.post("/api/generate", {"tokens": 2}).status_code == 200


@pytest.mark.parametrize("waiting", [0, 2])
def test_who_waited_too_long_takes_no_thread(start, waiting):
    server = start(limits={"searching_waiting": waiting, "search_s": 1.0})
    threads = in_background(lambda: server.get("/api/search", params={"q": "sleep 0.9 river"}))
    statuses = [
        server.get("/api/search", params={"q": "sleep 0.7 river"}).status_code for _ in range(1)
    ]
    assert statuses == [504 if waiting else 503]
    joined(threads)
