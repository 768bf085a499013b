"""A queue of a fixed length, and a time limit."""

from __future__ import annotations

import pytest

from tests.serve.conftest import Held
from tests.serve.test_api import problem
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def river_status(server) -> int:
    return server.get("/api/search?q=river").status_code


def test_full_queue_gets_503_with_when_to_come_again(start):
    server = start(limits={"searching_waiting": 1, "writing_waiting": 0})
    running = Held(server, "running").wait_until_begun()
    # One of these waits in the queue, and the other finds it full.
    pair = [Held(server, "first"), Held(server, "second")]
    wait_for(lambda: any(one.answered for one in pair), "one is turned away")
    refused = next(one for one in pair if one.answered)
    (queued,) = (one for one in pair if one is not refused)
    full = refused.answer()
    assert full.status_code == 503 and int(full.headers["retry-after"]) >= 1
    assert "busy" in problem(full)["what"]
    # Writing has threads of its own, and what needs none is answered.
    assert server.post("/api/generate", {"tokens": 2}).status_code == 200
    assert server.get("/healthz").status_code == 200 and server.get("/").status_code == 200
    running.free()
    queued.free()
    assert running.answer().status_code == queued.answer().status_code == 200
    assert river_status(server) == 200

    writing = Held(server, "writing", writing=True).wait_until_begun()
    assert server.post("/v1/embeddings", {"model": "papers", "input": "a"}).status_code == 503
    assert river_status(server) == 200
    writing.free()
    assert writing.answer().status_code == 200


def test_request_over_the_time_limit_gets_504_and_the_next_is_served(start):
    server = start(limits={"search_s": 0.5, "write_s": 0.5})
    search = Held(server, "search")
    answer = search.answer()
    assert answer.status_code == 504 and "too long" in problem(answer)["what"]
    search.free()
    wait_for(lambda: river_status(server) == 200, "the thread serves again")
    # The model stops writing once nobody waits.
    assert Held(server, "writing", writing=True).answer().status_code == 504
    wait_for(
        lambda: server.post("/api/generate", {"tokens": 2}).status_code == 200,
        "the model writes again",
    )


@pytest.mark.parametrize("waiting", [0, 2])
def test_request_that_waited_too_long_takes_no_thread(start, waiting):
    server = start(limits={"searching_waiting": waiting, "search_s": 1.0})
    running = Held(server, "running").wait_until_begun()
    late = Held(server, "late")
    assert late.answer().status_code == (504 if waiting else 503)
    running.free()
    wait_for(lambda: river_status(server) == 200, "the thread serves again")
    assert not late.begun
