"""Answer a query from an index: documents, each with its best passage and the place of that."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import Place, cite_place
from farspan.domain.notebook import html_table
from farspan.domain.problems import Refusal
from farspan.domain.units import counted
from farspan.retrieval.choose import MixChoice, usual_mix
from farspan.retrieval.chunk import Chunk
from farspan.retrieval.evaluate import ONLY_WORDS, explain_choice
from farspan.retrieval.filtered_vectors import FilteredVectors
from farspan.retrieval.filters import Bindings, Where
from farspan.retrieval.hybrid_ranking import (
    DEPTH,
    SYSTEM_NAMES,
    VOICE_NAMES,
    WORDS_ALONE,
    Ints,
    Mix,
    System,
    Voice,
    VoiceScores,
    cosine_deviation,
    fuse_scores,
    query_form,
    vector_scores,
)
from farspan.retrieval.index import (
    ENCODER_VECTORS,
    OWN_VECTORS,
    Index,
    IndexManifest,
    QueryEmbedder,
    Recipe,
    SetName,
)
from farspan.retrieval.passages import IndexedDocument
from farspan.retrieval.snippets import find_marks, make_snippet
from farspan.retrieval.stores import Scores, Vectors

#: The set of vectors of each voice.
SETS: dict[Voice, SetName] = {"model": OWN_VECTORS, "encoder": ENCODER_VECTORS}
#: Random strings that the nearest passage is compared to: of 20 queries without meaning one comes
#: nearer than 19 of them, a level of 5 %. Their letters are drawn from sampled passages.
NUM_RANDOM_QUERIES = 19
NUM_SAMPLED_PASSAGES = 50
#: The reason for a search by vectors where keyword search was better, or for no result.
NO_WORD = "no word of the query is in the documents"
#: Places of one text that a result lists.
MAX_PLACES = 100


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A document that was found, with its best passage."""

    #: The passage's, in 16 hexadecimal digits.
    id: str
    title: str
    score: float
    #: BM25 of the document, and the cosine of its nearest passage; None where no vector was asked
    #: for.
    word_score: float
    vector_score: float | None
    #: The beginning of the passage, or the text around the query's first word, in one line.
    text: str
    #: The place to look it up: file (and row), line, page, and the headings above. 0 where the
    #: source has none.
    origin: str
    line: int = 0
    page: int = 0
    headings: tuple[str, ...] = ()
    #: The whole passage, and the spans of the query's words in it: first character, and the one
    #: after the last.
    passage: str
    marks: tuple[tuple[int, int], ...] = ()
    metadata: dict[str, str] = {}
    #: Other places of exactly this text, MAX_PLACES at most; and the number of all such places.
    also: tuple[Place, ...] = ()
    copies: int = 0

    @property
    def place(self) -> str:
        """The citation of the passage: `notes/a.md:12, Methods > Sampling` or `a.pdf, page 3`."""
        above = f", {' > '.join(self.headings)}" if self.headings else ""
        return cite_place(self.origin, self.line, self.page) + above


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a query, best first, of `total` documents that were found.

    `system` ranked them, for the reason `why`. Where no word of the query is in the index
    (`unknown_words`), only documents are found that are nearer than chance.
    """

    query: str
    system: System
    why: str
    #: The voices that ranked, the heaviest first; `by_table`: the query's vector for the encoder's
    #: passages came from a table.
    voices: tuple[Voice, ...] = ("bm25",)
    by_table: bool = False
    unknown_words: bool = False
    results: tuple[Result, ...]
    total: int = 0

    @property
    def ranked_by(self) -> str:
        """The system that ranked the documents, in a few words."""
        name = SYSTEM_NAMES[self.system]
        if self.system == "fused":
            name = f"{name} ({' and '.join(VOICE_NAMES[voice] for voice in self.voices)})"
        if self.by_table:
            name = f"{name}, the query by a table"
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
    where: Where = None,
    offset: int = 0,
    among: npt.NDArray[np.bool_] | None = None,
) -> Answer:
    """Return the k best documents from the one at `offset` on.

    `system` ranks them; by default, the one that the index's evaluation chose. `where` filters by
    the values of fields, and `among` by document (N). Raises Refusal (usage, out-of-range) for
    fields and values that are not there.
    """
    bindings = index.bind(where, among)

    # A query that is a document's whole title finds that document before those that mention it.
    words_N = index.lexical.bm25_scores(index.words.of_query(query))
    titled = index.named.get(query.strip().lower(), [])
    words_N[titled] += words_N.max(initial=0)
    known = bool(words_N.any())
    words_deviation = float(words_N.std())
    ranking_by = choose_ranking(index, system, known)
    if bindings is not None:
        words_N = np.where(bindings.mask, words_N, np.float32(0))

    scores: dict[Voice, VoiceScores] = {"bm25": VoiceScores(words_N, words_deviation)}
    vectors: dict[SetName, Vectors] = {}
    for voice, embedder in ranking_by.embedders.items():
        name = SETS[voice]
        vectors[name] = embedder.queries([query_form(query) if name == OWN_VECTORS else query])[0]
        searched = passage_vectors(index, name, bindings)
        cosines_N = _vector_scores(index, searched, vectors[name])
        if not known and system is None:
            threshold = chance_cosine(index, name, embedder, query, searched)
            cosines_N[cosines_N <= threshold] = 0
        deviation = cosine_deviation(index.covariances[name], vectors[name])
        scores[voice] = VoiceScores(cosines_N, deviation)
    first, *others = ranking_by.mix.voices
    scores_N = fuse_scores(scores, ranking_by.mix) if others else scores[first].scores

    # A document that is blank but for its title has no passage to show.
    matched = np.flatnonzero((scores_N > 0) & index.passages.shown_N)
    ranking = matched[np.argsort(-scores_N[matched], kind="stable")]
    best = ranking[offset : offset + k].tolist()
    results = _collect_results(index, query, best, scores_N, words_N, vectors, ranking_by.mix)
    return Answer(
        query=query,
        system=ranking_by.system,
        why=ranking_by.why,
        voices=ranking_by.mix.voices,
        by_table=ranking_by.by_table,
        unknown_words=not known,
        results=tuple(results),
        total=len(ranking),
    )


class RankingBy(NamedTuple):
    """What ranks documents for a query: weights of voices, what embeds the query for each, and
    why."""

    system: System
    mix: Mix
    embedders: dict[Voice, QueryEmbedder]
    why: str
    by_table: bool = False


def choose_ranking(index: Index, system: System | None, known: bool) -> RankingBy:
    """Return the ranking of a query: the system that was asked for, else what was chosen on tuning
    queries, as far as it is there.

    `known`: whether the index has any word of the query. Raises Refusal (usage) for a system whose
    vectors the index lacks, and (no-index) for a run with another model.
    """
    manifest = index.manifest
    if system not in (None, "bm25"):
        _require_vectors(index, system)
    evaluation = manifest.evaluation
    searched_voices = [voice for voice, name in SETS.items() if name in manifest.sets]
    choice = MixChoice(mix=usual_mix(searched_voices))
    table_choice = None
    if evaluation is not None:
        choice = evaluation.choice
        table_choice = evaluation.table_choice

    mix = _mix_for(manifest, system, known, choice)
    encoder = None
    by_table = False
    if "encoder" in mix.weights:
        encoder = index.encoder
        if encoder is None:
            # The encoder is not on this machine.
            encoder = index.query_table
            by_table = encoder is not None
            mix = _mix_for(manifest, system, known, table_choice or choice)
            choice = table_choice or choice
    if "encoder" in mix.weights and encoder is None:
        if system == "encoder":
            raise _refuse_system(index, "encoder", "the encoder is not on this machine")
        mix = mix.without("encoder")

    embedders: dict[Voice, QueryEmbedder] = {}
    if "encoder" in mix.weights and encoder is not None:
        embedders["encoder"] = encoder
    if "model" in mix.weights:
        embedders["model"] = index.own
    if system:
        why = "asked for"
    elif not known and embedders:
        why = NO_WORD
    elif not manifest.sets:
        why = ONLY_WORDS
    elif evaluation is None:
        why = not_evaluated(manifest.recipe)
    else:
        why = explain_choice(choice)
    return RankingBy(system or _system_of(mix), mix, embedders, why, by_table)


def _mix_for(manifest: IndexManifest, system: System | None, known: bool, choice: MixChoice) -> Mix:
    """Return the weights of voices for a query; `choice` was made on tuning queries."""
    if system == "bm25" or not manifest.sets:
        return WORDS_ALONE
    if system == "model":
        return Mix(bm25=0.0, model=1.0)
    if system == "encoder":
        return Mix(bm25=0.0, encoder=1.0)
    if system is None and not known:
        return _even_mix(manifest).without("bm25")
    if system == "fused" and choice.mix == WORDS_ALONE:
        return _even_mix(manifest)
    return choice.mix


def _require_vectors(index: Index, system: System) -> None:
    """Refuse a system whose vectors the index lacks."""
    sets = index.manifest.sets
    needed = {"model": OWN_VECTORS, "encoder": ENCODER_VECTORS}.get(system)
    if not sets or (needed is not None and needed not in sets):
        raise _refuse_system(index, system, f"its sets of vectors: {', '.join(sets) or 'none'}")


def _even_mix(manifest: IndexManifest) -> Mix:
    """Return words and the index's best vectors in equal parts, which nothing was measured for."""
    if manifest.best_set is None:
        return WORDS_ALONE
    if manifest.best_set == ENCODER_VECTORS:
        return Mix(bm25=0.5, encoder=0.5)
    return Mix(bm25=0.5, model=0.5)


