"""Choose on tuning queries how an index answers: how text becomes words, BM25's k1 and b, and the
weights of voices.

Titles and openings are in their authors' words, which flatters keyword search: on three corpora of
documentation they chose half the weight for a ready encoder that questions which people asked would
have chosen. So an encoder begins with the weight that those corpora agree on (ENCODER_SHARE), and
only questions move it; titles and openings can refuse it. The run's own vectors have no such
evidence: they stay only where the 95 % interval of their gain is above 0, and have half at most.

Shapes: Q queries, C candidates of a query, V voices, W mixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.retrieval.bm25 import K1, B, BM25Index, Numbered
from farspan.retrieval.hybrid_ranking import (
    DEPTH,
    WORDS_ALONE,
    Mix,
    Voice,
    VoiceScores,
    normalize_scores,
)
from farspan.retrieval.metrics import Floats, Ints, bootstrap_interval, ndcg, relevant_ranks
from farspan.retrieval.queries import Kind, Query
from farspan.retrieval.stores import Scores
from farspan.retrieval.words import WordRules, Words

#: Values of BM25 that are tried. Tuned BM25 of long documents reaches k1 4.46 (Anserini, MS MARCO).
K1S = (0.9, 1.5, 2.0, 3.0, 5.0)
BS = (0.4, 0.75, 0.9, 1.0)
#: Ways to make words that are tried, by stems and stop words left out; ties go to the first.
WORD_RULES = ((True, True), (False, True), (True, False), (False, False))
#: Documents over which these are compared: more would take minutes and change no choice.
MAX_COMPARED_DOCUMENTS = 4000
#: Weights are tried in steps of one over this.
WEIGHT_STEPS = 20
#: The encoder's share beside words, also where its table embeds queries [fitted: perl-doc, R's
#: manuals and Debian's, questions that people asked: best at .80 to .85].
ENCODER_SHARE = 0.85
#: The share of the run's own vectors at most: titles, which they were fitted to, choose .85 to 1,
#: and questions that people asked find a third less by them alone than by words [perl-doc, Debian's
#: manuals: words .616 and .425, own vectors .41 and .30, half each .645 and .43].
MAX_OWN_SHARE = 0.5
#: What a share's squared distance from that costs, in nDCG@10 summed over the questions [fitted: on
#: the same corpora, by drawing 10 to 100 of the questions to choose on].
PRIOR_STRENGTH = 20
#: Queries that have to differ before a gain is certain: of fewer that all gain, a two-sided sign
#: test says that they do so by chance in more than 5 % of cases (2 / 2**6 = 3 %).
MIN_DIFFERENT_QUERIES = 6
#: Kinds of queries that people wrote to ask something.
ASKED_KINDS = ("question", "own")


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

    `scores` (V, C) are normalized, `relevant` are the columns of all answers.
    """

    scores: Scores
    relevant: Ints


def choose_words(
    bodies: Bodies, tuning: Sequence[Query], languages: Sequence[str], seed: int
) -> LexicalChoice:
    """Choose how text becomes words, and BM25's k1 and b, by nDCG@10 of the tuning queries.

    What is best elsewhere (LexicalChoice's defaults) stays unless something else is better for
    certain.
    """
    usual = usual_words(languages)
    if not tuning:
        return usual
    codes = usual.rules.languages
    compared, asked = _sample_documents(len(bodies.texts), tuning, seed)
    texts = [bodies.texts[row] for row in compared]
    spoken = [bodies.languages[row] for row in compared]
    measured: list[tuple[LexicalChoice, Floats]] = []
    for stems, stop_words in WORD_RULES:
        rules = WordRules(stems=stems, stop_words=stop_words, languages=codes)
        ranking = _WordRanking(rules, texts, spoken, asked)
        if rules == usual.rules:
            measured.append((usual, ranking.measure_ndcg(usual.k1, usual.b)))
        measured.append(_choose_bm25(ranking))
    # The best of many recipes looks better than it is on the queries that chose it: other queries
    # decide.
    _, usual_Q = measured[0]
    chooses_Q = _first_half(asked)
    best, best_Q = max(measured, key=lambda choice: choice[1][chooses_Q].mean())
    return best if is_certain_gain((best_Q - usual_Q)[~chooses_Q], seed) else usual


