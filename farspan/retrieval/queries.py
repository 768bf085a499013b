"""Queries that a corpus gives by itself, with the documents that answer them: its titles, its
questions, its openings.

A title is asked with its separators split. A question is a heading that ends in a question mark. An
opening is a document's first line, as it stands: it says in a sentence what the document is about,
as people ask, and every corpus has some. What is asked is left out of what can be found.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from farspan.corpus.copies import Copies
from farspan.domain.corpus import Document
from farspan.retrieval.chunk import Chunk, bare, head_length
from farspan.retrieval.lexical import words
from farspan.retrieval.outline import outline
from farspan.retrieval.rank import query_form

Kind = Literal["title", "question", "opening", "own"]
#: Documents whose titles and openings are reported, at least (as far as the corpus has them) and at
#: most; and those that choices are made on. As many documents with questions at most serve for
#: each.
QUERIES, MOST, TUNING = 500, 2000, 300
#: A document can be asked for if its body has so many words.
BODY_WORDS = 5
#: A line of fewer words is a name rather than an opening, and a heading of fewer no question.
OPENING_WORDS, QUESTION_WORDS = 4, 3


class Query(msgspec.Struct, frozen=True):
    """What is asked, and the documents that answer it: for titles and openings all of that title or
    the same body."""

    text: str
    relevant: tuple[int, ...]
    kind: Kind = "title"


class Queries(msgspec.Struct, frozen=True):
    """No document answers both a reported and a tuning query. Of the reported titles, `filling` are
    of the training split."""

    reported: list[Query]
    tuning: list[Query]
    filling: int

    @property
    def relevant(self) -> frozenset[int]:
        """Documents that answer any: nothing may be fitted to them."""
        return frozenset(n for query in (*self.reported, *self.tuning) for n in query.relevant)


def body_of(document: Document) -> str:
    """The text without its first line, without the title where the text repeats it, and without
    questions."""
    start = head_length(document)
    return without_questions(document.text[start:], start, question_lines(document))


def passage_of(chunk: Chunk, questions: Sequence[Line]) -> str:
    """What is embedded of a chunk, without questions of its document."""
    before = len(chunk.indexed) - len(chunk.text)
    return without_questions(chunk.indexed, chunk.start - before, questions)


class Line(NamedTuple):
    """Where a line of a document's text begins and ends."""

    start: int
    end: int


def question_lines(document: Document) -> list[Line]:
    """The lines of headings that are questions, in order."""
    lines: list[Line] = []
    for heading in outline(document) if "?" in document.text else ():
        if heading.start >= 0 and _is_question(heading.title):
            # A title may go over several lines.
            end = document.text.find("\n", heading.start + len(heading.title))
            lines.append(Line(heading.start, end if end >= 0 else len(document.text)))
    return lines


def without_questions(text: str, start: int, questions: Sequence[Line]) -> str:
    """The text, which begins at a place of its document, with blanks in place of questions: places
    of the rest stay."""
    pieces: list[str] = []
    copied = 0
    first = bisect_right(questions, start, key=lambda line: line.end)
    for line in questions[first:]:
        if line.start >= start + len(text):
            break
        begin, end = max(line.start - start, 0), min(line.end - start, len(text))
        pieces += (text[copied:begin], " " * (end - begin))
        copied = end
    return "".join((*pieces, text[copied:]))


def questions_of(document: Document) -> list[str]:
    """The title, if it is a question; else headings that are."""
    if _is_question(document.title):
        return [document.title]
    if "?" not in document.text:
        return []
    return [
        heading.title
        for heading in outline(document)
        if heading.start >= 0 and _is_question(heading.title)
    ]


def opening_of(document: Document) -> str:
    """The first line that does not repeat the title; empty where it is no more than a name."""
    lines = [
        line.strip() for line in document.text[: head_length(document)].splitlines() if line.strip()
    ]
    line = lines[-1] if lines else ""
    return line if len(words(line)) >= OPENING_WORDS and bare(line) != bare(document.title) else ""


