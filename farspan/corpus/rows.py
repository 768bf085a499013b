"""Rows as documents: JSON lines, JSON arrays, tables and Parquet files, each row bounded."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
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
from farspan.domain.config import FieldsConfig
from farspan.domain.corpus import Document, Skipped

TEXT_FIELDS = ("text", "content", "body")
TITLE_FIELD = "title"
#: Bytes of a row in addition to its text: they stand with every part of a long text.
MAX_FIELDS_BYTES = 1 << 20
NOT_JSON = "not a JSON object"
FIELDS_TOO_LONG = f"its fields beside the text are longer than {MAX_FIELDS_BYTES >> 20} MiB"
TOO_MUCH_MEMORY = "takes too much memory"
#: Between the columns that make one text, and between the items of a list.
_COLUMNS_APART = "\n\n"
_ITEMS_APART = "\n"
#: Lists in lists, and objects in them, whose text is taken.
_MAX_DEPTH = 8
#: Characters of a row's own name; what is longer is no name.
_MAX_ID_CHARS = 200
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


def read_json_rows(
    file: Path,
    encoding: str,
    fields: FieldsConfig = FieldsConfig(),
    *,
    unwrap: bool = False,
) -> Iterator[Document | Skipped]:
    """Read an object a line, or a JSON array of objects, or objects over several lines each.

    `unwrap`: an object that has no text itself but a list of objects stands for these.
    """
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
                yield from _json_row(row, file, number, fields, unwrap)


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


def _json_row(
    row: bytes, file: Path, number: int, fields: FieldsConfig, unwrap: bool
) -> Iterator[Document | Skipped]:
    # Lists and objects take up to sixty times the memory of their text; strings do not.
    if len(row) > MAX_FIELDS_BYTES and len(_STRING.sub(b"", row)) > MAX_FIELDS_BYTES:
        yield Skipped.row(file, number, FIELDS_TOO_LONG)
        return
    try:
        value = json.loads(row)
    except json.JSONDecodeError as error:
        yield Skipped.row(file, number, NOT_JSON, error.msg)
        return
    except (ValueError, RecursionError) as error:
        yield Skipped.row(file, number, NOT_JSON, first_words(error))
        return
    if not isinstance(value, dict):
        yield Skipped.row(file, number, NOT_JSON, f"a {type(value).__name__}")
        return
    inner = _inner_rows(value, fields) if unwrap and not has_text(value, fields) else []
    if not inner:
        yield row_document(value, file, number, fields=fields)
    for place, inner_row in enumerate(inner, 1):
        origin = f"{file}:{number}.{place}"
        title = f"{file.name}:{number}.{place}"
        yield row_document(inner_row, file, number, origin=origin, title=title, fields=fields)


def _inner_rows(value: dict[str, Any], fields: FieldsConfig) -> list[dict[str, Any]]:
    """Return the rows of the first list in an object whose first item is a row with text."""
    for items in value.values():
        if isinstance(items, list) and items and isinstance(items[0], dict):
            rows = [item for item in items if isinstance(item, dict)]
            if has_text(rows[0], fields):
                return rows
    return []


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
    row: Mapping[str, Any],
    file: Path,
    number: int,
    *,
    origin: str = "",
    title: str = "",
    fields: FieldsConfig = FieldsConfig(),
) -> Document | Skipped:
    """Turn a row into a document: text, title, every other scalar as metadata.

    `origin` and `title` are those of a row that names none; by default its file and number.
    """
    text_columns = _text_columns(row, fields)
    if not text_columns:
        return Skipped.row(file, number, lacks_text(fields), describe_columns(row))
    texts = [_flatten_text(_value_of(row, column)) for column in text_columns]
    text = _COLUMNS_APART.join(filter(None, texts))
    # A character is a byte or more.
    if len(text) > MAX_DOCUMENT_BYTES:
        return Skipped.row(file, number, TOO_LONG)
    title_column = _find_column(row, fields.title or TITLE_FIELD) or ""
    name = _value_of(row, title_column)
    if not isinstance(name, str | int | float):
        name = ""
    metadata = {}
    for key, value in row.items():
        if key not in text_columns and key != title_column and isinstance(value, str | int | float):
            metadata[str(key)] = str(value)
    if sum(map(len, (*metadata, *metadata.values(), str(name)))) > MAX_FIELDS_BYTES:
        return Skipped.row(file, number, FIELDS_TOO_LONG)
    id_column = _find_column(row, fields.id) if fields.id else None
    row_id = " ".join(str(_value_of(row, id_column or "") or "").split())
    if row_id and len(row_id) <= _MAX_ID_CHARS:
        origin = f"{file}:{row_id}"
        title = title or f"{file.name}:{row_id}"
    return Document(
        title=str(name or title or f"{file.name}:{number}"),
        text=text,
        origin=origin or f"{file}:{number}",
        metadata=metadata,
    )


def is_called_by_place(title: str, origin: str) -> bool:
    """Return True for the title of a row without one, which is called by where it stands: nobody
    asks for it by that."""
    has_place = ":" in title or origin.startswith("hf:")
    return has_place and origin.replace(":", " ").endswith(title.replace(":", " "))


def is_called_by_number(title: str, origin: str) -> bool:
    """Return True for the title of a file without one that is its name with a number, such as
    `scan-0034`."""
    return any(map(str.isdigit, title)) and title == PurePath(origin).stem


def lacks_text(fields: FieldsConfig) -> str:
    """Return why a row without text is left out."""
    columns = fields.texts or TEXT_FIELDS
    *others, last = columns
    return f"no text in a column {', '.join(others)} or {last}" if others else f"no text in {last}"


def has_columns(columns: Mapping[str, Any], fields: FieldsConfig) -> bool:
    """Return True if a column can hold the text of rows, also where that of a row is empty."""
    return any(_find_column(columns, name) for name in fields.texts or TEXT_FIELDS)


def has_text(row: Mapping[str, Any], fields: FieldsConfig) -> bool:
    """Return True for a row that makes a document."""
    return bool(_text_columns(row, fields))


def _text_columns(row: Mapping[str, Any], fields: FieldsConfig) -> list[str]:
    """Return the columns that make a row's text: all that are named and hold some, or the first of
    the usual ones that holds a text."""
    columns = []
    for name in fields.texts or TEXT_FIELDS:
        column = _find_column(row, name)
        value = None if column is None else _value_of(row, column)
        if fields.texts and _flatten_text(value):
            columns.append(column or "")
        elif not fields.texts and isinstance(value, str):
            return [column or ""]
    return columns


def _find_column(row: Mapping[str, Any], name: str) -> str | None:
    """Return the column of a name: as it is written, in other letters, or `object.key`."""
    if name in row:
        return name
    folded = name.casefold()
    for column in row:
        if isinstance(column, str) and column.casefold() == folded:
            return column
    outer, dot, _ = name.partition(".")
    is_inner = dot and outer in row and isinstance(row[outer], dict | None)
    return name if is_inner else None


def _value_of(row: Mapping[str, Any], column: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _flatten_text(value: Any, depth: int = 0) -> str:
    """Return the text of a value of a named column: that of lists and objects is that of their
    items, each on a line."""
    if isinstance(value, str):
        return value
    if value is None or depth > _MAX_DEPTH:
        return ""
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return _ITEMS_APART.join(filter(None, (_flatten_text(item, depth + 1) for item in items)))
    return str(value) if isinstance(value, int | float) else ""


def read_parquet(file: Path, fields: FieldsConfig = FieldsConfig()) -> Iterator[Document | Skipped]:
    """Read the rows of a Parquet file. Raises UnreadableFile if no column can hold the text.

    To be run where memory is bounded: a page of a few bytes may claim to hold gigabytes.
    """
    from pyarrow import parquet, types

    # Pages are read one by one, not a row group's at once.
    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    # Lists and objects become no part of a document, unless they are named as its text.
    texts: list[str] = []
    scalars: list[str] = []
    columns = dict.fromkeys(table.schema_arrow.names)
    wanted = {_find_column(columns, name.partition(".")[0]) for name in fields.texts}
    for field in table.schema_arrow:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        is_text = types.is_string(kind) or types.is_large_string(kind)
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        if field.name in wanted or (is_text and not fields.texts):
            texts.append(field.name)
        if is_text or is_number or field.name in wanted:
            scalars.append(field.name)
    if not has_columns(dict.fromkeys(texts), fields):
        raise UnreadableFile(lacks_text(fields), describe_columns(columns))
    first = 1
    for group in range(table.num_row_groups):
        count = table.metadata.row_group(group).num_rows
        yield from _read_row_group(table, group, scalars, file, first, count, fields)
        first += count


def describe_columns(columns: Iterable[object]) -> str:
    """Name the columns that there are, the first of many."""
    shown = [str(column)[:100] for column in itertools.islice(columns, _COLUMNS_SHOWN + 1)]
    if len(shown) > _COLUMNS_SHOWN:
        shown[_COLUMNS_SHOWN] = "..."
    return f"its columns are {', '.join(shown) or 'none'}"


def _read_row_group(
    table: Any,
    group: int,
    columns: list[str],
    file: Path,
    first: int,
    count: int,
    fields: FieldsConfig,
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
                yield row_document(row, file, first + done, fields=fields)
                done += 1
            return
        except MemoryError:
            # Strings that a page holds once may stand in many rows.
            continue
    yield Skipped.row(file, first + done, TOO_MUCH_MEMORY, count=max(1, count - done))
