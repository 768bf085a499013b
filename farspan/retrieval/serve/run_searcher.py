"""The searcher over an index, with the run's model where there is one. The model is loaded when it
is needed first: words alone are searched without PyTorch."""

from __future__ import annotations

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
from farspan.retrieval.serve.searcher import POINTS, Kind, WrittenPiece
from farspan.retrieval.stores import Vectors

if TYPE_CHECKING:
    from farspan.runtime.inference import Trained


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
    ) -> Answer:
        return search(self._index, query, k, system, where, offset)

    def passage(self, chunk_id: str) -> Result:
        return passage(self._index, chunk_id)

    def surround(self, chunk_id: str, before: int, after: int) -> browse.Surrounded:
        return browse.surround(self._index, chunk_id, before, after)

    def documents(self, k: int, offset: int = 0, where: Where = None) -> browse.Documents:
        return browse.list_documents(self._index, k, offset, where)

    def similar(self, chunk_id: str, k: int) -> tuple[Result, ...]:
        return similar(self._index, chunk_id, k)

    def map(self) -> tuple[list[str], npt.NDArray[np.floating]]:
        """Return the two directions in which the passages' vectors differ most; of many passages an
        even choice."""
        passages = self._index.passages
        rows = np.unique(
            np.linspace(0, len(passages.rows_N) - 1, min(len(passages.rows_N), POINTS)).astype(
                np.int64
            )
        )
        return [f"{number:016x}" for number in passages.rows_N["id"][rows].tolist()], plane(
            self._index.vectors(rows, self._index.manifest.best_set)
        )

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


def plane(vectors_NE: Vectors) -> npt.NDArray[np.float64]:
    """Where vectors lie in the plane of their two principal directions (N, 2), from -1 to 1 each
    way."""
    centred_NE = np.asarray(vectors_NE, np.float64) - vectors_NE.mean(0)
    _, directions_EE = np.linalg.eigh(centred_NE.T @ centred_NE)
    flat_N2 = np.zeros((len(vectors_NE), 2))
    flat_N2[:, : directions_EE.shape[1]] = centred_NE @ directions_EE[:, :-3:-1]
    return flat_N2 / max(float(np.abs(flat_N2).max(initial=0)), 1e-12)
