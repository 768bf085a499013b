"""The passages nearest to a vector among the documents that a filter leaves.

A store compares equal values of one field. What it cannot compare, and documents with exact copies,
whose fields at their other places a store does not have, are ranked here by their vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from farspan.retrieval.filters import Bindings
from farspan.retrieval.passages import IndexedDocument, Passages
from farspan.retrieval.stores import Scores, Store, Vectors

#: Passages whose vectors are read and compared, at most. Of more, the nearest of all passages
#: are asked for until enough of them pass: 20,000 vectors are read in less time than a store lists
#: all of 1,000,000.
MAX_READ_PASSAGES = 20_000
#: How many more are asked for than would be enough if the filter took passages at random.
OVERSAMPLING = 1.5

Rows = npt.NDArray[np.intp]


class FilteredVectors:
    """A store of one set of vectors, narrowed to a filter's documents; to none without
    `bindings`."""

    def __init__(
        self,
        store: Store,
        passages: Passages,
        documents: Sequence[IndexedDocument],
        bindings: Bindings | None = None,
    ) -> None:
        self._store = store
        self._passages = passages
        self._documents = documents
        self._bindings = bindings

    def nearest(self, vector_E: Vectors, k: int) -> tuple[Rows, Scores]:
        """Return the rows of the k nearest passages, best first, and their cosines.

        A store at a server may have passages of the index that replaces this one: they are skipped.
        """
        if self._bindings is None:
            return self._ask_store(vector_E, k)
        if self._bindings.payload is not None:
            near = self._ask_store(vector_E, k, self._bindings.payload)
            copies = _best_of(vector_E, self._copied_rows, self._copied_vectors, k)
            return _merge(near, copies, k)
        if len(self._passing_rows) <= MAX_READ_PASSAGES:
            return _best_of(vector_E, self._passing_rows, self._passing_vectors, k)
        return self._ask_until_enough(vector_E, k)

    def _ask_store(
        self, vector_E: Vectors, k: int, payload: dict[str, str] | None = None
    ) -> tuple[Rows, Scores]:
        hits = self._store.search(vector_E, k, payload)
        rows = self._passages.rows_of(hits.ids)
        return rows[rows >= 0], hits.scores[rows >= 0]

    def _ask_until_enough(self, vector_E: Vectors, k: int) -> tuple[Rows, Scores]:
        """Ask for more and more of all passages, until k of them pass or there are no more."""
        total = len(self._passages.rows_N)
        asked = round(OVERSAMPLING * k * total / len(self._passing_rows))
        while True:
            rows, scores = self._ask_store(vector_E, min(asked, total))
            passes_N = self._passes_N[rows]
            if passes_N.sum() >= k or asked >= total:
                return rows[passes_N][:k], scores[passes_N][:k]
            asked *= 2

    @cached_property
    def _passes_N(self) -> npt.NDArray[np.bool_]:
        """Which passages (N) are of documents that pass."""
        assert self._bindings is not None
        passes: npt.NDArray[np.bool_] = self._bindings.mask[self._passages.rows_N["document"]]
        return passes

    @cached_property
    def _passing_rows(self) -> Rows:
        return np.flatnonzero(self._passes_N)

    @cached_property
    def _passing_vectors(self) -> Vectors:
        return self._read(self._passing_rows)

    @cached_property
    def _copied_rows(self) -> Rows:
        """The rows of documents that pass and have exact copies elsewhere."""
        has_copies_N = np.array([bool(document.places) for document in self._documents], bool)
        is_copied_N = has_copies_N[self._passages.rows_N["document"]]
        return np.flatnonzero(self._passes_N & is_copied_N)

    @cached_property
    def _copied_vectors(self) -> Vectors:
        return self._read(self._copied_rows)

    def _read(self, rows: Rows) -> Vectors:
        return self._store.vectors(self._passages.rows_N["id"][rows].tolist())


def _best_of(vector_E: Vectors, rows: Rows, vectors_NE: Vectors, k: int) -> tuple[Rows, Scores]:
    cosines_N = (vectors_NE @ vector_E).astype(np.float32)
    best = np.argsort(-cosines_N, kind="stable")[:k]
    return rows[best], cosines_N[best]


def _merge(first: tuple[Rows, Scores], second: tuple[Rows, Scores], k: int) -> tuple[Rows, Scores]:
    """Return the k best of both, each row once."""
    rows = np.concatenate([first[0], second[0]])
    scores = np.concatenate([first[1], second[1]])
    order = np.argsort(-scores, kind="stable")
    _, positions = np.unique(rows[order], return_index=True)
    kept = order[np.sort(positions)][:k]
    return rows[kept], scores[kept]
