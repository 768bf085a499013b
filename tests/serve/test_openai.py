"""Vectors in OpenAI's form."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.serve.conftest import Server
from tests.serve.library import CONTEXT, DIM, vector


def embed(server: Server, input: object, **more) -> dict:
    answer = server.post("/v1/embeddings", {"model": "papers", "input": input, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_embeddings_of_a_list_are_in_order_and_equal_those_of_single_texts(server):
    one = embed(server, "a boat")
    several = embed(server, ["a boat", "🚣 and נהר", "the sea"])
    assert one["object"] == "list" and one["model"] == "papers"
    assert one["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert [entry["index"] for entry in several["data"]] == [0, 1, 2]
    assert {entry["object"] for entry in several["data"]} == {"embedding"}
    assert several["data"][0]["embedding"] == one["data"][0]["embedding"]
    assert np.allclose(several["data"][2]["embedding"], vector("the sea"), atol=1e-6)


def test_base64_is_of_little_endian_floats(server):
    numbers = embed(server, ["a boat", "b"])["data"]
    packed = embed(server, ["a boat", "b"], encoding_format="base64", dimensions=DIM, user="me")[
        "data"
    ]
    for one, other in zip(numbers, packed, strict=True):
        assert np.array_equal(
            np.frombuffer(base64.b64decode(other["embedding"]), "<f4"), np.float32(one["embedding"])
        )


def test_embeddings_input_is_a_query_by_input_type_or_prefix(server):
    document, query = (
        embed(server, "a boat", input_type=kind)["data"] for kind in ("document", "query")
    )
    assert np.allclose(document[0]["embedding"], -np.array(query[0]["embedding"]))
    mixed = embed(server, ["a boat", "query: a boat", "a boat"])["data"]
    assert [mixed[row]["embedding"] == query[0]["embedding"] for row in range(3)] == [
        False,
        True,
        False,
    ]
    # With a type the prefix is text.
    assert embed(server, "query: a boat", input_type="document")["usage"]["prompt_tokens"] == 3


def test_embeddings_answer_reports_how_many_tokens_were_cut(server):
    answer = embed(server, ["short", "word " * (CONTEXT + 7)])
    assert answer["cut"] == [0, 7] and answer["usage"]["prompt_tokens"] == CONTEXT + 1


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"input": [1, 2, 3]}, 422, "tokens and not text"),
        ({"input": [[1, 2], [3]]}, 422, "tokens and not text"),
        ({"input": ""}, 422, "text 0 is empty"),
        ({"input": ["a", " "]}, 422, "text 1 is empty"),
        ({"input": []}, 422, "the list is empty"),
        ({"input": ["a"] * 257}, 422, "at most 256"),
        ({"input": 7}, 422, "input"),
        ({"dimensions": 8}, 422, f"set dimensions to {DIM}"),
        ({"encoding_format": "hex"}, 422, "encoding_format"),
        ({"input_type": "passage"}, 422, "input_type"),
        ({"model": "text-embedding-3-small"}, 404, "set model to papers"),
        ({"inputs": "a"}, 422, "use input instead of inputs"),
    ],
)
def test_invalid_embeddings_request_is_refused_with_error_and_problem(
    server, changes, status, words
):
    answer = server.post("/v1/embeddings", {"model": "papers", "input": "a", **changes})
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert words in told["error"]["message"] and words in " ".join(told["problem"].values())
    assert (
        told["error"]["type"] == "invalid_request_error"
        and told["error"]["code"] == told["problem"]["code"]
    )


def test_the_model_is_listed(server):
    told = server.get("/v1/models").json()
    assert told == {
        "object": "list",
        "data": [{"id": "papers", "object": "model", "created": 1, "owned_by": "farspan"}],
    }
