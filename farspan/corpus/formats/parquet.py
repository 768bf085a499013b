"""Parquet files: each row is a document."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from farspan.corpus.formats._format import Format, Needs, Runs
from farspan.corpus.reading import ReadOptions
from farspan.corpus.rows import read_parquet
from farspan.domain.corpus import Document, Skipped


def read_table(file: Path, options: ReadOptions) -> Iterator[Document | Skipped]:
    """Read the rows of a file."""
    return read_parquet(file, options.fields)


def _has_pyarrow() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


FORMATS = (
    Format(
        (".parquet",),
        read_table,
        runs=Runs.GUARDED,
        is_text=False,
        needs=Needs(_has_pyarrow, "parquet"),
        has_rows=True,
        read_as="named rows",
    ),
)
