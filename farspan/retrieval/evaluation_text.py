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

from farspan.domain.corpus import Document
from farspan.retrieval.chunk import Chunk, head_length
from farspan.retrieval.hybrid_ranking import query_form
from farspan.retrieval.index_task import Task
from farspan.retrieval.queries import (
    Queries,
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
    found: list[str]
    fitted_rows: list[int]
    passages: list[str]

    @cached_property
    def candidates(self) -> list[int]:
        """The chunks with text to be found by."""
        return [row for row, text in enumerate(self.found) if text.strip()]

    def owners(self, chunks: Sequence[Chunk]) -> npt.NDArray[np.int64]:
        """Return the document of each candidate."""
        return np.array([chunks[row].document for row in self.candidates], np.int64)

    def changed(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return the candidates whose text is not what the index holds of them."""
        return [row for row in self.candidates if self.found[row] != chunks[row].indexed]

    @property
    def reported(self) -> list[str]:
        """Reported queries as they are embedded by the run's own model."""
        return [query_form(query.text) for query in self.queries.reported]

    @property
    def tuning(self) -> list[str]:
        """Tuning queries as they are embedded by the run's own model."""
        return [query_form(query.text) for query in self.queries.tuning]


def mine_evaluation(task: Task, chunks: Sequence[Chunk]) -> EvaluationText:
    """Choose queries from a task's documents, and what these are found by."""
    documents = task.documents
    copies = task.known_copies()
    bodies = [body_of(document) for document in documents]
    queries = choose_queries(
        documents, bodies, task.train, task.recipe.seed, own=task.own, copies=copies
    )
    questions = [question_lines(document) for document in documents]
    asked = queries.relevant
    whole = [_text_in_index(document) for document in documents]
    found_bodies = [bodies[row] if row in asked else text for row, text in enumerate(whole)]
    heads = [head_length(document) for document in documents]
    found = []
    fitted_rows = []
    passages = []
    for row, chunk in enumerate(chunks):
        number = chunk.document
        body = body_of_chunk(chunk, heads[number], questions[number])
        found.append(body if number in asked else chunk.indexed)
        if number < copies.kept and body.strip():
            fitted_rows.append(row)
            passages.append(body)
    if not passages:
        # Documents of a line each: there is nothing but their heads.
        fitted_rows = [row for row, chunk in enumerate(chunks) if chunk.document < copies.kept]
        passages = [chunks[row].indexed for row in fitted_rows]
    return EvaluationText(queries, found_bodies, found, fitted_rows, passages)


def _text_in_index(document: Document) -> str:
    """Return the text that BM25 finds a document by."""
    return f"{document.title}\n{document.text}"
