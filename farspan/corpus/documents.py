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
from farspan.domain.corpus import Document, encodable
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


def clean(text: str) -> str:
    """Return text that UTF-8 can hold, with Unix line ends, without byte-order mark, NUL or outer
    blank space."""
    return unix(text).strip(_OUTER)


def unix(text: str) -> str:
    """Return text that UTF-8 can hold, with Unix line ends and without NUL."""
    return encodable(text).replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")


def parts(blocks: Iterable[str]) -> Iterator[str]:
    """Split a stream of text in parts of at most PART_CHARS, cut at a paragraph, a line or a
    space."""
    held = ""
    for block in blocks:
        held += block
        while len(held) > PART_CHARS:
            marks = (held.rfind(mark, PART_CHARS // 2, PART_CHARS) for mark in ("\n\n", "\n", " "))
            end = next((mark for mark in marks if mark > 0), PART_CHARS)
            # Two characters may be one line end.
            end -= held[end - 1 : end + 1] == "\r\n"
            yield held[:end]
            held = held[end:]
    yield held


def numbered(title: str, number: int) -> str:
    """Return the title of part `number`, from 1, of a document."""
    return title if number == 1 else f"{title} (part {number})"


def cut(document: Document) -> Iterator[Document]:
    """Clean a document and cut it in parts that are not blank, each with the line and page it
    begins on, and the headings in it and above it."""
    title = " ".join(clean(document.title).split())
    origin = encodable(document.origin)
    title = title[:MAX_TITLE_CHARS]
    metadata = {clean(key): clean(value) for key, value in document.metadata.items()}
    whole = unix(document.text).rstrip(_OUTER)
    line = document.line
    page = document.page
    outer = len(whole) - len(whole.lstrip(_OUTER))
    blank = whole[:outer]
    text = whole[outer:]
    sections = Sections(document.headings or ())
    at = outer
    for number, part in enumerate(parts([text]), 1):
        inner = part.strip("\n")
        skipped = len(part) - len(part.lstrip("\n"))
        blank += part[:skipped]
        headings = sections.take(at + skipped, at + len(part))
        at += len(part)
        line, page = _place_after(blank, line, page)
        # Some blank space, such as U+3000, is not what `clean` takes away; a part of nothing else
        # says nothing.
        if part.strip():
            yield Document(
                title=numbered(title, number),
                text=inner,
                origin=origin,
                metadata=metadata,
                line=line,
                page=page,
                headings=document.headings and headings,
            )
        blank = part[skipped:]


def _place_after(text: str, line: int, page: int) -> tuple[int, int]:
    """Return line and page of what follows a text that begins on these; 0 stays 0."""
    return line and line + text.count("\n"), page and page + text.count("\f")


def divide(document: Document, at: int) -> tuple[Document, Document]:
    """Cut a document in two at a character that neither side is blank around; the second part has
    a title of its own, and the line and page that it begins on."""
    head = document.text[:at]
    tail = document.text[at:]
    skipped = len(tail) - len(tail.lstrip(_OUTER))
    line, page = _place_after(document.text[: at + skipped], document.line, document.page)
    sections = Sections(document.headings or ())
    head_headings = sections.take(0, at)
    tail_headings = sections.take(at + skipped, len(document.text))
    return (
        msgspec.structs.replace(
            document,
            text=head.rstrip(_OUTER),
            headings=document.headings and head_headings,
        ),
        msgspec.structs.replace(
            document,
            title=f"{document.title} (end)",
            text=tail[skipped:],
            line=line,
            page=page,
            headings=document.headings and tail_headings,
        ),
    )


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Write one zstd frame of JSON lines; files of several frames come from joining such files."""
    with (
        open_own(path, "wb") as target,
        zstandard.open(target, "wb", cctx=zstandard.ZstdCompressor(level=1)) as file,
    ):
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
    decoder = msgspec.json.Decoder(Document)
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