def _system_of(mix: Mix) -> System:
    first, *others = mix.voices
    return "fused" if others else first


def _refuse_system(index: Index, system: System, fact: str) -> Refusal:
    return Refusal(
        "usage",
        what=f"this index cannot be searched by {SYSTEM_NAMES[system]}",
        where=index.path,
        fact=fact,
        remedy="search without --system",
    )


def chance_cosine(
    index: Index,
    name: SetName,
    embedder: QueryEmbedder,
    query: str,
    vectors: FilteredVectors,
) -> float:
    """Return the cosine that a query without meaning reaches: the highest of random strings.

    Their words are as long as this query's, of letters drawn from the documents.
    """
    rng = random.Random(query)
    num_chunks = index.manifest.chunks
    letters: list[str] = []
    for row in rng.sample(range(num_chunks), min(NUM_SAMPLED_PASSAGES, num_chunks)):
        letters.extend(filter(str.isalpha, index.passages.chunk(row).text))
    if not letters:
        return 0.0

    lengths = [len(word) for word in query.split()]
    forms = []
    for _ in range(NUM_RANDOM_QUERIES):
        random_words = ["".join(rng.choices(letters, k=length)) for length in lengths]
        random_query = " ".join(random_words)
        forms.append(query_form(random_query) if name == OWN_VECTORS else random_query)

    cosines: list[float] = []
    for vector_E in embedder.queries(forms):
        _, nearest_cosines = vectors.nearest(vector_E, 1)
        cosines.extend(nearest_cosines)
    return float(max(cosines, default=0.0))


