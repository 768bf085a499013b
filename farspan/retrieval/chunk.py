"""Cut documents into chunks: overlapping windows that end at the end of a section, paragraph,
sentence or word.

Their size is in word pieces, which are estimated: one index serves several encoders, and is made
before any of them is known.
"""

from __future__ import annotations

import functools
import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec

from farspan.corpus.rows import is_called_by_number, is_called_by_place
from farspan.domain.corpus import Document
from farspan.domain.struct_files import to_json
from farspan.retrieval.names import combining_marks
from farspan.retrieval.outline import HeadingPaths, outline
from farspan.retrieval.scripts import unspaced_letters
from farspan.retrieval.text_cuts import whole_character_behind

_LINE = re.compile(r"[^\n]+")
#: Blanks between two lines that a pattern matches: it would scan a long run from each place in it.
_MAX_BLANKS = 200
#: Chunks are cut before one of these, best first: the end of a paragraph; of a line or sentence,
#: quotes and brackets that close behind it included; of a word or a clause.
_BOUNDARIES = (
    re.compile(rf"\s{{0,{_MAX_BLANKS}}}\n\s{{0,{_MAX_BLANKS}}}\n"),
    re.compile(
        r"\n|(?<=[.!?:;؟।॥])\s|(?<=[。！？｡．])(?![」』”’）】〉》])|(?<=[。！？][」』”’）】〉》])"
    ),
    re.compile(r"\s|(?<=[、，；：])"),
)
#: White space that counts as one word piece.
_BLANKS = 16
#: What counts as one word piece [measured on two corpora of documentation]: 128 of these are 115
#: tokens of a BPE of 8,192 trained on the same text and 122 of all-MiniLM-L6-v2's; 19 of 20 full
#: chunks have less than 134 of either.
_ASCII_PIECE = re.compile(rf"[A-Za-z]{{1,6}}|\d{{1,3}}|[^\w\s]|_|\s{{{_BLANKS}}}")
#: Marks that a character of a script without spaces keeps where it is cut from its neighbours.
_MAX_MARKS = 8


@functools.cache
def _piece_pattern() -> re.Pattern[str]:
    """Return the pattern of a word piece in any script: characters of Han, Thai and the like and
    Korean syllables count one by one, with their marks."""
    marks = combining_marks()
    single = rf"[{unspaced_letters()}\u1100-\u11ff\uac00-\ud7ff]"
    return re.compile(
        rf"{single}[{marks}]*|(?:(?!{single}|[\d_])[\w{marks}]){{1,6}}"
        rf"|\d{{1,3}}|[^\w\s]|_|\s{{{_BLANKS}}}"
    )


