"""Answer a query from an index: documents, each with its best passage, where that stands, and why
it was found."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import Place, cite
from farspan.domain.notebook import html_table
from farspan.domain.problems import Refusal
from farspan.domain.units import counted
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.index import Index, IndexManifest, Recipe
from farspan.retrieval.lexical import NAME, content_words, words
from farspan.retrieval.passages import IndexedDocument
from farspan.retrieval.rank import (
    DEPTH,
    SYSTEM_NAMES,
    Ints,
    System,
    fuse,
    query_form,
    vector_scores,
)
from farspan.retrieval.stores import Scores, Vectors

SNIPPET_CHARS = 300
#: Random strings whose nearest passage says what a cosine means: one query without meaning in
#: twenty comes nearer than all of them. Their letters are those of so many passages.
NONSENSE = 19
SAMPLED = 50
#: Why vectors answer though words alone were found better, or nothing is found.
NO_WORD = "no word of the query is in the documents"
#: Places of one text that a result names.
MAX_PLACES = 100


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A document that answers, and the passage of it that fits best."""

    #: The passage's, in 16 hexadecimal digits.
    id: str
    title: str
    score: float
    #: BM25 of the document, and the cosine of its nearest passage; None where no vector was asked
    #: for.
    word_score: float
    vector_score: float | None
    #: The beginning of the passage, or what is around the first word of the query's, in one line.
    text: str
    #: Where to look it up: file (and row), line, page, and the headings above. 0 where the source
    #: has none.
    origin: str
    line: int = 0
    page: int = 0
    headings: tuple[str, ...] = ()
    #: The whole passage, and where words of the query are in it: first character, and the one after
    #: the last.
    passage: str
    marks: tuple[tuple[int, int], ...] = ()
    metadata: dict[str, str] = {}
    #: Where else exactly this text stands, MAX_PLACES at most; and the number of all such places.
    also: tuple[Place, ...] = ()
    copies: int = 0

    @property
    def place(self) -> str:
        """Where the passage stands, as one would cite it: `notes/a.md:12, Methods > Sampling` or
        `a.pdf, page 3`."""
        above = f", {' > '.join(self.headings)}" if self.headings else ""
        return cite(self.origin, self.line, self.page) + above


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Best first, of `total` documents that were found. `system` ranked them; `why` says why it was
    asked. Where no word of the query is in the index (`unknown_words`), only documents are found
    that are nearer than chance."""

    query: str
    system: System
    why: str
    unknown_words: bool = False
    results: tuple[Result, ...]
    total: int = 0

    @property
    def ranked_by(self) -> str:
        """How the documents were ranked, in a few words."""
        name = SYSTEM_NAMES[self.system]
        return f"{name}: {NO_WORD}" if self.unknown_words else name

    def __repr__(self) -> str:
        shown = f"{len(self.results)} of {counted(self.total, 'document')}"
        return f"<Answer to {self.query!r}: {shown}, {self.ranked_by}>"

    def _repr_html_(self) -> str:
        rows = [
            (str(rank), f"{result.score:.3f}", result.title, result.place, result.text)
            for rank, result in enumerate(self.results, 1)
        ]
        heads = ("", "score", "title", "place", "text")
        return html_table(heads, rows, caption=self.ranked_by, right=(0, 1))


def search(
    index: Index,
    query: str,
    k: int = 10,
    system: System | None = None,
    where: Mapping[str, str] | None = None,
    offset: int = 0,
) -> Answer:
    """The k best documents from the one at `offset` on, by `system`, or by what the index's
    evaluation found better.

    `where` narrows them to those with these values in these fields. Raises Refusal (usage) for a
    field that there is not.
    """
    evaluation = index.manifest.evaluation
    within = dict(where or {})
    mask_N = index.masked(within) if within else None
    words_N = index.lexical.scores(query)
    # Who gives a document's whole title means that document, and not those that mention it.
    words_N[index.named.get(query.strip().lower(), [])] += words_N.max(initial=0)
    known = bool(words_N.any())
    chosen, why = (system, "asked for") if system else _better(index.manifest, known)
    if mask_N is not None:
        words_N = np.where(mask_N, words_N, np.float32(0))
    scores_N = words_N
    vector_E = None
    if chosen != "bm25":
        vector_E = index.embedder.queries([query_form(query)])[0]
        scores_N = _vector_scores(index, vector_E, within, mask_N)
    if not known and system is None:
        scores_N[scores_N <= chance_cosine(index, query, within)] = 0
    if chosen == "fused":
        scores_N = fuse(words_N, scores_N, evaluation.fusion_weight if evaluation else 1.0)
    # A document that is blank but for its title has no passage to show.
    found = np.flatnonzero((scores_N > 0) & index.passages.shown_N)
    found = found[np.argsort(-scores_N[found], kind="stable")]
    best = found[offset : offset + k].tolist()
    results = _results(index, query, best, scores_N, words_N, vector_E)
    return Answer(
        query=query,
        system=chosen,
        why=why,
        unknown_words=not known,
        results=tuple(results),
        total=len(found),
    )


def chance_cosine(index: Index, query: str, where: Mapping[str, str]) -> float:
    """The cosine that a query without meaning reaches: that of the passage nearest to any of
    NONSENSE strings, whose words are as long as this query's, of letters of the documents."""
    rng = random.Random(query)
    rows = rng.sample(range(index.manifest.chunks), min(SAMPLED, index.manifest.chunks))
    letters = [
        letter for row in rows for letter in index.passages.chunk(row).text if letter.isalpha()
    ]
    if not letters:
        return 0.0
    lengths = [len(word) for word in query.split()]
    nonsense = [
        " ".join("".join(rng.choices(letters, k=length)) for length in lengths)
        for _ in range(NONSENSE)
    ]
    vectors = index.embedder.queries([query_form(text) for text in nonsense])
    scores = [index.store.search(vector_E, 1, where or None).scores for vector_E in vectors]
    return float(max((best for found in scores for best in found), default=0.0))


