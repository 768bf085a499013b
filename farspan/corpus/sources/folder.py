"""A folder of text files, or one file: .txt .md .rst .html .jsonl(.gz|.zst) .parquet, and .pdf with
pypdf installed."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from farspan.corpus.documents import PART_CHARS, clean, numbered, open_zst, parts
from farspan.domain.codec import missing_path
from farspan.domain.corpus import Document, Skipped
from farspan.domain.escapes import shell_line, shell_word
from farspan.domain.problems import Refusal

TEXT_FIELDS = ("text", "content", "body")
#: Libraries that a kind of file needs, and the extra that installs them.
_NEEDS = {".pdf": ("pypdf", "pdf"), ".parquet": ("pyarrow", "parquet")}
_OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".zst": open_zst}
#: What a file in another encoding begins with. The longer marks come first: one begins like a
#: shorter one.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
#: Kinds of files that came to be read in another way: what the same file held before is not what it
#: holds now.
_READ_AS = {".pdf": "pages", ".html": "headings", ".htm": "headings"}
_UNPACK = {".gz": ("gzip", "-d"), ".zst": ("zstd", "-d", "--rm")}
_HEADING = re.compile(
    r"^#{1,6}[ \t]+(.+?)[ \t#]*$|^([^\s].*)\n[=\-~^\"'*+#]{3,}[ \t]*$", re.MULTILINE
)
#: YAML at the top of a Markdown file; it begins with a key, which text between two rules does not.
_FRONT_MATTER = re.compile(
    r"\A---[ \t]*\n(?=(?:#.*\n)*[\w-]+[ \t]*:)((?s:.*?))^(?:---|\.\.\.)[ \t]*$", re.MULTILINE
)
#: A title on one line; `>` and `|` begin one of several lines.
_FRONT_TITLE = re.compile(r"^title[ \t]*:[ \t]*([^\s>|].*?)[ \t]*$", re.MULTILINE)


def open_source(location: str) -> Folder:
    """The files under `location`; refuses a path that does not exist or has no file that can be
    read."""
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
        self.skipped: list[Skipped] = []
        self.size_bytes = 0
        self._missing = {suffix: remedy for suffix in _NEEDS if (remedy := _missing_extra(suffix))}
        counts: Counter[str] = Counter()
        # Names are bytes to the system, and not all of them UTF-8.
        digest = hashlib.sha256(os.fsencode(path.absolute()))
        for file in _walk(path):
            suffix = _suffix(file)
            counts[suffix] += 1
            if suffix in _READERS:
                stat = file.stat()
                self.size_bytes += stat.st_size
                # With the extra that is asked for, the same files hold more than without it.
                about = f"\0{stat.st_size}\0{stat.st_mtime_ns}\0{self._missing.get(suffix, '')}"
                about += f"{_READ_AS.get(suffix, '')}\n"
                digest.update(os.fsencode(file) + about.encode())
        self._digest = digest.hexdigest()
        if not any(suffix in _READERS and suffix not in self._missing for suffix in counts):
            raise self._nothing(counts)

    def fingerprint(self) -> str:
        return self._digest

    def documents(self) -> Iterator[Document]:
        self.skipped.clear()
        for file in _walk(self.path):
            suffix = _suffix(file)
            if suffix not in _READERS:
                self.skipped.append(Skipped.file(file, "not a kind of file that can be read"))
            elif suffix in self._missing:
                self.skipped.append(Skipped.file(file, f"needs {self._missing[suffix]}"))
            else:
                yield from self._read(file, suffix)

    def _read(self, file: Path, suffix: str) -> Iterator[Document]:
        taken, empty = False, True
        try:
            for document in _READERS[suffix](file):
                taken, empty = True, empty and not document.text.strip()
                yield document
        except Refusal as refusal:
            if taken or refusal.problem.code != "not-utf8" or _encoding(file):
                raise
            self.skipped.append(Skipped.file(file, "not text (NUL bytes)"))
        except Exception as error:  # readers of damaged files raise anything
            if suffix != ".pdf":
                raise Refusal(
                    "source-unreadable",
                    what="the file cannot be read as what its name says",
                    where=file,
                    fact=" ".join(str(error).split())[:300],
                    remedy=f"take it out of the folder: mv {shell_word(file)} /tmp/",
                ) from None
            self.skipped.append(Skipped.file(file, f"not a PDF that can be read ({error})"))
        else:
            if empty:
                self.skipped.append(
                    Skipped.file(file, "no text in it" + (" (a scan?)" if suffix == ".pdf" else ""))
                )

    def _nothing(self, counts: Counter[str]) -> Refusal:
        kinds = (
            ", ".join(f"{number} {suffix or '(none)'}" for suffix, number in counts.most_common(8))
            or "nothing"
        )
        remedy = next((self._missing[suffix] for suffix in counts if suffix in self._missing), None)
        return Refusal(
            "extra-missing" if remedy else "no-documents",
            what="there is no file here that can be read",
            where=self.path,
            fact=f"it holds {kinds}; farspan reads {' '.join(_READERS)}",
            remedy=remedy
            or f"name a folder with such files: ls {shell_word(self.path.absolute().parent)}",
        )


def _walk(path: Path) -> Iterator[Path]:
    """Files under `path` in sorted order, a folder's at a time, so that memory does not grow with
    their number."""
    if path.is_file():
        yield path
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if not entry.name.startswith("."):
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            elif entry.is_file():
                yield Path(entry.path)


def _suffix(file: Path) -> str:
    """The end of the name that says what is in the file, such as `.txt` or `.jsonl.gz`."""
    name = file.name.lower()
    return next((suffix for suffix in _READERS if name.endswith(suffix)), file.suffix.lower())


def _missing_extra(suffix: str) -> str | None:
    """The command that installs what files of this kind need, if that is not there."""
    library, extra = _NEEDS[suffix]
    return f"pip install 'farspan[{extra}]'" if importlib.util.find_spec(library) is None else None


def _mending(file: Path, fix: str) -> str:
    """A command that mends a text file; of a packed one the command that unpacks it, which comes
    first."""
    unpack = _UNPACK.get(file.suffix.lower())
    return shell_line(*unpack, file) if unpack else fix


def _open(file: Path) -> Any:
    return _OPENERS.get(file.suffix.lower(), partial(open, mode="rb"))(file)


def _lines(file: Path, most: int = -1) -> Iterator[str]:
    """Lines of a text file, those beyond `most` bytes in pieces; refuses what is not UTF-8, at its
    first bad byte."""
    with _open(file) as stream:
        try:
            yield from codecs.iterdecode(iter(partial(stream.readline, most), b""), "utf-8")
        except UnicodeDecodeError as error:
            encoding = _encoding(file)
            path_word = shell_word(Path(f"{file}.utf8"))
            fix = (
                f"iconv -f {shell_word(encoding)} -t utf-8 -o {path_word} {shell_word(file)} && "
                f"mv {path_word} {shell_word(file)}"
            )
            raise Refusal(
                "not-utf8",
                what="the file is not UTF-8 text",
                where=f"{file}, byte {stream.tell() - len(error.object) + error.start}",
                fact=f"byte 0x{error.object[error.start]:02x} there: {error.reason}",
                remedy=_mending(file, fix)
                if encoding
                else f"take it out of the folder: mv {shell_word(file)} /tmp/",
            ) from None


def _encoding(file: Path) -> str | None:
    """What a file that is not UTF-8 may be written in, by its beginning; None for NUL bytes, which
    no text has."""
    with _open(file) as stream:
        head = stream.read(PART_CHARS)
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    return None if b"\0" in head else "latin1"


def _plain(file: Path) -> Iterator[Document]:
    """A text file, in parts if it is long, titled by its first heading (.md, .rst) or its name."""
    title, line, page = file.stem, 1, 0
    for number, text in enumerate(parts(_lines(file, PART_CHARS)), 1):
        # A text with form feeds, as `pdftotext` writes it, has pages.
        page = page or int("\f" in text)
        if number == 1 and file.suffix.lower() != ".txt":
            # Headings are looked for between Unix line ends, and not behind a byte-order mark.
            title = _heading(clean(text), file.suffix.lower()) or title
        yield Document(
            title=numbered(title, number), text=text, origin=str(file), line=line, page=page
        )
        line, page = line + text.count("\n"), page and page + text.count("\f")


def _heading(text: str, suffix: str) -> str:
    """The title in a Markdown file's front matter, else the first heading behind that; empty
    without either."""
    front = _FRONT_MATTER.match(text) if suffix == ".md" else None
    if front and (named := _FRONT_TITLE.search(front[1])) and (title := _unquoted(named[1])):
        return title
    heading = _HEADING.search(text, front.end() if front else 0)
    return (heading[1] or heading[2]) if heading else ""


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if quoted else value


def _html(file: Path) -> Iterator[Document]:
    from farspan.corpus._html import read_html

    title, text = read_html("".join(_lines(file)))
    yield Document(title=title or file.stem, text=text, origin=str(file))


def _jsonl(file: Path) -> Iterator[Document]:
    """An object a line; its text is in the field `text`, `content` or `body`."""
    for number, line in enumerate(_lines(file), 1):
        if number == 1:
            line = line.removeprefix(
                "\ufeff"
            )  # some editors begin a file with a byte-order mark; JSON has none
        if line.strip():
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"{type(row).__name__} where an object should be")
            except (ValueError, RecursionError) as error:
                raise Refusal(
                    "source-unreadable",
                    what="the line is not a JSON object",
                    where=f"{file}:{number}",
                    fact=str(error),
                    remedy=_mending(file, f"sed -i.bak '{number:d}d' {shell_word(file)}"),
                ) from None
            yield row_document(row, f"{file}:{number}", file.stem)


def row_document(row: dict[str, Any], origin: str, name: str) -> Document:
    """A table row as a document: text column, title, every other scalar as metadata; refuses a row
    without text."""
    field = next((field for field in TEXT_FIELDS if isinstance(row.get(field), str)), None)
    if field is None:
        raise Refusal(
            "source-unreadable",
            what="the row has no known column of text",
            where=origin,
            fact=(
                f"its columns are {', '.join(map(str, row)) or 'none'}; farspan looks for "
                f"{', '.join(TEXT_FIELDS)}"
            ),
            remedy=f"rename the column that holds the text to {shell_word(TEXT_FIELDS[0])}",
        )
    rest = {key: value for key, value in row.items() if key not in (field, "title")}
    metadata = {
        str(key): str(value) for key, value in rest.items() if isinstance(value, str | int | float)
    }
    return Document(
        title=str(row.get("title") or name), text=row[field], origin=origin, metadata=metadata
    )


def _parquet(file: Path) -> Iterator[Document]:
    from pyarrow import parquet

    batches = parquet.ParquetFile(file).iter_batches(batch_size=256, use_threads=False)
    for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
        yield row_document(row, f"{file}:{number}", file.stem)


def _pdf(file: Path) -> Iterator[Document]:
    import pypdf

    reader = pypdf.PdfReader(file)
    title = reader.metadata.title if reader.metadata else None
    text = "\f".join(page.extract_text() for page in reader.pages)
    yield Document(title=title or file.stem, text=text, origin=str(file), page=1)


_READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    ".txt": _plain,
    ".md": _plain,
    ".rst": _plain,
    ".html": _html,
    ".htm": _html,
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".jsonl.zst": _jsonl,
    ".parquet": _parquet,
    ".pdf": _pdf,
}
