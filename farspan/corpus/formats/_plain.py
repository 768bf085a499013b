"""Read text files as they are, in parts of bounded size, with the headings of an outline."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from farspan.corpus.documents import normalize_line_ends, part_title, split_parts
from farspan.corpus.formats._format import PACKED, FormatReader
from farspan.corpus.outline import Outline
from farspan.corpus.reading import ReadOptions, read_text
from farspan.domain.corpus import Document, Heading

#: Makes other text of that of a file, with as many line ends.
Transform = Callable[[Iterator[str]], Iterator[str]]


def plain_reader(
    make_outline: Callable[[], Outline] | None = None,
    *,
    keep_name: bool = False,
    transform: Transform | None = None,
) -> FormatReader:
    """Return a reader of text, titled by what it names as its title, its first heading, or its
    file.

    `keep_name`: the title is the whole name of the file. `transform`: what is made of the text.
    """

    def read(file: Path, options: ReadOptions) -> Iterator[Document]:
        outline = make_outline() if make_outline else None
        pieces = read_text(file, options.encoding)
        if transform is not None:
            pieces = transform(_with_line_ends(pieces))
        title = file.name.removesuffix(_packed(file)) if keep_name else options.stem(file)
        return _read_parts(file, pieces, outline, title, keep_name)

    return read


def _packed(file: Path) -> str:
    """Return the ending of a packed file, empty for another."""
    return file.suffix if file.suffix.lower() in PACKED else ""


def _read_parts(
    file: Path, pieces: Iterator[str], outline: Outline | None, title: str, keep_name: bool
) -> Iterator[Document]:
    line = 1
    page = 0
    at = 0
    for number, text in enumerate(split_parts(_add_to_outline(pieces, outline)), 1):
        # A text with form feeds, as `pdftotext` writes it, has pages.
        page = page or int("\f" in text)
        headings: tuple[Heading, ...] | msgspec.UnsetType = msgspec.UNSET
        if outline:
            size = len(normalize_line_ends(text))
            headings = outline.take(at, at + size)
            at += size
            if number == 1 and not keep_name:
                title = outline.title or title
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


def _add_to_outline(pieces: Iterator[str], outline: Outline | None) -> Iterator[str]:
    """Yield the text of a file in pieces, after the outline has read each."""
    line_ends = io.IncrementalNewlineDecoder(None, translate=True)
    for text in pieces:
        if outline:
            outline.add(line_ends.decode(text).replace("\0", ""))
        yield text


def _with_line_ends(pieces: Iterator[str]) -> Iterator[str]:
    """Yield the text with Unix line ends."""
    line_ends = io.IncrementalNewlineDecoder(None, translate=True)
    for text in pieces:
        yield line_ends.decode(text)
    yield line_ends.decode("", final=True)
