"""Read files of any known format: each by its reader, where that may run, and zip files by their
members."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from farspan.corpus.archives import Allowance, Member, ZipArchive, open_zip
from farspan.corpus.formats import find_ending, load_formats
from farspan.corpus.formats._format import PACKED, Format, Runs
from farspan.corpus.guarded import GuardedReader
from farspan.corpus.processes import usable_cores
from farspan.corpus.reading import (
    UTF8,
    ReadOptions,
    UnreadableFile,
    check_packed,
    find_encoding,
    first_words,
)
from farspan.corpus.rows import lacks_text
from farspan.domain.config import FieldsConfig
from farspan.domain.corpus import Document, SkipLog, Skipped
from farspan.domain.install import install_command

ZIP = ".zip"
NOT_READ = "not a kind of file that can be read"
#: Archives may hold archives, and these no others.
_MAX_ZIP_DEPTH = 2
ZIP_TOO_DEEP = "an archive in an archive in an archive"
#: Programs that convert documents at a time, and files that they may be ahead.
_MAX_CONVERTERS = 4
_AHEAD = 8

Item = Document | Skipped
Conversion = Future[list[Item]]


def missing_extra(ending: str) -> str:
    """Return the extra that files of an ending need and that is not installed, empty where nothing
    is missing."""
    known = load_formats().get(ending)
    if known is None or known.needs is None or known.needs.is_installed():
        return ""
    return known.needs.extra


class FileReader:
    """Reads files one after the other; what their readers start ends with it."""

    def __init__(self, fields: FieldsConfig, recoded: SkipLog) -> None:
        self._fields = fields
        self._recoded = recoded
        self._guarded = GuardedReader()
        self._converters: ThreadPoolExecutor | None = None
        self._stopped = threading.Event()
        #: By ending, as looking for them takes time.
        self._missing: dict[str, str] = {}
        self._has_rows = False
        self._lacking: Skipped | None = None

    def close(self) -> None:
        """End the processes that are there: nobody waits for them any more."""
        self._stopped.set()
        if self._converters is not None:
            self._converters.shutdown(cancel_futures=True)
        self._guarded.close()

    def lacking_columns(self) -> Skipped | None:
        """Return the first row without the columns that are named, if no row had them."""
        return None if self._has_rows else self._lacking

    def read_all(self, entries: Iterable[Path | Skipped]) -> Iterator[Item]:
        """Yield the documents of files in their order, and what is left out. Documents that a
        program converts are started on some files ahead."""
        waiting: deque[tuple[Path | Skipped, Conversion | None]] = deque()
        for entry in entries:
            started = None if isinstance(entry, Skipped) else self._start_conversion(entry)
            waiting.append((entry, started))
            if len(waiting) > _AHEAD:
                yield from self._read_entry(*waiting.popleft())
        while waiting:
            yield from self._read_entry(*waiting.popleft())

    def _read_entry(self, entry: Path | Skipped, started: Conversion | None) -> Iterator[Item]:
        if isinstance(entry, Skipped):
            yield entry
        elif find_ending(entry) == ZIP:
            yield from self._read_zip(entry, str(entry), None, 1)
        else:
            reason = self._why_unread(find_ending(entry))
            if reason:
                yield Skipped.file(entry, reason)
            else:
                yield from self._read_file(entry, str(entry), started)

    def _why_unread(self, ending: str) -> str:
        """Return why files of an ending are left out, empty for those that are read."""
        if ending not in load_formats():
            return NOT_READ
        if ending not in self._missing:
            extra = missing_extra(ending)
            self._missing[ending] = f"needs {install_command(extra)}" if extra else ""
        return self._missing[ending]

    def _start_conversion(self, file: Path) -> Conversion | None:
        """Start to read a file that a program converts; None for another."""
        ending = find_ending(file)
        known = load_formats().get(ending)
        if known is None or known.runs is not Runs.CONVERTER or self._why_unread(ending):
            return None
        if self._converters is None:
            count = min(_MAX_CONVERTERS, usable_cores())
            self._converters = ThreadPoolExecutor(count)
        return self._converters.submit(self._convert, known, file, ending, str(file))

    def _convert(self, known: Format, file: Path, ending: str, label: str) -> list[Item]:
        options = self._find_options(known, file, ending, label)
        return list(filter(None, known.read(file, options, self._stopped)))

    def _find_options(self, known: Format, file: Path, ending: str, label: str) -> ReadOptions:
        """Find how a file is encoded. Raises UnreadableFile for a damaged one."""
        encoding = UTF8
        is_packed = ending.endswith(PACKED)
        if known.is_text:
            max_ratio = known.max_ratio if is_packed else 0
            encoding = find_encoding(file, page=known.declares, max_ratio=max_ratio)
        elif is_packed:
            check_packed(file, known.max_ratio)
        if encoding != UTF8:
            self._recoded.add(Skipped.file(label, f"read as {encoding}"))
        return ReadOptions(ending, encoding, self._fields)

    def _read_file(self, file: Path, label: str, started: Conversion | None) -> Iterator[Item]:
        """Yield the documents of a file that is cited as `label`, and itself or rows of it where
        they cannot be read."""
        ending = find_ending(file)
        known = load_formats()[ending]
        is_empty = True
        try:
            for item in self._start_reading(known, file, ending, label, started):
                if isinstance(item, Skipped):
                    # Where pages alone are left out the text is not empty.
                    is_empty = False
                else:
                    is_empty = is_empty and not item.text.strip()
                self._note_columns(known, item)
                yield _cite_as(item, file, label)
        except UnreadableFile as error:
            entry = Skipped.file(label, error.reason, error.detail, bad=True)
            if known.has_rows:
                self._note_columns(known, entry)
            yield entry
        except OSError as error:
            reason = error.strerror or first_words(error)
            yield Skipped.file(label, "cannot be opened", reason, bad=True)
        else:
            if is_empty:
                yield Skipped.file(label, "no text in it")

    def _start_reading(
        self, known: Format, file: Path, ending: str, label: str, started: Conversion | None
    ) -> Iterator[Item]:
        """Return the items of a file, from where its reader may run."""
        if started is not None:
            return iter(started.result())
        if known.runs is Runs.CONVERTER:
            return iter(self._convert(known, file, ending, label))
        options = self._find_options(known, file, ending, label)
        if known.runs is Runs.GUARDED:
            return self._guarded.read(known.read, file, options)
        return filter(None, known.read(file, options))

    def _note_columns(self, known: Format, item: Item) -> None:
        """Note whether rows have the columns that are named."""
        if not known.has_rows or not self._fields.texts:
            return
        if isinstance(item, Document):
            self._has_rows = True
        elif item.reason == lacks_text(self._fields):
            self._lacking = self._lacking or item

    def _read_zip(
        self, file: Path, label: str, allowance: Allowance | None, depth: int
    ) -> Iterator[Item]:
        """Yield the documents of an archive; each member is cited below it."""
        if depth > _MAX_ZIP_DEPTH:
            yield Skipped.file(label, ZIP_TOO_DEEP)
            return
        try:
            allowance = allowance or Allowance(file.stat().st_size)
            with open_zip(file, allowance) as archive:
                for member in archive.members():
                    place = f"{label}/{member.path}"
                    yield from self._read_member(archive, member, place, allowance, depth)
        except UnreadableFile as error:
            yield Skipped.file(label, error.reason, error.detail, bad=True)
        except OSError as error:
            reason = error.strerror or first_words(error)
            yield Skipped.file(label, "cannot be opened", reason, bad=True)

    def _read_member(
        self, archive: ZipArchive, member: Member, label: str, allowance: Allowance, depth: int
    ) -> Iterator[Item]:
        ending = find_ending(Path(member.path))
        reason = "" if ending == ZIP else self._why_unread(ending)
        if reason:
            yield Skipped.file(label, reason)
            return
        try:
            with archive.unpack(member) as file:
                if ending == ZIP:
                    yield from self._read_zip(file, label, allowance, depth + 1)
                else:
                    yield from self._read_file(file, label, None)
        except UnreadableFile as error:
            yield Skipped.file(label, error.reason, error.detail, bad=True)


def _cite_as(item: Item, file: Path, label: str) -> Item:
    """Return a document, or what was left out, cited by where it stands in an archive."""
    place = str(file)
    if place == label:
        return item
    if isinstance(item, Document):
        return replace(item, origin=item.origin.replace(place, label, 1))
    return replace(item, path=(item.path or "").replace(place, label, 1))
