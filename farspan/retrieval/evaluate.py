"""Retrieval quality: words, each voice's vectors, and the mix that searches use.

Queries are of several kinds (`queries.py`), and are reported by kind. The candidates are the
bodies of all documents. What is chosen is chosen on tuning queries, which are not reported
(`choose.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.plan_words import join_words
from farspan.domain.units import counted
from farspan.report.tables import table_lines
from farspan.retrieval.bm25 import BM25Index, Numbered
from farspan.retrieval.choose import Bodies, LexicalChoice, MixChoice, choose_mix, score_queries
from farspan.retrieval.hybrid_ranking import (
    SYSTEM_NAMES,
    Mix,
    Voice,
    VoiceScores,
    best_by_document,
    fuse_scores,
    score_words,
)
from farspan.retrieval.metrics import (
    Floats,
    Ints,
    bootstrap_interval,
    hit_rate,
    mrr,
    ndcg,
    recall,
    relevant_ranks,
)
from farspan.retrieval.queries import Kind, Queries, Query
from farspan.retrieval.stores import Vectors
from farspan.retrieval.words import Words

#: Means over fewer queries than this are not shown: a single query would change them too much.
MIN_REPORTED = 5
METRICS = {
    "ndcg_at_10": partial(ndcg, k=10),
    "mrr_at_10": partial(mrr, k=10),
    "recall_at_100": partial(recall, k=100),
    "hit_at_1": partial(hit_rate, k=1),
    "hit_at_10": partial(hit_rate, k=10),
}
KIND_NAMES: dict[Kind, str] = {
    "title": "title query",
    "asked": "title question",
    "question": "question query",
    "opening": "opening query",
    "own": "own query",
}
#: Systems that are compared: the mix with its parts, and the run's model after its fit and before.
COMPARED = (
    ("fused", "bm25"),
    ("fused", "encoder"),
    ("fused by table", "bm25"),
    ("model", "bm25"),
    ("model", "untuned"),
)


#: Cosines that are computed at once: 16 MB.
COSINE_BLOCK = 1 << 22
#: Why words answer where nothing else could.
ONLY_WORDS = "the index has no other voice"


class Quality(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Means over the queries, between 0 and 1."""

    ndcg_at_10: float
    mrr_at_10: float
    recall_at_100: float
    hit_at_1: float
    hit_at_10: float


class ScoreDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean of `a - b` over the same queries, and its 95 % interval from a paired bootstrap."""

    a: str
    b: str
    metric: str
    mean: float
    interval: tuple[float, float]


class KindQuality(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Qualities by system and differences for one kind, with its reported and tuning queries."""

    reported: int
    tuning: int
    systems: dict[str, Quality]
    differences: tuple[ScoreDifference, ...]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Qualities by kind of query, the choices made on tuning queries, and the documents used."""

    kinds: dict[Kind, KindQuality]
    #: Weights of voices that searches use; and those for queries whose vectors a table makes, as
    #: the encoder is not there.
    choice: MixChoice
    table_choice: MixChoice | None = None
    #: Documents whose titles were reported, of the validation split and of the training split where
    #: those were too few.
    val_documents: int
    train_documents: int
    #: Documents of the corpus, and those of them that have a body to be found by.
    documents: int
    with_body: int
    #: Documents that are near copies of others: where one of these is right, so are they.
    near_copies: int = 0
    seed: int

    @property
    def default(self) -> Literal["bm25", "fused"]:
        """The system that searches use."""
        return "bm25" if self.choice.mix.voices == ("bm25",) else "fused"

    @property
    def has_words_alone(self) -> bool:
        """Whether words were all that could be measured."""
        return all(kind.systems.keys() == {"bm25"} for kind in self.kinds.values())


class SideVectors(msgspec.Struct, frozen=True):
    """One model's vectors of body chunks (C, E), reported queries and tuning queries (Q, E)."""

    chunks: Vectors
    reported: Vectors
    tuning: Vectors


#: Sides of an evaluation: the run's model, fitted and before that; the encoder, and queries by its
#: table.
SideName = Literal["model", "untuned", "untrained", "encoder", "table"]


