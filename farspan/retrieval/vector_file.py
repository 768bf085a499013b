"""Vectors of an index as one file, for databases that farspan does not talk to: .parquet, .jsonl or
.npy.

FILE.parquet     columns id, vector (list of float32), text, and one for each key of the payload
FILE.jsonl       the same keys, one JSON object a line
FILE.npy         vectors alone (N, E), float32; FILE.jsonl next to it has the other keys, row by row
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
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.escapes import shell_word
from farspan.domain.install import install_command
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import missing_path
from farspan.retrieval import targets
from farspan.retrieval.filters import field_value
from farspan.retrieval.index import OWN_VECTORS, Index, IndexFingerprint, SetName
from farspan.retrieval.passages import rebuild_command
from farspan.retrieval.stores import Payload

#: Rows that are held at a time.
_BATCH = 1024
#: Keys of a payload, and whether each has text or whole numbers.
Types = dict[str, type]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A passage: its id, below 2**63, its unit vector (E), its text, and what a search can be
    narrowed by."""

    id: int
    vector: npt.NDArray[np.float32]
    text: str
    payload: Payload


def written_set(index: Index) -> SetName:
    """Return the set of vectors that is written: the run's own where there are some. Refuse
    (no-index) an index without vectors."""
    if OWN_VECTORS in index.manifest.sets:
        return OWN_VECTORS
    if index.manifest.best_set is None:
        raise Refusal(
            "no-index",
            what="the index has no vectors to write",
            where=index.path,
            fact="it answers by words alone",
            remedy=f"{rebuild_command(index.path.parent)} --encoder minilm",
        )
    return index.manifest.best_set


def rows(index: Index, name: SetName) -> Iterator[Row]:
    """Yield the passages of an index in their order, with the vectors of a set. A field that a
    document lacks is empty text."""
    for start in range(0, index.manifest.chunks, _BATCH):
        batch = np.arange(start, min(start + _BATCH, index.manifest.chunks))
        for row, vector in zip(batch.tolist(), index.vectors(batch, name), strict=True):
            chunk = index.passages.chunk(row)
            document = index.documents[chunk.document]
            payload: dict[str, str | int] = {
                name: field_value(document, name) or "" for name in index.manifest.fields
            }
            above = " > ".join(chunk.headings)
            payload |= {"line": chunk.line, "page": chunk.page, "headings": above}
            yield Row(id=chunk.id, vector=vector, text=chunk.text, payload=payload)


def write_vectors(path: Path, rows: Iterable[Row], about: IndexFingerprint) -> None:
    """Write rows to `path`, and next to it how databases load them; what is written appears whole.

    The payload of each row has the keys of the first. Refuses as `files_of` does.
    """
    files = files_of(path)
    every = iter(rows)
    largest = 0
    first = [*itertools.islice(every, 1)]
    fields: dict[str, type] = {}
    for row in first:
        fields = {name: type(value) for name, value in row.payload.items()}

    def measured() -> Iterator[Row]:
        nonlocal largest
        for row in itertools.chain(first, every):
            encoded = msgspec.json.encode({**row.payload, "text": row.text})
            largest = max(largest, len(encoded))
            yield row

    with _write_together(files) as temporary:
        _FORMATS[path.suffix](temporary, measured(), about, fields)
        text = targets.page(path.name, about, fields, largest)
        temporary[-1].write_text(text, encoding="utf-8")


def files_of(path: Path) -> list[Path]:
    """Return the files that are written for `path`: itself, the keys next to vectors alone, and the
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
def _write_together(files: list[Path]) -> Iterator[list[Path]]:
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


def _row_keys(row: Row) -> dict[str, Any]:
    return {**row.payload, "id": str(row.id), "text": row.text}


def _write_jsonl(files: list[Path], rows: Iterator[Row], about: IndexFingerprint, _: Types) -> None:
    with open(files[0], "wb") as file:
        for row in rows:
            line = _row_keys(row) | {"vector": row.vector.tolist()}
            file.write(msgspec.json.encode(line) + b"\n")


def _write_npy(files: list[Path], rows: Iterator[Row], about: IndexFingerprint, _: Types) -> None:
    count = 0
    with open(files[0], "wb") as vectors, open(files[1], "wb") as keys:
        _write_header(vectors, 0, about.dim)
        for row in rows:
            vectors.write(row.vector.astype("<f4").tobytes())
            keys.write(msgspec.json.encode(_row_keys(row)) + b"\n")
            count += 1
        # NumPy leaves room in a header for the first axis to grow.
        vectors.seek(0)
        _write_header(vectors, count, about.dim)


def _write_header(file: IO[bytes], count: int, dim: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (count, dim)}
    np.lib.format.write_array_header_1_0(file, header)


def _write_parquet(
    files: list[Path], rows: Iterator[Row], about: IndexFingerprint, fields: Types
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    types = {name: pa.int64() if kind is int else pa.string() for name, kind in fields.items()}
    own = {"id": pa.string(), "vector": pa.list_(pa.float32()), "text": pa.string()}
    schema = pa.schema(own | types, metadata={"farspan": msgspec.json.encode(about)})
    with parquet.ParquetWriter(files[0], schema) as writer:
        while batch := list(itertools.islice(rows, _BATCH)):
            lines = [_row_keys(row) | {"vector": row.vector} for row in batch]
            writer.write_table(pa.Table.from_pylist(lines, schema=schema))


_FORMATS: dict[str, Callable[[list[Path], Iterator[Row], IndexFingerprint, Types], None]] = {
    ".jsonl": _write_jsonl,
    ".npy": _write_npy,
    ".parquet": _write_parquet,
}
