"""The readable text of an HTML page and its headings, which are marked in it as in Markdown."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from farspan.corpus._markup import read_markup
from farspan.corpus.documents import normalize_line_ends
from farspan.corpus.outline import MAX_HEADING_CHARS, MAX_UNDERLINED_CHARS
from farspan.domain.corpus import Heading


def _split_tags(line: str) -> frozenset[str]:
    return frozenset(line.split())


#: What is shown on lines of its own: a paragraph apart, or on the next line. All else stays in the
#: line, as the standard has it of elements that it does not know (WHATWG HTML, 15.3).
_PARAGRAPHS = _split_tags(
    "address article aside blockquote body caption center dialog dir dl fieldset figcaption figure"
    " footer form frameset head header hgroup hr html legend listing main menu nav ol p pre search"
    " section details summary table tbody tfoot thead ul xmp h1 h2 h3 h4 h5 h6"
)
_LINES = _split_tags("br dd div dt li optgroup option td th tr")
#: Cells of formulas, which stand side by side.
_CELLS = frozenset(("mtd", "mtr", "mlabeledtr"))
#: What is not shown, or not as part of the text.
_HIDDEN = _split_tags("script style noscript iframe noembed noframes template svg nav title")
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
#: Elements without content, which have no end tag.
_VOID = frozenset(("br", "hr"))
#: What ends a drawing that was never closed (WHATWG HTML, 13.2.6.5).
_NOT_IN_SVG = (
    _PARAGRAPHS | _LINES | _split_tags("b big code em i img s small span strong sub sup tt u")
) - frozenset(("title",))
#: Parts of a drawing that hold HTML.
_HTML_IN_SVG = ("foreignobject", "desc")
#: Elements whose end tag also ends what is open in them.
_CONTAINERS = _PARAGRAPHS - _VOID - {"p"} | _LINES - _VOID | {*_HIDDEN, *_HTML_IN_SVG}

_BLANK = re.compile(r"\s+")


class Page(NamedTuple):
    """`title` is the page's <title>, or else its first <h1>."""

    title: str
    text: str
    headings: tuple[Heading, ...]


def read_html(page: str) -> Page:
    """Return the text of a page, blocks on lines of their own, <pre> as it is written.

    An element whose end tag is missing hides nothing, and is a heading to its first block alone.
    """
    reader = _Reader()
    for part in read_markup(page):
        if not part.tag:
            reader.add_text(part.text)
        elif part.is_end:
            reader.end(part.tag)
        else:
            reader.start(part.tag)
    return reader.finish()


class _Open(NamedTuple):
    """An element whose end matters: its depth among the open ones, and the pieces of text and the
    headings before it."""

    tag: str
    depth: int
    pieces: int
    headings: int


class _PlacedHeading(NamedTuple):
    """A heading, which is the piece of text of this number."""

    piece: int
    level: int
    title: str


