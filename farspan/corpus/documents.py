"""Documents as text that can be trained on, and as files: one JSON object a line, compressed with zstd."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal

import msgspec
import zstandard

from farspan.domain.corpus import CorpusManifest, Document

#: Longer documents are cut in parts: memory stays flat, and one big file still has a train and a validation part.
PART_CHARS = 1 << 18


def clean(text: str) -> str:
    """Text with Unix line ends, no byte-order mark, NUL or outer blank space; lone surrogates become U+FFFD."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").strip("\ufeff \t\n\v\f")


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
    """The document cleaned, in parts that are not empty."""
    title = " ".join(clean(document.title).split())
    for number, text in enumerate(parts([clean(document.text)]), 1):
        if text := text.strip("\n"):
            yield msgspec.structs.replace(document, title=numbered(title, number), text=text)


def write_documents(file: IO[bytes], documents: Iterable[Document], *, level: int = 3) -> None:
    """Append one zstd frame of JSON lines to an open file."""
    encoder = msgspec.json.Encoder()
    with zstandard.ZstdCompressor(level=level).stream_writer(file, closefd=False) as writer:
        for document in documents:
            writer.write(encoder.encode(document) + b"\n")


def open_zst(path: Path) -> io.BufferedReader:
    """The decompressed bytes of a .zst file of any number of frames, as a stream."""
    reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
    return io.BufferedReader(reader, buffer_size=1 << 18)


def read_lines(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Document]:
    """Documents number `start` to `stop` of a file that `write_documents` wrote; earlier ones are not decoded."""
    decoder = msgspec.json.Decoder(Document)
    with open_zst(path) as lines:
        for line in itertools.islice(lines, start, stop):
            yield decoder.decode(line)


def read_documents(folder: Path, split: Literal["train", "val"] | None = None) -> Iterator[Document]:
    """The kept documents of a prepared corpus, in the order of its token files: all of train, then all of val."""
    manifest = msgspec.json.decode((folder / "corpus.json").read_bytes(), type=CorpusManifest)
    train = manifest.train.documents
    start, stop = {"train": (0, train), "val": (train, None), None: (0, None)}[split]
    return read_lines(folder / "documents.jsonl.zst", start, stop)
