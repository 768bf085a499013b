"""Retrieval quality: BM25, the model before and after the fit, and hybrid search.

Queries are of several kinds (`queries.py`), and are reported by kind. The candidates are the
bodies of all documents. BM25's k1 and b, the fusion weight and the default system are chosen on
tuning queries, which are not reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.plan_words import join_words
from farspan.domain.units import counted
from farspan.report.tables import table_lines
from farspan.retrieval.bm25 import K1, B, BM25Index, Numbered
from farspan.retrieval.hybrid_ranking import (
    SYSTEM_NAMES,
    Nearest,
    fuse_hybrid_scores,
    vector_scores,
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
from farspan.retrieval.stores import Scores, Vectors

FUSION_WEIGHTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
#: Values of BM25 that are tried, k1 first.
K1S = (0.6, 0.9, 1.2, 1.5, 2.0)
BS = (0.3, 0.5, 0.75, 0.9)
#: Means over fewer queries than this are not shown: a single query would change them too much.
MIN_REPORTED = 5
#: Tuning queries of a kind at which its weight is half of what it tends to.
SHRINK = 20
METRICS = {
    "ndcg_at_10": partial(ndcg, k=10),
    "mrr_at_10": partial(mrr, k=10),
    "recall_at_100": partial(recall, k=100),
    "hit_at_1": partial(hit_rate, k=1),
    "hit_at_10": partial(hit_rate, k=10),
}


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
    #: The system that searches use. "fused" where hybrid search is better than BM25 on the tuning
    #: queries: `gain` is the difference in mean nDCG@10 with its 95 % interval, where every kind
    #: has the same weight.
    default: Literal["bm25", "fused"]
    gain: ScoreDifference | None
    fusion_weight: float
    k1: float
    b: float
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


class ModelVectors(msgspec.Struct, frozen=True):
    """One model's vectors of body chunks (C, E), reported queries and tuning queries (Q, E)."""

    chunks: Vectors
    reported: Vectors
    tuning: Vectors


class ChosenSettings(msgspec.Struct, frozen=True):
    """The settings chosen on tuning queries."""

    lexical: BM25Index
    k1: float
    b: float
    weight: float
    default: Literal["bm25", "fused"]
    gain: ScoreDifference | None


def evaluate(
    bodies: Sequence[str],
    owners: npt.ArrayLike,
    queries: Queries,
    sides: Mapping[str, ModelVectors],
    seed: int,
    compared: Sequence[tuple[str, str]] = (
        ("model", "untuned"),
        ("model", "bm25"),
        ("fused", "bm25"),
    ),
) -> Evaluation:
    """Measure BM25, every side and BM25 fused with the side "model", and compare pairs of systems.

    `bodies` are the candidates' texts, `owners[i]` is the document of body chunk i.
    """
    chosen = choose_settings(bodies, owners, queries.tuning, sides["model"], seed)
    N = len(bodies)
    # Ranks of the relevant documents by system and query.
    by_system: dict[str, list[Ints]] = {}
    nearest = {name: exact_search(owners, side.chunks) for name, side in sides.items()}
    for row, query in enumerate(queries.reported):
        scored = {"bm25": chosen.lexical.bm25_scores(query.text)}
        for name, side in sides.items():
            scored[name] = vector_scores(nearest[name], side.reported[row], N)
        scored["fused"] = fuse_hybrid_scores(scored["bm25"], scored["model"], chosen.weight)
        for system, scores_N in scored.items():
            by_system.setdefault(system, []).append(relevant_ranks(scores_N, query.relevant))

    kinds: dict[Kind, KindQuality] = {}
    for kind in dict.fromkeys(query.kind for query in queries.reported):
        rows = [row for row, query in enumerate(queries.reported) if query.kind == kind]
        measured = {}
        qualities = {}
        for system, ranked in by_system.items():
            values = measure_rankings([ranked[row] for row in rows])
            means = {metric: float(values_Q.mean()) for metric, values_Q in values.items()}
            measured[system] = values
            qualities[system] = Quality(**means)
        differences = []
        for a, b in compared:
            if a in measured and b in measured:
                differences.append(_compare_systems(measured, a, b, seed))
        num_tuning = sum(query.kind == kind for query in queries.tuning)
        kinds[kind] = KindQuality(
            reported=len(rows),
            tuning=num_tuning,
            systems=qualities,
            differences=tuple(differences),
        )

    titles = sum(query.kind == "title" for query in queries.reported)
    with_body = sum(bool(body.strip()) for body in bodies)
    return Evaluation(
        kinds=kinds,
        default=chosen.default,
        gain=chosen.gain,
        fusion_weight=chosen.weight,
        k1=chosen.k1,
        b=chosen.b,
        val_documents=titles - queries.filling,
        train_documents=queries.filling,
        documents=N,
        with_body=with_body,
        seed=seed,
    )