def similar(index: Index, chunk_id: str, k: int = 5) -> tuple[Result, ...]:
    """The k passages of other documents whose vectors are nearest to a passage's. Raises Refusal
    (usage) for an id that the index does not have."""
    row = row_of(index, chunk_id)
    numbers_N = index.passages.rows_N["document"]
    own = index.passages.of_document(int(numbers_N[row]))
    (vector_E,) = index.vectors(np.array([row]))
    rows, scores = nearest(index, vector_E, k + len(own) + DEPTH, {})
    near: dict[int, tuple[int, float]] = {}
    for other, score in zip(rows.tolist(), scores.tolist(), strict=True):
        if other not in own:
            near.setdefault(int(numbers_N[other]), (other, score))
    return tuple(
        _of_chunk(index, other, "", score=score, word_score=0.0, vector_score=score)
        for other, score in [*near.values()][:k]
    )


def passage(index: Index, chunk_id: str, query: str = "") -> Result:
    """One passage by its id. Raises Refusal (usage) for an id that the index does not have."""
    return _of_chunk(
        index, row_of(index, chunk_id), query, score=0.0, word_score=0.0, vector_score=None
    )


def row_of(index: Index, chunk_id: str) -> int:
    number = int(chunk_id, 16) if re.fullmatch(r"[0-9a-f]{16}", chunk_id) else -1
    row = int(index.passages.rows_of(np.array([number % 2**63], np.int64))[0])
    if row < 0 or number < 0:
        raise Refusal(
            "usage",
            what="there is no passage of this id",
            where=f"passage {chunk_id[:40]!r}",
            fact="the index may have been made again since, without it",
            remedy="search again",
        )
    return row


def _better(manifest: IndexManifest, known: bool) -> tuple[System, str]:
    """The system to ask, and why; `known` says whether any word of the query is in the index."""
    if not known:
        return "model", NO_WORD
    evaluation = manifest.evaluation
    if evaluation is None:
        return "bm25", not_evaluated(manifest.recipe)
    if evaluation.default == "fused":
        return "fused", "it found more than keyword search on tuning queries"
    return "bm25", "hybrid search was not significantly better on tuning queries"


def not_evaluated(recipe: Recipe) -> str:
    """Why an index has no evaluation."""
    return (
        "no document has text after its first line"
        if recipe.evaluate
        else "the index was made without evaluation"
    )


