"""Tables in text, .csv and .tsv: each row is a document.

Without a column of text all columns make the text, each value behind the name of its column.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from farspan.corpus.formats._format import Format, Runs
from farspan.corpus.reading import (
    CHUNK_BYTES,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    ReadOptions,
    UnreadableFile,
    bounded_lines,
    first_words,
    open_utf8,
)
from farspan.corpus.rows import (
    MAX_FIELDS_BYTES,
    describe_columns,
    has_columns,
    has_text,
    lacks_text,
    row_document,
)
from farspan.domain.config import FieldsConfig
from farspan.domain.corpus import Document, Skipped

_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}
#: A table with more columns is data for programs.
MAX_COLUMNS = 2000
TOO_MANY_COLUMNS = f"more than {MAX_COLUMNS:,} columns"
NOT_A_ROW = "not a row of the table"
#: A longer cell is no name of a column.
_MAX_NAME_CHARS = 100


def read_table(file: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Read the rows of a table, numbered as a spreadsheet does: the names of columns are row 1."""
    # The default is 128 KiB; this process reads nothing else.
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    ending = next((end for end in _DELIMITERS if options.ending.startswith(end)), ".csv")
    delimiter = _find_delimiter(file, options.encoding, _DELIMITERS[ending])
    columns: list[str] | None = None
    fields = options.fields
    with open_utf8(file, options.encoding) as stream:
        lines = _Lines(stream)
        rows = csv.reader(lines, delimiter=delimiter)
        number = 0
        while True:
            number += 1
            try:
                cells = next(rows, None)
            except csv.Error as error:
                yield Skipped.row(file, number, NOT_A_ROW, first_words(error))
                continue
            if cells is None:
                break
            if lines.take_dropped():
                yield Skipped.row(file, number, TOO_LONG)
            elif len(cells) > MAX_COLUMNS:
                yield Skipped.row(file, number, TOO_MANY_COLUMNS)
            elif columns is None and not any(map(str.strip, cells)):
                continue
            elif columns is None:
                has_names = _are_names(cells) or has_columns(dict.fromkeys(cells), fields)
                columns = [cell.strip() for cell in cells] if has_names else []
                if fields.texts and not has_columns(dict.fromkeys(columns), fields):
                    detail = describe_columns(columns) if columns else "its columns have no names"
                    raise UnreadableFile(lacks_text(fields), detail)
                if not has_names:
                    yield from _read_row(cells, columns, file, number, fields)
            elif any(map(str.strip, cells)):
                yield from _read_row(cells, columns, file, number, fields)


def _read_row(
    cells: list[str], columns: list[str], file: Path, number: int, fields: FieldsConfig
) -> Iterator[Document | Skipped]:
    """Yield the document of a row; without names of columns its text is its cells."""
    row = {}
    for place, cell in enumerate(cells):
        name = columns[place] if place < len(columns) else ""
        row[name or f"column {place + 1}"] = cell.strip()
    if has_text(row, fields):
        filled = {name: value for name, value in row.items() if value or name in columns}
        yield row_document(filled, file, number, fields=fields)
        return
    if fields.texts:
        # Its cells in these columns are empty.
        yield Skipped.row(file, number, lacks_text(fields), describe_columns(row))
        return
    pairs = [(name, value) for name, value in row.items() if value]
    lines = [f"{name}: {value}" if columns else value for name, value in pairs]
    text = "\n".join(lines)
    if len(text) > MAX_FIELDS_BYTES:
        yield Skipped.row(file, number, TOO_LONG)
        return
    document = row_document({**dict(pairs), _ALL_CELLS: text}, file, number, fields=_all(fields))
    yield document


#: The column of all others, where none is the text.
_ALL_CELLS = "\0all"


def _all(fields: FieldsConfig) -> FieldsConfig:
    return FieldsConfig(text=_ALL_CELLS, title=fields.title, id=fields.id)


class _Lines:
    """The lines of a table as text; one that is too long is left out."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._lines = bounded_lines(stream)
        self._was_dropped = False
        self._is_first = True

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        if line is None:
            self._was_dropped = True
            line = b"\n"
        text = line.decode("utf-8", "replace")
        if self._is_first:
            text = text.removeprefix("\ufeff")
            self._is_first = False
        return text

    def take_dropped(self) -> bool:
        """Return whether a line of the last row was left out."""
        was_dropped = self._was_dropped
        self._was_dropped = False
        return was_dropped


def _find_delimiter(file: Path, encoding: str, delimiters: str) -> str:
    """Return the delimiter that the first line has most of, outside quotes."""
    with open_utf8(file, encoding) as stream:
        sample = stream.read(CHUNK_BYTES).decode("utf-8", "replace").lstrip("\ufeff\r\n ")
    counts = dict.fromkeys(delimiters, 0)
    is_quoted = False
    for character in sample:
        if character == '"':
            is_quoted = not is_quoted
        elif not is_quoted and character == "\n":
            break
        elif not is_quoted and character in counts:
            counts[character] += 1
    return max(delimiters, key=lambda delimiter: counts[delimiter])


def _are_names(cells: list[str]) -> bool:
    """Return True for cells that are names of columns: distinct, short, and no numbers. The first
    may be empty, as pandas writes it."""
    columns = [cell.strip() for cell in cells]
    filled = columns if columns[0] else columns[1:]
    if not filled or not all(filled) or len(set(filled)) < len(filled):
        return False
    return all(len(name) <= _MAX_NAME_CHARS and not _is_number(name) for name in filled)


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True


FORMATS = (
    Format(
        tuple(_DELIMITERS),
        read_table,
        runs=Runs.GUARDED,
        packed=True,
        # Rows are bounded one by one.
        max_ratio=0,
        has_rows=True,
    ),
)
