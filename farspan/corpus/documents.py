"""Documents as text that can be trained on, and as files: one JSON object a line, compressed with
zstd."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from farspan.corpus.outline import Sections
from farspan.domain.corpus import Document, make_encodable
from farspan.domain.decoding import json_decoder
from farspan.domain.own_files import open_own

#: Longer documents are cut in parts: memory stays flat, and one big file still has a train and a
#: validation part.
PART_CHARS = 1 << 18
#: Of a prepared corpus: the documents of its token files, all of train and then all of val; and
#: those that were dropped as copies of these.
DOCUMENTS = "documents.jsonl.zst"
COPIES = "copies.jsonl.zst"
#: A title stands with every part of its document: what is longer is cut off.
MAX_TITLE_CHARS = 1000
#: What is no part of a text around it: byte-order mark and blank space.
_OUTER = "\ufeff \t\n\v\f"


def clean_text(text: str) -> str:
    """Return text that UTF-8 can hold, with Unix line ends, without byte-order mark, NUL or outer
    blank space."""
    return normalize_line_ends(text).strip(_OUTER)


def normalize_line_ends(text: str) -> str:
    """Return text that UTF-8 can hold, with Unix line ends and without NUL."""
    return make_encodable(text).replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")


def split_parts(blocks: Iterable[str]) -> Iterator[str]:
    """Split a stream of text in parts of at most PART_CHARS, cut at a paragraph, a line or a
    space."""
    waiting = ""
    for block in blocks:
        waiting += block
        while len(waiting) > PART_CHARS:
            end = PART_CHARS
            for mark in ("\n\n", "\n", " "):
                place = waiting.rfind(mark, PART_CHARS // 2, PART_CHARS)
                if place > 0:
                    end = place
                    break
            # Two characters may be one line end.
            end -= waiting[end - 1 : end + 1] == "\r\n"
            yield waiting[:end]
            waiting = waiting[end:]
    yield waiting


def part_title(title: str, number: int) -> str:
    """Return the title of part `number`, from 1, of a document."""
    return title if number == 1 else f"{title} (part {number})"


def cut_document(document: Document) -> Iterator[Document]:
    """Clean a document and cut it in parts that are not blank, each with the line and page it
    begins on, and the headings in it and above it."""
    title = " ".join(clean_text(document.title).split())[:MAX_TITLE_CHARS]
    origin = make_encodable(document.origin)
    metadata = {clean_text(key): clean_text(value) for key, value in document.metadata.items()}
    whole = normalize_line_ends(document.text).rstrip(_OUTER)
    line = document.line
    page = document.page
    text = whole.lstrip(_OUTER)
    at = len(whole) - len(text)
    # Blank space between the part before and this one.
    blank = whole[:at]
    sections = Sections(document.headings or ())
    for number, part in enumerate(split_parts([text]), 1):
        skipped = len(part) - len(part.lstrip("\n"))
        blank += part[:skipped]
        headings = sections.take(at + skipped, at + len(part))
        at += len(part)
        line, page = _place_after(blank, line, page)
        # `clean_text` keeps some blank space, such as U+3000; a part of nothing else is left out.
        if part.strip():
            yield Document(
                title=part_title(title, number),
                text=part.strip("\n"),
                origin=origin,
                metadata=metadata,
                line=line,
                page=page,
                headings=document.headings and headings,
            )
        blank = part[skipped:]


def _place_after(text: str, line: int, page: int) -> tuple[int, int]:
    """Return line and page of what follows a text that begins on these; 0 stays 0."""
    if line:
        line += text.count("\n")
    if page:
        page += text.count("\f")
    return line, page


def divide_document(document: Document, at: int) -> tuple[Document, Document]:
    """Cut a document in two at a character that neither side is blank around; the second part has
    a title of its own, and the line and page that it begins on."""
    head = document.text[:at].rstrip(_OUTER)
    tail = document.text[at:].lstrip(_OUTER)
    start = len(document.text) - len(tail)
    line, page = _place_after(document.text[:start], document.line, document.page)
    head_headings = tail_headings = document.headings
    if document.headings:
        sections = Sections(document.headings)
        head_headings = sections.take(0, at)
        tail_headings = sections.take(start, len(document.text))
    first = msgspec.structs.replace(document, text=head, headings=head_headings)
    second = msgspec.structs.replace(
        document,
        title=f"{document.title} (end)",
        text=tail,
        line=line,
        page=page,
        headings=tail_headings,
    )
    return first, second


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Write one zstd frame of JSON lines; files of several frames come from joining such files."""
    compressor = zstandard.ZstdCompressor(level=1)
    with open_own(path, "wb") as target, zstandard.open(target, "wb", cctx=compressor) as file:
        for document in documents:
            file.write(msgspec.json.encode(document) + b"\n")


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write a .npy file."""
    with open_own(path, "wb") as file:
        np.save(file, array)


def open_zst(path: Path) -> io.BufferedReader:
    """Open the decompressed bytes of a .zst file of any number of frames, as a stream."""
    reader = zstandard.ZstdDecompressor().stream_reader(
        path.open("rb"), read_across_frames=True, closefd=True
    )
    return io.BufferedReader(reader, buffer_size=1 << 18)


def read_lines(path: Path) -> Iterator[Document]:
    """Yield the documents that `write_documents` wrote."""
    decoder = json_decoder(Document)
    with open_zst(path) as lines:
        for line in lines:
            yield decoder.decode(line)


def read_documents(folder: Path) -> Iterator[Document]:
    """Yield the kept documents of a prepared corpus in the order of its token files: all of train,
    then all of val."""
    return read_lines(folder / DOCUMENTS)


def read_copies(folder: Path) -> Iterator[Document]:
    """Yield the documents of a prepared corpus that were dropped as copies of kept ones, in the
    order of the source."""
    return read_lines(folder / COPIES)
