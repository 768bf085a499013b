"""How well queries find their documents: BM25, the model before and after it was fitted, BM25 and
model fused.

Queries are of several kinds (`queries.py`), and are reported by kind. What can be found are the
bodies of all documents. BM25's k1 and b, the weight of the fusion, and what searches answer with
are chosen on queries that are not reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.units import counted
from farspan.domain.words import joined
from farspan.report.tables import table_lines
from farspan.retrieval.lexical import K1, B, Lexical, Numbered
from farspan.retrieval.metrics import Floats, Ints, bootstrap, hit, mrr, ndcg, ranks, recall
from farspan.retrieval.queries import Kind, Queries, Query
from farspan.retrieval.rank import SYSTEM_NAMES, Nearest, fuse, vector_scores
from farspan.retrieval.stores import Scores, Vectors

WEIGHTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
#: Values of BM25 that are tried, k1 first.
K1S = (0.6, 0.9, 1.2, 1.5, 2.0)
BS = (0.3, 0.5, 0.75, 0.9)
#: Means over fewer queries than this are not shown: one query more or less would turn them over.
MIN_REPORTED = 5
#: A kind with as many tuning queries as this says half as much as one with very many.
SHRINK = 20
METRICS = {
    "ndcg_at_10": partial(ndcg, k=10),
    "mrr_at_10": partial(mrr, k=10),
    "recall_at_100": partial(recall, k=100),
    "hit_at_1": partial(hit, k=1),
    "hit_at_10": partial(hit, k=10),
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
    """Of queries of one kind: how many were reported and tuned on, qualities by system, and
    differences."""

    reported: int
    tuning: int
    systems: dict[str, Quality]
    differences: tuple[ScoreDifference, ...]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Qualities by kind of query, what was chosen on tuning queries, and over what all was
    measured."""

    kinds: dict[Kind, KindQuality]
    #: What a search answers with. "fused" where that finds more of the tuning queries' documents
    #: than words alone: `gain` is the mean of its nDCG@10 less that of words, each kind weighing
    #: the same, and its 95 % interval.
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
    """One model's vectors: of the body chunks (C, E), of the reported queries and of the tuning
    queries (Q, E)."""

    chunks: Vectors
    reported: Vectors
    tuning: Vectors


class Choice(msgspec.Struct, frozen=True):
    """What was chosen on tuning queries."""

    lexical: Lexical
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
    """Measure BM25, every side, and BM25 fused with the side "model"; and one system of each pair
    against the other.

    `bodies` are the documents as they can be found, `owners[i]` is the document of body chunk i.
    """
    chosen = choose(bodies, owners, queries.tuning, sides["model"], seed)
    N = len(bodies)
    by_system: dict[str, list[Ints]] = {}
    for row, query in enumerate(queries.reported):
        scored = {"bm25": chosen.lexical.scores(query.text)}
        scored |= {
            name: vector_scores(exact(owners, side.chunks), side.reported[row], N)
            for name, side in sides.items()
        }
        scored["fused"] = fuse(scored["bm25"], scored["model"], chosen.weight)
        for system, scores_N in scored.items():
            by_system.setdefault(system, []).append(ranks(scores_N, query.relevant))
    kinds: dict[Kind, KindQuality] = {}
    for kind in dict.fromkeys(query.kind for query in queries.reported):
        rows = [row for row, query in enumerate(queries.reported) if query.kind == kind]
        measured = {
            system: measure([ranked[row] for row in rows]) for system, ranked in by_system.items()
        }
        kinds[kind] = KindQuality(
            reported=len(rows),
            tuning=sum(query.kind == kind for query in queries.tuning),
            systems={
                system: Quality(
                    **{metric: float(values_Q.mean()) for metric, values_Q in values.items()}
                )
                for system, values in measured.items()
            },
            differences=tuple(
                _compare(measured, a, b, seed) for a, b in compared if {a, b} <= {*measured}
            ),
        )
    titles = sum(query.kind == "title" for query in queries.reported)
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
        with_body=sum(bool(body.strip()) for body in bodies),
        seed=seed,
    )


