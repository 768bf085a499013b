"""Plain text, Markdown and reStructuredText."""

from __future__ import annotations

from farspan.corpus.formats._format import Format
from farspan.corpus.formats._plain import plain_reader
from farspan.corpus.markdown import MarkdownOutline
from farspan.corpus.outline import UnderlinedOutline

FORMATS = (
    Format((".txt", ".text"), plain_reader(), packed=True),
    # Others than Markdown's own endings: R's and Quarto's notebooks.
    Format(
        (".md", ".markdown", ".rmd", ".qmd"),
        plain_reader(MarkdownOutline),
        packed=True,
        read_as="outline",
    ),
    Format((".rst",), plain_reader(UnderlinedOutline), packed=True, read_as="outline"),
)
