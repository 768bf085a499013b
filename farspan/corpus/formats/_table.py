"""A table, row by row: the names of its columns, and a document of each row.

Without a column of text all columns make the text, each value behind the name of its column.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from farspan.corpus.reading import TOO_LONG, UnreadableFile
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

#: A table with more columns is data for programs.
MAX_COLUMNS = 2000
TOO_MANY_COLUMNS = f"more than {MAX_COLUMNS:,} columns"
#: A longer cell is no name of a column.
_MAX_NAME_CHARS = 100
#: The column of all others, where none is the text.
_ALL_CELLS = "\0all"


class Table:
    """A table of a file. Its first row that is not blank has the names of the columns, if these
    look like names; `sheet` is cited too."""

    def __init__(self, file: Path, fields: FieldsConfig, sheet: str = "") -> None:
        self._file = file
        self._fields = fields
        self._sheet = sheet
        #: None before the first row, empty where the columns have no names.
        self._columns: list[str] | None = None

    def read_row(self, cells: list[str], number: int) -> Iterator[Document | Skipped]:
        """Yield the document of a row. Raises UnreadableFile if no column can hold the text."""
        cells = [cell.strip() for cell in cells]
        if not any(cells):
            return
        if len(cells) > MAX_COLUMNS:
            yield Skipped.row(self._file, number, TOO_MANY_COLUMNS)
        elif self._columns is not None:
            yield self._make_document(cells, self._columns, number)
        else:
            has_names = _are_names(cells) or has_columns(dict.fromkeys(cells), self._fields)
            self._columns = cells if has_names else []
            if self._fields.texts and not has_columns(dict.fromkeys(self._columns), self._fields):
                detail = describe_columns(cells) if has_names else "its columns have no names"
                raise UnreadableFile(lacks_text(self._fields), detail)
            if not has_names:
                yield self._make_document(cells, [], number)

    def _make_document(
        self, cells: list[str], columns: list[str], number: int
    ) -> Document | Skipped:
        row: dict[str, str] = {}
        for column, cell in enumerate(cells):
            name = columns[column] if column < len(columns) else ""
            if cell:
                row[name or f"column {column + 1}"] = cell
        fields = self._fields
        if not has_text(row, fields):
            if fields.texts:
                # Its cells in these columns are empty.
                return Skipped.row(self._file, number, lacks_text(fields), describe_columns(row))
            pairs = row.items()
            lines = [f"{name}: {value}" if columns else value for name, value in pairs]
            row[_ALL_CELLS] = "\n".join(lines)
            if len(row[_ALL_CELLS]) > MAX_FIELDS_BYTES:
                return Skipped.row(self._file, number, TOO_LONG)
            fields = FieldsConfig(text=_ALL_CELLS, title=fields.title, id=fields.id)
        place = f"{self._sheet}:{number}" if self._sheet else str(number)
        return row_document(
            row,
            self._file,
            number,
            origin=f"{self._file}:{place}",
            title="" if fields.id else f"{self._file.name}:{place}",
            fields=fields,
        )


def _are_names(cells: list[str]) -> bool:
    """Return True for cells that are names of columns: distinct, short, and no numbers. The first
    may be empty, as pandas writes it."""
    filled = cells if cells[0] else cells[1:]
    if not filled or not all(filled) or len(set(filled)) < len(filled):
        return False
    return all(len(name) <= _MAX_NAME_CHARS and not _is_number(name) for name in filled)


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True
