"""Completions and chats in OpenAI's form, whole and as they are written."""

from __future__ import annotations

import json

import pytest

from farspan.retrieval.serve.openai_text import StopFilter
from tests.serve.conftest import Held, Server
from tests.waiting import wait_for

CHAT = {"model": "papers", "messages": [{"role": "user", "content": "a river"}]}
TEXT = {"model": "papers", "prompt": "a river"}


def events(server: Server, path: str, form: dict) -> list[dict]:
    """The events of a text as it is written; the last line says that it is whole."""
    with server.client.stream("POST", server.url + path, json={**form, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_completion_has_text_reason_and_usage(server):
    answer = server.post("/v1/completions", {**TEXT, "max_tokens": 3}).json()
    (choice,) = answer["choices"]
    assert choice == {
        "text": " word0 word1 word2",
        "index": 0,
        "finish_reason": "length",
        "logprobs": None,
    }
    assert answer["object"] == "text_completion" and answer["model"] == "papers"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    ended = server.post("/v1/completions", {**TEXT, "prompt": ["it ends"]}).json()
    assert ended["choices"][0]["finish_reason"] == "stop"


def test_chat_has_a_message_of_the_assistant(server):
    form = {**CHAT, "max_completion_tokens": 2, "temperature": 0, "n": 1, "user": "me"}
    answer = server.post("/v1/chat/completions", form).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": " word0 word1", "refusal": None}
    assert choice["finish_reason"] == "length"


def test_messages_are_the_prompt_one_after_the_other(server):
    messages = [
        {"role": "system", "content": "one two"},
        {"role": "user", "content": [{"type": "text", "text": "three"}]},
        {"role": "assistant", "content": "four five"},
    ]
    answer = server.post("/v1/chat/completions", {**CHAT, "messages": messages}).json()
    assert answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_text_is_that_of_the_whole_answer(server, path):
    form = {**(CHAT if "chat" in path else TEXT), "max_tokens": 4}
    whole = server.post(path, form).json()
    parts = events(server, path, form)
    if "chat" in path:
        assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
        text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
        assert text == whole["choices"][0]["message"]["content"]
        assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    else:
        text = "".join(part["choices"][0]["text"] for part in parts)
        assert text == whole["choices"][0]["text"]
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons[-1] == "length" and set(reasons[:-1]) <= {None}
    assert len(parts) >= 4 and len({part["id"] for part in parts}) == 1
    with_usage = events(server, path, {**form, "stream_options": {"include_usage": True}})
    assert with_usage[-1]["choices"] == []
    assert with_usage[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_ends_the_text_before_it(server, stream):
    form = {**CHAT, "max_tokens": 6, "stop": ["rd2 wo", "never"]}
    if stream:
        parts = events(server, "/v1/chat/completions", form)
        text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
        reason = parts[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = server.post("/v1/chat/completions", form).json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert text == " word0 word1 wo" and reason == "stop"


def test_stop_filter_holds_back_only_what_may_begin_a_stop():
    stop_filter = StopFilter(["abc", "xy"])
    assert [stop_filter.add(text) for text in ("1a", "b", "d x", "z")] == ["1", "", "abd ", "xz"]
    assert stop_filter.add("ab") == "" and stop_filter.add("", last=True) == "ab"
    assert StopFilter(["a"]).add("bab") == "b" and StopFilter([]).add("x") == "x"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "gpt-4"}, 404, "no model 'gpt-4'"),
        ({"max_tokens": 513}, 422, "at most 512"),
        ({"max_tokens": 0}, 422, "max_tokens"),
        ({"temperature": 3}, 422, "temperature"),
        ({"top_p": 0}, 422, "top_p"),
        ({"n": 2}, 422, "n"),
        ({"stop": list("abcde")}, 422, "at most 4"),
        ({"tools": []}, 422, "tools"),
        ({"frequency_penalty": 1}, 422, "frequency_penalty"),
    ],
)
def test_what_the_model_has_no_part_for_is_refused(server, path, change, status, words):
    form = {**(CHAT if "chat" in path else TEXT), **change}
    for stream in (False, True):
        answer = server.post(path, {**form, "stream": stream})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert words in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "hello",
    ],
)
def test_messages_that_are_none_are_refused(server, messages):
    answer = server.post("/v1/chat/completions", {**CHAT, "messages": messages})
    assert answer.status_code == 422 and answer.json()["error"]["code"]


def test_fault_in_the_middle_is_an_event_without_a_traceback(server):
    form = {**TEXT, "prompt": "breaks", "stream": True}
    with server.client.stream("POST", server.url + "/v1/completions", json=form) as answer:
        lines = [line for line in answer.iter_lines() if line]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["type"] == "server_error" and "/etc/secret" not in lines[-1]
    whole = server.post("/v1/completions", {**TEXT, "prompt": "fault", "stream": True})
    assert whole.status_code == 500 and "/etc/secret" not in whole.text


def test_models_are_listed_and_found_by_name(server):
    assert server.get("/v1/models").json()["data"][0]["id"] == "papers"
    assert server.get("/v1/models/papers").json()["object"] == "model"
    assert server.get("/v1/models/other").status_code == 404


@pytest.mark.slow
def test_client_that_goes_away_frees_the_model(start):
    server = start(limits={"writing": 1, "writing_waiting": 1})
    form = {**TEXT, "prompt": "slow one", "stream": True}
    with server.client.stream("POST", server.url + "/v1/completions", json=form) as answer:
        next(answer.iter_lines())
        wait_for(lambda: (server.run / "held-slow_one").exists(), "the model writes")
    # The one thread is free again: others are answered.
    assert server.post("/v1/completions", TEXT).status_code == 200


@pytest.mark.slow
def test_full_queue_is_refused_before_a_text_begins(start):
    server = start(limits={"writing": 1, "writing_waiting": 0})
    held = Held(server, "full", writing=True).wait_until_begun()
    answer = server.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert answer.status_code == 503 and "retry-after" in answer.headers
    held.free()
    held.answer()
