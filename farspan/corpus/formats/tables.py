"""Tables in text, .csv and .tsv: each row is a document."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from farspan.corpus.formats._format import Format, Runs
from farspan.corpus.formats._table import Table
from farspan.corpus.reading import (
    CHUNK_BYTES,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    ReadOptions,
    bounded_lines,
    first_words,
    open_utf8,
)
from farspan.domain.corpus import Document, Skipped

_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}
NOT_A_ROW = "not a row of the table"


def read_table(file: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Read the rows of a table, numbered as a spreadsheet does: the names of columns are row 1."""
    # The default is 128 KiB; this process reads nothing else.
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    ending = next((end for end in _DELIMITERS if options.ending.startswith(end)), ".csv")
    delimiter = _find_delimiter(file, options.encoding, _DELIMITERS[ending])
    table = Table(file, options.fields)
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
            else:
                yield from table.read_row(cells, number)


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