def similar(index: Index, chunk_id: str, k: int = 5) -> tuple[Result, ...]:
    """Return the k passages of other documents whose vectors are nearest to a passage's; by words,
    where the index has no vectors.

    Raises Refusal (usage) for an id that the index does not have.
    """
    row = row_of(index, chunk_id)
    numbers_N = index.passages.rows_N["document"]
    own = index.passages.of_document(int(numbers_N[row]))
    name = index.manifest.best_set
    if name is None:
        return _similar_by_words(index, row, k)
    (vector_E,) = index.vectors(np.array([row]), name)
    rows, scores = passage_vectors(index, name).nearest(vector_E, k + len(own) + DEPTH)
    near: dict[int, tuple[int, float]] = {}
    for other, score in zip(rows.tolist(), scores.tolist(), strict=True):
        if other not in own:
            near.setdefault(int(numbers_N[other]), (other, score))
    results = []
    for other, score in [*near.values()][:k]:
        result = _result_of(index, other, "", score=score, word_score=0.0, vector_score=score)
        results.append(result)
    return tuple(results)


def _similar_by_words(index: Index, row: int, k: int) -> tuple[Result, ...]:
    """Return the passages with the most of a passage's words, one of each of k other documents."""
    chunk = index.passages.chunk(row)
    terms = index.words.of_query(chunk.indexed)
    words_N = index.lexical.bm25_scores(terms)
    words_N[chunk.document] = 0
    matched = np.flatnonzero((words_N > 0) & index.passages.shown_N)
    best = matched[np.argsort(-words_N[matched], kind="stable")][:k].tolist()
    return tuple(_collect_results(index, chunk.indexed, best, words_N, words_N, {}, WORDS_ALONE))


def passage(index: Index, chunk_id: str, query: str = "") -> Result:
    """Return a passage by its id. Raises Refusal (usage) for an id that the index does not have."""
    row = row_of(index, chunk_id)
    return _result_of(index, row, query, score=0.0, word_score=0.0, vector_score=None)


