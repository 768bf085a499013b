"""How well titles find their documents: BM25, the model, an untrained model of the same shape, BM25 and model fused.

A query is a document's title with its separators split. What can be found are the bodies of all documents: the title
and the first line are left out. Weights of the fusion are chosen on queries that are not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from farspan.domain.corpus import Document
from farspan.retrieval.chunk import head_length
from farspan.retrieval.lexical import Lexical, words
from farspan.retrieval.metrics import Floats, Ints, bootstrap, hit, ndcg, ranks
from farspan.retrieval.rank import Scores, by_document, fuse, query_form
from farspan.retrieval.stores import Vectors

#: Reported queries at least (as far as the corpus has them) and at most, and queries to choose the fusion's weight on.
QUERIES, MOST, TUNING = 500, 2000, 300
#: A document can be asked for if its body has so many words.
BODY_WORDS = 5
WEIGHTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
SYSTEMS = ("bm25", "model", "untrained", "fused")


class Quality(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Means over the queries, between 0 and 1."""

    hit_at_1: float
    hit_at_10: float
    ndcg_at_10: float


class Difference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean of `a - b` over the same queries, and its 95 % interval from a paired bootstrap."""

    a: str
    b: str
    metric: str
    mean: float
    interval: tuple[float, float]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Qualities by system, differences, and over what they were measured."""

    systems: dict[str, Quality]
    differences: tuple[Difference, ...]
    #: Queries reported: titles of validation documents, and of training documents where those were too few.
    val_queries: int
    train_queries: int
    tuning_queries: int
    #: Documents of the corpus, and those of them that have a body to be found by.
    documents: int
    with_body: int
    fusion_weight: float
    #: Chunks of a document that vectors were made of, its head being the first; None: all.
    first_chunks: int | None
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


def choose_queries(documents: Sequence[Document], bodies: Sequence[str], train: int, seed: int) -> Queries:
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
    tuning = rest[: min(TUNING, len(eligible) // 4)]
    filling = rest[len(tuning) :][: max(QUERIES - len(val), 0)]

    def query(number: int) -> Query:
        same = {*groups[f"title {forms[number]}"], *groups[f"body {bodies[number].strip()}"]}
        return Query(forms[number], tuple(sorted(n for n in same if bodies[n].strip())))

    asked = {n for number in val + filling for n in query(number).relevant}
    return Queries([query(n) for n in val + filling], [query(n) for n in tuning if n not in asked], len(filling))


def body_of(document: Document) -> str:
    """The text without its first line, and without the title where the text repeats it."""
    return document.text[head_length(document) :]


class Side(msgspec.Struct, frozen=True):
    """One model's vectors: of the body chunks (N, D), of the reported queries and of the tuning queries (Q, D)."""

    chunks: Vectors
    reported: Vectors
    tuning: Vectors

    def scores(self, query_D: Vectors, owners: Sequence[int], documents: int) -> Scores:
        return by_document(owners, self.chunks @ query_D, documents)


def evaluate(
    bodies: Sequence[str], owners: Sequence[int], queries: Queries, trained: Side, untrained: Side, seed: int,
    first_chunks: int | None = None,
) -> Evaluation:  # fmt: skip
    """Measure the four systems; `bodies` are the documents as they can be found, `owners[i]` that of body chunk i.

    `first_chunks` only says how many chunks of a document there are vectors of, where that is limited.
    """
    reported, tuning, filling = queries.reported, queries.tuning, queries.filling
    lexical, N = Lexical.build(bodies), len(bodies)
    weight = _best_weight(tuning, lexical, lambda row: trained.scores(trained.tuning[row], owners, N))
    found: dict[str, list[Ints]] = {system: [] for system in SYSTEMS}
    for row, query in enumerate(reported):
        bm25_N = lexical.scores(query.text)
        model_N = trained.scores(trained.reported[row], owners, N)
        untrained_N = untrained.scores(untrained.reported[row], owners, N)
        for system, scores_N in zip(
            SYSTEMS, (bm25_N, model_N, untrained_N, fuse(bm25_N, model_N, weight)), strict=True
        ):
            found[system].append(ranks(scores_N, query.relevant))
    measured = {system: _measure(rows) for system, rows in found.items()}
    return Evaluation(
        systems={
            system: Quality(**{metric: float(values.mean()) for metric, values in metrics.items()})
            for system, metrics in measured.items()
        },
        differences=tuple(
            _difference(measured, a, b, metric, seed)
            for a, b in (("model", "untrained"), ("fused", "bm25"))
            for metric in ("hit_at_1", "hit_at_10", "ndcg_at_10")
        ),
        val_queries=len(reported) - filling, train_queries=filling, tuning_queries=len(tuning),
        documents=N, with_body=sum(bool(body.strip()) for body in bodies), fusion_weight=weight,
        first_chunks=first_chunks, seed=seed,
    )  # fmt: skip


def _best_weight(tuning: Sequence[Query], lexical: Lexical, vectors: Callable[[int], Scores]) -> float:
    """The weight with the best nDCG@10 on the tuning queries; the smallest of those that tie."""
    gains = np.zeros(len(WEIGHTS))
    for row, query in enumerate(tuning):
        lexical_N, vectors_N = lexical.scores(query.text), vectors(row)
        gains += [ndcg(ranks(fuse(lexical_N, vectors_N, weight), query.relevant), 10) for weight in WEIGHTS]
    return WEIGHTS[int(gains.argmax())]


def _measure(found: Sequence[Ints]) -> dict[str, Floats]:
    """Each metric of each query, from the ranks of its relevant documents."""
    return {
        "hit_at_1": np.array([hit(ranks, 1) for ranks in found]),
        "hit_at_10": np.array([hit(ranks, 10) for ranks in found]),
        "ndcg_at_10": np.array([ndcg(ranks, 10) for ranks in found]),
    }


def _difference(measured: dict[str, dict[str, Floats]], a: str, b: str, metric: str, seed: int) -> Difference:
    differences_Q = measured[a][metric] - measured[b][metric]
    return Difference(
        a=a, b=b, metric=metric, mean=float(differences_Q.mean()), interval=bootstrap(differences_Q, seed=seed)
    )  # fmt: skip


def table(evaluation: Evaluation) -> str:
    """The evaluation as text: systems, differences with intervals, and what was asked of what."""
    lines = [f"{'':12}{'hit@1':>8}{'hit@10':>8}{'nDCG@10':>9}"]
    for system, quality in evaluation.systems.items():
        lines.append(f"{system:12}{quality.hit_at_1:8.3f}{quality.hit_at_10:8.3f}{quality.ndcg_at_10:9.3f}")
    for difference in evaluation.differences:
        low, high = difference.interval
        name = f"{difference.a} - {difference.b}"
        lines.append(f"{name:18} {difference.metric:11}{difference.mean:+.3f}  95 % interval {low:+.3f} to {high:+.3f}")
    count = evaluation.val_queries + evaluation.train_queries
    origin = f"all {evaluation.val_queries} validation documents that can be asked for"
    if evaluation.train_queries:
        origin += f" and {evaluation.train_queries} training documents"
    limit = f", vectors of the first {evaluation.first_chunks} chunks of each" if evaluation.first_chunks else ""
    lines += [
        f"{count} titles as queries ({origin}), split at separators; fusion weight"
        f" {evaluation.fusion_weight:g} chosen on {evaluation.tuning_queries} others",
        f"candidates: {evaluation.documents} documents without title and first line, of which {evaluation.with_body}"
        f" have text left{limit}",
        f"searches answer with {evaluation.better}",
    ]
    return "\n".join(lines)
