"""The files in a .zip, one at a time, each unpacked to a file of bounded size.

No path of an archive is ever used as one: a member is unpacked under its last name alone, in a
folder that is removed with it.
"""

from __future__ import annotations

import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from farspan.corpus.reading import (
    CHUNK_BYTES,
    MAX_UNPACKED_RATIO,
    UNPACKS_TOO_FAR,
    UNSUSPICIOUS_BYTES,
    UnreadableFile,
    first_words,
)

#: Members that an archive may have, and the bytes of their list.
MAX_MEMBERS = 100_000
_MAX_LIST_BYTES = 16 << 20
#: Bytes of a member.
MAX_MEMBER_BYTES = 1 << 30
#: Bytes that all members together, nested ones too, may unpack to whatever the ratio.
_UNSUSPICIOUS_TOTAL_BYTES = 64 << 20
TOO_MANY_MEMBERS = f"has more than {MAX_MEMBERS:,} files in it"
MEMBER_TOO_LONG = f"longer than {MAX_MEMBER_BYTES >> 30} GiB"
NEEDS_PASSWORD = "needs a password"
#: What others write bounds nothing of what it unpacks to at a time.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
#: Bytes of a member's last name, as file systems have them.
_MAX_NAME_BYTES = 200
_ENCRYPTED = 1


class Member(NamedTuple):
    """A file in an archive: its path there, which is cited and never used, and how to unpack it."""

    path: PurePosixPath
    info: zipfile.ZipInfo


class Allowance:
    """The bytes that an archive, and archives in it, may still unpack to."""

    def __init__(self, archive_bytes: int) -> None:
        self._bytes = max(_UNSUSPICIOUS_TOTAL_BYTES, MAX_UNPACKED_RATIO * archive_bytes)

    def take(self, size: int) -> None:
        """Take `size` bytes. Raises UnreadableFile where fewer are left."""
        self._bytes -= size
        if self._bytes < 0:
            raise UnreadableFile(UNPACKS_TOO_FAR)


class ZipArchive:
    """An open archive. What its readers raise of a damaged one becomes UnreadableFile."""

    def __init__(self, archive: zipfile.ZipFile, allowance: Allowance) -> None:
        self._archive = archive
        self._allowance = allowance

    def members(self) -> Iterator[Member]:
        """Yield the files in the order of their paths; hidden ones are passed over."""
        infos = self._archive.infolist()
        if len(infos) > MAX_MEMBERS:
            raise UnreadableFile(TOO_MANY_MEMBERS)
        for info in sorted(infos, key=lambda info: info.filename):
            # Some programs of Windows write its own separators.
            path = PurePosixPath(info.filename.replace("\\", "/"))
            parts = [part for part in path.parts if part not in ("/", ".", "..")]
            is_hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
            if parts and not info.is_dir() and not is_hidden:
                yield Member(PurePosixPath(*parts), info)

    @contextmanager
    def unpack(self, member: Member) -> Iterator[Path]:
        """Unpack a member to a file that is there within the block. Raises UnreadableFile for one
        that is damaged, or unpacks to too much."""
        info = member.info
        if info.flag_bits & _ENCRYPTED:
            raise UnreadableFile(NEEDS_PASSWORD)
        if info.compress_type not in _METHODS:
            raise UnreadableFile("packed in a way that is not read")
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise UnreadableFile("no regular file")
        with tempfile.TemporaryDirectory(prefix="farspan-zip-") as folder:
            file = Path(folder) / _safe_name(member.path.name)
            with file.open("wb") as target:
                self._copy(info, target)
            yield file

    def _copy(self, info: zipfile.ZipInfo, target: IO[bytes]) -> None:
        most = max(UNSUSPICIOUS_BYTES, MAX_UNPACKED_RATIO * info.compress_size)
        size = 0
        with _refusing_damage(), self._archive.open(info) as content:
            while chunk := content.read(CHUNK_BYTES):
                size += len(chunk)
                self._allowance.take(len(chunk))
                if size > most:
                    raise UnreadableFile(UNPACKS_TOO_FAR)
                if size > MAX_MEMBER_BYTES:
                    raise UnreadableFile(MEMBER_TOO_LONG)
                target.write(chunk)


@contextmanager
def open_zip(path: Path, allowance: Allowance) -> Iterator[ZipArchive]:
    """Open an archive. Raises UnreadableFile for a damaged one."""
    with path.open("rb") as file:
        with _refusing_damage():
            archive = zipfile.ZipFile(_BoundedReads(file))
        with archive:
            yield ZipArchive(archive, allowance)


class _BoundedReads:
    """A file that gives no more than some megabytes at a time: the list of an archive's members has
    the length that it claims."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek = file.seek
        self.tell = file.tell
        self.close = file.close

    def read(self, size: int = -1) -> bytes:
        most = _MAX_LIST_BYTES + 1
        content = self._file.read(most if size < 0 else min(size, most))
        if len(content) > _MAX_LIST_BYTES:
            raise UnreadableFile(TOO_MANY_MEMBERS)
        return content

    def seekable(self) -> bool:
        return True


@contextmanager
def _refusing_damage() -> Iterator[None]:
    try:
        yield
    except UnreadableFile:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError) as error:
        raise UnreadableFile("damaged", first_words(error)) from None
    except (RuntimeError, OverflowError, LookupError, struct.error) as error:
        raise UnreadableFile("damaged", first_words(error)) from None


def _safe_name(name: str) -> str:
    """Return a file name that any file system takes, with the ending of `name`."""
    cleaned = "".join(" " if ord(character) < 32 else character for character in name)
    encoded = cleaned.encode("utf-8", "replace")[-_MAX_NAME_BYTES:]
    return encoded.decode("utf-8", "ignore") or "file"