def usual_words(languages: Sequence[str]) -> LexicalChoice:
    """Return how text of these languages becomes words where nothing is measured."""
    return LexicalChoice(rules=WordRules(languages=tuple(languages)))


def _first_half(queries: Sequence[Query]) -> npt.NDArray[np.bool_]:
    """Return which queries (Q) are of every other document, the first among them."""
    answers = [query.relevant[0] for query in queries]
    numbers = {document: number for number, document in enumerate(dict.fromkeys(answers))}
    return np.array([numbers[document] % 2 == 0 for document in answers])


def is_certain_gain(differences_Q: Floats, seed: int) -> bool:
    """Return whether a gain in nDCG@10 by query is above 0 for certain.

    The interval of very few queries has no width, so that these alone make nothing certain.
    """
    if np.count_nonzero(differences_Q) < MIN_DIFFERENT_QUERIES:
        return False
    low, _ = bootstrap_interval(differences_Q, seed=seed)
    return low > 0


class _WordRanking:
    """Ranks documents by words that are made in one way."""

    def __init__(
        self,
        rules: WordRules,
        texts: Sequence[str],
        languages: Sequence[str],
        tuning: Sequence[Query],
    ) -> None:
        words = Words(rules)
        self.rules = rules
        self._numbered = Numbered(map(words.of_text, texts, languages))
        self._tuning = tuning
        self._asked = [words.of_query(query.text) for query in tuning]

    def measure_ndcg(self, k1: float, b: float) -> Floats:
        """Return nDCG@10 of each tuning query."""
        lexical = BM25Index.build(self._numbered, k1, b)
        measured = []
        for query, words in zip(self._tuning, self._asked, strict=True):
            ranks = relevant_ranks(lexical.bm25_scores(words), query.relevant)
            measured.append(ndcg(ranks, 10))
        return np.array(measured)


def _choose_bm25(ranking: _WordRanking) -> tuple[LexicalChoice, Floats]:
    """Return the best k1 and b of one way to make words, and their nDCG@10 by query."""
    usual = LexicalChoice(rules=ranking.rules)
    by_k1 = {k1: ranking.measure_ndcg(k1, usual.b) for k1 in K1S}
    k1 = max(by_k1, key=lambda tried: by_k1[tried].mean())
    by_b = {b: by_k1[k1] if b == usual.b else ranking.measure_ndcg(k1, b) for b in BS}
    b = max(by_b, key=lambda tried: by_b[tried].mean())
    return LexicalChoice(rules=ranking.rules, k1=k1, b=b), by_b[b]


