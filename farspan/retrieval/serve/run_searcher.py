"""The searcher over an index, with the run's model where there is one. The model is loaded when it
is needed first: words alone are searched without PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from farspan.domain.problems import Refusal
from farspan.retrieval import browse
from farspan.retrieval.filters import Where
from farspan.retrieval.hybrid_ranking import System
from farspan.retrieval.index import INDEX_MANIFEST, Index, IndexManifest
from farspan.retrieval.names import query_form
from farspan.retrieval.search import Answer, Result, passage, search, similar
from farspan.retrieval.serve.searcher import Kind, WrittenPiece
from farspan.retrieval.stores import Vectors
from farspan.retrieval.topics import MAX_NAMED_CHARS, Topics, find_topics, refuse_topic

if TYPE_CHECKING:
    from farspan.runtime.inference import Trained

#: Vectors that are read at once.
BLOCK_ROWS = 16_384


class IndexSearcher:
    """A `Searcher`.

    `load_model` returns the model that the index is of; None where there is none. `close` is called
    once it is done with, and closes the index.
    """

    def __init__(
        self,
        index: Index,
        load_model: Callable[[], Trained] | None,
        close: Callable[[], None],
    ) -> None:
        self._index = index
        self._load_model = load_model
        self.close = close
        self._grouping = threading.Lock()
        self._groups: tuple[Topics, npt.NDArray[np.intp]] | None = None

    @property
    def manifest(self) -> IndexManifest:
        return self._index.manifest

    @property
    def fields(self) -> tuple[str, ...]:
        return self._index.manifest.fields

    def search(
        self,
        query: str,
        k: int,
        system: System | None = None,
        where: Where = None,
        offset: int = 0,
        topic: int | None = None,
    ) -> Answer:
        among = None if topic is None else self._documents_of(topic)
        return search(self._index, query, k, system, where, offset, among)

    def topics(self) -> Topics:
        return self._grouped[0]

    def _documents_of(self, topic: int) -> npt.NDArray[np.bool_]:
        topics, numbers_N = self._grouped
        if not 0 <= topic < len(topics.topics):
            raise refuse_topic(topic, topics)
        return np.equal(numbers_N, topic)

    @property
    def _grouped(self) -> tuple[Topics, npt.NDArray[np.intp]]:
        """The topics, and that of each document; found when they are asked for first."""
        with self._grouping:
            if self._groups is None:
                self._groups = group_documents(self._index)
            return self._groups

    def passage(self, chunk_id: str) -> Result:
        return passage(self._index, chunk_id)

    def surround(self, chunk_id: str, before: int, after: int) -> browse.Surrounded:
        return browse.surround(self._index, chunk_id, before, after)

    def documents(
        self, k: int, offset: int = 0, where: Where = None, topic: int | None = None
    ) -> browse.Documents:
        among = None if topic is None else self._documents_of(topic)
        return browse.list_documents(self._index, k, offset, where, among)

    def similar(self, chunk_id: str, k: int) -> tuple[Result, ...]:
        return similar(self._index, chunk_id, k)

    @property
    def dim(self) -> int:
        own = self._index.manifest.sets.get("own")
        if own is None:
            raise no_model(self._index.path)
        return own.dim

    def embed(self, texts: list[str], kind: Kind) -> tuple[Vectors, list[int], int]:
        from farspan.retrieval.embed import Embedder

        trained = self._trained()
        own = [query_form(text) for text in texts] if kind == "query" else texts
        lengths = [len(tokens) for tokens in trained.tokenizer.encode_batch(own)]
        # The end of text comes first.
        most = trained.model.spec.context - 1
        cut = [max(length - most, 0) for length in lengths]
        if self._index.manifest.origin is None:
            raise no_model(self._index.path)
        embedder = self._index.own
        assert isinstance(embedder, Embedder)
        vectors = embedder.queries(own) if kind == "query" else embedder.passages(own)
        return vectors, cut, sum(lengths) - sum(cut)

    def generate(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        top_k: int,
        seed: int,
        enough: Callable[[], bool] = lambda: False,
    ) -> str:
        from farspan.runtime.model.generate import generate

        trained = self._trained()
        return generate(
            trained.model,
            trained.tokenizer,
            prompt,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            enough=enough,
        )

    def write(
        self,
        prompt: str,
        tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[WrittenPiece]:
        from farspan.runtime.model.generate import sample_tokens

        trained = self._trained()
        tokenizer = trained.tokenizer
        prompt_ids = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
        sampled = sample_tokens(
            trained.model,
            tokenizer,
            prompt_ids,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            enough=enough,
        )
        ids: list[int] = []
        shown = ""
        for token in sampled:
            ids.append(token)
            text = tokenizer.decode(ids)
            # A character may come in several tokens.
            if not text.endswith("\ufffd"):
                yield WrittenPiece(text[len(shown) :], len(prompt_ids), len(ids))
                shown = text
        text = tokenizer.decode(ids)
        ended = len(ids) < tokens and not enough()
        yield WrittenPiece(text[len(shown) :], len(prompt_ids), len(ids), ended)

    def _trained(self) -> Trained:
        if self._load_model is None:
            raise no_model(self._index.path)
        return self._load_model()

    def stamp(self) -> tuple[int, int]:
        there = (self._index.path / INDEX_MANIFEST).stat()
        return there.st_mtime_ns, there.st_ino


def no_model(where: object) -> Refusal:
    return Refusal(
        "no-model",
        what="there is no model that writes or embeds",
        where=where,
        fact="only an index is open, and it belongs to no run",
        remedy="train one on the same text: farspan init FOLDER",
    )


def group_documents(index: Index) -> tuple[Topics, npt.NDArray[np.intp]]:
    """Return the topics of an index, and that of each document."""
    texts = [title_and_text(index, number) for number in range(len(index.documents))]
    return find_topics(mean_vectors(index), texts)


def title_and_text(index: Index, number: int) -> str:
    """Return a document's title and first passages, as much as its topic is named by."""
    pieces = [index.documents[number].title]
    size = 0
    for row in index.passages.of_document(number):
        text = index.passages.chunk(row).text
        pieces.append(text)
        size += len(text)
        if size >= MAX_NAMED_CHARS:
            break
    return "\n".join(pieces)


def mean_vectors(index: Index) -> Vectors | None:
    """Return the mean vector of each document's passages, zero of one without any; None of an index
    without vectors."""
    name = index.manifest.best_set
    if name is None:
        return None
    rows_N = index.passages.rows_N
    sums_NE = np.zeros((len(index.documents), index.manifest.sets[name].dim), np.float32)
    for start in range(0, len(rows_N), BLOCK_ROWS):
        rows = np.arange(start, min(start + BLOCK_ROWS, len(rows_N)))
        np.add.at(sums_NE, rows_N["document"][rows], index.vectors(rows, name))
    counts_N = np.bincount(rows_N["document"], minlength=len(sums_NE))
    means_NE: Vectors = sums_NE / np.maximum(counts_N, 1).astype(np.float32)[:, None]
    return means_NE
