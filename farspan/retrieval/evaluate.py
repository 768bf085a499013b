"""How well titles find their documents: BM25, the model, an untrained model of the same shape, BM25 and model fused.

A query is a document's title with its separators split. What can be found are the bodies of all documents: the title
and the first line are left out. Weights of the fusion are chosen on queries that are not reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import Document
from farspan.domain.units import counted
from farspan.report.tables import table_lines
from farspan.retrieval.chunk import head_length
from farspan.retrieval.lexical import Lexical, words
from farspan.retrieval.metrics import Floats, Ints, bootstrap, hit, ndcg, ranks
from farspan.retrieval.rank import by_document, fuse, query_form
from farspan.retrieval.stores import Vectors

#: Reported queries at least (as far as the corpus has them) and at most, and queries to choose the fusion's weight on.
QUERIES, MOST, TUNING = 500, 2000, 300
#: A document can be asked for if its body has so many words.
BODY_WORDS = 5
WEIGHTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
METRICS = {"hit_at_1": partial(hit, k=1), "hit_at_10": partial(hit, k=10), "ndcg_at_10": partial(ndcg, k=10)}


class Quality(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Means over the queries, between 0 and 1."""

    hit_at_1: float
    hit_at_10: float
    ndcg_at_10: float


class ScoreDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean of `a - b` over the same queries, and its 95 % interval from a paired bootstrap."""

    a: str
    b: str
    metric: str
    mean: float
    interval: tuple[float, float]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Qualities by system, differences, and over what they were measured."""

    systems: dict[str, Quality]
    differences: tuple[ScoreDifference, ...]
    #: Queries reported: titles of validation documents, and of training documents where those were too few.
    val_queries: int
    train_queries: int
    tuning_queries: int
    #: Documents of the corpus, and those of them that have a body to be found by.
    documents: int
    with_body: int
    fusion_weight: float
    seed: int

    @property
    def better(self) -> Literal["bm25", "fused"]:
        """What a search answers with: "fused" where its nDCG@10 is higher, "bm25" otherwise."""
        return "fused" if self.systems["fused"].ndcg_at_10 > self.systems["bm25"].ndcg_at_10 else "bm25"


class Query(msgspec.Struct, frozen=True):
    """A title as it is asked, and the documents that answer it: all of that title or of the same body."""

    text: str
    relevant: tuple[int, ...]


class Queries(msgspec.Struct, frozen=True):
    """No document answers both a reported and a tuning query. `filling` of the reported are of the training split."""

    reported: list[Query]
    tuning: list[Query]
    filling: int


