"""FAISS: a flat index, or an HNSW graph for many vectors, in a file; ids and payloads in another.

What was added is on disk after `finish`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import faiss
import msgspec
import numpy as np

from farspan.domain.own_files import open_own
from farspan.retrieval.stores import Hits, Ids, Payload, StoreLocation, Vectors
from farspan.retrieval.stores._common import (
    checked_filter,
    in_order,
    missing,
    refuse_location,
    rows_to_add,
    sorted_ids,
)

#: Up to so many bytes of vectors every one is compared: exact, and some 0.03 s a search at the
#: most.
EXACT_BYTES = 512_000_000
#: Neighbours of a vector in the graph, and candidates that are kept while it is built and searched.
NEIGHBOURS, BUILD_EF, SEARCH_EF = 32, 200, 512
_VECTORS, _ROWS = "vectors.faiss", "rows"


class _Rows(msgspec.Struct, array_like=True):
    """The id and the payload of each vector, in FAISS's order."""

    ids: list[int]
    payloads: list[dict[str, str | int]]


class FaissStore:
    def __init__(self, place: StoreLocation, index: faiss.Index, rows: _Rows) -> None:
        self._place, self._index, self._rows = place, index, rows

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        numbers, vectors_ND, kept = rows_to_add(ids, vectors_ND, payloads, self._place.dim)
        if numbers:
            self._index.add(vectors_ND)
            self._rows.ids += numbers
            self._rows.payloads += kept
            self._forget()

    def delete(self, ids: Sequence[int]) -> None:
        kept = np.flatnonzero(~np.isin(self._rows.ids, np.asarray(ids, np.int64)))
        if len(kept) < len(self._rows.ids):
            self._index = self._rebuilt(faiss.IndexFlatIP(self._place.dim), kept)
            self._rows.ids = [self._rows.ids[row] for row in kept]
            self._rows.payloads = [self._rows.payloads[row] for row in kept]
            self._forget()

    def _forget(self) -> None:
        """Forget what was computed of other rows."""
        for name in ("_rows_with", "_row_of"):
            self.__dict__.pop(name, None)

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> Hits:
        equal = checked_filter(vector_D, where, self._place.dim)
        index, how = self._index, None
        most = len(self._rows.ids)
        if equal:
            # A graph finds little of what a filter leaves: then every vector that it leaves is
            # compared.
            rows = set.intersection(*(self._rows_with[field] for field in equal.items()))
            most, index = len(rows), self._flat()
            how = faiss.SearchParameters(sel=faiss.IDSelectorBatch(sorted(rows)))
        elif isinstance(index, faiss.IndexHNSWFlat):
            how = faiss.SearchParametersHNSW(efSearch=max(SEARCH_EF, k))
        if not most:
            return Hits(np.empty(0, np.int64), np.empty(0, np.float32))
        with _one_thread():
            query_1D = np.asarray(vector_D, np.float32)[None]
            scores_1K, rows_1K = index.search(query_1D, min(k, most), params=how)
        found = rows_1K[0] >= 0
        ids = [self._rows.ids[row] for row in rows_1K[0][found]]
        return Hits(np.array(ids, np.int64), scores_1K[0][found])

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

    def _flat(self) -> faiss.IndexFlat:
        hnsw = isinstance(self._index, faiss.IndexHNSWFlat)
        return faiss.downcast_index(self._index.storage) if hnsw else self._index

    def _rebuilt(self, index: faiss.Index, rows: Ids) -> faiss.Index:
        """The index, with the vectors of these rows added."""
        if len(rows):
            index.add(self._flat().reconstruct_batch(rows))
        return index

    def vectors(self, ids: Sequence[int]) -> Vectors:
        found = [int(number) for number in ids if number in self._row_of]
        rows = np.array([self._row_of[number] for number in found], np.int64)
        vectors_ND = self._flat().reconstruct_batch(rows) if found else ()
        return in_order(ids, dict(zip(found, vectors_ND, strict=True)), self._place.dim)

    def ids(self) -> Ids:
        return sorted_ids(self._rows.ids)

    def finish(self) -> None:
        count = len(self._rows.ids)
        graph = isinstance(self._index, faiss.IndexHNSWFlat)
        if count * self._place.dim * 4 > EXACT_BYTES and not graph:
            hnsw = faiss.IndexHNSWFlat(self._place.dim, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
            hnsw.hnsw.efConstruction = BUILD_EF
            self._index = self._rebuilt(hnsw, np.arange(count))
        faiss.write_index(self._index, str(self._place.folder / _VECTORS))
        with open_own(self._place.folder / _ROWS, "wb") as file:
            file.write(msgspec.msgpack.encode(self._rows))

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
    """A new store in a folder that does not exist yet."""
    refuse_location(place)
    place.folder.mkdir(parents=True)
    return FaissStore(place, faiss.IndexFlatIP(place.dim), _Rows([], []))


def open(place: StoreLocation) -> FaissStore:
    """The store that is in a folder."""
    refuse_location(place)
    if not (place.folder / _ROWS).exists():
        raise missing(place.folder, f"{_ROWS} is missing")
    rows = msgspec.msgpack.decode((place.folder / _ROWS).read_bytes(), type=_Rows)
    return FaissStore(place, faiss.read_index(str(place.folder / _VECTORS)), rows)


def drop(place: StoreLocation) -> None:
    """Its folder is all that there is of it."""
