"""Vectors of an index as one file, for databases that farspan does not talk to: .parquet, .jsonl or
.npy.

FILE.parquet     columns id, vector (list of float32), text, and one for each key of the payload
FILE.jsonl       the same keys, one JSON object a line
FILE.npy         vectors alone (N, E), float32; FILE.jsonl beside it has the other keys, row by row
FILE.load.md     schema and commands for each database of `farspan.retrieval.targets`, filled in

An id is written in digits, as text: JSON readers that know only floats would round it. Nothing here
imports PyTorch.

Shapes: N rows, B rows of a batch, E size of a vector.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.codec import missing_path
from farspan.domain.escapes import shell_word
from farspan.domain.install import install_command
from farspan.domain.problems import Refusal
from farspan.retrieval import targets
from farspan.retrieval.index import Index, IndexFingerprint, field
from farspan.retrieval.stores import Payload

#: Rows that are held at a time.
_BATCH = 1024


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A passage: its id, below 2**63, its unit vector (E), its text, and what a search can be
    narrowed by."""

    id: int
    vector: npt.NDArray[np.float32]
    text: str
    payload: Payload


def rows(index: Index) -> Iterator[Row]:
    """The passages of an index in their order. What a document does not have in a field is empty
    text."""
    for start in range(0, index.manifest.chunks, _BATCH):
        batch = np.arange(start, min(start + _BATCH, index.manifest.chunks))
        for row, vector in zip(batch.tolist(), index.vectors(batch), strict=True):
            chunk = index.passages.chunk(row)
            document = index.documents[chunk.document]
            payload: dict[str, str | int] = {
                name: field(document, name) or "" for name in index.manifest.fields
            }
            above = " > ".join(chunk.headings)
            payload |= {"line": chunk.line, "page": chunk.page, "headings": above}
            yield Row(id=chunk.id, vector=vector, text=chunk.text, payload=payload)


def write_vectors(path: Path, rows: Iterable[Row], about: IndexFingerprint) -> None:
    """Write rows to `path`, and beside it how databases load them; what is written appears whole.

    The payload of each row has the keys of the first. Refuses as `files_of` does. Raises ValueError
    for a vector that is not of `about.dim` numbers, and for other keys.
    """
    files = files_of(path)
    write = _FORMATS[path.suffix]
    with _appearing(files) as temporary:
        facts = _Facts(about.dim)
        write(temporary, facts.seen(rows), about)
        text = targets.page(path.name, about, facts.fields, facts.largest)
        temporary[-1].write_text(text, encoding="utf-8")


def files_of(path: Path) -> list[Path]:
    """The files that are written for `path`: itself, the keys beside vectors alone, and the
    commands.

    Refuses (out-of-range) another ending, (run-exists) to write over a file, (path-missing) a
    folder that is not there, and (extra-missing) Parquet without pyarrow.
    """
    if path.suffix not in _FORMATS:
        raise Refusal(
            "out-of-range",
            what=f"vectors cannot be written as {path.suffix or 'a file without an ending'}",
            where=path,
            fact=f"formats: {', '.join(_FORMATS)}",
            remedy=f"name it {shell_word(path.with_suffix('.parquet').name)}",
        )
    beside = [path.with_suffix(".jsonl")] if path.suffix == ".npy" else []
    files = [path, *beside, path.with_name(f"{path.name}.load.md")]
    if there := [file for file in files if os.path.lexists(file)]:
        raise Refusal(
            "run-exists",
            what="this file exists already",
            where=there[0],
            fact="nothing is ever written over",
            remedy=f"name another file, such as {shell_word(f'{path.stem}-2{path.suffix}')}",
        )
    if not path.absolute().parent.is_dir():
        raise missing_path(path.absolute().parent)
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise Refusal(
            "extra-missing",
            what="writing Parquet needs pyarrow",
            where=sys.executable,
            fact="pyarrow is not installed there",
            remedy=install_command("parquet"),
        )
    return files


