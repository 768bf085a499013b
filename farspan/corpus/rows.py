"""Rows as documents: JSON lines, JSON arrays and Parquet files, each row bounded."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from farspan.corpus.reading import (
    CHUNK_BYTES,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    UnreadableFile,
    bounded_lines,
    first_words,
    open_utf8,
)
from farspan.domain.corpus import Document, Skipped

TEXT_FIELDS = ("text", "content", "body")
#: Bytes of a row in addition to its text: they stand with every part of a long text.
MAX_FIELDS_BYTES = 1 << 20
NO_TEXT = f"no text in a column {', '.join(TEXT_FIELDS[:-1])} or {TEXT_FIELDS[-1]}"
NOT_JSON = "not a JSON object"
FIELDS_TOO_LONG = f"its fields beside the text are longer than {MAX_FIELDS_BYTES >> 20} MiB"
TOO_MUCH_MEMORY = "takes too much memory"
#: Columns that are named where none of them holds text.
_COLUMNS_SHOWN = 8
#: Rows of a Parquet file that are decoded at a time; one where so many take too much memory.
_PARQUET_ROWS = (256, 1)

#: A string, which may go on to the end of the row: what never ends is then looked at once.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
#: What matters to the extent of a JSON value, outside and inside a string.
_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')
_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_json_rows(file: Path, encoding: str) -> Iterator[Document | Skipped]:
    """Read an object a line, or a JSON array of objects, or objects over several lines each."""
    has_no_lines = _has_no_lines(file, encoding)
    with open_utf8(file, encoding) as stream:
        rows = json_values(stream) if has_no_lines else bounded_lines(stream)
        for number, row in enumerate(rows, 1):
            if row is None:
                yield Skipped.row(file, number, TOO_LONG)
                continue
            if number == 1:
                # Some editors begin a file with a byte-order mark; JSON has none.
                row = row.removeprefix(_BYTE_ORDER_MARK)
            if row.strip(_BLANK):
                yield _json_row(row, file, number)


def _has_no_lines(file: Path, encoding: str) -> bool:
    """Return True for a JSON array, and for a first object that goes over several lines."""
    with open_utf8(file, encoding) as stream:
        begin = stream.read(CHUNK_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip(_BLANK)
    if begin.startswith(b"["):
        return True
    first, newline, _ = begin.partition(b"\n")
    if not newline or _is_json(first):
        return False
    # A damaged first line is no beginning of an object that ends on a later one.
    with open_utf8(file, encoding) as stream:
        value = next(json_values(stream), None)
    return value is not None and _is_json(value)


def _is_json(row: bytes) -> bool:
    try:
        return isinstance(json.loads(row), dict)
    except (ValueError, RecursionError):
        return False


def _json_row(row: bytes, file: Path, number: int) -> Document | Skipped:
    # Lists and objects take up to sixty times the memory of their text; strings do not.
    if len(row) > MAX_FIELDS_BYTES and len(_STRING.sub(b"", row)) > MAX_FIELDS_BYTES:
        return Skipped.row(file, number, FIELDS_TOO_LONG)
    try:
        value = json.loads(row)
    except json.JSONDecodeError as error:
        return Skipped.row(file, number, NOT_JSON, error.msg)
    except (ValueError, RecursionError) as error:
        return Skipped.row(file, number, NOT_JSON, first_words(error))
    if not isinstance(value, dict):
        return Skipped.row(file, number, NOT_JSON, f"a {type(value).__name__}")
    return row_document(value, file, number)


def json_values(stream: IO[bytes], most: int = MAX_DOCUMENT_BYTES) -> Iterator[bytes | None]:
    """Yield elements of a JSON array, or objects on end; None for one of more than `most` bytes.

    What is no JSON comes out as a piece that is none either.
    """
    value = _Value(most)
    depth = 0
    in_array: bool | None = None
    in_string = is_escaped = False
    while chunk := stream.read(CHUNK_BYTES):
        if in_array is None:
            chunk = chunk.removeprefix(_BYTE_ORDER_MARK).lstrip(_BLANK)
            if not chunk:
                continue
            in_array = chunk.startswith(b"[")
            chunk = chunk[1:] if in_array else chunk
        begin = at = 0
        if is_escaped:
            at = 1
            is_escaped = False
        while mark := (_INSIDE if in_string else _OUTSIDE).search(chunk, at):
            at = mark.end()
            character = mark[0]
            if in_string:
                if character == b"\\":
                    is_escaped = at == len(chunk)
                    at += 1
                else:
                    in_string = False
            elif character == b'"':
                in_string = True
            elif character in b"[{":
                depth += 1
            elif character in b"]}":
                depth -= 1
                if depth == 0 and not in_array:
                    value.add(chunk[begin:at])
                    begin = at
                    yield value.take()
                elif depth < 0:
                    # The end of the array.
                    value.add(chunk[begin : at - 1])
                    begin = at
                    depth = 0
                    in_array = False
                    if not value.is_blank():
                        yield value.take()
            elif depth == 0 and in_array:
                value.add(chunk[begin : at - 1])
                begin = at
                yield value.take()
        value.add(chunk[begin:])
    if not value.is_blank():
        yield value.take()


class _Value:
    """The bytes of a JSON value so far, which are given up when they become too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = bytearray()
        self._is_too_long = False

    def add(self, piece: bytes) -> None:
        if self._is_too_long or len(self._bytes) + len(piece) > self._most:
            self._is_too_long = True
            self._bytes.clear()
        else:
            self._bytes += piece

    def take(self) -> bytes | None:
        """Return the value, None if it was too long; what is added next begins another one."""
        value = None if self._is_too_long else bytes(self._bytes)
        self._bytes = bytearray()
        self._is_too_long = False
        return value

    def is_blank(self) -> bool:
        return not self._is_too_long and not self._bytes.strip(_BLANK)


