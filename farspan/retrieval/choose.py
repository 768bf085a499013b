"""Choose on tuning queries how an index answers: how text becomes words, BM25's k1 and b, and the
weights of voices.

A choice that costs something must pay for certain: voices are added to words one at a time, and
each stays only where the 95 % interval of its gain is above 0.

Shapes: Q queries, C candidates of a query, V voices, W mixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.retrieval.bm25 import K1, B, BM25Index, Numbered
from farspan.retrieval.hybrid_ranking import DEPTH, WORDS_ALONE, Mix, Voice, normalize_scores
from farspan.retrieval.metrics import Floats, Ints, bootstrap_interval, ndcg, relevant_ranks
from farspan.retrieval.queries import Query
from farspan.retrieval.stores import Scores
from farspan.retrieval.words import WordRules, Words

#: Values of BM25 that are tried. Tuned BM25 of long documents reaches k1 4.46 (Anserini, MS MARCO).
K1S = (0.6, 0.9, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0)
BS = (0.3, 0.5, 0.75, 0.9, 1.0)
#: Ways to make words that are tried, by stems and stop words left out; ties go to the first.
WORD_RULES = ((True, True), (False, True), (True, False), (False, False))
#: Documents over which these are compared: more would take minutes and change no choice.
MAX_COMPARED_DOCUMENTS = 4000
#: Weights are tried in steps of one over this.
WEIGHT_STEPS = 20


class Bodies(NamedTuple):
    """The texts that documents are found by in an evaluation, and the language of each."""

    texts: Sequence[str]
    languages: Sequence[str]


class LexicalChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How text becomes words, and BM25's k1 and b."""

    rules: WordRules
    k1: float = K1
    b: float = B


class ScoredQuery(NamedTuple):
    """The candidates of a query: documents (C) that any voice ranks high, and the answers.

    `scores` (V, C) are normalized. `num_relevant` counts all answers, `relevant` are their columns.
    """

    scores: Scores
    relevant: Ints
    num_relevant: int


def choose_words(
    bodies: Bodies, tuning: Sequence[Query], languages: Sequence[str], seed: int
) -> LexicalChoice:
    """Choose how text becomes words, and BM25's k1 and b, by mean nDCG@10 of the tuning queries."""
    codes = tuple(languages)
    if not tuning:
        return LexicalChoice(rules=WordRules(languages=codes))
    compared, asked = _sample_documents(len(bodies.texts), tuning, seed)
    texts = [bodies.texts[row] for row in compared]
    spoken = [bodies.languages[row] for row in compared]
    best: tuple[float, LexicalChoice] | None = None
    for stems, stop_words in WORD_RULES:
        rules = WordRules(stems=stems, stop_words=stop_words, languages=codes)
        quality, choice = _choose_bm25(rules, texts, spoken, asked)
        if best is None or quality > best[0]:
            best = quality, choice
    assert best is not None
    return best[1]


def _choose_bm25(
    rules: WordRules, texts: Sequence[str], languages: Sequence[str], tuning: Sequence[Query]
) -> tuple[float, LexicalChoice]:
    """Return the best k1 and b of one way to make words, and their mean nDCG@10."""
    words = Words(rules)
    numbered = Numbered(map(words.of_text, texts, languages))
    asked = [words.of_query(query.text) for query in tuning]

    def quality(k1: float, b: float) -> float:
        lexical = BM25Index.build(numbered, k1, b)
        ranked = []
        for query, query_words in zip(tuning, asked, strict=True):
            ranks = relevant_ranks(lexical.bm25_scores(query_words), query.relevant)
            ranked.append(ndcg(ranks, 10))
        return float(np.mean(ranked))

    by_k1 = {k1: quality(k1, B) for k1 in K1S}
    k1 = max(by_k1, key=by_k1.__getitem__)
    by_b = {b: by_k1[k1] if b == B else quality(k1, b) for b in BS}
    b = max(by_b, key=by_b.__getitem__)
    return by_b[b], LexicalChoice(rules=rules, k1=k1, b=b)


