"""Reranking: likelihoods as a plain loop has them, and what a search does with them."""

from contextlib import closing

import numpy as np
import pytest
import torch

from farspan.retrieval.rank import RERANKED
from farspan.retrieval.rerank import log_likelihoods
from farspan.retrieval.search import search
from tests.retrieval import making


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("reranked") / "index"
    making.make(path)
    with closing(making.opened(path, making.model(5))) as opened:
        yield opened


def plain(model, query: str, passage: str) -> float:
    encode = making.TOKENIZER.encode_batch
    asked = encode([query])[0][: making.SPEC.context // 2]
    before = [
        making.TOKENIZER.end_of_text,
        *encode([f"{passage}\n\n"])[0][: making.SPEC.context - 1 - len(asked)],
    ]
    with torch.no_grad():
        logs_SV = model(torch.tensor([before + asked]))[0].log_softmax(-1)
    return float(np.mean([logs_SV[len(before) + i - 1, token] for i, token in enumerate(asked)]))


@pytest.mark.parametrize(
    "query", ["school", "how much time is there for school and work", "word " * 60]
)
def test_likelihoods_are_those_of_a_plain_loop(query, monkeypatch):
    monkeypatch.setattr("farspan.retrieval.rerank.bf16_is_fast", lambda device: False)
    model, passages = (
        making.model(5),
        [d.text[: 20 + 37 * n % 700] for n, d in enumerate(making.DOCUMENTS[:40])],
    )
    expected = [plain(model, query, passage) for passage in passages]
    np.testing.assert_allclose(
        log_likelihoods(model, making.TOKENIZER, query, passages), expected, atol=2e-5
    )


def test_empty_query_gives_every_passage_the_same_likelihood():
    model = making.model(5)
    assert log_likelihoods(model, making.TOKENIZER, "", ["a", "b"]).tolist() == [0, 0]
    assert log_likelihoods(model, making.TOKENIZER, "a", []).tolist() == []


def test_a_reranked_search_reorders_the_first_documents_alone(index):
    query = "time school"
    fused = search(index, query, 200, "fused")
    found = search(index, query, 200, "reranked")
    names = [[result.origin for result in answer.results] for answer in (fused, found)]
    assert found.system == "reranked" and found.total == fused.total > RERANKED
    assert (
        sorted(names[0][:RERANKED]) == sorted(names[1][:RERANKED])
        and names[0][:RERANKED] != names[1][:RERANKED]
    )
    assert names[0][RERANKED:] == names[1][RERANKED:]
    scores = [result.score for result in found.results]
    assert scores == sorted(scores, reverse=True)
    assert [r.origin for r in search(index, query, 7, "reranked", offset=5).results] == names[1][
        5:12
    ]


def test_nothing_found_is_nothing_reranked(index):
    assert search(index, "time", 5, "reranked", {"title": "no such title"}).results == ()
