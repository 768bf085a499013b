"""A folder of text files, or one file, of the formats in `farspan.corpus.formats`, also in .zip
files. What cannot be read is left out and named."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from farspan.corpus.file_reader import ZIP, FileReader, missing_extra
from farspan.corpus.formats import find_ending, load_formats
from farspan.domain.config import FieldsConfig
from farspan.domain.corpus import NAMES_SHOWN, Document, SkipLog, Skipped
from farspan.domain.escapes import shell_word
from farspan.domain.install import install_command
from farspan.domain.problems import Refusal, command
from farspan.domain.struct_files import missing_path

#: Endings that a refusal names; there are more than a hundred.
_KNOWN_SHOWN = ".txt .md .html .pdf .docx .epub .tex .csv .jsonl .parquet .ipynb .eml .py .zip"


def open_source(location: str, fields: FieldsConfig = FieldsConfig()) -> Folder:
    """Open the files under `location`; refuses a path that does not exist or has no file that can
    be read."""
    try:
        path = Path(location).expanduser()
    except RuntimeError:
        raise Refusal(
            "path-missing",
            what="there is no such home folder",
            where=location,
            fact=(
                "a path that begins with ~NAME lies in the home folder of a user, and none has "
                "this name"
            ),
            remedy=f"use ~/{shell_word(location[1:])}, in your own home folder, or the whole path",
        ) from None
    if not path.exists():
        raise missing_path(path)
    return Folder(path, fields)


class Folder:
    """Files in the order of their sorted paths; hidden ones are passed over."""

    def __init__(self, path: Path, fields: FieldsConfig = FieldsConfig()) -> None:
        self.path = path
        self.fields = fields
        self.skipped = SkipLog()
        self.recoded = SkipLog()
        self.size_bytes = 0
        self._missing: dict[str, str] = {}
        counts: Counter[str] = Counter()
        formats = load_formats()
        # Names are bytes to the system, and not all of them UTF-8.
        digest = hashlib.sha256(os.fsencode(path.absolute()))
        for file in _walk_source(path):
            if isinstance(file, Skipped):
                self.skipped.add(file)
                continue
            ending = find_ending(file)
            counts[ending] += 1
            if ending in formats or ending == ZIP:
                stat = file.stat()
                self.size_bytes += stat.st_size
                read_as = formats[ending].read_as if ending in formats else ""
                lacking = self._find_lacking(ending)
                about = f"\0{stat.st_size}\0{stat.st_mtime_ns}\0{lacking}{read_as}\n"
                digest.update(os.fsencode(file) + about.encode())
        if fields != FieldsConfig():
            digest.update(msgspec.json.encode(fields))
        self._digest = digest.hexdigest()
        readable = {ending for ending in counts if ending in formats or ending == ZIP}
        if all(map(self._missing_extra, readable)):
            raise self._no_readable_file(counts)

    def fingerprint(self) -> str:
        return self._digest

    def _missing_extra(self, ending: str) -> str:
        """Return the extra that files of an ending need, empty where nothing is missing."""
        extra = self._missing.get(ending)
        if extra is None:
            extra = missing_extra(ending)
            self._missing[ending] = extra
        return extra

    def _find_lacking(self, ending: str) -> str:
        """Return the extras that files of an ending lack, for the fingerprint: with an extra, the
        same files hold more than without it. The same text wherever farspan is installed."""
        extras = {self._missing_extra(ending)}
        if ending == ZIP:
            extras = set(map(self._missing_extra, load_formats()))
        extras.discard("")
        return " ".join(f"pip install 'farspan[{extra}]'" for extra in sorted(extras))

    def documents(self) -> Iterator[Document]:
        self.skipped.clear()
        self.recoded.clear()
        with contextlib.closing(FileReader(self.fields, self.recoded)) as reader:
            for item in reader.read_all(_walk_source(self.path)):
                if isinstance(item, Skipped):
                    self.skipped.add(item)
                else:
                    yield item
        lacking = reader.lacking_columns()
        if lacking is not None:
            raise self._no_named_column(lacking)

    def _no_named_column(self, lacking: Skipped) -> Refusal:
        return Refusal(
            "source-unreadable",
            what="no row of the source has a column that data.fields names",
            where=self.path,
            fact=str(lacking),
            remedy=(
                "name columns that there are: "
                f"{command('prepare', '--set', 'data.fields.text=COLUMN')}"
            ),
            key="data.fields.text",
        )

    def _no_readable_file(self, counts: Counter[str]) -> Refusal:
        kinds = [f"{number} {ending or '(none)'}" for ending, number in counts.most_common(8)]
        # Such as a folder that may not be opened.
        kinds += map(str, self.skipped.entries()[:NAMES_SHOWN])
        missing = next(filter(None, map(self._missing_extra, counts)), "")
        remedy = install_command(missing) if missing else ""
        others = len(load_formats()) - len(_KNOWN_SHOWN.split())
        return Refusal(
            "extra-missing" if remedy else "no-documents",
            what="there is no file here that can be read",
            where=self.path,
            fact=(
                f"it holds {', '.join(kinds) or 'nothing'}; farspan reads {_KNOWN_SHOWN} and "
                f"{others} others"
            ),
            remedy=remedy
            or f"name a folder with such files: ls {shell_word(self.path.absolute().parent)}",
        )


def _walk_source(path: Path) -> Iterator[Path | Skipped]:
    """Yield the files under `path` in sorted order, and what may not be read. Each folder is listed
    once, also where links lead to it; one inside `path` in its own place."""
    if path.is_file():
        yield path
        return
    yield from _walk_folder(path, path.resolve(), set())


def _walk_folder(folder: Path, root: Path, seen: set[tuple[int, int]]) -> Iterator[Path | Skipped]:
    """Yield a folder's files one at a time, so that memory does not grow with their number."""
    try:
        about = folder.stat()
        place = (about.st_dev, about.st_ino)
        if place in seen:
            return
        seen.add(place)
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield Skipped.file(folder, "cannot be opened", error.strerror or "", bad=True)
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        try:
            is_folder = entry.is_dir()
            is_file = entry.is_file()
        except OSError:
            # Such as a link that leads to itself.
            is_folder = is_file = False
        if is_folder:
            if not entry.is_symlink() or not _has_own_place(path.resolve(), root):
                yield from _walk_folder(path, root, seen)
        elif is_file:
            yield path
        elif entry.is_symlink():
            yield Skipped.file(path, "a link that leads to no file")
        else:
            yield Skipped.file(path, "no regular file")


def _has_own_place(folder: Path, root: Path) -> bool:
    """Return True for a folder that is reached without a link: inside `root`, and not hidden."""
    if not folder.is_relative_to(root):
        return False
    return not any(name.startswith(".") for name in folder.relative_to(root).parts)
