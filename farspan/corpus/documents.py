"""Documents as text that can be trained on, and as files: one JSON object a line, compressed with zstd."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import zstandard

from farspan.domain.corpus import Document

#: Longer documents are cut in parts: memory stays flat, and one big file still has a train and a validation part.
PART_CHARS = 1 << 18


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs joined, and those without their other half as U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clean(text: str) -> str:
    """Text that UTF-8 can hold, with Unix line ends, without byte-order mark, NUL or outer blank space."""
    return encodable(text).replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").strip("\ufeff \t\n\v\f")


def parts(blocks: Iterable[str]) -> Iterator[str]:
    """A stream of text in parts of at most PART_CHARS characters, cut at a paragraph, a line or a space."""
    held = ""
    for block in blocks:
        held += block
        while len(held) > PART_CHARS:
            marks = (held.rfind(mark, PART_CHARS // 2, PART_CHARS) for mark in ("\n\n", "\n", " "))
            end = next((mark for mark in marks if mark > 0), PART_CHARS)
            yield held[:end]
            held = held[end:]
    yield held


def numbered(title: str, number: int) -> str:
    """The title of part `number`, from 1, of a document."""
    return title if number == 1 else f"{title} (part {number})"


def cut(document: Document) -> Iterator[Document]:
    """The document cleaned, in parts that are not blank."""
    title, origin = " ".join(clean(document.title).split()), encodable(document.origin)
    metadata = {clean(key): clean(value) for key, value in document.metadata.items()}
    for number, text in enumerate(parts([clean(document.text)]), 1):
        # Some blank space, such as U+3000, is not what `clean` takes away; a part of nothing else says nothing.
        if text.strip():
            yield Document(title=numbered(title, number), text=text.strip("\n"), origin=origin, metadata=metadata)


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Write one zstd frame of JSON lines; files of several frames come from joining such files."""
    with zstandard.open(path, "wb", cctx=zstandard.ZstdCompressor(level=1)) as file:
        for document in documents:
            file.write(msgspec.json.encode(document) + b"\n")


def open_zst(path: Path) -> io.BufferedReader:
    """The decompressed bytes of a .zst file of any number of frames, as a stream."""
    reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
    return io.BufferedReader(reader, buffer_size=1 << 18)


def read_lines(path: Path) -> Iterator[Document]:
    """The documents that `write_documents` wrote."""
    decoder = msgspec.json.Decoder(Document)
    with open_zst(path) as lines:
        for line in lines:
            yield decoder.decode(line)


def read_documents(folder: Path) -> Iterator[Document]:
    """The kept documents of a prepared corpus, in the order of its token files: all of train, then all of val."""
    return read_lines(folder / "documents.jsonl.zst")