def choose(
    bodies: Sequence[str],
    owners: npt.ArrayLike,
    tuning: Sequence[Query],
    side: ModelVectors,
    seed: int,
) -> Choice:
    """BM25's k1 and b, the weight of its fusion with a model's vectors, and whether searches answer
    with that: nothing but words, unless the interval of what it finds more is above 0, and no kind
    of query finds less."""
    if not tuning:
        return Choice(Lexical.build(bodies), K1, B, 1.0, "bm25", None)
    numbered = Numbered(bodies)
    balance_Q = _balance([query.kind for query in tuning])

    def found(scores: Iterable[Scores]) -> Floats:
        return np.array(
            [ndcg(ranks(s, query.relevant), 10) for s, query in zip(scores, tuning, strict=True)]
        )

    def words(k1: float, b: float) -> list[Scores]:
        lexical = Lexical.build(numbered, k1, b)
        return [lexical.scores(query.text) for query in tuning]

    k1 = max(K1S, key=lambda k1: float(balance_Q @ found(words(k1, B))))
    b = max(BS, key=lambda b: float(balance_Q @ found(words(k1, b))))
    words_QN = words(k1, b)
    nearest = exact(owners, side.chunks)
    near_QN = [vector_scores(nearest, query_E, len(bodies)) for query_E in side.tuning]
    alone_Q = found(words_QN)
    more_WQ = np.array(
        [found(map(fuse, words_QN, near_QN, repeat(weight))) - alone_Q for weight in WEIGHTS]
    )
    # Of few queries of a kind less is believed; of weights that tie the smallest is taken.
    kinds = [query.kind for query in tuning]
    believed_Q = balance_Q * np.array(
        [kinds.count(kind) / (kinds.count(kind) + SHRINK) for kind in kinds]
    )
    best = int((more_WQ @ believed_Q).argmax())
    balanced_Q = more_WQ[best] * balance_Q * len(tuning)
    interval = bootstrap(balanced_Q, seed=seed)
    loses = any(more_WQ[best][np.array(kinds) == kind].mean() < 0 for kind in set(kinds))
    return Choice(
        lexical=Lexical.build(numbered, k1, b),
        k1=k1,
        b=b,
        weight=WEIGHTS[best],
        default="fused" if interval[0] > 0 and not loses else "bm25",
        gain=ScoreDifference(
            a="fused",
            b="bm25",
            metric="ndcg_at_10",
            mean=float(balanced_Q.mean()),
            interval=interval,
        ),
    )


def exact(owners: npt.ArrayLike, chunks_CE: Vectors) -> Nearest:
    """What finds chunks as a store does that compares every one; `owners` are their documents."""
    owners_C = np.asarray(owners, np.int64)

    def nearest(vector_E: Vectors, k: int) -> tuple[Ints, Scores]:
        scores_C = chunks_CE @ vector_E
        best = np.argpartition(scores_C, -k)[-k:] if k < len(scores_C) else slice(None)
        return owners_C[best], scores_C[best]

    return nearest


def _balance(kinds: Sequence[Kind]) -> Floats:
    """What each query weighs, so that every kind weighs the same; 1 in all."""
    return np.array([1 / (len(set(kinds)) * kinds.count(kind)) for kind in kinds])


def measure(rankings: Sequence[Ints]) -> dict[str, Floats]:
    """Each metric of each query, from the ranks of its relevant documents."""
    return {
        name: np.array([metric(ranked) for ranked in rankings]) for name, metric in METRICS.items()
    }


def _compare(
    measured: Mapping[str, dict[str, Floats]], a: str, b: str, seed: int
) -> ScoreDifference:
    differences_Q = measured[a]["ndcg_at_10"] - measured[b]["ndcg_at_10"]
    interval = bootstrap(differences_Q, seed=seed)
    return ScoreDifference(
        a=a, b=b, metric="ndcg_at_10", mean=float(differences_Q.mean()), interval=interval
    )


def table(evaluation: Evaluation) -> str:
    """The evaluation as text: systems by kind of query, differences with intervals, and what was
    asked of what."""
    lines: list[str] = []
    for kind, found in evaluation.kinds.items():
        if found.reported < MIN_REPORTED:
            lines += [f"{_many(found.reported, kind)}: too few to measure on", ""]
            continue
        rows = [
            (
                system,
                *(
                    f"{value:.3f}"
                    for value in (quality.ndcg_at_10, quality.mrr_at_10, quality.recall_at_100)
                ),
            )
            for system, quality in found.systems.items()
        ]
        lines += table_lines(
            (_many(found.reported, kind), "nDCG@10", "MRR@10", "recall@100"), rows, right=(1, 2, 3)
        )
        lines += [f"{one.a} - {one.b}: nDCG@10 {_shown(one)}" for one in found.differences]
        lines.append("")
    sources = [counted(evaluation.val_documents, "validation document")]
    if evaluation.train_documents:
        sources.append(counted(evaluation.train_documents, "training document"))
    copies = []
    if evaluation.near_copies:
        copies = [
            f"{counted(evaluation.near_copies, 'near copy')} of these: one of the right document "
            "is right too"
        ]
    tuning = joined(
        [_many(found.tuning, kind) for kind, found in evaluation.kinds.items() if found.tuning]
    )
    lines += [
        f"title queries: the titles of {joined(sources)}, split at separators",
        f"candidates: {counted(evaluation.documents, 'document')} without the text of the query, "
        f"{evaluation.with_body:,} of them not empty",
        *copies,
        f"tuned on {tuning or 'no queries'}, none of them above: BM25 with k1 {evaluation.k1:g} "
        f"and b {evaluation.b:g}, vectors with weight {evaluation.fusion_weight:g}",
        f"default: {SYSTEM_NAMES[evaluation.default]}; {why(evaluation)}",
    ]
    return "\n".join(lines)


def _many(number: int, kind: Kind) -> str:
    return counted(number, "own query" if kind == "own" else f"{kind} query")


def why(evaluation: Evaluation) -> str:
    """The evidence for the default system."""
    if evaluation.gain is None:
        return "there are no tuning queries to choose by"
    return f"fused - bm25 on tuning queries: nDCG@10 {_shown(evaluation.gain)}"


def _shown(difference: ScoreDifference) -> str:
    low, high = difference.interval
    return f"{difference.mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f})"