def choose_queries(
    documents: Sequence[Document], bodies: Sequence[str], train: int, seed: int, most_tuning: int = TUNING
) -> Queries:
    """Queries for documents of which the first `train` are the training split.

    Validation is reported whole up to MOST; training documents fill up to QUERIES, and others of them serve for tuning.
    """
    forms = [query_form(document.title) for document in documents]
    groups: dict[str, list[int]] = {}
    for number, (form, body) in enumerate(zip(forms, bodies, strict=True)):
        for key in {f"title {form}", f"body {body.strip()}"}:
            groups.setdefault(key, []).append(number)
    eligible = [n for n, body in enumerate(bodies) if forms[n].strip() and len(words(body)) >= BODY_WORDS]
    eligible = [int(n) for n in np.random.default_rng(seed).permutation(eligible)]
    val, rest = [n for n in eligible if n >= train][:MOST], [n for n in eligible if n < train]
    # A corpus too small for both keeps a quarter for tuning.
    tuning = rest[: min(most_tuning, len(eligible) // 4)]
    filling = rest[len(tuning) :][: max(QUERIES - len(val), 0)]

    def query(number: int) -> Query:
        same = {*groups[f"title {forms[number]}"], *groups[f"body {bodies[number].strip()}"]}
        return Query(forms[number], tuple(sorted(n for n in same if bodies[n].strip())))

    relevant = {n for number in val + filling for n in query(number).relevant}
    apart = [query(n) for n in tuning if relevant.isdisjoint(query(n).relevant)]
    return Queries([query(n) for n in val + filling], apart, len(filling))


def body_of(document: Document) -> str:
    """The text without its first line, and without the title where the text repeats it."""
    return document.text[head_length(document) :]


class ModelVectors(msgspec.Struct, frozen=True):
    """One model's vectors: of the body chunks (C, E), of the reported queries and of the tuning queries (Q, E)."""

    chunks: Vectors
    reported: Vectors
    tuning: Vectors


def evaluate(
    bodies: Sequence[str], owners: npt.ArrayLike, queries: Queries, sides: Mapping[str, ModelVectors], seed: int,
    compared: Sequence[tuple[str, str]] = (("model", "untrained"), ("fused", "bm25")),
) -> Evaluation:  # fmt: skip
    """Measure BM25, every side, and BM25 fused with the side "model"; and one system of each pair against the other.

    `bodies` are the documents as they can be found, `owners[i]` is the document of body chunk i.
    """
    lexical, N = Lexical.build(bodies), len(bodies)
    weight = _fusion_weight(queries.tuning, lexical, owners, sides["model"])
    by_system: dict[str, list[Ints]] = {}
    for row, query in enumerate(queries.reported):
        scored = {"bm25": lexical.scores(query.text)}
        scored |= {name: by_document(owners, side.chunks @ side.reported[row], N) for name, side in sides.items()}
        scored["fused"] = fuse(scored["bm25"], scored["model"], weight)
        for system, scores_N in scored.items():
            by_system.setdefault(system, []).append(ranks(scores_N, query.relevant))
    measured = {system: measure(ranked) for system, ranked in by_system.items()}
    return Evaluation(
        systems={
            system: Quality(**{metric: float(values_Q.mean()) for metric, values_Q in values.items()})
            for system, values in measured.items()
        },
        differences=tuple(_compare(measured, a, b, metric, seed) for a, b in compared for metric in METRICS),
        val_queries=len(queries.reported) - queries.filling, train_queries=queries.filling,
        tuning_queries=len(queries.tuning), documents=N, with_body=sum(bool(body.strip()) for body in bodies),
        fusion_weight=weight, seed=seed,
    )  # fmt: skip


def _fusion_weight(tuning: Sequence[Query], lexical: Lexical, owners: npt.ArrayLike, side: ModelVectors) -> float:
    """The weight with the best nDCG@10 on the tuning queries; the smallest of those that tie."""
    gains = np.zeros(len(WEIGHTS))
    for query, query_E in zip(tuning, side.tuning, strict=True):
        bm25_N = lexical.scores(query.text)
        model_N = by_document(owners, side.chunks @ query_E, len(bm25_N))
        gains += [ndcg(ranks(fuse(bm25_N, model_N, weight), query.relevant), 10) for weight in WEIGHTS]
    return WEIGHTS[int(gains.argmax())]


def measure(rankings: Sequence[Ints]) -> dict[str, Floats]:
    """Each metric of each query, from the ranks of its relevant documents."""
    return {name: np.array([metric(ranked) for ranked in rankings]) for name, metric in METRICS.items()}


def _compare(measured: Mapping[str, dict[str, Floats]], a: str, b: str, metric: str, seed: int) -> ScoreDifference:
    differences_Q = measured[a][metric] - measured[b][metric]
    interval = bootstrap(differences_Q, seed=seed)
    return ScoreDifference(a=a, b=b, metric=metric, mean=float(differences_Q.mean()), interval=interval)


def table(evaluation: Evaluation) -> str:
    """The evaluation as text: systems, differences with intervals, and what was asked of what."""
    rows = [
        (system, *(f"{figure:.3f}" for figure in (quality.hit_at_1, quality.hit_at_10, quality.ndcg_at_10)))
        for system, quality in evaluation.systems.items()
    ]
    lines = table_lines(("", "hit@1", "hit@10", "nDCG@10"), rows, right=(1, 2, 3))
    for difference in evaluation.differences:
        low, high = difference.interval
        name = f"{difference.a} - {difference.b}"
        lines.append(f"{name:18} {difference.metric:11}{difference.mean:+.3f}  95 % interval {low:+.3f} to {high:+.3f}")
    count = evaluation.val_queries + evaluation.train_queries
    every = "all " if evaluation.val_queries < MOST else ""
    origin = f"{every}{counted(evaluation.val_queries, 'validation document')} that can be asked for"
    if evaluation.train_queries:
        origin += f" and {counted(evaluation.train_queries, 'training document')}"
    lines += [
        f"{counted(count, 'title')} as queries ({origin}), split at separators; fusion weight"
        f" {evaluation.fusion_weight:g} chosen on {counted(evaluation.tuning_queries, 'other')}",
        f"candidates: {counted(evaluation.documents, 'document')} without title and first line, of which "
        f"{evaluation.with_body} have text left",
        f"searches answer with {evaluation.better}",
    ]
    return "\n".join(lines)
