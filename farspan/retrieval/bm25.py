"""Words for BM25: names are split at dots, underscores and camel case, and kept whole next to their
parts."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

with warnings.catch_warnings():
    # In a notebook that lacks its widgets tqdm, which bm25s imports, complains.
    warnings.simplefilter("ignore")
    import bm25s
    from bm25s import stopwords

NAME = re.compile(r"\w+(?:\.\w+)*")
_SEPARATOR = re.compile(r"[._]+")
#: Between a small letter or digit and a capital, and before the last capital of a run:
#: CrossEntropy, HTTPServer.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def split_name(name: str) -> list[str]:
    """Split a name: `torch.nn.CrossEntropyLoss` into torch, nn, cross, entropy, loss."""
    pieces: list[str] = []
    for piece in _SEPARATOR.split(name):
        pieces += _CAMEL.split(piece)
    return [piece.lower() for piece in pieces if piece]


def spread(text: str) -> str:
    """Return a text's words in lower case, names split, one space before each as inside a text."""
    pieces = itertools.chain.from_iterable(split_name(match[0]) for match in NAME.finditer(text))
    return "".join(f" {part}" for part in pieces)


def split_words(text: str) -> list[str]:
    """Lower-cased words of a text in order; a name of several parts gives its parts, then
    itself."""
    collected: list[str] = []
    for match in NAME.finditer(text):
        name = match[0].strip("_")
        pieces = split_name(name)
        collected += pieces
        if len(pieces) > 1:
            collected.append(name.lower())
    return collected


#: By language: English, German, Dutch, French, Spanish, Portuguese, Italian, Russian, Swedish and
#: Norwegian.
STOP_WORDS = tuple(
    frozenset(words)
    for words in (
        stopwords.STOPWORDS_EN_PLUS,
        stopwords.STOPWORDS_GERMAN,
        stopwords.STOPWORDS_DUTCH,
        stopwords.STOPWORDS_FRENCH,
        stopwords.STOPWORDS_SPANISH,
        stopwords.STOPWORDS_PORTUGUESE,
        stopwords.STOPWORDS_ITALIAN,
        stopwords.STOPWORDS_RUSSIAN,
        stopwords.STOPWORDS_SWEDISH,
        stopwords.STOPWORDS_NORWEGIAN,
    )
)
#: A text is in a language whose stop words are this share of its words. They are a third to a half
#: of prose; words that two languages share, such as `die` and `in`, stay below it.
MIN_STOP_SHARE = 0.1


def stop_words(text: str) -> frozenset[str]:
    """Return the stop words of the language that a text is in; none where it is in no known one."""
    text_words = split_words(text)
    counts = [sum(word in listed for word in text_words) for listed in STOP_WORDS]
    most = max(counts)
    if most < MIN_STOP_SHARE * len(text_words) or not most:
        return frozenset()
    return STOP_WORDS[counts.index(most)]


def content_words(query: str, text: str) -> frozenset[str]:
    """Return the words of a query, without the stop words of a text's language unless there are no
    others."""
    asked = frozenset(split_words(query))
    return asked - stop_words(text) or asked


#: What BM25 is where nothing was chosen: bm25s' own.
K1 = 1.5
B = 0.75


class Numbered:
    """Texts as numbers of their words, from which BM25 of any k1 and b is made."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Words are numbered as they come: bm25s itself would number them by their hashes, another
        # way in each process.
        self.vocabulary: dict[str, int] = {}
        # A text without words counts as one empty word: bm25s cannot index a corpus that has no
        # word at all.
        self.ids = [
            [
                self.vocabulary.setdefault(word, len(self.vocabulary))
                for word in split_words(text) or [""]
            ]
            for text in texts
        ]


class BM25Index:
    """BM25 over texts numbered from 0 (bm25s, Lucene's variant)."""

    def __init__(self, index: bm25s.BM25) -> None:
        self._index = index

    @classmethod
    def build(cls, texts: Iterable[str] | Numbered, k1: float = K1, b: float = B) -> BM25Index:
        numbered = texts if isinstance(texts, Numbered) else Numbered(texts)
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
        """Number of texts."""
        return int(self._index.scores["num_docs"])

    def bm25_scores(self, query: str) -> npt.NDArray[np.float32]:
        """BM25 of every text for the query: 0 where no word is shared."""
        return self._index.get_scores_from_ids(self._index.get_tokens_ids(split_words(query)))