def _vector_scores(
    index: Index,
    vector_E: Vectors,
    where: Mapping[str, str],
    mask_N: npt.NDArray[np.bool_] | None,
) -> Scores:
    """Cosines by document, where `where` fields have these values: in documents of `mask_N`."""
    more = [] if mask_N is None else _rows_by_copies(index, mask_N)

    def documents_near(vector_E: Vectors, k: int) -> tuple[Ints, Scores]:
        rows, scores = nearest(index, vector_E, k, where)
        if more:
            # A store knows the fields of one place of each document.
            rows = np.concatenate([rows, more])
            scores = np.concatenate([scores, index.vectors(np.array(more)) @ vector_E])
        return index.passages.rows_N["document"][rows], scores

    return vector_scores(documents_near, vector_E, index.manifest.documents)


def nearest(
    index: Index, vector_E: Vectors, k: int, where: Mapping[str, str]
) -> tuple[npt.NDArray[np.intp], Scores]:
    """Rows of the k passages nearest to a vector, best first, and their cosines. A store at a
    server may know passages of the index that takes this one's place: they are passed over."""
    hits = index.store.search(vector_E, k, where or None)
    rows = index.passages.rows_of(hits.ids)
    return rows[rows >= 0], hits.scores[rows >= 0]


def _rows_by_copies(index: Index, mask_N: npt.NDArray[np.bool_]) -> list[int]:
    """Rows of the passages of the documents in `mask_N` that have copies elsewhere."""
    numbers = [number for number in np.flatnonzero(mask_N) if index.documents[number].places]
    return [row for number in numbers for row in index.passages.of_document(int(number))]


def _results(
    index: Index,
    query: str,
    documents: list[int],
    scores_N: Scores,
    words_N: Scores,
    vector_E: Vectors | None,
) -> Iterator[Result]:
    """Each document by its passage with the most words of the query, of equals the nearest one;
    with the cosine of the nearest of all, where there is a vector."""
    ranges = [index.passages.of_document(number) for number in documents]
    terms = {*words(query)}
    near = dict[int, float]()
    if vector_E is not None:
        every = [row for rows in ranges for row in rows]
        cosines = index.vectors(np.array(every, np.intp)) @ vector_E
        near = dict(zip(every, cosines.tolist(), strict=True))

    def fit(row: int) -> tuple[int, float]:
        return len(terms & {*words(index.passages.chunk(row).indexed)}), near.get(row, 0.0)

    for number, rows in zip(documents, ranges, strict=True):
        yield _of_chunk(
            index,
            max(rows, key=fit),
            query,
            score=float(scores_N[number]),
            word_score=float(words_N[number]),
            vector_score=None if vector_E is None else max(near[row] for row in rows),
        )


def _of_chunk(
    index: Index,
    row: int,
    query: str,
    *,
    score: float,
    word_score: float,
    vector_score: float | None,
) -> Result:
    chunk: Chunk = index.passages.chunk(row)
    document = index.documents[chunk.document]
    text = chunk.text.strip("\n")
    return Result(
        id=f"{chunk.id:016x}",
        title=chunk.title,
        score=score,
        word_score=word_score,
        vector_score=vector_score,
        text=snippet(text, query),
        origin=chunk.origin,
        line=chunk.line,
        page=chunk.page,
        headings=chunk.headings,
        passage=text,
        marks=tuple(marks(text, query)),
        metadata=document.metadata,
        also=tuple(_place(chunk, document, place) for place in document.places[:MAX_PLACES]),
        copies=len(document.places),
    )


def _place(chunk: Chunk, document: IndexedDocument, place: Place) -> Place:
    """Where a passage of a document stands in a copy of that."""
    return msgspec.structs.replace(
        place,
        line=place.line and place.line + chunk.line - document.line,
        page=place.page and place.page + chunk.page - document.page,
    )


def marks(text: str, query: str) -> Iterable[tuple[int, int]]:
    """Where content words of the query are in a text: first character, and the one after the
    last."""
    terms = content_words(query, text)
    return (found.span() for found in NAME.finditer(text) if terms & {*words(found[0])})


def snippet(text: str, query: str) -> str:
    """About SNIPPET_CHARS of the text in one line, from the word before the first content word of
    the query's."""
    terms = content_words(query, text)
    line = " ".join(text.split())
    first = next(
        (match.start() for match in re.finditer(r"\S+", line) if terms & {*words(match[0])}), 0
    )
    start = 0 if first < SNIPPET_CHARS // 2 else line.rfind(" ", 0, first - 1) + 1
    return ("… " if start else "") + textwrap.shorten(line[start:], SNIPPET_CHARS, placeholder=" …")
