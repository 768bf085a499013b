"""Words are split as names are read, and scores are BM25's by the formula."""

import math
from collections import Counter

import numpy as np
import pytest

from farspan.retrieval.bm25 import BM25Index, split_words

TEXTS = [
    "torch.nn.CrossEntropyLoss computes the cross entropy",
    "an entropy coder",
    "reads a file",
    "the file, the FILE",
]


def test_names_are_split_and_kept_whole():
    assert split_words("torch.nn.CrossEntropyLoss") == [
        "torch",
        "nn",
        "cross",
        "entropy",
        "loss",
        "torch.nn.crossentropyloss",
    ]
    assert split_words("HTTPServer _private_name x2Y plain.") == [
        "http",
        "server",
        "httpserver",
        "private",
        "name",
        "private_name",
        "x2",
        "y",
        "x2y",
        "plain",
    ]
    assert split_words("Ünïcode 日本 ...") == ["ünïcode", "日本"]


def bm25(query: str, k1: float = 1.5, b: float = 0.75) -> np.ndarray:
    """Lucene's BM25, written out."""
    texts = [Counter(split_words(text)) for text in TEXTS]
    lengths = [sum(text.values()) for text in texts]
    mean = sum(lengths) / len(texts)
    scores = []
    for text, length in zip(texts, lengths, strict=True):
        score = 0.0
        for word in split_words(query):
            having = sum(word in other for other in texts)
            idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            score += idf * text[word] / (text[word] + k1 * (1 - b + b * length / mean))
        scores.append(score)
    return np.array(scores)


@pytest.mark.parametrize(
    "query", ["entropy", "cross entropy loss", "the file", "torch.nn.CrossEntropyLoss", "a unknown"]
)
def test_scores_are_bm25s_before_and_after_a_save(query, tmp_path):
    built = BM25Index.build(TEXTS)
    built.save(tmp_path / "bm25")
    for index in (built, BM25Index.load(tmp_path / "bm25")):
        np.testing.assert_allclose(index.bm25_scores(query), bm25(query), rtol=1e-5, atol=1e-7)


def test_nothing_shared_scores_zero():
    for query in ("", "unheard of words", "..."):
        assert not BM25Index.build(TEXTS[:2]).bm25_scores(query).any()
    assert BM25Index.build(["", " "]).bm25_scores("x").tolist() == [0, 0]
