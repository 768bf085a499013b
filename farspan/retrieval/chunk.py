"""Documents to chunks: overlapping windows of tokens, cut where paragraphs, sentences or words end.

Every cut lies before white space (or inside a word too long for one chunk): there byte-level pre-tokenizers of GPT-2's
kind start a new token anyway, so a chunk's tokens are those that the document has at its span.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Annotated, Protocol

import msgspec

from farspan.domain.corpus import Document

#: Documents encoded at once: enough to keep the tokenizer's threads busy, few enough to keep memory flat.
_BATCH = 1024

#: Where a sentence or line ends: after closing punctuation and before white space, or before the line break.
_SENTENCE_END = re.compile(r"(?<=\S)(?=\n)|(?<=[.!?:;])(?=\s)")
_WORD_END = re.compile(r"(?<=\S)(?=\s)")
_LINE = re.compile(r"[^\n]+")
_PARAGRAPH = re.compile(r"\s*\n\s*\n")


class Encoder(Protocol):
    """What chunking needs of a tokenizer."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...


class Chunking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Windows of at most `size` tokens, neighbours share at most `overlap`; `per_document` keeps the first ones."""

    size: Annotated[int, msgspec.Meta(ge=8)] = 128
    overlap: Annotated[int, msgspec.Meta(ge=0)] = 16
    per_document: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if 2 * self.overlap > self.size:
            raise ValueError(f"overlap {self.overlap} is more than half of the chunk size {self.size}")


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is the document's text[start_char : start_char + len(text)] and its tokens [start, stop)."""

    id: int
    #: Position of the document in the corpus, and of the chunk in its document.
    document: int
    ordinal: int
    #: Whether the chunk is of the document's head, which the evaluation leaves out of what can be found.
    head: bool
    title: str
    origin: str
    text: str
    start_char: int
    start: int
    stop: int

    @property
    def indexed(self) -> str:
        """What is embedded: a head goes with its title."""
        return f"{self.title}\n{self.text}" if self.head else self.text


def head_length(document: Document) -> int:
    """Characters of the first line; where that only repeats the title, also the line after it."""
    lines = [match for match in _LINE.finditer(document.text) if any(map(str.isalnum, match[0]))][:2]
    if not lines:
        return len(document.text)
    repeats = _bare(lines[0][0]) == _bare(document.title)
    end = lines[min(repeats, len(lines) - 1)].end()
    return end if document.text[end:].strip() else len(document.text)


def _bare(line: str) -> str:
    return "".join(filter(str.isalnum, line)).lower()


def chunk_documents(documents: Iterable[Document], tokenizer: Encoder, chunking: Chunking) -> Iterator[Chunk]:
    """Every chunk of every document, in order; ids count from 0. A document without text gives none.

    Head and body are cut apart first, so that no chunk holds some of both.
    """
    numbered = iter(enumerate(documents))
    next_id = 0
    while batch := list(islice(numbered, _BATCH)):
        cuts = [head_length(document) for _, document in batch]
        parts = [part for (_, d), cut in zip(batch, cuts, strict=True) for part in (d.text[:cut], d.text[cut:])]
        lengths = [len(ids) for ids in tokenizer.encode_batch(parts)]
        for place, (number, document) in enumerate(batch):
            head = list(_windows(parts[2 * place], lengths[2 * place], tokenizer, chunking))
            body = _windows(parts[2 * place + 1], lengths[2 * place + 1], tokenizer, chunking)
            head_tokens = head[-1][3] if head else 0
            windows = chain(((True, 0, 0, w) for w in head), ((False, cuts[place], head_tokens, w) for w in body))
            for ordinal, (is_head, char, token, window) in enumerate(islice(windows, chunking.per_document)):
                start_char, stop_char, start, stop = window
                yield Chunk(
                    id=next_id, document=number, ordinal=ordinal, head=is_head, title=document.title,
                    origin=document.origin, text=document.text[char + start_char : char + stop_char],
                    start_char=char + start_char, start=token + start, stop=token + stop,
                )  # fmt: skip
                next_id += 1


def _windows(text: str, length: int, tokenizer: Encoder, chunking: Chunking) -> Iterator[tuple[int, int, int, int]]:
    """(start_char, stop_char, start, stop) of each window; `length` is the whole text's in tokens."""
    if not text.strip():
        return
    if length <= chunking.size:
        yield 0, len(text), 0, length
        return
    pieces = _pieces(text, tokenizer, chunking.size)
    chars, tokens = [0], [0]
    for piece, count in pieces:
        chars.append(chars[-1] + len(piece))
        tokens.append(tokens[-1] + count)
    first = 0
    while first < len(pieces):
        last = _cut(first, tokens, pieces, chunking.size)
        yield chars[first], chars[last], tokens[first], tokens[last]
        if last == len(pieces):
            return
        following = last
        while following - 1 > first and tokens[last] - tokens[following - 1] <= chunking.overlap:
            following -= 1
        # The overlap and the next new piece must fit together, or the window would not move on.
        while tokens[last + 1] - tokens[following] > chunking.size:
            following += 1
        first = following


def _cut(first: int, tokens: list[int], pieces: list[tuple[str, int]], size: int) -> int:
    """Where the window from piece `first` ends: a paragraph's end in its second half, or the last piece that fits."""
    last = first + 1
    while last < len(pieces) and tokens[last + 1] - tokens[first] <= size:
        last += 1
    if last == len(pieces):
        return last
    for end in range(last, first, -1):
        if 2 * (tokens[end] - tokens[first]) < size:
            break
        if _PARAGRAPH.match(pieces[end][0]):
            return end
    return last


def _pieces(text: str, tokenizer: Encoder, size: int) -> list[tuple[str, int]]:
    """The text in consecutive pieces with their token counts, none longer than `size`: sentences, words, halves."""
    pieces = [text]
    counts = [size + 1]
    cuts: Iterator[Callable[[str], list[str]]] = chain((_SENTENCE_END.split, _WORD_END.split), repeat(_halves))
    for cut in cuts:
        pieces = [
            part for piece, n in zip(pieces, counts, strict=True) for part in (cut(piece) if n > size else [piece])
        ]
        counts = [len(ids) for ids in tokenizer.encode_batch(pieces)]
        if max(counts) <= size:
            break
    return list(zip(pieces, counts, strict=True))


def _halves(text: str) -> list[str]:
    return [text[: len(text) // 2], text[len(text) // 2 :]]
