"""The searcher over a run's own index and model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from farspan.corpus.tokenizer import Tokenizer
from farspan.retrieval.embed import Embedder
from farspan.retrieval.hybrid_ranking import System, query_form
from farspan.retrieval.index import INDEX_MANIFEST, Index, IndexManifest
from farspan.retrieval.search import Answer, Result, passage, search, similar
from farspan.retrieval.serve.searcher import POINTS, Kind
from farspan.retrieval.stores import Vectors
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.generate import generate


class IndexSearcher:
    """A `Searcher`. `close` is called once it is done with, and closes the index."""

    def __init__(
        self, index: Index, model: Decoder, tokenizer: Tokenizer, close: Callable[[], None]
    ) -> None:
        self._index = index
        self._model = model
        self._tokenizer = tokenizer
        self.close = close
        embedder = index.embedder
        assert isinstance(embedder, Embedder)
        self._embedder = embedder

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
        where: Mapping[str, str] | None = None,
        offset: int = 0,
    ) -> Answer:
        return search(self._index, query, k, system, where, offset)

    def passage(self, chunk_id: str) -> Result:
        return passage(self._index, chunk_id)

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
            self._index.vectors(rows)
        )

    def embed(self, texts: list[str], kind: Kind) -> tuple[Vectors, list[int], int]:
        own = [query_form(text) for text in texts] if kind == "query" else texts
        lengths = [len(tokens) for tokens in self._tokenizer.encode_batch(own)]
        # The end of text comes first.
        most = self._model.spec.context - 1
        cut = [max(length - most, 0) for length in lengths]
        vectors = self._embedder.queries(own) if kind == "query" else self._embedder.passages(own)
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
        return generate(
            self._model,
            self._tokenizer,
            prompt,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            enough=enough,
        )

    def stamp(self) -> tuple[int, int]:
        there = (self._index.path / INDEX_MANIFEST).stat()
        return there.st_mtime_ns, there.st_ino


def plane(vectors_NE: Vectors) -> npt.NDArray[np.float64]:
    """Where vectors lie in the plane of their two principal directions (N, 2), from -1 to 1 each
    way."""
    centred_NE = np.asarray(vectors_NE, np.float64) - vectors_NE.mean(0)
    _, directions_EE = np.linalg.eigh(centred_NE.T @ centred_NE)
    flat_N2 = np.zeros((len(vectors_NE), 2))
    flat_N2[:, : directions_EE.shape[1]] = centred_NE @ directions_EE[:, :-3:-1]
    return flat_N2 / max(float(np.abs(flat_N2).max(initial=0)), 1e-12)
