"""The texts of an evaluation: queries mined from documents, and what these are found by.

A document that is asked for is found by its body: what a query was taken from (title, first line,
questions) is left out of it. All others compete with their whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from farspan.corpus.distinct_texts import Copies
from farspan.domain.corpus import Document
from farspan.retrieval.chunk import Chunk, head_length, titled_text
from farspan.retrieval.hybrid_ranking import query_form
from farspan.retrieval.queries import (
    Queries,
    Query,
    body_of,
    body_of_chunk,
    choose_queries,
    question_lines,
)


@dataclass(frozen=True)
class EvaluationText:
    """Queries, and the texts of documents and of chunks (N) that they are found by.

    `fitted_rows` are chunks that a model may be fitted to, with their texts `passages`: those of
    documents that are no copies, without heads and questions.
    """

    queries: Queries
    #: Texts of documents, and of chunks; a chunk that is only a head has an empty one.
    bodies: list[str]
    texts: list[str]
    fitted_rows: list[int]
    passages: list[str]

    @cached_property
    def candidates(self) -> list[int]:
        """The chunks with text to be found by."""
        return [row for row, text in enumerate(self.texts) if text.strip()]

    def owners(self, chunks: Sequence[Chunk]) -> npt.NDArray[np.int64]:
        """Return the document of each candidate."""
        return np.array([chunks[row].document for row in self.candidates], np.int64)

    def changed(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the candidates whose text is not what the index holds of them."""
        return [row for row in self.candidates if self.texts[row] != chunks[row].indexed]

    @property
    def reported(self) -> list[str]:
        """Reported queries as they are embedded by the run's own model."""
        return [query_form(query.text) for query in self.queries.reported]

    @property
    def tuning(self) -> list[str]:
        """Tuning queries as they are embedded by the run's own model."""
        return [query_form(query.text) for query in self.queries.tuning]


def mine_evaluation(
    documents: Sequence[Document],
    chunks: Sequence[Chunk],
    *,
    train: int,
    copies: Copies,
    own: Sequence[Query],
    seed: int,
) -> EvaluationText:
    """Choose queries from documents, the first `train` of the training split, and what these are
    found by. `own` are a person's queries."""
    bodies = [body_of(document) for document in documents]
    queries = choose_queries(documents, bodies, train, seed, own=own, copies=copies)
    questions = [question_lines(document) for document in documents]
    asked = queries.relevant
    whole = [titled_text(document.text, [document.title]) for document in documents]
    found_bodies = [bodies[row] if row in asked else text for row, text in enumerate(whole)]
    heads = [head_length(document) for document in documents]
    texts = []
    fitted_rows = []
    passages = []
    for row, chunk in enumerate(chunks):
        number = chunk.document
        body = body_of_chunk(chunk, heads[number], questions[number])
        texts.append(body if number in asked else chunk.indexed)
        if number < copies.kept and body.strip():
            fitted_rows.append(row)
            passages.append(body)
    if not passages:
        # Documents of a line each: there is nothing but their heads.
        fitted_rows = [row for row, chunk in enumerate(chunks) if chunk.document < copies.kept]
        passages = [chunks[row].indexed for row in fitted_rows]
    return EvaluationText(queries, found_bodies, texts, fitted_rows, passages)
