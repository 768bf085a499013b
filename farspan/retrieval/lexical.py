"""Words for BM25: names are split at dots, underscores and camel case, and kept whole beside their parts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import bm25s

_NAME = re.compile(r"\w+(?:\.\w+)*")
_SEPARATOR = re.compile(r"[._]+")
#: Between a small letter or digit and a capital, and before the last capital of a run: CrossEntropy, HTTPServer.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def parts(name: str) -> list[str]:
    """`torch.nn.CrossEntropyLoss` as torch, nn, cross, entropy, loss."""
    return [part.lower() for piece in _SEPARATOR.split(name) for part in _CAMEL.split(piece) if part]


def words(text: str) -> list[str]:
    """Lower-cased words of a text in order; a name of several parts gives its parts, then itself."""
    found: list[str] = []
    for match in _NAME.finditer(text):
        name = match[0].strip("_")
        pieces = parts(name)
        found += pieces
        if len(pieces) > 1:
            found.append(name.lower())
    return found


class Lexical:
    """BM25 over texts numbered from 0 (bm25s, Lucene's variant)."""

    def __init__(self, index: bm25s.BM25 | None, size: int) -> None:
        self._index, self._size = index, size

    @classmethod
    def build(cls, texts: Iterable[str]) -> Lexical:
        import bm25s

        corpus = [words(text) for text in texts]
        if not any(corpus):
            return cls(None, len(corpus))
        index = bm25s.BM25()
        index.index(corpus, create_empty_token=False, show_progress=False)
        return cls(index, len(corpus))

    @classmethod
    def load(cls, folder: Path, size: int) -> Lexical:
        """What `save` wrote for `size` texts; the scores are memory-mapped."""
        import bm25s

        return cls(bm25s.BM25.load(folder, mmap=True, show_progress=False) if folder.exists() else None, size)

    def save(self, folder: Path) -> None:
        if self._index is not None:
            self._index.save(folder, show_progress=False)

    def scores(self, query: str) -> npt.NDArray[np.float32]:
        """BM25 of every text for the query: 0 where no word is shared."""
        if self._index is None:
            return np.zeros(self._size, np.float32)
        known = [word for word in words(query) if word in self._index.vocab_dict]
        return self._index.get_scores(known) if known else np.zeros(self._size, np.float32)
