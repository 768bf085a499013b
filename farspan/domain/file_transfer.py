"""Files on their way between hosts: a tar, whatever carries it.

What carries it is a sealed connection between two workers, or the standard streams of a command on
a host. What comes is another machine's word: only regular files of expected names are taken.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, cast

from farspan.domain.own_files import open_own

#: Bytes that are handed to the carrier at a time, and taken from it: what fits a cache.
SEND_CHUNK_BYTES = 2**20
RECEIVE_CHUNK_BYTES = 2**16


class Unexpected(Exception):
    """What comes is not what was asked for, or not all of it."""


class Readable(Protocol):
    def read(self, size: int) -> bytes: ...


class Writable(Protocol):
    def write(self, content: bytes) -> int: ...


def send_files(
    carrier: Writable,
    files: Iterable[tuple[Path, str]],
    contents: Mapping[str, bytes] | None = None,
) -> None:
    """Send files and folders under their names, and files of these contents before them. What the
    user's own links lead to is sent, not the links."""
    stream = cast(io.RawIOBase, carrier)
    with tarfile.open(
        fileobj=stream, mode="w|", bufsize=SEND_CHUNK_BYTES, dereference=True
    ) as archive:
        for name, content in (contents or {}).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for path, name in files:
            archive.add(path, arcname=name)


def receive_files(
    carrier: Readable, folder: Path, is_expected: Callable[[str], object], *, sync: bool = False
) -> None:
    """Write what comes into a folder; with `sync` it is on the disk afterwards. Raises Unexpected
    for anything but regular files of expected names."""
    try:
        with tarfile.open(
            fileobj=cast(io.RawIOBase, carrier), mode="r|", bufsize=RECEIVE_CHUNK_BYTES
        ) as archive:
            for member in archive:
                if not member.isdir():
                    _receive_file(archive, member, folder, is_expected, sync)
    except tarfile.TarError as error:
        raise Unexpected(str(error)) from None


def _receive_file(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    folder: Path,
    is_expected: Callable[[str], object],
    sync: bool,
) -> None:
    is_regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
    if not is_regular or not is_expected(member.name):
        raise Unexpected(f"it sends {member.name!r}, which was not asked for")
    content = archive.extractfile(member)
    assert content is not None
    target = folder / member.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_own(target, "wb") as file:
        shutil.copyfileobj(content, file, RECEIVE_CHUNK_BYTES)
        if sync:
            file.flush()
            os.fsync(file.fileno())
