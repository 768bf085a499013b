"""Queries mined from a corpus, with the documents that answer them: titles, questions, openings.

A title query is the title with its separators split; asked, it stands in a question as people begin
one. A question is a heading that ends in a
question mark. An opening is a document's first line as it stands: it summarizes the document in a
sentence, as people ask, and every corpus has some. A query's text is removed from the candidates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from farspan.corpus.distinct_texts import Copies
from farspan.corpus.rows import is_called_by_number, is_called_by_place
from farspan.domain.corpus import Document, Heading
from farspan.retrieval.chunk import Chunk, bare, head_length
from farspan.retrieval.names import query_form
from farspan.retrieval.outline import outline
from farspan.retrieval.word_parts import count_words
from farspan.retrieval.words import Words

Kind = Literal["title", "asked", "question", "opening", "own"]
#: Documents whose titles and openings are reported: at least, as far as the corpus has them, and at
#: most; and those of the tuning queries. The same limits hold for documents with questions.
MIN_REPORTED_DOCUMENTS = 500
MAX_REPORTED_DOCUMENTS = 2000
MAX_TUNING_DOCUMENTS = 300
#: Words that a document's body needs before the document is asked for.
MIN_BODY_WORDS = 5
#: A line of fewer words is a name rather than an opening, and a heading of fewer no question.
MIN_OPENING_WORDS = 4
MIN_QUESTION_WORDS = 3


#: How people ask for what a title names. The words around it find nothing, and must cost nothing.
QUESTION_FORMS = (
    "how do I {}",
    "what is {}",
    "how does {} work",
    "where is {} explained",
    "how to use {}",
    "can someone explain {} to me",
)


class Query(msgspec.Struct, frozen=True):
    """A query and the documents that answer it.

    Titles and openings are answered by all documents of that title or of the same body.
    """

    text: str
    relevant: tuple[int, ...]
    kind: Kind = "title"


class Queries(msgspec.Struct, frozen=True):
    """Reported and tuning queries; no document answers one of both.

    Of the reported titles, `filling` are of the training split.
    """

    reported: list[Query]
    tuning: list[Query]
    filling: int

    @property
    def relevant(self) -> frozenset[int]:
        """Return the documents that answer any query: nothing may be fitted to them."""
        return _relevant_documents((*self.reported, *self.tuning))


def _relevant_documents(queries: Iterable[Query]) -> frozenset[int]:
    return frozenset(chain.from_iterable(query.relevant for query in queries))


def body_of(document: Document) -> str:
    """Return the text without its first line, a repeated title and questions."""
    start = head_length(document)
    return without_questions(document.text[start:], start, question_lines(document))


def body_of_chunk(chunk: Chunk, head: int, questions: Sequence[TextLine]) -> str:
    """Return the text of a chunk without its document's first `head` characters and questions;
    empty where it is only that."""
    skipped = max(head - chunk.start, 0)
    if skipped >= len(chunk.text):
        return ""
    return without_questions(chunk.text[skipped:], chunk.start + skipped, questions)


class TextLine(NamedTuple):
    """A line's span of characters in its document's text."""

    start: int
    end: int


def question_lines(document: Document) -> list[TextLine]:
    """Return the lines of headings that are questions, in order."""
    lines: list[TextLine] = []
    for heading in _question_headings(document):
        # A title may span several lines.
        end = document.text.find("\n", heading.start + len(heading.title))
        if end < 0:
            end = len(document.text)
        lines.append(TextLine(heading.start, end))
    return lines


def _question_headings(document: Document) -> list[Heading]:
    if "?" not in document.text:
        return []
    headings = [heading for heading in outline(document) if heading.start >= 0]
    return [heading for heading in headings if _is_question(heading.title)]


def without_questions(text: str, start: int, questions: Sequence[TextLine]) -> str:
    """Return the text with its questions blanked out; other characters keep their offsets.

    The text begins at character `start` of its document.
    """
    pieces: list[str] = []
    copied = 0
    first = bisect_right(questions, start, key=lambda line: line.end)
    for line in questions[first:]:
        if line.start >= start + len(text):
            break
        begin = max(line.start - start, 0)
        end = min(line.end - start, len(text))
        pieces += (text[copied:begin], " " * (end - begin))
        copied = end
    return "".join((*pieces, text[copied:]))


def questions_of(document: Document) -> list[str]:
    """Return the title if it is a question, else the headings that are questions."""
    if _is_question(document.title):
        return [document.title]
    return [heading.title for heading in _question_headings(document)]


def opening_of(document: Document) -> str:
    """Return the first line that does not repeat the title; empty if it is only a name."""
    head = document.text[: head_length(document)]
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    line = lines[-1] if lines else ""
    if count_words(line) < MIN_OPENING_WORDS or bare(line) == bare(document.title):
        return ""
    return line


def _is_question(line: str) -> bool:
    return line.rstrip().endswith("?") and count_words(line) >= MIN_QUESTION_WORDS


def choose_queries(
    documents: Sequence[Document],
    bodies: Sequence[str],
    train: int,
    seed: int,
    most_tuning: int = MAX_TUNING_DOCUMENTS,
    own: Sequence[Query] = (),
    copies: Copies | None = None,
) -> Queries:
    """Mine queries from documents; the first `train` are the training split.

    Titles and openings: validation is reported whole up to MOST; training documents fill up to
    QUERIES, and others of them serve for tuning. Questions: half of the documents that have some
    serve for either. At least half of the training split answers none of these queries, and can be
    fitted to. Of a person's `own` queries half serve for either. Near `copies` are not asked for,
    and answer as well.
    """
    copies = copies or Copies.none(len(documents))
    groups = _AnswerGroups(documents, bodies, copies.clusters)
    rng = np.random.default_rng(seed)

    # Documents that own queries judge are not asked for a second time.
    own = [Query(query.text, groups.with_near_copies(query.relevant), query.kind) for query in own]
    judged = _relevant_documents(own)
    titled = [n for n in range(copies.kept) if groups.forms[n].strip()]
    eligible = [n for n in titled if count_words(bodies[n]) >= MIN_BODY_WORDS]
    eligible = [int(n) for n in rng.permutation(eligible) if n not in judged]

    # Questions: validation and half of the training documents are reported, the rest tuned on.
    asked = [n for n in eligible if questions_of(documents[n])]
    max_train = train // (8 if asked else 4)
    trained = [n for n in asked if n < train]
    half = min(len(asked) // 2, most_tuning, max_train)
    reported_questions = [n for n in asked if n >= train][:MAX_REPORTED_DOCUMENTS]
    reported_questions += trained[half:][:max_train]

    # Titles and openings: training documents fill up a small validation split.
    named = [n for n in eligible if not _is_question(documents[n].title)]
    val = [n for n in named if n >= train][:MAX_REPORTED_DOCUMENTS]
    rest = [n for n in named if n < train]
    tuned = rest[: min(most_tuning, max_train)]
    room = min(max(MIN_REPORTED_DOCUMENTS - len(val), 0), max_train)
    filling = rest[len(tuned) :][:room]

    shuffled = [own[int(n)] for n in rng.permutation(len(own))]
    reported = groups.name_queries(val)
    filled = groups.name_queries(filling)
    num_filling = sum(query.kind == "title" for query in filled)
    reported += filled
    reported += groups.question_queries(reported_questions)
    reported += shuffled[len(own) // 2 :]
    tuning = groups.name_queries(tuned)
    tuning += groups.question_queries(trained[:half])
    tuning += shuffled[: len(own) // 2]
    relevant = _relevant_documents(reported)
    tuning = [query for query in tuning if relevant.isdisjoint(query.relevant)]
    return Queries(reported, tuning, num_filling)


def _names_its_text(document: Document, body: str) -> bool:
    """Return False for a title that nobody would ask for: the place of a row without one, or a
    file's name with a number, such as `IMG_2041`, with no word that the text has."""
    place = (document.title, document.origin)
    if is_called_by_place(*place):
        return False
    if not is_called_by_number(*place):
        return True
    words = Words()
    return not set(words.of_text(document.title)).isdisjoint(words.of_text(body))


