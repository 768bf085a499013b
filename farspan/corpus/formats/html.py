"""HTML pages: what a reader sees of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from farspan.corpus.formats._format import Format
from farspan.corpus.reading import ReadOptions, read_whole
from farspan.domain.corpus import Document


def read_page(file: Path, options: ReadOptions) -> Iterator[Document]:
    """Read a page, titled by its title, its first heading, or its name."""
    from farspan.corpus._html import read_html

    page = read_html(read_whole(file, options.encoding))
    title = page.title or options.stem(file)
    yield Document(title=title, text=page.text, origin=str(file), headings=page.headings)


FORMATS = (
    Format((".html", ".htm", ".xhtml"), read_page, declares=True, packed=True, read_as="outline"),
)
