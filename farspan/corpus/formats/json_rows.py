"""JSON: an object a line, an array of objects, or objects on end; each is a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from farspan.corpus.formats._format import Format
from farspan.corpus.reading import ReadOptions
from farspan.corpus.rows import read_json_rows
from farspan.domain.corpus import Document, Skipped

#: Rows are named after their file and number.
_READ_AS = "named rows"


def read_lines(file: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Read rows that each have a text."""
    return read_json_rows(file, options.encoding, options.fields)


def read_values(file: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Read rows, also those of a list within an object."""
    return read_json_rows(file, options.encoding, options.fields, unwrap=True)


# Rows are bounded one by one, whatever their file unpacks to.
FORMATS = (
    Format(
        (".jsonl", ".ndjson"), read_lines, packed=True, max_ratio=0, has_rows=True, read_as=_READ_AS
    ),
    # C4 names its JSON lines so.
    Format((".json",), read_values, packed=True, max_ratio=0, has_rows=True, read_as=_READ_AS),
)
