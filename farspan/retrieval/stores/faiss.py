"""FAISS: a flat index, or an HNSW graph for many vectors, beside a log that keeps what came after
the last finish().

A generation is a folder that is whole when it gets its name: `vectors.faiss`, `rows` (ids and
payloads) and `log`. Changes go to the newest one's log; `finish` folds them into the next. One
process writes, and others read a copy.
"""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import IO

import faiss
import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.own_files import open_own
from farspan.retrieval.stores import About, Hit, Ids, Payload, Spot, Vectors
from farspan.retrieval.stores._common import (
    check_keys,
    check_vectors,
    new_folder,
    own_folder,
    rows_to_add,
)

#: Up to so many bytes of vectors every one is compared: exact, and some 0.03 s a search at the
#: most.
EXACT_BYTES = 512_000_000
#: Neighbours of a vector in the graph, and candidates that are kept while it is built and searched.
NEIGHBOURS, BUILD_EF, SEARCH_EF = 32, 200, 512
_GENERATIONS, _VECTORS, _ROWS, _LOG = "generations", "vectors.faiss", "rows", "log"
#: Before each change in the log: its bytes and their CRC-32.
_HEAD = struct.Struct(">QI")


class _Change(msgspec.Struct, frozen=True, array_like=True):
    """Vectors that were added, in float32, or ids that were deleted: these have no payloads."""

    ids: list[int]
    vectors: bytes = b""
    payloads: list[dict[str, str | int]] = []


class _Rows(msgspec.Struct, frozen=True, array_like=True):
    ids: list[int]
    payloads: list[dict[str, str | int]]


class FaissStore:
    def __init__(self, folder: Path, about: About) -> None:
        self._folder, self._about = folder, about
        self._log: IO[bytes] | None = None
        self._load()

    def _load(self) -> None:
        """Read the newest generation and what its log adds."""
        newest = self._generation()
        rows = msgspec.msgpack.decode((newest / _ROWS).read_bytes(), type=_Rows)
        self._index = faiss.read_index(str(newest / _VECTORS))
        self._ids: list[int] = []
        self._payloads: list[dict[str, str | int]] = []
        self._row_of: dict[int, int] = {}
        self._with: dict[tuple[str, str | int], list[int]] = defaultdict(list)
        self._enter(rows.ids, rows.payloads)
        self._end = 0
        for change, self._end in _changes(newest / _LOG):
            self._apply(change)

    def _generation(self) -> Path:
        """The newest one; a killed process may have left the one before it, and a part of the one
        after it."""
        return max(
            (p for p in self._folder.iterdir() if p.name.isdigit()), key=lambda path: int(path.name)
        )

    def _enter(self, ids: list[int], payloads: list[dict[str, str | int]]) -> None:
        """Number the rows after those that are there; a row whose id comes again is dead."""
        for row, (number, payload) in enumerate(zip(ids, payloads, strict=True), len(self._ids)):
            self._row_of[number] = row
            for field in payload.items():
                self._with[field].append(row)
        self._ids += ids
        self._payloads += payloads
        self._alive_N: npt.NDArray[np.bool_] | None = None

    def _apply(self, change: _Change) -> None:
        if change.payloads:
            self._index.add(np.frombuffer(change.vectors, np.float32).reshape(-1, self._about.dim))
            self._enter(change.ids, change.payloads)
        else:
            for number in change.ids:
                self._row_of.pop(number, None)
            self._alive_N = None

    def _write(self, change: _Change) -> None:
        """Append to the log, on disk when this returns; then change what is in memory."""
        if self._log is None:
            self._log = open_own(self._generation() / _LOG, "rb+")
            self._log.truncate(self._end)
            self._log.seek(self._end)
        body = msgspec.msgpack.encode(change)
        self._log.write(_HEAD.pack(len(body), zlib.crc32(body)) + body)
        self._log.flush()
        os.fsync(self._log.fileno())
        self._end = self._log.tell()
        self._apply(change)

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        numbers, vectors_ND, kept = rows_to_add(ids, vectors_ND, payloads, self._about.dim)
        if numbers:
            self._write(_Change(numbers, vectors_ND.tobytes(), kept))

    def delete(self, ids: Sequence[int]) -> None:
        there = [int(number) for number in ids if int(number) in self._row_of]
        if there:
            self._write(_Change(there))

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> list[Hit]:
        check_vectors(vector_D, self._about.dim)
        equal = dict(where or {})
        check_keys({*equal})
        chosen_N = self._alive()
        if equal:
            rows = reduce(
                np.intersect1d,
                [np.array(self._with.get(field, []), np.int64) for field in equal.items()],
            )
            chosen_N = np.zeros(len(self._ids), np.bool_)
            chosen_N[rows] = self._alive()[rows]
        k = min(k, int(chosen_N.sum()))
        if k < 1:
            return []
        sel = (
            None
            if chosen_N.all()
            else faiss.IDSelectorBitmap(np.packbits(chosen_N, bitorder="little"))
        )
        # A graph finds little of what a filter leaves: then every vector that it leaves is
        # compared.
        if equal or not isinstance(self._index, faiss.IndexHNSWFlat):
            index, how = self._flat(), faiss.SearchParameters(sel=sel)
        else:
            index, how = (
                self._index,
                faiss.SearchParametersHNSW(sel=sel, efSearch=max(SEARCH_EF, k)),
            )
        with _one_thread():
            scores_1K, rows_1K = index.search(np.asarray(vector_D, np.float32)[None], k, params=how)
        found = zip(scores_1K[0].tolist(), rows_1K[0].tolist(), strict=True)
        return [
            Hit(id=self._ids[r], score=score, payload=dict(self._payloads[r]))
            for score, r in found
            if r >= 0
        ]

    def _alive(self) -> npt.NDArray[np.bool_]:
        if self._alive_N is None:
            self._alive_N = np.zeros(len(self._ids), np.bool_)
            self._alive_N[[*self._row_of.values()]] = True
        return self._alive_N

    def _flat(self) -> faiss.IndexFlat:
        hnsw = isinstance(self._index, faiss.IndexHNSWFlat)
        return faiss.downcast_index(self._index.storage) if hnsw else self._index

    def ids(self) -> Ids:
        return np.sort(np.fromiter(self._row_of, np.int64, len(self._row_of)))

    def count(self) -> int:
        return len(self._row_of)

    def describe(self) -> About:
        return self._about

    def finish(self) -> None:
        if not self._end:
            return
        rows = sorted(self._row_of.values())
        graph = len(rows) * self._about.dim * 4 > EXACT_BYTES
        index = self._index
        if len(rows) < len(self._ids) or graph != isinstance(index, faiss.IndexHNSWFlat):
            index = _new_index(self._about.dim, graph)
            index.add(self._flat().reconstruct_batch(np.array(rows, np.int64)))
        kept = _Rows([self._ids[row] for row in rows], [self._payloads[row] for row in rows])
        _write_generation(self._folder, int(self._generation().name) + 1, index, kept)
        self.close()
        self._load()
        for path in {*self._folder.iterdir()} - {self._generation()}:
            shutil.rmtree(path)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


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