@functools.cache
def _word_pattern(is_ascii: bool) -> re.Pattern[str]:
    """Return the pattern of what no chunk ends in, with the blanks before it: words, and characters
    of scripts without spaces."""
    if is_ascii:
        return re.compile(r"\s*\S+|\s+")
    single = f"[{unspaced_letters()}]"
    marked = rf"{single}[{combining_marks()}]{{0,{_MAX_MARKS}}}"
    return re.compile(rf"\s*(?:{marked}|(?:(?!{single})\S)+)|\s+")


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is the text of document number `document` from character `start` on."""

    #: A hash of the chunk's text and source: it stays the same when the text around it changes.
    id: int
    document: int
    #: Whether the document begins with it.
    first: bool
    title: str
    origin: str
    text: str
    start: int
    #: The place to look it up: line and page of the source, 0 where it has none, and the headings
    #: above, outermost first.
    line: int = 0
    page: int = 0
    headings: tuple[str, ...] = ()

    @property
    def indexed(self) -> str:
        """The text that is embedded: the first passage goes with the title where it does not begin
        with it. Names of places and numbered files are left out: on Debian's manuals they cost an
        encoder .08 of nDCG@10."""
        place = (self.title, self.origin)
        if not self.first or is_called_by_place(*place) or is_called_by_number(*place):
            return self.text
        return titled_text(self.text, [self.title])


def head_length(document: Document) -> int:
    """Return the length of the first line, in characters; where it repeats the title, also of the
    next."""
    lines = []
    for match in _LINE.finditer(document.text):
        if any(map(str.isalnum, match[0])):
            lines.append(match)
        if len(lines) == 2:
            break
    if not lines:
        return len(document.text)
    head = lines[0]
    if len(lines) == 2 and bare(head[0]) == bare(document.title):
        head = lines[1]
    has_body = document.text[head.end() :].strip()
    return head.end() if has_body else len(document.text)


def titled_text(text: str, titles: Iterable[str]) -> str:
    """Return the text below those of its titles that its first line with letters does not
    repeat."""
    lines = (bare(match[0]) for match in _LINE.finditer(text))
    first = next(filter(None, lines), "")
    return "\n".join([*(title for title in titles if bare(title) != first), text])


def bare(line: str) -> str:
    """Return the letters and digits of a line in lower case, which two lines are compared by."""
    return "".join(filter(str.isalnum, line)).lower()


def chunk_document(document: Document, number: int, size: int) -> Iterator[Chunk]:
    """Yield the chunks of a document, in order, of at most `size` word pieces (8 or more), as
    `count_pieces` estimates them.

    Neighbours share at most an eighth of that. A document that is blank gives no chunk.
    """
    headings = outline(document)
    starts = [heading.start for heading in headings]
    paths = HeadingPaths(headings)
    repeats = Counter[str]()
    for start, stop in _split_windows(document.text, size, starts):
        text = document.text[start:stop]
        repeats[text] += 1
        # The chunk's place is that of its first character that is not blank.
        at = start + len(text) - len(text.lstrip())
        line = document.line and document.line + document.text.count("\n", 0, at)
        page = document.page and document.page + document.text.count("\f", 0, at)
        first = start == 0
        yield Chunk(
            id=_chunk_id(document, first, text, repeats[text]),
            document=number,
            first=first,
            title=document.title,
            origin=document.origin,
            text=text,
            start=start,
            line=line,
            page=page,
            headings=paths.at(at),
        )


def _chunk_id(document: Document, first: bool, text: str, repeat: int) -> int:
    """Return a hash below 2**63. `repeat` counts equal texts in one document."""
    content = to_json((document.origin, document.title, document.metadata, first, text, repeat))
    digest = hashlib.sha256(content).digest()
    return int.from_bytes(digest[:8]) >> 1


def _split_windows(text: str, size: int, headings: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last character of each window.

    A window ends at the best place in its second half, which is before a heading where there is
    one (`headings`: their first characters). It shares nothing with the next window there.
    """
    if not text.strip():
        return
    pieces = list(_split_words(text, size))
    chars = [0, *accumulate(len(piece) for piece, _ in pieces)]
    tokens = [0, *accumulate(count for _, count in pieces)]
    # A piece begins with the blank space before its word, and a heading after it.
    heading_pieces = {bisect_right(chars, at) - 1 for at in headings if 0 < at < len(text)}

    def boundary_rank(piece: int) -> tuple[int, int]:
        return _boundary_rank(text, chars[piece]), piece

    first = last = 0
    while last < len(pieces):
        # The candidates for the window's end: `half` to `most`.
        start = tokens[first]
        half = bisect_left(tokens, start + size // 2)
        most = bisect_right(tokens, start + size) - 1
        candidates = range(max(half, first + 1), most + 1)
        last = next((piece for piece in candidates if piece in heading_pieces), len(pieces))
        if last == len(pieces):
            last = most
            if most < len(pieces):
                last = max(range(half, most + 1), key=boundary_rank)
        yield chars[first], chars[last]

        first = last
        if last not in heading_pieces:
            first = bisect_left(tokens, tokens[last] - size // 8)


def count_pieces(text: str) -> int:
    """Estimate the word pieces of a text."""
    pattern = _ASCII_PIECE if text.isascii() else _piece_pattern()
    return len(pattern.findall(text))


def _split_words(text: str, size: int) -> Iterator[tuple[str, int]]:
    """Yield words with the white space before them, in parts of at most `size // 2` pieces, and
    their pieces. Parts count together what they do in one, or more."""
    for word in _word_pattern(text.isascii()).findall(text):
        count = count_pieces(word)
        if count <= size // 2:
            yield word, count
            continue
        # Blanks are counted by the run: parts of one have a piece each.
        start = 0
        blanks = len(word) - len(word.lstrip())
        while blanks - start >= _BLANKS:
            stop = whole_character_behind(word, start + _BLANKS, _BLANKS)
            part = word[start:stop]
            yield part, count_pieces(part) + (len(part) > _BLANKS)
            start = stop
        # A character is a piece at most.
        while start < len(word):
            stop = whole_character_behind(word, start + size // 8, size // 4)
            yield word[start:stop], count_pieces(word[start:stop])
            start = stop


def _boundary_rank(text: str, at: int) -> int:
    """Return the rank of a cut before character `at`: 0 is the best, others are negative."""
    for rank, boundary in enumerate(_BOUNDARIES):
        if boundary.match(text, at):
            return -rank
    return -len(_BOUNDARIES)
