"""How documents are ranked for a query: BM25, vectors, and both. Search and its evaluation share
every line of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from farspan.retrieval.bm25 import split_name
from farspan.retrieval.stores import Scores, Vectors

System = Literal["bm25", "model", "fused"]
SYSTEM_NAMES: dict[System, str] = {
    "bm25": "keyword search (BM25)",
    "model": "vector search",
    "fused": "hybrid search (BM25 and vectors)",
}
#: Documents that vectors propose for a query; others get nothing from them.
DEPTH = 100
#: Passages that are asked for to find them: a document may hold several of the nearest.
CHUNKS = 4 * DEPTH

Ints = npt.NDArray[np.integer[Any]]
#: What gives the passages nearest to a vector, this many at most: their documents, and cosines.
Nearest = Callable[[Vectors, int], tuple[Ints, Scores]]


def query_form(text: str) -> str:
    """Return a query as it is embedded: names split as BM25 splits them, one space before each word
    as inside a text."""
    pieces = itertools.chain.from_iterable(map(split_name, text.split()))
    return "".join(f" {part}" for part in pieces)


def vector_scores(nearest: Nearest, vector_E: Vectors, count: int) -> Scores:
    """Cosines by document, from the CHUNKS passages nearest to a query, of `count` documents."""
    return best_by_document(*nearest(vector_E, CHUNKS), count)


def best_by_document(documents: Ints, similarities: npt.NDArray[np.floating], count: int) -> Scores:
    """Scores of `count` documents from the similarities of chunks: a document's best, kept for the
    DEPTH best only.

    `documents[i]` is the document of chunk i. Documents without a chunk, beyond DEPTH or unlike the
    query get 0.
    """
    scores_N = np.zeros(count, np.float32)
    np.maximum.at(scores_N, documents, similarities.astype(np.float32))
    if count > DEPTH:
        scores_N[scores_N < np.partition(scores_N, -DEPTH)[-DEPTH]] = 0
    return scores_N


def fuse_hybrid_scores(lexical_N: Scores, vectors_N: Scores, weight: float) -> Scores:
    """BM25 as a share of the query's best, plus `weight` times the cosine."""
    return lexical_N / max(float(lexical_N.max(initial=0)), 1e-9) + weight * vectors_N
