"""Where documents come from. One file a source, and the file's name is its registration.

A source module offers `open_source(location, fields) -> Source`; a run.yaml names it as `NAME` or
`NAME:LOCATION` (`hf:` is short for `huggingface:`). Anything else is a path, read by `folder`.
Listing sources imports none of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, cast

from farspan.domain.config import FieldsConfig
from farspan.domain.corpus import Document, SkipLog
from farspan.domain.problems import Refusal
from farspan.domain.suggest import any_of, suggest


class Source(Protocol):
    """A stream of documents, the same in the same order every time while `fingerprint` stays the
    same."""

    #: Size of what will be read, for the disk check; 0 when it cannot be known before reading.
    size_bytes: int
    #: What was left out and why, and what was read in another encoding than UTF-8; complete once
    #: `documents` is exhausted.
    skipped: SkipLog
    recoded: SkipLog

    def fingerprint(self) -> str:
        """Return a cheap mark of the present content, such as a hash of paths, sizes and times;
        reads no text."""

    def documents(self) -> Iterator[Document]: ...


def list_sources() -> list[str]:
    """List the sources' names without importing them."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(module for module in modules if not module.startswith("_"))


def open_source(spec: str, fields: FieldsConfig = FieldsConfig()) -> Source:
    """Open the source that `spec` names, with `fields` as the columns of its rows; refuses what
    does not exist."""
    name, colon, location = spec.partition(":")
    name = "huggingface" if name == "hf" else name
    if name not in list_sources() or (not colon and _is_path(name, spec)):
        _refuse_misspelt(spec)
        name = "folder"
        location = spec
    module = importlib.import_module(f"{__name__}.{name}")
    return cast(Source, module.open_source(location, fields))


def _refuse_misspelt(spec: str) -> None:
    """Refuse a word that is neither a path nor a source and means one: `pydoc`."""
    likely = suggest(
        spec, (name for name in list_sources() if name not in ("folder", "huggingface"))
    )
    if likely and not Path(spec).expanduser().exists():
        raise Refusal(
            "path-missing",
            what="there is no such source, file or folder",
            where=spec,
            fact=f"{Path.cwd()} has no {spec!r}",
            remedy=f"use {any_of(likely)}",
        )


def _is_path(name: str, spec: str) -> bool:
    """Return True if the bare name of a source that needs a location is meant as a path."""
    return name == "folder" or (name == "huggingface" and Path(spec).exists())
