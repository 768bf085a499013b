"""The headings of a document as its source found them, and those that a passage lies under."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from farspan.corpus.markdown import MarkdownOutline
from farspan.corpus.outline import UnderlinedOutline, path, read_outline
from farspan.domain.corpus import Document, Heading

#: Files whose text has headings in Markdown: earlier corpora hold the text of these alone.
_MARKDOWN = (".md", ".html", ".htm")


def outline(document: Document) -> tuple[Heading, ...]:
    """Return the headings of a document; where its source does not know them, underlined titles."""
    if document.headings is not msgspec.UNSET:
        return document.headings
    is_markdown = PurePath(document.origin).suffix.lower() in _MARKDOWN
    return read_outline(document.text, MarkdownOutline() if is_markdown else UnderlinedOutline())


class HeadingPaths:
    """The headings that each place of a text lies under."""

    def __init__(self, headings: Sequence[Heading]) -> None:
        self._starts = [heading.start for heading in headings]
        self._paths: list[tuple[Heading, ...]] = [()]
        for heading in headings:
            self._paths.append(tuple(path((*self._paths[-1], heading))))

    def at(self, place: int) -> tuple[str, ...]:
        """Return the headings above a character, outermost first; its own
        heading is one of them."""
        above = self._paths[bisect_right(self._starts, place)]
        return tuple(heading.title for heading in above)