def _is_question(line: str) -> bool:
    return line.rstrip().endswith("?") and len(words(line)) >= QUESTION_WORDS


def choose_queries(
    documents: Sequence[Document],
    bodies: Sequence[str],
    train: int,
    seed: int,
    most_tuning: int = TUNING,
    own: Sequence[Query] = (),
    copies: Copies | None = None,
) -> Queries:
    """Queries for documents of which the first `train` are the training split.

    Titles and openings: validation is reported whole up to MOST; training documents fill up to
    QUERIES, and others of them serve for tuning. Questions: half of the documents that have some
    serve for either. At least half of the training split answers nothing of that, and can be fitted
    to. Of a person's `own` queries half serve for either. Near `copies` are not asked for, and
    answer as well.
    """
    copies = copies or Copies.none(len(documents))
    same, rng = _Same(documents, bodies, copies.clusters), np.random.default_rng(seed)
    own = [Query(query.text, same.near(query.relevant), query.kind) for query in own]
    judged = {n for query in own for n in query.relevant}
    eligible = [
        n
        for n, body in enumerate(bodies[: copies.kept])
        if same.forms[n].strip() and len(words(body)) >= BODY_WORDS
    ]
    eligible = [int(n) for n in rng.permutation(eligible) if n not in judged]
    asked = [n for n in eligible if questions_of(documents[n])]
    most = train // (8 if asked else 4)
    trained = [n for n in asked if n < train]
    half = min(len(asked) // 2, most_tuning, most)
    questions = [n for n in asked if n >= train][:MOST] + trained[half:][:most]
    named = [n for n in eligible if not _is_question(documents[n].title)]
    val, rest = [n for n in named if n >= train][:MOST], [n for n in named if n < train]
    tuning = rest[: min(most_tuning, most)]
    filling = rest[len(tuning) :][: min(max(QUERIES - len(val), 0), most)]
    reported = [query for n in val + filling for query in _named(documents[n], same, n)]
    reported += [
        Query(text, same.of(n), "question")
        for n in questions
        for text in questions_of(documents[n])
    ]
    shuffled = [own[int(n)] for n in rng.permutation(len(own))]
    reported += shuffled[len(own) // 2 :]
    relevant = {n for query in reported for n in query.relevant}
    chosen = [query for n in tuning for query in _named(documents[n], same, n)]
    chosen += [
        Query(text, same.of(n), "question")
        for n in trained[:half]
        for text in questions_of(documents[n])
    ]
    chosen += shuffled[: len(own) // 2]
    return Queries(
        reported, [query for query in chosen if relevant.isdisjoint(query.relevant)], len(filling)
    )


class _Same:
    """Documents of one title or one body, which answer for each other, with near copies of them."""

    def __init__(
        self, documents: Sequence[Document], bodies: Sequence[str], clusters: Sequence[int]
    ) -> None:
        self._clusters = clusters
        self._members: dict[int, list[int]] = {}
        for number, first in enumerate(clusters):
            self._members.setdefault(first, []).append(number)
        self.forms = [query_form(document.title) for document in documents]
        self._bodies = [body.strip() for body in bodies]
        self._groups: dict[str, list[int]] = {}
        for number, (form, body) in enumerate(zip(self.forms, self._bodies, strict=True)):
            for key in {f"title {form}", f"body {body}"}:
                self._groups.setdefault(key, []).append(number)

    def of(self, number: int) -> tuple[int, ...]:
        keys = f"title {self.forms[number]}", f"body {self._bodies[number]}"
        same = {n for key in keys for n in self._groups[key] if self._bodies[n]}
        return tuple(n for n in self.near(same) if n in same or self._bodies[n])

    def near(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """These documents and their near copies."""
        near = {member for n in numbers for member in self._members[self._clusters[n]]}
        return tuple(sorted(near))


def _named(document: Document, same: _Same, number: int) -> list[Query]:
    title, opening = Query(same.forms[number], same.of(number)), opening_of(document)
    return [title, Query(opening, title.relevant, "opening")] if opening else [title]
