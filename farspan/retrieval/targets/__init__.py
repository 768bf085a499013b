"""Databases that farspan does not connect to: their limits, and the commands that load a file of
vectors.

Each has a Markdown file in this folder, a template. None of the commands was run against its
database.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from farspan.retrieval.index import IndexFingerprint

_FOLDER = Path(__file__).parent


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A database: its file here, and its documented limits for a vector and its metadata."""

    name: str
    title: str
    numbers: int
    #: The documentation of the limit.
    source: str
    metadata_bytes: int | None = None


TARGETS = (
    Target(
        name="pinecone",
        title="Pinecone",
        numbers=20_000,
        metadata_bytes=40_960,
        source="docs.pinecone.io, database limits",
    ),
    Target(
        name="redis",
        title="Redis",
        numbers=32_768,
        source="Google's Memorystore for Redis; Redis's own pages name no limit",
    ),
    Target(
        name="mongodb",
        title="MongoDB",
        numbers=8192,
        source="mongodb.com/docs, how to index vector fields",
    ),
    Target(
        name="solr",
        title="Solr",
        numbers=1024,
        source="guide of Solr 9.0; after apache/solr#1680, of 2023, more with a warning",
    ),
    Target(
        name="cassandra",
        title="Cassandra",
        numbers=8192,
        source="cassandra.apache.org, vector CQL data type, 5.0",
    ),
)


def page(file: str, about: IndexFingerprint, fields: Mapping[str, type], largest: int) -> str:
    """Return how each database loads a file of vectors, as Markdown.

    `fields` are the keys of a payload with their types, str or int. `largest` is the size of the
    largest text and payload as JSON, in bytes.
    """
    import jinja2

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        variable_start_string="<<",
        variable_end_string=">>",
    )
    jinja.filters["quoted"] = json.dumps
    vectors = Path(file)
    types = {name: kind.__name__ for name, kind in fields.items()}
    # A request may have 2 MB; a number takes at most 24 bytes of one.
    rows = 1_000_000 // (24 * about.dim + largest)
    values = {
        "file": file,
        "suffix": vectors.suffix,
        "beside": vectors.with_suffix(".jsonl").name,
        "dim": about.dim,
        "about": about,
        "fields": types,
        "largest": largest,
        "pinecone_rows": max(1, min(1000, rows)),
    }
    parts = [jinja.get_template("page.md").render(values)]
    for target in TARGETS:
        template = jinja.get_template(f"{target.name}.md")
        limits = _format_limits(target, about.dim, largest)
        section = template.render(target=target, **values)
        parts.append(f"## {target.title}\n\n{limits}\n\n{section}")
    return "\n".join(parts)


def _format_limits(target: Target, dim: int, largest: int) -> str:
    """Return the limits of the database, and which of them these vectors exceed."""
    bounds = [(dim, target.numbers, "numbers a vector")]
    if target.metadata_bytes is not None:
        bounds.append((largest, target.metadata_bytes, "bytes of metadata a vector"))
    limits = [f"{limit:,} {noun}" for _, limit, noun in bounds]
    text = f"It takes up to {' and '.join(limits)} ({target.source})."
    exceeding = [f"{size:,} {noun}" for size, limit, noun in bounds if size > limit]
    if exceeding:
        return f"**Too large for it: these have {' and '.join(exceeding)}.** {text}"
    return text