def choose_settings(
    bodies: Sequence[str],
    owners: npt.ArrayLike,
    tuning: Sequence[Query],
    side: ModelVectors,
    seed: int,
) -> ChosenSettings:
    """Choose BM25's k1 and b, the fusion weight and the default system.

    The default is BM25, unless the interval of hybrid search's gain is above 0 and no kind of query
    loses.
    """
    if not tuning:
        return ChosenSettings(BM25Index.build(bodies), K1, B, 1.0, "bm25", None)
    numbered = Numbered(bodies)
    kinds = [query.kind for query in tuning]
    balance_Q = _balance_kinds(kinds)

    def measure_ndcg(scores: Iterable[Scores]) -> Floats:
        values = []
        for scores_N, query in zip(scores, tuning, strict=True):
            values.append(ndcg(relevant_ranks(scores_N, query.relevant), 10))
        return np.array(values)

    def bm25_scores(k1: float, b: float) -> list[Scores]:
        lexical = BM25Index.build(numbered, k1, b)
        return [lexical.bm25_scores(query.text) for query in tuning]

    def bm25_quality(k1: float, b: float) -> float:
        return float(balance_Q @ measure_ndcg(bm25_scores(k1, b)))

    k1 = max(K1S, key=lambda k1: bm25_quality(k1, B))
    b = max(BS, key=lambda b: bm25_quality(k1, b))
    bm25_QN = bm25_scores(k1, b)
    nearest = exact_search(owners, side.chunks)
    vector_QN = [vector_scores(nearest, query_E, len(bodies)) for query_E in side.tuning]

    # Gain of hybrid search in nDCG@10 by fusion weight and query.
    bm25_Q = measure_ndcg(bm25_QN)
    gain_WQ = np.empty((len(FUSION_WEIGHTS), len(tuning)))
    for row, weight in enumerate(FUSION_WEIGHTS):
        fused_QN = map(fuse_hybrid_scores, bm25_QN, vector_QN, repeat(weight))
        gain_WQ[row] = measure_ndcg(fused_QN) - bm25_Q

    # Kinds with few queries count less; of weights that tie the smallest is taken.
    counts_Q = np.array([kinds.count(kind) for kind in kinds])
    shrunk_Q = balance_Q * (counts_Q / (counts_Q + SHRINK))
    best = int((gain_WQ @ shrunk_Q).argmax())
    gain_Q = gain_WQ[best]
    balanced_Q = gain_Q * balance_Q * len(tuning)
    gain = _score_difference("fused", "bm25", balanced_Q, seed)
    kind_Q = np.array(kinds)
    any_kind_loses = any(gain_Q[kind_Q == kind].mean() < 0 for kind in set(kinds))
    is_better = gain.interval[0] > 0 and not any_kind_loses
    return ChosenSettings(
        lexical=BM25Index.build(numbered, k1, b),
        k1=k1,
        b=b,
        weight=FUSION_WEIGHTS[best],
        default="fused" if is_better else "bm25",
        gain=gain,
    )


def exact_search(owners: npt.ArrayLike, chunks_CE: Vectors) -> Nearest:
    """Return an exact nearest-neighbour search of chunks; `owners` are their documents."""
    owners_C = np.asarray(owners, np.int64)

    def nearest(vector_E: Vectors, k: int) -> tuple[Ints, Scores]:
        scores_C = chunks_CE @ vector_E
        if k >= len(scores_C):
            return owners_C, scores_C
        best = np.argpartition(scores_C, -k)[-k:]
        return owners_C[best], scores_C[best]

    return nearest


def _balance_kinds(kinds: Sequence[Kind]) -> Floats:
    """Return weights of queries that add up to 1, with equal sums for all kinds."""
    num_kinds = len(set(kinds))
    return np.array([1 / (num_kinds * kinds.count(kind)) for kind in kinds])


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


def format_evaluation(evaluation: Evaluation) -> str:
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
            interval = _format_difference(difference)
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
    tuning = join_words(tuned) or "no queries"
    k1 = f"{evaluation.k1:g}"
    b = f"{evaluation.b:g}"
    weight = f"{evaluation.fusion_weight:g}"
    documents = counted(evaluation.documents, "document")
    with_body = f"{evaluation.with_body:,}"
    default = SYSTEM_NAMES[evaluation.default]
    evidence = explain_default(evaluation)
    lines += [
        f"title queries: the titles of {join_words(sources)}, split at separators",
        f"candidates: {documents} without the text of the query, {with_body} of them not empty",
        *copies,
        f"tuned on {tuning}, none of them above: BM25 with k1 {k1} and b {b}, vectors with weight "
        f"{weight}",
        f"default: {default}; {evidence}",
    ]
    return "\n".join(lines)


def _count_queries(number: int, kind: Kind) -> str:
    return counted(number, "own query" if kind == "own" else f"{kind} query")


def explain_default(evaluation: Evaluation) -> str:
    """Return the evidence for the default system."""
    if evaluation.gain is None:
        return "there are no tuning queries to choose by"
    return f"fused - bm25 on tuning queries: nDCG@10 {_format_difference(evaluation.gain)}"


def _format_difference(difference: ScoreDifference) -> str:
    low, high = difference.interval
    return f"{difference.mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f})"