class _AnswerGroups:
    """Documents of one title or one body, which answer for each other, with near copies of them."""

    def __init__(
        self, documents: Sequence[Document], bodies: Sequence[str], clusters: Sequence[int]
    ) -> None:
        self._documents = documents
        self._clusters = clusters
        self._members: dict[int, list[int]] = {}
        for number, first in enumerate(clusters):
            self._members.setdefault(first, []).append(number)
        self.forms = [query_form(document.title) for document in documents]
        self._bodies = [body.strip() for body in bodies]
        self._groups: dict[str, list[int]] = {}
        for number in range(len(documents)):
            for key in self._text_keys(number):
                self._groups.setdefault(key, []).append(number)

    def _text_keys(self, number: int) -> tuple[str, str]:
        return f"title {self.forms[number]}", f"body {self._bodies[number]}"

    def answers_to(self, number: int) -> tuple[int, ...]:
        """Return the documents that answer the queries of document `number`."""
        members = chain.from_iterable(self._groups[key] for key in self._text_keys(number))
        same = {n for n in members if self._bodies[n]}
        return tuple(n for n in self.with_near_copies(same) if n in same or self._bodies[n])

    def with_near_copies(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return these documents and their near copies, sorted."""
        members = (self._members[self._clusters[n]] for n in numbers)
        return tuple(sorted(set(chain.from_iterable(members))))

    def name_queries(self, numbers: Sequence[int]) -> list[Query]:
        """Return title queries, alone and in a question, and opening queries for documents."""
        queries = []
        for number in numbers:
            relevant = self.answers_to(number)
            if _names_its_text(self._documents[number], self._bodies[number]):
                title = self.forms[number]
                queries.append(Query(title, relevant))
                question = QUESTION_FORMS[number % len(QUESTION_FORMS)]
                queries.append(Query(question.format(title.strip()), relevant, "asked"))
            opening = opening_of(self._documents[number])
            if opening:
                queries.append(Query(opening, relevant, "opening"))
        return queries

    def question_queries(self, numbers: Sequence[int]) -> list[Query]:
        """Return queries for the questions that documents ask."""
        queries = []
        for number in numbers:
            relevant = self.answers_to(number)
            for text in questions_of(self._documents[number]):
                queries.append(Query(text, relevant, "question"))
        return queries
