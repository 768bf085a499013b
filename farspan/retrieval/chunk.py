"""Documents to chunks: overlapping windows of tokens, cut where sections, paragraphs, sentences or
words end.

Cuts lie before white space (or inside a word too long for half a chunk): there byte-level
pre-tokenizers of GPT-2's kind start a new token anyway, so a chunk's tokens are those that the
document has at its place.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.codec import to_json
from farspan.domain.corpus import Document
from farspan.retrieval.outline import HeadingPaths, outline

_LINE = re.compile(r"[^\n]+")
_WORD = re.compile(r"\s*\S+|\s+")
#: Blank space between two lines that is looked at: a long run of it would be gone through from each
#: of its places.
_MAX_BLANKS = 200
#: Where to cut before, best first: the end of a paragraph, of a line or sentence, of a word.
_ENDS = (
    re.compile(rf"\s{{0,{_MAX_BLANKS}}}\n\s{{0,{_MAX_BLANKS}}}\n"),
    re.compile(r"\n|(?<=[.!?:;])\s"),
    re.compile(r"\s"),
)


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is the text of document number `document` from character `start` on."""

    #: From what the chunk says and where it is from: it stays the same when the text around it
    #: changes.
    id: int
    document: int
    #: Whether the chunk is of the document's head, which the evaluation leaves out of what can be
    #: found.
    head: bool
    title: str
    origin: str
    text: str
    start: int
    #: Where to look it up: line and page of the source, 0 where it has none, and the headings
    #: above, outermost first.
    line: int = 0
    page: int = 0
    headings: tuple[str, ...] = ()

    @property
    def indexed(self) -> str:
        """What is embedded: a head goes with its title."""
        return f"{self.title}\n{self.text}" if self.head else self.text


def head_length(document: Document) -> int:
    """Characters of the first line; where that only repeats the title, also the line after it."""
    lines = [match for match in _LINE.finditer(document.text) if any(map(str.isalnum, match[0]))][
        :2
    ]
    if not lines:
        return len(document.text)
    repeats = bare(lines[0][0]) == bare(document.title)
    end = lines[min(repeats, len(lines) - 1)].end()
    return end if document.text[end:].strip() else len(document.text)


def bare(line: str) -> str:
    """Letters and digits alone, small: what two lines are compared by."""
    return "".join(filter(str.isalnum, line)).lower()


def chunk_document(
    document: Document, number: int, tokenizer: Tokenizer, size: int
) -> Iterator[Chunk]:
    """The chunks of one document, whose number they bear: of at most `size` tokens (8 or more), in
    order; neighbours share at most an eighth of that.

    Head and body are cut apart, so that no chunk holds some of both. A part that is blank gives no
    chunk.
    """
    cut = head_length(document)
    headings = outline(document)
    seen = Counter[str]()
    starts = [heading.start for heading in headings]
    paths = HeadingPaths(headings)
    for head, offset, part in ((True, 0, document.text[:cut]), (False, cut, document.text[cut:])):
        for start, stop in _windows(part, tokenizer, size, [at - offset for at in starts]):
            at = offset + start
            text = part[start:stop]
            # Blank space that a chunk begins with is no place.
            first = at + len(text) - len(text.lstrip())
            line, page = (
                at_document and at_document + document.text.count(mark, 0, first)
                for at_document, mark in ((document.line, "\n"), (document.page, "\f"))
            )
            seen[text] += 1
            yield Chunk(
                id=_identity(document, head, text, seen[text]),
                document=number,
                head=head,
                title=document.title,
                origin=document.origin,
                text=text,
                start=at,
                line=line,
                page=page,
                headings=paths.at(first),
            )


def _identity(document: Document, head: bool, text: str, times: int) -> int:
    """A number below 2**63. The same words may stand in one document several times."""
    content = to_json((document.origin, document.title, document.metadata, head, text, times))
    return int.from_bytes(hashlib.sha256(content).digest()[:8]) >> 1


def _windows(
    text: str, tokenizer: Tokenizer, size: int, headings: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """First and last character of each window. One ends at the best place in its second half:
    before a heading, of those that begin at these characters, if there is one. What ends there
    shares nothing with the next."""
    if not text.strip():
        return
    pieces = list(_pieces(text, size))
    chars = [0, *accumulate(map(len, pieces))]
    tokens = [0, *accumulate(length - 1 for length in tokenizer.encode_joined(pieces)[1])]
    # A piece begins with the blank space before its word, and a heading after it.
    before_heading = {bisect_right(chars, at) - 1 for at in headings if 0 < at < len(text)}
    first = last = 0
    while last < len(pieces):
        half = bisect_left(tokens, tokens[first] + size // 2)
        most = bisect_right(tokens, tokens[first] + size) - 1
        titled = [
            piece for piece in range(max(half, first + 1), most + 1) if piece in before_heading
        ]
        if titled and titled[0] < len(pieces):
            last = titled[0]
        elif most < len(pieces):
            last = max(range(half, most + 1), key=lambda p: (_worth(text, chars[p]), p))
        else:
            last = most
        yield chars[first], chars[last]
        first = last if last in before_heading else bisect_left(tokens, tokens[last] - size // 8)


def _pieces(text: str, size: int) -> Iterator[str]:
    """Words with the white space before them, in parts where one could have more than `size // 2`
    tokens."""
    for word in _WORD.findall(text):
        # A token has a byte or more, a character at most four.
        step = len(word) if len(word.encode()) <= size // 2 else size // 8
        yield from (word[start : start + step] for start in range(0, len(word), step))


def _worth(text: str, at: int) -> int:
    """How good a place the one before character `at` is to cut."""
    return next((-rank for rank, end in enumerate(_ENDS) if end.match(text, at)), -len(_ENDS))
