"""Positive pairs mined from a corpus: titles, openings and headings, with the passages that they
stand above; and passages that look as if they did.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import Document
from farspan.retrieval.bm25 import BM25Index
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.names import query_form
from farspan.retrieval.queries import opening_of
from farspan.retrieval.words import Words

#: Passages of a document at most that its title and its opening belong to: the first ones say best
#: what it is about.
MAX_PASSAGES_OF_TITLE = 4
#: Pairs at most: more are not read within the steps of a fit.
MAX_PAIRS = 131_072
#: The passages that BM25 finds first for a text, without its own, are what it is told from.
NUM_NEGATIVES = 20


class Pairs(msgspec.Struct, frozen=True):
    """Text number `texts[i]` belongs to passage `passages[i]`, and not to those of
    `negatives[texts[i]]`. Passages of one of `groups` (N) may answer each other's texts."""

    asked: list[str]
    texts: list[int]
    passages: list[int]
    negatives: list[list[int]]
    groups: npt.NDArray[np.int64]


def mine_pairs(
    documents: Sequence[Document],
    bodies: Sequence[Chunk],
    passages: Sequence[str],
    excluded: Collection[int],
) -> Pairs:
    """Mine pairs of `documents`, evenly over them, without those in `excluded`.

    `passages` are the texts of `bodies`.
    """
    rows: dict[int, list[int]] = {}
    for row, chunk in enumerate(bodies):
        rows.setdefault(chunk.document, []).append(row)
    mined: list[tuple[str, int]] = []
    for number, document in enumerate(documents):
        if number not in excluded:
            title = query_form(document.title)
            opening = opening_of(document)
            for row in rows.get(number, ()):
                headings = bodies[row].headings[-1:]
                near = (title, opening) if row in rows[number][:MAX_PASSAGES_OF_TITLE] else ()
                mined += [(text, row) for text in (*near, *headings) if text.strip()]
    mined = mined[:: len(mined) // MAX_PAIRS + 1]
    asked = list(dict.fromkeys(text for text, _ in mined))
    numbers = {text: number for number, text in enumerate(asked)}
    groups = np.array([chunk.document for chunk in bodies], np.int64)
    own: list[set[int]] = [set() for _ in asked]
    for text, row in mined:
        own[numbers[text]].add(bodies[row].document)
    return Pairs(
        asked=asked,
        texts=[numbers[text] for text, _ in mined],
        passages=[row for _, row in mined],
        negatives=_mine_hard_negatives(asked, own, passages, groups, excluded),
        groups=groups,
    )


def _mine_hard_negatives(
    asked: Sequence[str],
    own: Sequence[set[int]],
    passages: Sequence[str],
    groups: npt.NDArray[np.int64],
    excluded: Collection[int],
) -> list[list[int]]:
    """Of each text the passages that BM25 finds first, without those of its own documents and of
    `excluded`."""
    if not asked:
        return []
    words = Words()
    lexical = BM25Index.build(map(words.of_text, passages))
    is_excluded_N = np.isin(groups, list(excluded))
    count = min(NUM_NEGATIVES + MAX_PASSAGES_OF_TITLE, len(passages))
    mined = []
    for text, documents in zip(asked, own, strict=True):
        scores_N = lexical.bm25_scores(words.of_query(text))
        scores_N[is_excluded_N] = 0
        rows_R = np.flatnonzero(scores_N)
        if len(rows_R) > count:
            best = np.argpartition(-scores_N[rows_R], count - 1)[:count]
            rows_R = np.sort(rows_R[best])
        mined.append([row for row in rows_R.tolist() if groups[row] not in documents])
    return mined