def row_document(
    row: dict[str, Any], file: Path, number: int, *, origin: str = "", title: str = ""
) -> Document | Skipped:
    """Turn a row into a document: text column, title, every other scalar as metadata."""
    field = next((field for field in TEXT_FIELDS if isinstance(row.get(field), str)), None)
    if field is None:
        return Skipped.row(file, number, NO_TEXT, _columns_shown(row))
    text = row[field]
    # A character is a byte or more.
    if len(text) > MAX_DOCUMENT_BYTES:
        return Skipped.row(file, number, TOO_LONG)
    metadata = {}
    for key, value in row.items():
        if key not in (field, "title") and isinstance(value, str | int | float):
            metadata[str(key)] = str(value)
    name = row.get("title")
    fields = [*metadata, *metadata.values()]
    if isinstance(name, str):
        fields.append(name)
    if sum(map(len, fields)) > MAX_FIELDS_BYTES:
        return Skipped.row(file, number, FIELDS_TOO_LONG)
    return Document(
        title=str(name or title or file.stem),
        text=text,
        origin=origin or f"{file}:{number}",
        metadata=metadata,
    )


def read_parquet(file: Path) -> Iterator[Document | Skipped]:
    """Yield the rows of a Parquet file. Raises UnreadableFile if no column can hold the text.

    To be run where memory is bounded: a page of a few bytes may claim to hold gigabytes.
    """
    from pyarrow import parquet, types

    # Pages are read one by one, not a row group's at once.
    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    # Lists and objects become no part of a document.
    texts: list[str] = []
    scalars: list[str] = []
    for field in table.schema_arrow:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        if types.is_string(kind) or types.is_large_string(kind):
            texts.append(field.name)
            scalars.append(field.name)
        elif types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
            scalars.append(field.name)
    if not {*TEXT_FIELDS} & {*texts}:
        raise UnreadableFile(NO_TEXT, _columns_shown(table.schema_arrow.names))
    first = 1
    for group in range(table.num_row_groups):
        count = table.metadata.row_group(group).num_rows
        yield from _read_row_group(table, group, scalars, file, first, count)
        first += count


def _columns_shown(columns: Iterable[object]) -> str:
    shown = (str(column)[:100] for column in itertools.islice(columns, _COLUMNS_SHOWN))
    return f"its columns are {', '.join(shown) or 'none'}"


def _read_row_group(
    table: Any, group: int, columns: list[str], file: Path, first: int, count: int
) -> Iterator[Document | Skipped]:
    """Yield the `count` rows of a row group, numbered from `first`; fewer at a time where memory is
    short."""
    done = 0
    for at_a_time in _PARQUET_ROWS:
        batches = table.iter_batches(
            batch_size=at_a_time, row_groups=[group], columns=columns, use_threads=False
        )
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        try:
            for row in itertools.islice(rows, done, None):
                yield row_document(row, file, first + done)
                done += 1
            return
        except MemoryError:
            # Strings that a page holds once may stand in many rows.
            continue
    yield Skipped.row(file, first + done, TOO_MUCH_MEMORY, count=max(1, count - done))
