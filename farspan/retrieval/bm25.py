"""BM25 over documents that are given as words (`retrieval/words.py`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

with warnings.catch_warnings():
    # In a notebook that lacks its widgets tqdm, which bm25s imports, complains.
    warnings.simplefilter("ignore")
    import bm25s

#: What BM25 is where nothing was chosen [fitted: within .01 of the best on three corpora of
#: documentation, by questions that people asked].
K1 = 2.0
B = 0.9


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
    """BM25 over documents numbered from 0 (bm25s, Lucene's variant)."""

    def __init__(self, index: bm25s.BM25) -> None:
        self._index = index

    @classmethod
    def build(
        cls, documents: Iterable[Sequence[str]] | Numbered, k1: float = K1, b: float = B
    ) -> BM25Index:
        """Build it from the words of each document."""
        numbered = documents if isinstance(documents, Numbered) else Numbered(documents)
        index = bm25s.BM25(k1=k1, b=b)
        index.index((numbered.ids, numbered.vocabulary), show_progress=False)
        return cls(index)

    @classmethod
    def load(cls, folder: Path) -> BM25Index:
        """Load what `save` wrote, memory-mapped. Raises whatever damaged files lead to, and
        ValueError."""
        index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        starts = index.scores["indptr"]
        texts = index.scores["indices"]
        count = int(index.scores["num_docs"])
        ordered = (
            len(starts) > 0
            and starts[0] == 0
            and starts[-1] == len(texts) == len(index.scores["data"])
        )
        if (
            not ordered
            or (np.diff(starts) < 0).any()
            or (len(texts) and not 0 <= texts.min() <= texts.max() < count)
        ):
            raise ValueError("the places of words are out of order")
        if max(index.vocab_dict.values(), default=0) >= len(starts):
            raise ValueError("there are more words than places of words")
        return cls(index)

    def save(self, folder: Path) -> None:
        self._index.save(folder, show_progress=False)

    @property
    def count(self) -> int:
        """Number of documents."""
        return int(self._index.scores["num_docs"])

    def bm25_scores(self, words: Sequence[str]) -> npt.NDArray[np.float32]:
        """BM25 of every document for the words of a query: 0 where none is shared."""
        return self._index.get_scores_from_ids(self._index.get_tokens_ids(list(words)))
