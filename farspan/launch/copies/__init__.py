"""Places that copies of runs are kept in, one file each: a file's name is the kind of place, and
`open_places(location, hosts)` opens what `checkpoint.copy` names. Listing them imports none.

A place holds files by names such as `papers-1f2e/run.json`. It may be written by others: what it
lists and holds is another machine's word.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import IO, Protocol

from farspan.domain.cluster import Host


class CopyError(Exception):
    """A place that cannot be written or read now, with the reason as its message."""


class ByteSource(Protocol):
    def read(self, size: int) -> bytes: ...


class CopyPlace(Protocol):
    """Every method takes bounded time and raises CopyError, but for folders of the system's."""

    #: As people write it.
    name: str

    def list_folders(self) -> list[str]:
        """List the folders that lie in the place itself. Raises CopyError where it is not there."""

    def list_files(self, folder: str) -> dict[str, int]:
        """Return the bytes of each whole file in a folder and those inside, by the name within it.
        Empty where there is no such folder."""

    def read_file(self, name: str, most: int) -> bytes | None:
        """Return a small file; None where it is not there. Raises CopyError where it has more than
        `most` bytes."""

    def put_file(self, name: str, content: ByteSource, size: int) -> None:
        """Write a file of `size` bytes. It is there whole, or as it was before."""

    def fetch_file(self, name: str, file: IO[bytes], size: int) -> None:
        """Write the content of a file of `size` bytes to `file`."""

    def delete_files(self, file_names: Sequence[str]) -> None:
        """Delete files, in this order."""

    def checksum(self, name: str) -> str | None:
        """Return the SHA-256 of a file as it is stored; None where the place has verified that
        itself when the file was put."""


def place_kind(location: str) -> str:
    """Return the kind of place that a value of `checkpoint.copy` names."""
    if location == "site":
        return "site"
    scheme, separator, _ = location.partition("://")
    return scheme if separator else "folder"


def open_places(location: str, hosts: Sequence[Host]) -> list[CopyPlace]:
    """Open what a value of `checkpoint.copy` names; `site` is each of these hosts. Raises Refusal
    (copy-unusable, extra-missing)."""
    module = importlib.import_module(f"{__name__}.{place_kind(location)}")
    places: list[CopyPlace] = module.open_places(location, hosts)
    return places


def known_kind(location: str) -> bool:
    """Return whether `checkpoint.copy` may have this value."""
    return place_kind(location) in {module.name for module in pkgutil.iter_modules(__path__)}