def evaluate(
    bodies: Bodies,
    owners: npt.ArrayLike,
    queries: Queries,
    lexical: LexicalChoice,
    sides: Mapping[SideName, SideVectors],
    seed: int,
    compared: Sequence[tuple[str, str]] = COMPARED,
) -> Evaluation:
    """Choose the weights of voices, and measure words, every side and the mixes.

    `bodies` are the candidates' texts, `owners[i]` is the document of body chunk i.
    """
    count = len(bodies.texts)
    words = Words(lexical.rules)
    numbered = Numbered(map(words.of_text, bodies.texts, bodies.languages))
    bm25 = BM25Index.build(numbered, lexical.k1, lexical.b)
    owners_C = np.asarray(owners, np.int64)

    def word_scores(asked: Sequence[Query]) -> Callable[[int], VoiceScores]:
        return lambda row: score_words(bm25.bm25_scores(words.of_query(asked[row].text)))

    def side_scores(name: SideName, vectors_QE: Vectors) -> Callable[[int], VoiceScores]:
        cosines_of = cosine_rows(sides[name].chunks, vectors_QE)

        def score(row: int) -> VoiceScores:
            cosines_C = cosines_of(row)
            scores_N = best_by_document(owners_C, cosines_C, count)
            return VoiceScores(scores_N, float(cosines_C.std()))

        return score

    def choose(voices: Mapping[Voice, SideName]) -> MixChoice:
        """Choose the mix of words and these voices."""
        scorers: dict[Voice, Callable[[int], VoiceScores]] = {"bm25": word_scores(queries.tuning)}
        for voice, name in voices.items():
            scorers[voice] = side_scores(name, sides[name].tuning)
        scored = score_queries(queries.tuning, scorers)
        kinds = [query.kind for query in queries.tuning]
        return choose_mix(scored, kinds, tuple(scorers), seed)

    choices = {"fused": MixChoice()}
    by_system: dict[str, dict[Voice, SideName]] = {}
    if sides:
        by_system["fused"] = _voices_of(sides, "encoder")
    if "table" in sides:
        by_system["fused by table"] = _voices_of(sides, "table")
    choices |= {system: choose(voices) for system, voices in by_system.items()}

    # Ranks of the relevant documents by system and query.
    ranks: dict[str, list[Ints]] = {}
    scorers = {"bm25": word_scores(queries.reported)}
    for name, side in sides.items():
        scorers[name] = side_scores(name, side.reported)
    for row, query in enumerate(queries.reported):
        by_voice = {system: score(row) for system, score in scorers.items()}
        scored = {system: voice.scores for system, voice in by_voice.items()}
        for system, voices in by_system.items():
            mixed: dict[Voice, VoiceScores] = {"bm25": by_voice["bm25"]}
            for voice, name in voices.items():
                mixed[voice] = by_voice[name]
            scored[system] = fuse_scores(mixed, choices[system].mix)
        for system, scores_N in scored.items():
            ranks.setdefault(system, []).append(relevant_ranks(scores_N, query.relevant))

    kinds: dict[Kind, KindQuality] = {}
    for kind in dict.fromkeys(query.kind for query in queries.reported):
        rows = [row for row, query in enumerate(queries.reported) if query.kind == kind]
        num_tuning = sum(query.kind == kind for query in queries.tuning)
        by_kind = {system: [ranked[row] for row in rows] for system, ranked in ranks.items()}
        kinds[kind] = _measure_kind(by_kind, num_tuning, compared, seed)

    titles = sum(query.kind == "title" for query in queries.reported)
    with_body = sum(bool(body.strip()) for body in bodies.texts)
    return Evaluation(
        kinds=kinds,
        choice=choices["fused"],
        table_choice=choices.get("fused by table"),
        val_documents=titles - queries.filling,
        train_documents=queries.filling,
        documents=count,
        with_body=with_body,
        seed=seed,
    )


