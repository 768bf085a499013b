"""FAISS: a flat index, or an HNSW graph for many vectors, in a file; ids and payloads in another.

What was added is on disk after `finish`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import faiss
import msgspec
import numpy as np

from farspan.domain.decoding import decode_msgpack
from farspan.domain.own_files import open_own
from farspan.retrieval.stores import Ids, StoreLocation, Vectors
from farspan.retrieval.stores._common import CheckedStore, Fields, missing, refuse_location

#: Up to so many bytes of vectors every one is compared: exact, and some 0.03 s a search at the
#: most.
EXACT_BYTES = 512_000_000
#: Neighbours of a vector in the graph, and candidates that are kept while it is built and searched.
NEIGHBOURS = 32
BUILD_EF = 200
SEARCH_EF = 512
_VECTORS = "vectors.faiss"
_ROWS = "rows"


class _Rows(msgspec.Struct, array_like=True):
    """The id and the payload of each vector, in FAISS's order."""

    ids: list[int]
    payloads: list[dict[str, str | int]]


class FaissStore(CheckedStore):
    def __init__(self, place: StoreLocation, index: faiss.Index, rows: _Rows) -> None:
        super().__init__(place)
        self._index = index
        self._rows = rows

    def write(self, ids: list[int], vectors_ND: Vectors, payloads: list[Fields]) -> None:
        self._index.add(np.ascontiguousarray(vectors_ND))
        self._rows.ids += ids
        self._rows.payloads += payloads
        self._clear_caches()

    def remove(self, ids: list[int]) -> None:
        kept = np.flatnonzero(~np.isin(self._rows.ids, ids))
        if len(kept) < len(self._rows.ids):
            self._index = self._add_rows(faiss.IndexFlatIP(self.place.dim), kept)
            self._rows.ids = [self._rows.ids[row] for row in kept]
            self._rows.payloads = [self._rows.payloads[row] for row in kept]
            self._clear_caches()

    def _clear_caches(self) -> None:
        """Forget what was computed of other rows."""
        for name in ("_rows_with", "_row_of"):
            self.__dict__.pop(name, None)

    def nearest(self, vector_D: Vectors, k: int, where: Fields) -> tuple[list[int], Any]:
        index = self._index
        most = len(self._rows.ids)
        how = None
        if where:
            # A graph finds little of what a filter leaves: then every vector that it leaves is
            # compared.
            rows = set.intersection(*(self._rows_with[field] for field in where.items()))
            index = self._flat_index()
            most = len(rows)
            how = faiss.SearchParameters(sel=faiss.IDSelectorBatch(sorted(rows)))
        elif isinstance(index, faiss.IndexHNSWFlat):
            how = faiss.SearchParametersHNSW(efSearch=max(SEARCH_EF, k))
        if not most:
            return [], []
        with _one_thread():
            scores_1K, rows_1K = index.search(vector_D[None], min(k, most), params=how)
        is_hit = rows_1K[0] >= 0
        return [self._rows.ids[row] for row in rows_1K[0][is_hit]], scores_1K[0][is_hit]

    @cached_property
    def _rows_with(self) -> defaultdict[tuple[str, str | int], set[int]]:
        """The rows whose payload has a field with a value."""
        rows_with: defaultdict[tuple[str, str | int], set[int]] = defaultdict(set)
        for row, payload in enumerate(self._rows.payloads):
            for field in payload.items():
                rows_with[field].add(row)
        return rows_with

    @cached_property
    def _row_of(self) -> dict[int, int]:
        return {number: row for row, number in enumerate(self._rows.ids)}

    def _flat_index(self) -> faiss.IndexFlat:
        hnsw = isinstance(self._index, faiss.IndexHNSWFlat)
        return faiss.downcast_index(self._index.storage) if hnsw else self._index

    def _add_rows(self, index: faiss.Index, rows: Ids) -> faiss.Index:
        """Return the index, with the vectors of these rows added."""
        if len(rows):
            index.add(self._flat_index().reconstruct_batch(rows))
        return index

    def read(self, ids: list[int]) -> Iterator[tuple[Any, Any]]:
        for number in ids:
            if number in self._row_of:
                yield number, self._flat_index().reconstruct(self._row_of[number])

    def numbers(self) -> list[int]:
        return self._rows.ids

    def finish(self) -> None:
        count = len(self._rows.ids)
        graph = isinstance(self._index, faiss.IndexHNSWFlat)
        if count * self.place.dim * 4 > EXACT_BYTES and not graph:
            self._index = self._build_hnsw_index(count)
        faiss.write_index(self._index, str(self.place.folder / _VECTORS))
        with open_own(self.place.folder / _ROWS, "wb") as file:
            file.write(msgspec.msgpack.encode(self._rows))

    def _build_hnsw_index(self, count: int) -> faiss.Index:
        """Return the first `count` rows as an HNSW graph (arXiv 1603.09320)."""
        hnsw = faiss.IndexHNSWFlat(self.place.dim, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
        hnsw.hnsw.efConstruction = BUILD_EF
        return self._add_rows(hnsw, np.arange(count))

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """FAISS shares out queries among threads: with one query they only wait for each other, ten
    times as long."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def create(place: StoreLocation) -> FaissStore:
    """Create a store in a folder that does not exist yet."""
    refuse_location(place, "faiss")
    place.folder.mkdir(parents=True)
    return FaissStore(place, faiss.IndexFlatIP(place.dim), _Rows([], []))


def open(place: StoreLocation) -> FaissStore:
    """Open the store in a folder."""
    refuse_location(place, "faiss")
    if not (place.folder / _ROWS).exists():
        raise missing(place.folder, f"{_ROWS} is missing")
    rows = decode_msgpack((place.folder / _ROWS).read_bytes(), _Rows)
    return FaissStore(place, faiss.read_index(str(place.folder / _VECTORS)), rows)


def drop(place: StoreLocation) -> None:
    """Its folder is all that there is of it."""
