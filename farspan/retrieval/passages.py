"""The documents of an index and their chunks on disk: what is read of them is what is asked for.

    documents.jsonl    one IndexedDocument a line
    chunks.jsonl       one Chunk a line, in the order of their documents and of their places in them
    rows.npy           of each chunk: id, hash of what is embedded, document, first byte in
                       chunks.jsonl, is it in the fit

Their vectors lie in a store (`farspan.retrieval.stores`), under the chunks' ids.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import Document, Place
from farspan.domain.decoding import decode_json, json_decoder
from farspan.domain.escapes import shell_word
from farspan.domain.index_folder import INDEX_CONFIG
from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal, command
from farspan.domain.struct_files import content_hash
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.stores import Ids

_DOCUMENTS = "documents.jsonl"
_CHUNKS = "chunks.jsonl"
_ROWS = "rows.npy"
ROW = np.dtype(
    [("id", "<i8"), ("text", "<i8"), ("document", "<i4"), ("byte", "<i8"), ("fitted", "?")]
)
Rows = npt.NDArray[Any]


def rebuild_command(home: Path) -> str:
    """Return the command that makes the index in a run's folder, or in one of its own."""
    return command("index" if (home / INDEX_CONFIG).exists() else "embed", home)


class Damaged(Refusal):
    """A file of the index at `index`, in the folder of its run, is not what it was."""

    def __init__(self, index: Path, fact: str) -> None:
        super().__init__(
            "no-index",
            what="the index is damaged",
            where=index,
            fact=fact,
            remedy=f"rm -r {shell_word(index)} && {rebuild_command(index.parent)}",
        )


class IndexedDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`key` is a hash of the whole document and its source."""

    key: str
    title: str
    origin: str
    metadata: dict[str, str] = {}
    #: Line and page that it begins on, 0 where its source has none.
    line: int = 0
    page: int = 0
    #: Where exact copies of it stand.
    places: tuple[Place, ...] = ()

    @property
    def everywhere(self) -> tuple[IndexedDocument | Place, ...]:
        """The document and its exact copies, each with its title, origin and metadata."""
        return (self, *self.places)


def indexed_document(document: Document, places: tuple[Place, ...] = ()) -> IndexedDocument:
    return IndexedDocument(
        key=content_hash(document),
        title=document.title,
        origin=document.origin,
        metadata=document.metadata,
        line=document.line,
        page=document.page,
        places=places,
    )


def corpus_hash(documents: Sequence[IndexedDocument]) -> str:
    """Hash the texts of all documents and all their places."""
    keys = [document.key for document in documents]
    places = []
    for row, document in enumerate(documents):
        if document.places:
            places.append((row, document.places))
    return content_hash(keys, places) if places else content_hash(keys)


def text_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def write(
    folder: Path,
    documents: Sequence[IndexedDocument],
    chunks: Sequence[Chunk],
    texts_N: npt.NDArray[np.int64],
    fitted_N: npt.NDArray[np.bool_],
) -> None:
    """Write an index's passages, chunks being in the order of their documents."""
    encoder = msgspec.json.Encoder()
    with open_own(folder / _DOCUMENTS, "wb") as file:
        file.write(encoder.encode_lines(documents))
    lines = [encoder.encode(chunk) for chunk in chunks]
    with open_own(folder / _CHUNKS, "wb") as file:
        file.writelines(line + b"\n" for line in lines)
    rows_N = np.zeros(len(chunks), ROW)
    rows_N["id"] = [chunk.id for chunk in chunks]
    rows_N["document"] = [chunk.document for chunk in chunks]
    rows_N["byte"][1:] = np.cumsum([len(line) + 1 for line in lines])[:-1]
    rows_N["text"] = texts_N
    rows_N["fitted"] = fitted_N
    with open_own(folder / _ROWS, "wb") as file:
        np.save(file, rows_N)


class Passages:
    """The passages of the index at `index`, in `folder`, opened for reading. Raises Damaged where
    sizes contradict each other, or the manifest's counts of `documents` and `chunks`."""

    def __init__(self, index: Path, folder: Path, documents: int, chunks: int) -> None:
        self._index = index
        self._folder = folder
        self._count = documents
        try:
            self.rows_N: Rows = np.load(folder / _ROWS)
            self._size = (folder / _CHUNKS).stat().st_size
        except Exception as error:  # What a damaged header leads to is not said.
            raise Damaged(index, f"{_ROWS}: {error}") from None
        if self.rows_N.dtype != ROW or self.rows_N.shape != (chunks,):
            raise Damaged(index, f"{_ROWS} does not hold {chunks} chunks")
        numbers = self.rows_N["document"]
        bytes_N = self.rows_N["byte"]
        within = bool(
            numbers[0] >= 0
            and numbers[-1] < documents
            and bytes_N[0] == 0
            and bytes_N[-1] < self._size
        )
        if not (within and (np.diff(numbers) >= 0).all() and (np.diff(bytes_N) > 0).all()):
            raise Damaged(index, f"the places in {_ROWS} are not those of {_CHUNKS}")

    @cached_property
    def documents(self) -> list[IndexedDocument]:
        try:
            lines = json_decoder(IndexedDocument).decode_lines(
                (self._folder / _DOCUMENTS).read_bytes()
            )
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise Damaged(self._index, f"{_DOCUMENTS}: {error}") from None
        if len(lines) != self._count:
            raise Damaged(
                self._index, f"{_DOCUMENTS} has {len(lines)} documents and not {self._count}"
            )
        return lines

    @cached_property
    def _bytes(self) -> mmap.mmap:
        with open(self._folder / _CHUNKS, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def chunk(self, row: int) -> Chunk:
        start = int(self.rows_N["byte"][row])
        stop = int(self.rows_N["byte"][row + 1]) if row + 1 < len(self.rows_N) else self._size
        try:
            chunk = decode_json(self._bytes[start:stop], Chunk)
        except (ValueError, msgspec.MsgspecError) as error:
            raise Damaged(self._index, f"{_CHUNKS}, byte {start}: {error}") from None
        if chunk.document != self.rows_N["document"][row]:
            raise Damaged(
                self._index, f"{_CHUNKS}, byte {start}: a chunk of document {chunk.document}"
            )
        return chunk

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.chunk, range(len(self.rows_N)))

    @cached_property
    def shown_N(self) -> npt.NDArray[np.bool_]:
        """Which documents (N) have a passage."""
        return np.bincount(self.rows_N["document"], minlength=self._count) > 0

    def of_document(self, number: int) -> range:
        """Rows of a document's chunks."""
        first, last = np.searchsorted(self.rows_N["document"], [number, number + 1])
        return range(int(first), int(last))

    @cached_property
    def _by_id(self) -> tuple[Ids, npt.NDArray[np.intp]]:
        order = np.argsort(self.rows_N["id"])
        return self.rows_N["id"][order], order

    def rows_of(self, ids: Ids) -> npt.NDArray[np.intp]:
        """Return the row of each id; -1 for one that the index does not have."""
        sorted_N, order = self._by_id
        if not len(sorted_N):
            return np.full(len(ids), -1)
        at = np.searchsorted(sorted_N, ids).clip(max=len(sorted_N) - 1)
        return np.where(sorted_N[at] == ids, order[at], -1)