def cosine_rows(chunks_CE: Vectors, vectors_QE: Vectors) -> Callable[[int], Floats]:
    """Return a function of a query's row that returns its cosines (C): rows that are asked for one
    after the other are computed many at a time."""
    block = max(1, COSINE_BLOCK // max(len(chunks_CE), 1))
    block_rows: list[int] = []
    block_QC: list[Floats] = []

    def cosines(row: int) -> Floats:
        if row not in block_rows:
            last = min(row + block, len(vectors_QE))
            block_rows[:] = range(row, last)
            block_QC[:] = vectors_QE[row:last] @ chunks_CE.T
        return block_QC[row - block_rows[0]]

    return cosines


def _voices_of(sides: Mapping[SideName, SideVectors], encoder: SideName) -> dict[Voice, SideName]:
    """Return the voices that may be added to words, the one that usually finds more first."""
    voices: dict[Voice, SideName] = {}
    if encoder in sides:
        voices["encoder"] = encoder
    if "model" in sides:
        voices["model"] = "model"
    return voices


def _measure_kind(
    by_system: Mapping[str, Sequence[Ints]],
    num_tuning: int,
    compared: Sequence[tuple[str, str]],
    seed: int,
) -> KindQuality:
    """Return the qualities of one kind's queries from the ranks of their answers."""
    measured = {}
    qualities = {}
    num_reported = 0
    for system, ranked in by_system.items():
        num_reported = len(ranked)
        measured[system] = measure_rankings(ranked)
        means = {metric: float(values_Q.mean()) for metric, values_Q in measured[system].items()}
        qualities[system] = Quality(**means)
    differences = []
    for a, b in compared:
        if a in measured and b in measured:
            differences.append(_compare_systems(measured, a, b, seed))
    return KindQuality(
        reported=num_reported,
        tuning=num_tuning,
        systems=qualities,
        differences=tuple(differences),
    )


def measure_rankings(rankings: Sequence[Ints]) -> dict[str, Floats]:
    """Return each metric of each query, from the ranks of its relevant documents."""
    values = {}
    for name, metric in METRICS.items():
        values[name] = np.array([metric(ranked) for ranked in rankings])
    return values


def _compare_systems(
    measured: Mapping[str, dict[str, Floats]], a: str, b: str, seed: int
) -> ScoreDifference:
    differences_Q = measured[a]["ndcg_at_10"] - measured[b]["ndcg_at_10"]
    return _score_difference(a, b, differences_Q, seed)


def _score_difference(a: str, b: str, differences_Q: Floats, seed: int) -> ScoreDifference:
    """Return the mean of differences in nDCG@10 by query, with its bootstrap interval."""
    interval = bootstrap_interval(differences_Q, seed=seed)
    mean = float(differences_Q.mean())
    return ScoreDifference(a=a, b=b, metric="ndcg_at_10", mean=mean, interval=interval)


def format_evaluation(evaluation: Evaluation, lexical: LexicalChoice) -> str:
    """Return the evaluation as text.

    It has systems by kind of query, differences with intervals, and the queries and candidates.
    """
    lines: list[str] = []
    for kind, measured in evaluation.kinds.items():
        title = _count_queries(measured.reported, kind)
        if measured.reported < MIN_REPORTED:
            lines += [f"{title}: too few to measure on", ""]
            continue
        rows = []
        for system, quality in measured.systems.items():
            values = (quality.ndcg_at_10, quality.mrr_at_10, quality.recall_at_100)
            rows.append((system, *(f"{value:.3f}" for value in values)))
        lines += table_lines((title, "nDCG@10", "MRR@10", "recall@100"), rows, right=(1, 2, 3))
        for difference in measured.differences:
            interval = _format_interval(difference.mean, difference.interval)
            lines.append(f"{difference.a} - {difference.b}: nDCG@10 {interval}")
        lines.append("")

    sources = [counted(evaluation.val_documents, "validation document")]
    if evaluation.train_documents:
        sources.append(counted(evaluation.train_documents, "training document"))
    copies = []
    if evaluation.near_copies:
        num_copies = counted(evaluation.near_copies, "near copy")
        copies = [f"{num_copies} of these: one of the right document is right too"]
    tuned = []
    for kind, measured in evaluation.kinds.items():
        if measured.tuning:
            tuned.append(_count_queries(measured.tuning, kind))
    documents = counted(evaluation.documents, "document")
    with_body = f"{evaluation.with_body:,}"
    tuned_on = join_words(tuned) or "no queries"
    default = describe_mix(evaluation.choice.mix)
    evidence = explain_choice(evaluation.choice)
    if evaluation.has_words_alone:
        evidence = ONLY_WORDS
    words = format_lexical(lexical)
    lines += [
        f"title queries: the titles of {join_words(sources)}, split at separators",
        f"candidates: {documents} without the text of the query, {with_body} of them not empty",
        *copies,
        f"tuned on {tuned_on}, none of them above",
        f"words: {words}",
        f"default: {default}; {evidence}",
    ]
    if evaluation.table_choice is not None:
        choice = evaluation.table_choice
        mixed = describe_mix(choice.mix)
        lines.append(f"without the encoder at hand: {mixed}; {explain_choice(choice)}")
    return "\n".join(lines)


def format_lexical(lexical: LexicalChoice) -> str:
    """Return how text becomes words, and BM25's k1 and b."""
    stems = "stems" if lexical.rules.stems else "no stems"
    stop_words = "without stop words" if lexical.rules.stop_words else "with stop words"
    return f"{stems}, {stop_words}, BM25 with k1 {lexical.k1:g} and b {lexical.b:g}"


def _count_queries(number: int, kind: Kind) -> str:
    return counted(number, KIND_NAMES[kind])


def describe_mix(mix: Mix) -> str:
    """Return the name of a mix, with the weights of its voices."""
    first, *others = mix.voices
    return f"{SYSTEM_NAMES['fused']}, {mix}" if others else SYSTEM_NAMES[first]


def explain_choice(choice: MixChoice) -> str:
    """Return the evidence for the weights of voices."""
    if choice.gain is None:
        return "there are no tuning queries to choose by"
    if choice.mix.voices == ("bm25",):
        return "no other voice was better than words for certain on tuning queries"
    interval = _format_interval(choice.gain, choice.interval)
    return f"beyond words on tuning queries: nDCG@10 {interval}"


def _format_interval(mean: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f})"