def _sample_documents(
    count: int, tuning: Sequence[Query], seed: int
) -> tuple[list[int], list[Query]]:
    """Return at most MAX_COMPARED_DOCUMENTS documents, all that answer among them, and the queries
    with these documents' places in the sample."""
    answers = sorted(set(chain.from_iterable(query.relevant for query in tuning)))
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
    queries: Sequence[Query], voices: Mapping[Voice, Callable[[int], VoiceScores]]
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
        scored.append(ScoredQuery(scores_VC, relevant))
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
    and 95 % interval. None without tuning queries."""

    mix: Mix = WORDS_ALONE
    gain: float | None = None
    interval: tuple[float, float] = (0.0, 0.0)


def usual_mix(voices: Iterable[Voice]) -> Mix:
    """Return the weights for an index that nothing was measured on: the encoder's share is that of
    other corpora, and own vectors have none."""
    return _add_voice(WORDS_ALONE, "encoder", ENCODER_SHARE) if "encoder" in voices else WORDS_ALONE


def choose_mix(
    queries: Sequence[ScoredQuery],
    kinds: Sequence[Kind],
    voices: Sequence[Voice],
    seed: int,
) -> MixChoice:
    """Choose the weights of words, the encoder and the run's own vectors, as far as they are there.

    `voices` name the rows of the queries' scores. Queries count alike, of whatever kind.
    """
    if not queries:
        return MixChoice(mix=usual_mix(voices))
    measured = _Measured(queries, voices, seed)
    is_asked = np.array([kind in ASKED_KINDS for kind in kinds])
    mix = WORDS_ALONE
    if "encoder" in voices:
        mix = _choose_encoder_share(measured, is_asked)
    if "model" in voices:
        # Beside an encoder titles say nothing: own vectors were fitted to such pairs.
        counted_Q = is_asked if "encoder" in mix.weights else np.ones(len(queries), bool)
        mix = _add_own_vectors(measured, mix, counted_Q)
    gain_Q = measured.ndcg([mix])[0] - measured.words_Q
    interval = bootstrap_interval(gain_Q, seed=seed)
    return MixChoice(mix=mix, gain=float(gain_Q.mean()), interval=interval)


class _Measured:
    """nDCG@10 of mixes on the same queries."""

    def __init__(self, queries: Sequence[ScoredQuery], voices: Sequence[Voice], seed: int) -> None:
        self._queries = queries
        self._voices = voices
        self._seed = seed
        self.words_Q = self.ndcg([WORDS_ALONE])[0]

    def ndcg(self, mixes: Sequence[Mix]) -> Floats:
        """Return nDCG@10 (W, Q) of mixes."""
        weights_WV = np.stack([_weights_of(mix, self._voices) for mix in mixes])
        return measure_mixes(self._queries, weights_WV)

    def is_certain_gain(self, differences_Q: Floats) -> bool:
        """Return whether the mean of differences is above 0 for certain."""
        return is_certain_gain(differences_Q, self._seed)


def _choose_encoder_share(measured: _Measured, is_asked: npt.NDArray[np.bool_]) -> Mix:
    """Return words and the encoder with the share of other corpora, or the one that questions of
    this corpus choose; where that is worse than words for certain, the best of all queries."""
    shares = [step / WEIGHT_STEPS for step in range(WEIGHT_STEPS + 1)]
    mixes = [_add_voice(WORDS_ALONE, "encoder", share) for share in shares]
    quality_WQ = measured.ndcg(mixes)
    cost_W = PRIOR_STRENGTH * (np.array(shares) - ENCODER_SHARE) ** 2
    best = int((quality_WQ[:, is_asked].sum(axis=1) - cost_W).argmax())
    if measured.is_certain_gain(measured.words_Q - quality_WQ[best]):
        best = int(quality_WQ.mean(axis=1).argmax())
    return mixes[best]


def _add_own_vectors(measured: _Measured, mix: Mix, counted_Q: npt.NDArray[np.bool_]) -> Mix:
    """Return the mix with the run's own vectors where they find more for certain, by the queries
    that are counted."""
    if not counted_Q.any():
        return mix
    shares = [step / WEIGHT_STEPS for step in range(1, WEIGHT_STEPS + 1)]
    mixes = [_add_voice(mix, "model", share) for share in shares if share <= MAX_OWN_SHARE]
    gain_WQ = (measured.ndcg(mixes) - measured.ndcg([mix]))[:, counted_Q]
    best = int(gain_WQ.mean(axis=1).argmax())
    return mixes[best] if measured.is_certain_gain(gain_WQ[best]) else mix


def _add_voice(mix: Mix, voice: Voice, share: float) -> Mix:
    """Return a mix in which the voice has `share`, and the others the rest in their proportions."""
    weights = {name: weight * (1 - share) for name, weight in mix.weights.items()}
    return Mix(**({"bm25": 0.0} | weights | {voice: share}))


def _weights_of(mix: Mix, voices: Sequence[Voice]) -> npt.NDArray[np.float64]:
    return np.array([mix.weights.get(voice, 0.0) for voice in voices])