def _new_index(dim: int, graph: bool) -> faiss.Index:
    if not graph:
        return faiss.IndexFlatIP(dim)
    index = faiss.IndexHNSWFlat(dim, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILD_EF
    return index


def _changes(log: Path) -> Iterator[tuple[_Change, int]]:
    """Every change that is whole, and where it ends; a killed process may have left a part of a
    last one."""
    with open(log, "rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, crc = _HEAD.unpack(head)
            body = file.read(size)
            if len(body) < size or zlib.crc32(body) != crc:
                return
            yield msgspec.msgpack.decode(body, type=_Change), file.tell()


def _write_generation(folder: Path, number: int, index: faiss.Index, rows: _Rows) -> None:
    """Whole and on disk before it gets its name. What a killed process left of one is written
    over."""
    making = folder / f"{number}.making"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    faiss.write_index(index, str(making / _VECTORS))
    with open_own(making / _ROWS, "wb") as file:
        file.write(msgspec.msgpack.encode(rows))
    open_own(making / _LOG, "ab").close()
    for path in (*making.iterdir(), making):
        _to_disk(path)
    making.rename(folder / str(number))
    _to_disk(folder)


def _to_disk(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def shared(location: str) -> bool:
    """No: it is a folder."""
    return False


def create(spot: Spot, about: About) -> FaissStore:
    """A new store in a folder that does not exist yet, or is empty."""
    folder = new_folder(spot, about) / _GENERATIONS
    folder.mkdir()
    _write_generation(folder, 1, _new_index(about.dim, graph=False), _Rows([], []))
    return FaissStore(folder, about)


def open_store(spot: Spot) -> FaissStore:
    """The store that is in a folder, with everything that was acknowledged before a crash."""
    about = own_folder(spot, _GENERATIONS)
    return FaissStore(spot.folder / _GENERATIONS, about)


def drop(spot: Spot) -> None:
    """Its folder is all that there is of it."""
