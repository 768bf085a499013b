"""BM25 over documents that are given as words (`retrieval/words.py`).

bm25s computes it, once, when an index is made. Searches add up what it wrote: they need not wait
for the library, which imports SciPy where that is installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.decoding import decode_json
from farspan.domain.own_files import open_own

#: What BM25 is where nothing was chosen [fitted: within .01 of the best on three corpora of
#: documentation, by questions that people asked].
K1 = 2.0
B = 0.9
_ARRAYS = ("starts", "documents", "scores")
_WORDS = "words.json"


class Numbered:
    """Documents as numbers of their words, from which BM25 of any k1 and b is made."""

    def __init__(self, documents: Iterable[Sequence[str]]) -> None:
        # Words are numbered as they come: bm25s itself would number them by their hashes, another
        # way in each process.
        self.vocabulary: dict[str, int] = {}
        self.ids: list[list[int]] = []
        number = self.vocabulary.setdefault
        for words in documents:
            # A document without words counts as one empty word: bm25s cannot index a corpus that
            # has no word at all.
            self.ids.append([number(word, len(self.vocabulary)) for word in words or ("",)])


class BM25Index:
    """BM25 over documents numbered from 0 (bm25s, Lucene's variant).

    Word number w scores `scores[i]` in document `documents[i]`, for i from `starts[w]` to
    `starts[w + 1]`.
    """

    def __init__(
        self,
        words: Mapping[str, int],
        starts: npt.NDArray[Any],
        documents: npt.NDArray[Any],
        scores: npt.NDArray[Any],
        count: int,
    ) -> None:
        self._words = words
        self._starts = starts
        self._documents = documents
        self._scores = scores
        #: Number of documents.
        self.count = count

    @classmethod
    def build(
        cls, documents: Iterable[Sequence[str]] | Numbered, k1: float = K1, b: float = B
    ) -> BM25Index:
        """Build it from the words of each document."""
        with warnings.catch_warnings():
            # In a notebook that lacks its widgets tqdm, which bm25s imports, complains.
            warnings.simplefilter("ignore")
            import bm25s

        numbered = documents if isinstance(documents, Numbered) else Numbered(documents)
        index = bm25s.BM25(k1=k1, b=b)
        # It adds a word to what it is given.
        index.index((numbered.ids, dict(numbered.vocabulary)), show_progress=False)
        scores = index.scores
        return cls(
            numbered.vocabulary,
            scores["indptr"],
            scores["indices"],
            scores["data"],
            len(numbered.ids),
        )

    @classmethod
    def load(cls, folder: Path) -> BM25Index:
        """Load what `save` wrote, memory-mapped. Raises whatever damaged files lead to, and
        ValueError."""
        starts, documents, scores = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
        )
        words, count = decode_json((folder / _WORDS).read_bytes(), tuple[dict[str, int], int])
        ordered = (
            len(starts) > 0
            and starts[0] == 0
            and starts[-1] == len(documents) == len(scores)
            and bool((np.diff(starts) >= 0).all())
        )
        if not ordered or (len(documents) and not 0 <= documents.min() <= documents.max() < count):
            raise ValueError("the places of words are out of order")
        if max(words.values(), default=0) + 1 >= len(starts):
            raise ValueError("there are more words than places of words")
        return cls(words, starts, documents, scores, count)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = (self._starts, self._documents, self._scores)
        for name, array in zip(_ARRAYS, arrays, strict=True):
            with open_own(folder / f"{name}.npy", "wb") as file:
                np.save(file, array)
        with open_own(folder / _WORDS, "wb") as file:
            file.write(msgspec.json.encode((self._words, self.count)))

    def bm25_scores(self, words: Sequence[str]) -> npt.NDArray[np.float32]:
        """BM25 of every document for the words of a query: 0 where none is shared."""
        scores_N = np.zeros(self.count, np.float32)
        for word in words:
            number = self._words.get(word)
            if number is not None:
                here = slice(self._starts[number], self._starts[number + 1])
                # A document stands at a word once.
                scores_N[self._documents[here]] += self._scores[here]
        return scores_N