class _Reader:
    """What was read of a page so far: its text in pieces, and the elements that are open."""

    def __init__(self) -> None:
        self._title = ""
        self._pieces: list[str] = []
        self._headings: list[_PlacedHeading] = []
        self._open: list[str] = []
        self._counts: Counter[str] = Counter()
        self._noted: list[_Open] = []

    def start(self, tag: str) -> None:
        while self._counts["svg"] and tag in _NOT_IN_SVG:
            if any(self._counts[part] for part in _HTML_IN_SVG):
                break
            # An open drawing ends where text begins, but for its parts that hold text.
            self._close_element("svg", is_whole=False)
        if tag in _HEADINGS and self._noted and self._noted[-1].tag in _HEADINGS:
            # An open heading ends where the next one begins.
            self._close_element(self._noted[-1].tag, is_whole=False)
        self._add_break(tag)
        if tag not in _CONTAINERS:
            return
        if tag in _HIDDEN or tag in _HEADINGS or tag == "pre":
            self._noted.append(_Open(tag, len(self._open), len(self._pieces), len(self._headings)))
        self._open.append(tag)
        self._counts[tag] += 1

    def end(self, tag: str) -> None:
        if tag in _HEADINGS and self._noted and self._noted[-1].tag in _HEADINGS:
            # Any of their end tags ends a heading.
            tag = self._noted[-1].tag
        if self._counts[tag]:
            self._close_element(tag)
        self._add_break(tag)

    def add_text(self, text: str) -> None:
        if text and not self._counts["pre"]:
            text = _BLANK.sub(" ", text)
            if text[0] == " " and self._pieces and self._pieces[-1].endswith((" ", "\n")):
                text = text[1:]
        if text:
            self._pieces.append(text)

    def finish(self) -> Page:
        while self._noted:
            self._leave_open(self._noted.pop())
        self._headings.sort()
        first = next((heading.title for heading in self._headings if heading.level == 1), "")
        text, headings = _join_pieces(self._pieces, self._headings)
        return Page(self._title or first, text, headings)

    def _add_break(self, tag: str) -> None:
        if tag in _CELLS:
            self.add_text(" ")
            return
        line_end = "\n" if tag in _LINES else "\n\n" if tag in _PARAGRAPHS else ""
        # Blank lines on end are one.
        if line_end and not (self._pieces and self._pieces[-1] == "\n\n"):
            self._pieces.append(line_end)

    def _close_element(self, tag: str, *, is_whole: bool = True) -> None:
        """Close the innermost element of this name, and what is open in it."""
        name = ""
        while name != tag:
            name = self._open.pop()
            self._counts[name] -= 1
            if self._noted and self._noted[-1].depth == len(self._open):
                noted = self._noted.pop()
                if name == tag and is_whole:
                    self._take_content(noted)
                else:
                    self._leave_open(noted)

    def _take_content(self, noted: _Open) -> None:
        """Take the content of an element that is whole for what it is."""
        if noted.tag in _HEADINGS:
            self._unmark_headings(noted)
            self._take_heading(noted, len(self._pieces), MAX_HEADING_CHARS)
        elif noted.tag == "pre":
            # What looks like a heading in code is none.
            self._unmark_headings(noted)
        else:
            if noted.tag == "title" and not self._title and not self._counts["svg"]:
                self._title = " ".join("".join(self._pieces[noted.pieces :]).split())
            del self._pieces[noted.pieces :]
            del self._headings[noted.headings :]

    def _leave_open(self, noted: _Open) -> None:
        """Take the content of an element that was never closed for text of the page."""
        if noted.tag in _HEADINGS:
            end = noted.pieces
            while end < len(self._pieces) and "\n" not in self._pieces[end]:
                end += 1
            # A heading is a line of its own, also in code.
            if end < len(self._pieces) and self._pieces[end][0] != "\n":
                self._pieces[end] = f"\n{self._pieces[end]}"
            self._take_heading(noted, end, MAX_UNDERLINED_CHARS)

    def _take_heading(self, noted: _Open, end: int, most: int) -> None:
        """Put the text of a heading in one piece, with its mark; one of more than `most` characters
        is a text."""
        content = self._pieces[noted.pieces : end]
        title = " ".join("".join(content).split())
        if title and len(title) <= most:
            level = _HEADINGS[noted.tag]
            # The numbers of the pieces behind it stay what they are.
            blank = [""] * (len(content) - 1)
            self._pieces[noted.pieces : end] = [f"{'#' * level} {title}", *blank]
            self._headings.append(_PlacedHeading(noted.pieces, level, title))

    def _unmark_headings(self, noted: _Open) -> None:
        """Make text of the headings in an element."""
        for heading in self._headings[noted.headings :]:
            self._pieces[heading.piece] = heading.title
        del self._headings[noted.headings :]


def _join_pieces(
    pieces: list[str], placed: list[_PlacedHeading]
) -> tuple[str, tuple[Heading, ...]]:
    """Join pieces to a text without blanks at line ends or repeated blank lines, and find
    the places of its headings, each a line of its own."""
    text = "".join(pieces)
    if "\r" in text or "\0" in text:
        # A page may write them as `&#13;`.
        pieces = list(map(normalize_line_ends, pieces))
        text = "".join(pieces)
    numbers: list[int] = []
    number = copied = 0
    for heading in placed:
        number += "".join(pieces[copied : heading.piece]).count("\n")
        numbers.append(number)
        copied = heading.piece
    kept: list[str] = []
    places: dict[int, int] = {}
    place = 0
    for number, line in enumerate(text.split("\n")):
        line = line.rstrip() if kept else line.strip()
        if line or (kept and kept[-1]):
            kept.append(line)
            places[number] = place
            place += len(line) + 1
    headings = []
    for number, heading in zip(numbers, placed, strict=True):
        headings.append(Heading(places[number], heading.level, heading.title))
    return "\n".join(kept).rstrip(), tuple(headings)
