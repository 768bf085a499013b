"""Scores are BM25's by the formula."""

import math
from collections import Counter

import numpy as np
import pytest

from farspan.retrieval.bm25 import K1, B, BM25Index

TEXTS = [
    "torch.nn.CrossEntropyLoss computes the cross entropy",
    "an entropy coder",
    "reads a file",
    "the file, the FILE",
]


WORDS = [text.lower().split() for text in TEXTS]


def bm25(query: str, k1: float = 1.5, b: float = 0.75) -> np.ndarray:
    """Lucene's BM25, written out."""
    texts = list(map(Counter, WORDS))
    lengths = [sum(text.values()) for text in texts]
    mean = sum(lengths) / len(texts)
    scores = []
    for text, length in zip(texts, lengths, strict=True):
        score = 0.0
        for word in query.split():
            having = sum(word in other for other in texts)
            idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            score += idf * text[word] / (text[word] + k1 * (1 - b + b * length / mean))
        scores.append(score)
    return np.array(scores)


@pytest.mark.parametrize(
    "query", ["entropy", "cross entropy loss", "the file", "torch.nn.crossentropyloss", "a unknown"]
)
def test_scores_are_bm25s_before_and_after_a_save(query, tmp_path):
    built = BM25Index.build(WORDS)
    built.save(tmp_path / "bm25")
    for index in (built, BM25Index.load(tmp_path / "bm25")):
        np.testing.assert_allclose(
            index.bm25_scores(query.split()), bm25(query, K1, B), rtol=1e-5, atol=1e-7
        )


def test_nothing_shared_scores_zero():
    for query in ([], ["unheard", "of"]):
        assert not BM25Index.build(WORDS[:2]).bm25_scores(query).any()
    assert BM25Index.build([[], []]).bm25_scores(["x"]).tolist() == [0, 0]
