"""Documents that pandoc converts: Word, PowerPoint, OpenDocument, EPUB, RTF, LaTeX and XML of
journals."""

from __future__ import annotations

import contextlib
import functools
import html
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from farspan.corpus.formats._format import Format, FormatReader, Needs, Runs
from farspan.corpus.pandoc import convert_to_html, find_pandoc
from farspan.corpus.reading import (
    CHUNK_BYTES,
    MAX_DOCUMENT_BYTES,
    TOO_LONG,
    ReadOptions,
    UnreadableFile,
    open_utf8,
)
from farspan.domain.corpus import Document, Skipped

#: Files of pictures and text, which pandoc reads whole.
MAX_FILE_BYTES = 256 << 20
FILE_TOO_LONG = f"longer than {MAX_FILE_BYTES >> 20} MiB"
OTHER_XML = "XML that is neither JATS nor DocBook"

#: pandoc's names of formats, by endings of binary files and of text.
_BINARY = {
    ".docx": "docx",
    ".docm": "docx",
    ".pptx": "pptx",
    ".odt": "odt",
    ".epub": "epub",
}
_TEXT = {".rtf": "rtf", ".tex": "latex", ".latex": "latex", ".nxml": "jats", ".fb2": "fb2"}

_META = re.compile(r'<meta name="(author|dcterms\.date|keywords)" content="([^"]*)" */>')
_METADATA = {"author": "author", "dcterms.date": "date", "keywords": "keywords"}
#: The page that pandoc makes says so where a document has no title.
_NO_TITLE = "<title>-</title>"
_STYLE = re.compile(r"<style.*?</style>", re.DOTALL)
#: Where a slide begins.
_SLIDE = re.compile(r'<h2 id="slide-(\d+)"')
#: Cells beside each other, with the paragraphs that some formats have in them, and marks of notes.
_CELL_BEGIN = re.compile(r"(<t[dh][^>]*>)\s*<p>")
_CELL_END = re.compile(r"</p>\s*(</t[dh]>)")
_CELLS = re.compile(r"</t[dh]>\s*<t[dh][^>]*>")
_NOTE = re.compile(r'<a href="#fn(\d+)" class="footnote-ref"[^>]*><sup>\d+</sup></a>')
#: The mark that leads back from a note, and the private character that stands for a new page.
_BACK = "\u21a9\ufe0e"
_NEW_PAGE = "\ue00c"
_BETWEEN_CELLS = " | "
#: The first tag of XML, behind declarations and comments, and what is looked through for it.
_ROOT = re.compile(r"<(?![?!])(?:[\w.-]+:)?([\w.-]+)([^>]*)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_DOCBOOK = re.compile(r"docbook", re.IGNORECASE)
_DOCBOOK_ROOTS = ("book", "article", "chapter", "refentry")


def _reader(format_name: str, *, is_text: bool) -> FormatReader:
    """Return a reader of files that pandoc reads as `format_name`."""

    def read(file: Path, options: ReadOptions, stopped: threading.Event) -> Iterator[Document]:
        yield from _read_document(file, options, stopped, format_name, is_text=is_text)

    return read


def read_xml(
    file: Path, options: ReadOptions, stopped: threading.Event
) -> Iterator[Document | Skipped]:
    """Read XML of journals (JATS) and DocBook, by its first tag."""
    with open_utf8(file, options.encoding) as stream:
        head = stream.read(CHUNK_BYTES).decode("utf-8", "replace")
    format_name = _xml_format(head)
    if format_name:
        yield from _read_document(file, options, stopped, format_name, is_text=True)
    else:
        yield Skipped.file(file, OTHER_XML)


def _xml_format(head: str) -> str:
    """Return pandoc's name of a format of XML by the begin of a file, empty of another."""
    root = _ROOT.search(_COMMENT.sub("", head))
    if root is None:
        return ""
    about = head[: root.end()]
    if root[1] in _DOCBOOK_ROOTS and _DOCBOOK.search(about):
        return "docbook"
    return "jats" if root[1] in ("article", "pmc-articleset") else ""


def _read_document(
    file: Path,
    options: ReadOptions,
    stopped: threading.Event,
    format_name: str,
    *,
    is_text: bool,
) -> Iterator[Document]:
    pandoc = find_pandoc()
    assert pandoc is not None
    with contextlib.ExitStack() as opened:
        if is_text:
            content = opened.enter_context(_encoded_copy(file, options.encoding))
        else:
            content = opened.enter_context(file.open("rb"))
            if file.stat().st_size > MAX_FILE_BYTES:
                raise UnreadableFile(FILE_TOO_LONG)
        page = convert_to_html(pandoc, content, format_name, stopped)
    yield _page_document(page, file, options)


@contextlib.contextmanager
def _encoded_copy(file: Path, encoding: str) -> Iterator[IO[bytes]]:
    """Open a copy of a text in UTF-8, which pandoc takes."""
    with tempfile.TemporaryFile() as copy:
        with open_utf8(file, encoding) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                copy.write(chunk)
                if copy.tell() > MAX_DOCUMENT_BYTES:
                    raise UnreadableFile(TOO_LONG)
        copy.seek(0)
        yield copy


def _page_document(page: str, file: Path, options: ReadOptions) -> Document:
    """Return the document of a page that pandoc made: its text, headings, slides and metadata."""
    from farspan.corpus._html import read_html

    head, _, body = page.partition("</head>")
    metadata: dict[str, str] = {}
    for name, escaped in _META.findall(head):
        key = _METADATA[name]
        value = html.unescape(escaped).strip()
        if value:
            metadata[key] = f"{metadata[key]}, {value}" if key in metadata else value
    body = body.replace(_BACK, "").replace(_NEW_PAGE, "")
    body = _CELL_BEGIN.sub(r"\1", _CELL_END.sub(r"\1", body))
    body = _NOTE.sub(r" [\1]", _CELLS.sub(_BETWEEN_CELLS, body))
    has_slides = options.ending == ".pptx"
    if has_slides:
        body = _SLIDE.sub(_mark_slide, body)
    if _NO_TITLE in head:
        head = ""
    shown = read_html(f"{_STYLE.sub('', head)}</head>{body}")
    title = shown.title
    if not title and has_slides and shown.headings:
        # That of the first slide.
        title = shown.headings[0].title
    return Document(
        title=title or options.stem(file),
        # The mark is one character, as the form feed is: headings stay where they are.
        text=shown.text.replace(_NEW_PAGE, "\f"),
        origin=str(file),
        page=int(has_slides),
        metadata=metadata,
        headings=shown.headings,
    )


def _mark_slide(slide: re.Match[str]) -> str:
    """Put the mark of a new page before each slide but the first."""
    return slide[0] if slide[1] == "1" else f"<p>{_NEW_PAGE}</p>{slide[0]}"


def _needs(format_name: str) -> Needs:
    """Return the need of a format: a pandoc that reads it."""
    return Needs(functools.partial(_is_read, format_name), "formats")


def _is_read(format_name: str) -> bool:
    pandoc = find_pandoc()
    return pandoc is not None and format_name in pandoc.formats


def _formats() -> Iterator[Format]:
    for ending, name in _BINARY.items():
        read = _reader(name, is_text=False)
        needs = _needs(name)
        yield Format((ending,), read, runs=Runs.CONVERTER, is_text=False, needs=needs)
    for ending, name in _TEXT.items():
        read = _reader(name, is_text=True)
        needs = _needs(name)
        yield Format((ending,), read, runs=Runs.CONVERTER, declares=True, packed=True, needs=needs)
    yield Format(
        (".xml",),
        read_xml,
        runs=Runs.CONVERTER,
        declares=True,
        packed=True,
        needs=_needs("jats"),
    )


FORMATS = tuple(_formats())