def _sample_documents(
    count: int, tuning: Sequence[Query], seed: int
) -> tuple[list[int], list[Query]]:
    """Return at most MAX_COMPARED_DOCUMENTS documents, all that answer among them, and the queries
    with these documents' places in the sample."""
    answers = sorted({row for query in tuning for row in query.relevant})
    others = np.setdiff1d(np.arange(count), answers)
    room = max(MAX_COMPARED_DOCUMENTS - len(answers), 0)
    drawn = np.random.default_rng(seed).permutation(others)[:room].tolist()
    compared = sorted([*answers, *drawn])
    places = {row: place for place, row in enumerate(compared)}
    asked = []
    for query in tuning:
        relevant = tuple(places[row] for row in query.relevant)
        asked.append(msgspec.structs.replace(query, relevant=relevant))
    return compared, asked


def score_queries(
    queries: Sequence[Query], voices: Mapping[Voice, Callable[[int], Scores]]
) -> list[ScoredQuery]:
    """Return the candidates of each query; `voices` score all documents for query number q.

    The best DEPTH of every voice are candidates: no other document can be among the ten best of a
    mix.
    """
    scored = []
    for number, query in enumerate(queries):
        columns: list[Ints] = [np.asarray(query.relevant, np.int64)]
        normalized = []
        for voice, score in voices.items():
            scores_N = normalize_scores(voice, score(number))
            normalized.append(scores_N)
            depth = min(DEPTH, len(scores_N))
            best = np.argpartition(scores_N, -depth)[-depth:]
            columns.append(best[scores_N[best] > 0])
        candidates = np.unique(np.concatenate(columns))
        relevant = np.searchsorted(candidates, query.relevant)
        scores_VC = np.stack([scores_N[candidates] for scores_N in normalized])
        scored.append(ScoredQuery(scores_VC, relevant, len(query.relevant)))
    return scored


def rank_relevant(query: ScoredQuery, weights_WV: Floats) -> list[Ints]:
    """Return the ranks of a query's answers under each mix (W)."""
    mixed_WC = weights_WV @ query.scores
    # A document that no voice of the mix has found is ranked behind all that one has.
    return [relevant_ranks(scores_C, query.relevant.tolist()) for scores_C in mixed_WC]


def measure_mixes(queries: Iterable[ScoredQuery], weights_WV: Floats) -> Floats:
    """Return nDCG@10 (W, Q) of each mix for each query."""
    columns = []
    for query in queries:
        columns.append([ndcg(ranks, 10) for ranks in rank_relevant(query, weights_WV)])
    return np.array(columns, np.float64).T


class MixChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of voices, chosen on tuning queries, and the gain in nDCG@10 over words alone: mean
    and 95 % interval."""

    mix: Mix = WORDS_ALONE
    gain: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)


def choose_mix(
    queries: Sequence[ScoredQuery], voices: Sequence[Voice], added: Sequence[Voice], seed: int
) -> MixChoice:
    """Add the voices of `added` to words, in this order, where each finds more for certain.

    `voices` name the rows of the queries' scores. Queries count alike, of whatever kind.
    """
    present: list[Voice] = ["bm25"]
    weights_V = _weights_of(WORDS_ALONE, voices)
    words_Q = measure_mixes(queries, weights_V[None])[0]
    best_Q = words_Q
    mix = WORDS_ALONE
    for voice in added:
        tried = [
            _add_voice(mix, voice, share / WEIGHT_STEPS) for share in range(1, WEIGHT_STEPS + 1)
        ]
        weights_WV = np.stack([_weights_of(candidate, voices) for candidate in tried])
        quality_WQ = measure_mixes(queries, weights_WV)
        best = int(quality_WQ.mean(axis=1).argmax())
        low, _ = bootstrap_interval(quality_WQ[best] - best_Q, seed=seed)
        if low > 0:
            present.append(voice)
            mix = tried[best]
            best_Q = quality_WQ[best]
    gain_Q = best_Q - words_Q
    interval = bootstrap_interval(gain_Q, seed=seed)
    return MixChoice(mix=mix, gain=float(gain_Q.mean()), interval=interval)


def _add_voice(mix: Mix, voice: Voice, share: float) -> Mix:
    """Return a mix of which the voice is `share`, and the others the rest in their proportions."""
    weights = {name: weight * (1 - share) for name, weight in mix.weights.items()}
    return Mix(**({"bm25": 0.0} | weights | {voice: share}))


def _weights_of(mix: Mix, voices: Sequence[Voice]) -> npt.NDArray[np.float64]:
    return np.array([mix.weights.get(voice, 0.0) for voice in voices])
