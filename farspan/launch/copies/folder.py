"""Copies of runs in a folder: another disk of this machine, or one that is mounted from elsewhere.

The folder itself is never made. Where it is missing, its disk may not be mounted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from farspan.domain.cluster import Host
from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal
from farspan.domain.units import format_bytes
from farspan.launch.copies import ByteSource, CopyError, CopyPlace

COPY_CHUNK_BYTES = 2**20
#: The end of a file's name until it is whole.
PARTIAL = ".partial"


def open_places(location: str, hosts: Sequence[Host]) -> list[CopyPlace]:
    return [Folder(Path(location).expanduser().absolute())]


class Folder:
    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root

    def list_folders(self) -> list[str]:
        with self._explain_errors():
            return sorted(entry.name for entry in os.scandir(self._root) if entry.is_dir())

    def list_files(self, folder: str) -> dict[str, int]:
        sizes = dict[str, int]()
        with self._explain_errors():
            for path in sorted((self._root / folder).rglob("*")):
                if path.is_file() and not path.name.endswith(PARTIAL):
                    name = path.relative_to(self._root / folder).as_posix()
                    sizes[name] = path.stat().st_size
        return sizes

    def read_file(self, name: str, most: int) -> bytes | None:
        with self._explain_errors():
            try:
                with open(self._root / name, "rb") as file:
                    content = file.read(most + 1)
            except (FileNotFoundError, NotADirectoryError):
                self._root.stat()
                return None
        if len(content) > most:
            raise CopyError(f"{name} has more than {format_bytes(most)}")
        return content

    def put_file(self, name: str, content: ByteSource, size: int) -> None:
        target = self._root / name
        partial = target.with_name(target.name + PARTIAL)
        with self._explain_errors():
            self._root.stat()
            free = shutil.disk_usage(self._root).free
            if free < size:
                raise CopyError(f"{format_bytes(size)} needed, {format_bytes(free)} free")
            self._make_folders(target.parent)
            try:
                with open_own(partial, "wb", private=True) as file:
                    written = 0
                    while chunk := content.read(COPY_CHUNK_BYTES):
                        file.write(chunk)
                        written += len(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                if written != size:
                    raise CopyError(f"{name} has {written} bytes, not {size}")
                os.replace(partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def _make_folders(self, folder: Path) -> None:
        """Make a folder in the place, and those it lies in, for this user alone: they hold text."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)

    def fetch_file(self, name: str, file: IO[bytes], size: int) -> None:
        with self._explain_errors(), open(self._root / name, "rb") as stored:
            remaining = size
            while remaining and (chunk := stored.read(min(remaining, COPY_CHUNK_BYTES))):
                file.write(chunk)
                remaining -= len(chunk)
        if remaining:
            raise CopyError(f"{name} ends early")

    def delete_files(self, file_names: Sequence[str]) -> None:
        folders = set[Path]()
        with self._explain_errors():
            for name in file_names:
                path = self._root / name
                path.unlink(missing_ok=True)
                path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
                folders.add(path.parent)
        for folder in folders:
            if not any(folder.glob("*")):
                folder.rmdir()

    def checksum(self, name: str) -> str:
        digest = hashlib.sha256()
        with self._explain_errors(), open(self._root / name, "rb") as file:
            # Read from the disk, where the system can: its cache has what was written.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := file.read(COPY_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._root.is_dir():
                raise CopyError("there is no such folder: its disk may not be mounted") from None
            raise CopyError(f"{error.filename or self._root}: {error.strerror or error}") from None
        except Refusal as refusal:  # A link where a file belongs.
            raise CopyError(refusal.problem.fact) from None
