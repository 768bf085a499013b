"""A folder of text files, or one file: .txt .md .rst .html .jsonl .json.gz .parquet, and .pdf with
pypdf installed. What cannot be read is left out and named."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from farspan.corpus.documents import normalize_line_ends, part_title, split_parts
from farspan.corpus.guarded import GuardedReader, Reader
from farspan.corpus.markdown import MarkdownOutline
from farspan.corpus.outline import Outline, UnderlinedOutline
from farspan.corpus.reading import (
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    UTF8,
    UnreadableFile,
    find_encoding,
    first_words,
    read_text,
    read_whole,
)
from farspan.corpus.rows import read_json_rows, read_parquet
from farspan.domain.corpus import NAMES_SHOWN, Document, Heading, SkipLog, Skipped
from farspan.domain.escapes import shell_word
from farspan.domain.install import install_command
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import missing_path

#: Libraries that a kind of file needs, and the extra that installs them.
_NEEDS = {".pdf": ("pypdf", "pdf"), ".parquet": ("pyarrow", "parquet")}
#: Kinds of files that came to be read in another way: what the same file held before is not what it
#: holds now.
_READ_AS = {
    ".pdf": "whole words",
    ".html": "outline",
    ".htm": "outline",
    ".md": "outline",
    ".rst": "outline",
    ".jsonl.zst": "to its end",
}


def open_source(location: str) -> Folder:
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
    return Folder(path)


class Folder:
    """Files in the order of their sorted paths; hidden ones are passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = SkipLog()
        self.recoded = SkipLog()
        self.size_bytes = 0
        #: The command that installs what files of a kind need, where that is not there.
        self._missing: dict[str, str] = {}
        for suffix, (library, extra) in _NEEDS.items():
            if importlib.util.find_spec(library) is None:
                self._missing[suffix] = install_command(extra)
        counts: Counter[str] = Counter()
        # Names are bytes to the system, and not all of them UTF-8.
        digest = hashlib.sha256(os.fsencode(path.absolute()))
        for file in _walk_source(path):
            if isinstance(file, Skipped):
                self.skipped.add(file)
                continue
            suffix = _find_suffix(file)
            counts[suffix] += 1
            if suffix in _READERS:
                stat = file.stat()
                self.size_bytes += stat.st_size
                lacking = ""
                if suffix in self._missing:
                    # With this extra, the same files hold more than without it. The same text
                    # wherever farspan is installed.
                    lacking = f"pip install 'farspan[{_NEEDS[suffix][1]}]'"
                about = f"\0{stat.st_size}\0{stat.st_mtime_ns}\0{lacking}"
                about += f"{_READ_AS.get(suffix, '')}\n"
                digest.update(os.fsencode(file) + about.encode())
        self._digest = digest.hexdigest()
        readable = {*_READERS} - {*self._missing}
        if readable.isdisjoint(counts):
            raise self._no_readable_file(counts)

    def fingerprint(self) -> str:
        return self._digest

    def documents(self) -> Iterator[Document]:
        self.skipped.clear()
        self.recoded.clear()
        with contextlib.closing(GuardedReader()) as guarded:
            for file in _walk_source(self.path):
                if isinstance(file, Skipped):
                    self.skipped.add(file)
                    continue
                suffix = _find_suffix(file)
                if suffix not in _READERS:
                    self.skipped.add(Skipped.file(file, "not a kind of file that can be read"))
                elif suffix in self._missing:
                    self.skipped.add(Skipped.file(file, f"needs {self._missing[suffix]}"))
                else:
                    yield from self._read_file(file, suffix, guarded)

    def _read_file(self, file: Path, suffix: str, guarded: GuardedReader) -> Iterator[Document]:
        """Yield the documents of a file; logs it, or rows of it, where they cannot be read."""
        is_empty = True
        try:
            if suffix in _GUARDED_READERS:
                items = guarded.read(_GUARDED_READERS[suffix], file)
            else:
                encoding = find_encoding(file, page=suffix in _PAGES)
                items = _TEXT_READERS[suffix](file, encoding)
                if encoding != UTF8:
                    self.recoded.add(Skipped.file(file, f"read as {encoding}"))
            for item in items:
                if isinstance(item, Skipped):
                    is_empty = False
                    self.skipped.add(item)
                else:
                    is_empty = is_empty and not item.text.strip()
                    yield item
        except UnreadableFile as error:
            self.skipped.add(Skipped.file(file, error.reason, error.detail, bad=True))
        except OSError as error:
            reason = error.strerror or first_words(error)
            self.skipped.add(Skipped.file(file, "cannot be opened", reason, bad=True))
        else:
            if is_empty:
                scan = ", perhaps a scan" if suffix == ".pdf" else ""
                self.skipped.add(Skipped.file(file, f"no text in it{scan}"))

    def _no_readable_file(self, counts: Counter[str]) -> Refusal:
        kinds = [f"{number} {suffix or '(none)'}" for suffix, number in counts.most_common(8)]
        # Such as a folder that may not be opened.
        kinds += map(str, self.skipped.entries()[:NAMES_SHOWN])
        remedy = next(filter(None, map(self._missing.get, counts)), None)
        return Refusal(
            "extra-missing" if remedy else "no-documents",
            what="there is no file here that can be read",
            where=self.path,
            fact=f"it holds {', '.join(kinds) or 'nothing'}; farspan reads {' '.join(_READERS)}",
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


def _find_suffix(file: Path) -> str:
    """Return the end of the name that decides the reader, such as `.txt` or `.jsonl.gz`."""
    name = file.name.lower()
    return next((suffix for suffix in _READERS if name.endswith(suffix)), file.suffix.lower())


def _read_plain(file: Path, encoding: str) -> Iterator[Document]:
    """Read a text file, in parts if it is long, titled by what it names as its title, its first
    heading, or its name."""
    make_outline = _OUTLINES.get(file.suffix.lower())
    outline = make_outline() if make_outline else None
    title = file.stem
    line = 1
    page = 0
    at = 0
    for number, text in enumerate(split_parts(_read_outlined(file, encoding, outline)), 1):
        # A text with form feeds, as `pdftotext` writes it, has pages.
        page = page or int("\f" in text)
        headings: tuple[Heading, ...] | msgspec.UnsetType = msgspec.UNSET
        if outline:
            size = len(normalize_line_ends(text))
            headings = outline.take(at, at + size)
            at += size
            title = (outline.title or title) if number == 1 else title
        yield Document(
            title=part_title(title, number),
            text=text,
            origin=str(file),
            line=line,
            page=page,
            headings=headings,
        )
        line = line + text.count("\n")
        page = page and page + text.count("\f")


def _read_outlined(file: Path, encoding: str, outline: Outline | None) -> Iterator[str]:
    """Yield the text of a file in pieces, after the outline has read each."""
    line_ends = io.IncrementalNewlineDecoder(None, translate=True)
    for text in read_text(file, encoding):
        if outline:
            outline.add(line_ends.decode(text).replace("\0", ""))
        yield text


def _read_page(file: Path, encoding: str) -> Iterator[Document]:
    from farspan.corpus._html import read_html

    page = read_html(read_whole(file, encoding))
    yield Document(
        title=page.title or file.stem, text=page.text, origin=str(file), headings=page.headings
    )


def _read_pdf(file: Path) -> Iterator[Document | None]:
    import pypdf

    from farspan.corpus._pdf import join_broken_words, pdf_title

    reader = pypdf.PdfReader(file)
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnreadableFile("needs a password")
    title = reader.metadata.title if reader.metadata else None
    pages: list[str] = []
    chars = 0
    for page in reader.pages:
        pages.append(page.extract_text())
        chars += len(pages[-1])
        if chars > MAX_DOCUMENT_BYTES:
            raise UnreadableFile(TOO_LONG)
        # Each page may take as long as a document.
        yield None
    text = join_broken_words("\f".join(pages))
    yield Document(title=pdf_title(title, text, file.stem), text=text, origin=str(file), page=1)


#: What finds the headings of a text file. Others have none that can be told from their text.
_OUTLINES: dict[str, Callable[[], Outline]] = {".md": MarkdownOutline, ".rst": UnderlinedOutline}
#: Readers of text, given a file and its encoding; they also give the rows that they leave out.
_TEXT_READERS: dict[str, Callable[[Path, str], Iterator[Document | Skipped]]] = {
    ".txt": _read_plain,
    ".md": _read_plain,
    ".rst": _read_plain,
    ".html": _read_page,
    ".htm": _read_page,
    ".jsonl": read_json_rows,
    ".jsonl.gz": read_json_rows,
    ".jsonl.zst": read_json_rows,
    # As C4 names its JSON lines.
    ".json.gz": read_json_rows,
    ".json.zst": read_json_rows,
}
_PAGES = (".html", ".htm")
#: Readers of what unpacks to any size.
_GUARDED_READERS: dict[str, Reader] = {".parquet": read_parquet, ".pdf": _read_pdf}
_READERS = (*_TEXT_READERS, *_GUARDED_READERS)