def row_of(index: Index, chunk_id: str) -> int:
    """Return the row of a passage by its id. Raises Refusal (usage) for an unknown id."""
    row = -1
    if re.fullmatch(r"[0-9a-f]{16}", chunk_id):
        number = int(chunk_id, 16) % 2**63
        row = int(index.passages.rows_of(np.array([number], np.int64))[0])
    if row < 0:
        raise Refusal(
            "usage",
            what="there is no passage of this id",
            where=f"passage {chunk_id[:40]!r}",
            fact="the index may have been made again since, without it",
            remedy="search again",
        )
    return row


def not_evaluated(recipe: Recipe) -> str:
    """Return the reason why an index has no evaluation."""
    if recipe.evaluate:
        return "no document has text after its first line"
    return "the index was made without evaluation"


def passage_vectors(
    index: Index, name: SetName, bindings: Bindings | None = None
) -> FilteredVectors:
    """Return the vectors of passages in a set, of the documents that a filter leaves; of all
    without one."""
    return FilteredVectors(index.stores[name], index.passages, index.documents, bindings)


def _vector_scores(index: Index, vectors: FilteredVectors, vector_E: Vectors) -> Scores:
    """Return cosines by document."""

    def documents_near(vector_E: Vectors, k: int) -> tuple[Ints, Scores]:
        rows, scores = vectors.nearest(vector_E, k)
        return index.passages.rows_N["document"][rows], scores

    return vector_scores(documents_near, vector_E, index.manifest.documents)


def _collect_results(
    index: Index,
    query: str,
    documents: list[int],
    scores_N: Scores,
    words_N: Scores,
    vectors: Mapping[SetName, Vectors],
    mix: Mix,
) -> Iterator[Result]:
    """Yield each document with its best passage: by the share of the query's words that it has,
    and by its cosine, as the mix weighs words and vectors.

    The cosine is that of the document's nearest passage in the index's best set that was searched.
    """
    ranges = [index.passages.of_document(number) for number in documents]
    sought = index.words.content_of(query)
    cosines: dict[int, float] = {}
    searched: tuple[SetName, ...] = (ENCODER_VECTORS, OWN_VECTORS)
    name = next((name for name in searched if name in vectors), None)
    if name is not None and documents:
        rows = list(itertools.chain.from_iterable(ranges))
        cosines_N = index.vectors(np.array(rows, np.intp), name) @ vectors[name]
        cosines = dict(zip(rows, cosines_N.tolist(), strict=True))

    def fit(row: int) -> tuple[float, float]:
        cosine = cosines.get(row, 0.0)
        text = index.passages.chunk(row).indexed
        matching = frozenset[str]().union(*(m.words for m in index.words.matches(text, sought)))
        share = len(matching) / max(len(sought), 1)
        return mix.bm25 * share + (1 - mix.bm25) * cosine, cosine

    for number, rows_of_document in zip(documents, ranges, strict=True):
        highest = None
        if name is not None:
            highest = max(cosines[row] for row in rows_of_document)
        yield _result_of(
            index,
            max(rows_of_document, key=fit),
            query,
            score=float(scores_N[number]),
            word_score=float(words_N[number]),
            vector_score=highest,
        )


def _result_of(
    index: Index,
    row: int,
    query: str,
    *,
    score: float,
    word_score: float,
    vector_score: float | None,
) -> Result:
    """Return the passage at a row as a result."""
    chunk: Chunk = index.passages.chunk(row)
    document = index.documents[chunk.document]
    metadata = document.metadata
    chunk_id = f"{chunk.id:016x}"
    text = chunk.text.strip("\n")
    shown = make_snippet(text, query, index.words)
    spans = tuple(find_marks(text, query, index.words))
    copies = len(document.places)
    places = [_place_in_copy(chunk, document, place) for place in document.places[:MAX_PLACES]]
    also = tuple(places)
    return Result(
        id=chunk_id,
        title=chunk.title,
        score=score,
        word_score=word_score,
        vector_score=vector_score,
        text=shown,
        origin=chunk.origin,
        line=chunk.line,
        page=chunk.page,
        headings=chunk.headings,
        passage=text,
        marks=spans,
        metadata=metadata,
        also=also,
        copies=copies,
    )


def _place_in_copy(chunk: Chunk, document: IndexedDocument, place: Place) -> Place:
    """Return the place of a document's passage in a copy of the document."""
    # 0 stays 0: that source has no lines, or no pages.
    line = place.line and place.line + chunk.line - document.line
    page = place.page and place.page + chunk.page - document.page
    return msgspec.structs.replace(place, line=line, page=page)
