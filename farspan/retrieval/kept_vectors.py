"""Vectors of chunks that an index has already: what has the same text is not embedded again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from farspan.retrieval.index import Index, SetName
from farspan.retrieval.passages import text_hash
from farspan.retrieval.stores import Ids, Vectors


class KeptVectors:
    """The vectors of `texts` (N) in a set of the old index, and the texts that it lacks."""

    def __init__(self, old: Index | None, name: SetName, texts: Sequence[str]) -> None:
        self._old = old
        self._name: SetName = name
        self._old_N = np.full(len(texts), -1, np.int64)
        if old is not None:
            hashes = old.passages.rows_N["text"].tolist()
            row_of_text = {text: row for row, text in enumerate(hashes)}
            rows = [row_of_text.get(text_hash(text), -1) for text in texts]
            self._old_N = np.array(rows, np.int64)
            self.dim = old.manifest.sets[name].dim
        #: The rows (M) of texts that are new, in order.
        self.new = np.flatnonzero(self._old_N < 0)
        self.new_texts = [texts[row] for row in self.new.tolist()]

    def vectors(self, rows: Ids, new_ME: Vectors) -> Vectors:
        """Return the vectors (R, E) of texts, those of new ones from `new_ME`."""
        sources = self._old_N[rows]
        is_new = sources < 0
        if self._old is None:
            return new_ME[np.searchsorted(self.new, rows)]
        vectors_RE = np.empty((len(rows), self.dim), np.float32)
        vectors_RE[is_new] = new_ME[np.searchsorted(self.new, rows[is_new])]
        vectors_RE[~is_new] = self._old.vectors(sources[~is_new], self._name)
        return vectors_RE