@contextmanager
def _appearing(files: list[Path]) -> Iterator[list[Path]]:
    """Temporary files that take their names together once they are written; the first of them
    last."""
    temporary = [file.with_name(f"{file.name}.{os.getpid()}.tmp") for file in files]
    try:
        yield temporary
        for written, file in reversed(list(zip(temporary, files, strict=True))):
            with open(written, "rb") as flushed:
                os.fsync(flushed.fileno())
            os.replace(written, file)
    finally:
        for written in temporary:
            written.unlink(missing_ok=True)


class _Facts:
    """What is learnt of rows as they pass: the keys of their payloads with their types, and the
    size of the largest text and payload as JSON, in bytes."""

    def __init__(self, dim: int) -> None:
        self._dim, self.fields, self.largest = dim, dict[str, type](), 0

    def seen(self, rows: Iterable[Row]) -> Iterator[Row]:
        for number, row in enumerate(rows):
            if row.vector.shape != (self._dim,):
                raise ValueError(
                    f"row {number} has a vector of shape {row.vector.shape}, not ({self._dim},)"
                )
            if not number:
                self.fields = {name: type(value) for name, value in row.payload.items()}
            if row.payload.keys() != self.fields.keys():
                raise ValueError(
                    f"row {number} has {sorted(row.payload)}, the first {sorted(self.fields)}"
                )
            self.largest = max(
                self.largest, len(msgspec.json.encode({**row.payload, "text": row.text}))
            )
            yield row


def _keys(row: Row) -> dict[str, Any]:
    return {**row.payload, "id": str(row.id), "text": row.text}


def _write_jsonl(files: list[Path], rows: Iterator[Row], about: IndexFingerprint) -> None:
    encoder = msgspec.json.Encoder()
    with open(files[0], "wb") as file:
        for row in rows:
            file.write(encoder.encode(_keys(row) | {"vector": row.vector.tolist()}) + b"\n")


def _write_npy(files: list[Path], rows: Iterator[Row], about: IndexFingerprint) -> None:
    encoder, count = msgspec.json.Encoder(), 0
    with ExitStack() as stack:
        vectors, keys = (stack.enter_context(open(file, "wb")) for file in files[:2])
        start = _write_header(vectors, 0, about.dim)
        for row in rows:
            vectors.write(row.vector.astype("<f4").tobytes())
            keys.write(encoder.encode(_keys(row)) + b"\n")
            count += 1
        vectors.seek(0)
        # NumPy leaves room in a header for the first axis to grow.
        if _write_header(vectors, count, about.dim) != start:
            raise ValueError(f"the header of {count} rows is longer than that of none")


def _write_header(file: IO[bytes], count: int, dim: int) -> int:
    header = {"descr": "<f4", "fortran_order": False, "shape": (count, dim)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def _write_parquet(files: list[Path], rows: Iterator[Row], about: IndexFingerprint) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    first = next(rows, None)
    types = {} if first is None else {name: type(value) for name, value in first.payload.items()}
    schema = pa.schema(
        [("id", pa.string()), ("vector", pa.list_(pa.float32())), ("text", pa.string())]
        + [(name, pa.int64() if kind is int else pa.string()) for name, kind in types.items()],
        metadata={"farspan": msgspec.json.encode(about)},
    )
    every = itertools.chain([] if first is None else [first], rows)
    with parquet.ParquetWriter(files[0], schema) as writer:
        while batch := list(itertools.islice(every, _BATCH)):
            columns = {
                name: [_keys(row)[name] for row in batch]
                for name in schema.names
                if name != "vector"
            }
            flat = np.concatenate([row.vector for row in batch])
            ends = np.arange(len(batch) + 1, dtype=np.int32) * about.dim
            columns["vector"] = pa.ListArray.from_arrays(ends, pa.array(flat, pa.float32()))
            writer.write_table(
                pa.table({name: columns[name] for name in schema.names}, schema=schema)
            )


_FORMATS: dict[str, Callable[[list[Path], Iterator[Row], IndexFingerprint], None]] = {
    ".jsonl": _write_jsonl,
    ".npy": _write_npy,
    ".parquet": _write_parquet,
}
