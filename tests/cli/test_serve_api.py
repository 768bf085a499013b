"""The API of `farspan serve` over a real run, whose index is made again meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from farspan.retrieval.serve.server_info import find_server
from tests.cli.conftest import Farspan
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def indexed(run: Path, farspan: Farspan) -> Path:
    done = farspan("embed", str(run))
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def server(indexed: Path, desk: Path, environment: dict[str, str]):
    words = [sys.executable, "-m", "farspan", "serve", str(indexed), "--port", "0"]
    process = subprocess.Popen(
        words, cwd=desk, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url, *_ = wait_for(lambda: find_server(indexed), "the server's start", process)
        with httpx.Client(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
            yield process, client
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def test_server_answers_like_the_search_command_and_loads_a_new_index(
    server, indexed, farspan, desk
):
    process, client = server
    asked = farspan(
        "search", "school family", "--run", str(indexed), "--json", "-k", "3", "--system", "fused"
    )
    wanted = json.loads(asked.stdout)["answer"]
    answer = client.get(
        "/api/search", params={"q": "school family", "k": 3, "system": "fused"}
    ).json()
    assert answer == wanted
    some = answer["results"][0]["id"]
    assert client.get(f"/api/passages/{some}").json()["passage"] == answer["results"][0]["passage"]
    assert len(client.get(f"/api/passages/{some}/similar").json()["results"]) == 5
    form = {"model": "docs", "input": ["query: school", "family " * 100]}
    vectors = client.post("/v1/embeddings", json=form).json()
    about = client.get("/api/about").json()
    assert (
        len(vectors["data"][0]["embedding"]) == about["index"]["dim"]
        and vectors["cut"][0] == 0 < vectors["cut"][1]
    )
    assert sum(value**2 for value in vectors["data"][1]["embedding"]) == pytest.approx(1, abs=1e-4)
    assert client.post("/api/generate", json={"prompt": "time", "tokens": 3}).status_code == 200
    prompted = {"model": "docs", "prompt": "time", "max_tokens": 9, "seed": 3, "top_p": 0.9}
    written = client.post("/v1/completions", json=prompted).json()
    streamed = client.post("/v1/completions", json={**prompted, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.split("\n\n")[:-2]]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == written["choices"][0]["text"] and written["usage"]["completion_tokens"] > 0
    topics = client.get("/api/topics").json()["topics"]
    assert sum(topic["documents"] for topic in topics) == about["index"]["documents"]
    narrowed = client.get(
        "/api/search", params={"q": "school family", "topic": 0, "system": "fused"}
    )
    assert 0 < narrowed.json()["total"] <= topics[0]["documents"]
    assert "loss" in client.get("/report").text

    (desk / "docs" / "zeppelin.txt").write_text(
        "A zeppelin\n\nflies over the town, and people look up to it."
    )
    try:
        assert farspan("embed", str(indexed)).returncode == 0
        query = {"q": "zeppelin", "system": "bm25"}
        wait_for(
            lambda: client.get("/api/search", params=query).json()["total"],
            "the new index is taken up",
            process,
        )
    finally:
        (desk / "docs" / "zeppelin.txt").unlink()
    process.send_signal(2)
    out, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and error == "" and out.endswith("ended\n")
    assert not (indexed / "serve.json").exists()


def test_serve_refuses_a_folder_without_a_run_bad_ports_and_short_tokens(run, here, tmp_path):
    assert here("serve", str(tmp_path)).returncode == 22
    done = here("serve", str(run), "--port", "70000")
    assert done.returncode == 2 and "70000" in done.stderr
    done = here("serve", str(run), "--port", "0", FARSPAN_TOKEN="short")
    assert done.returncode == 15 and "16 to 200" in done.stderr
