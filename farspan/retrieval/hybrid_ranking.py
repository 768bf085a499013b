"""How documents are ranked for a query: by words, by vectors, and by a mix of both. Search and its
evaluation share every line of it.

Each voice (BM25, the run's own vectors, a ready encoder's) scores documents on a scale of its own.
A query's scores are divided by their standard deviation before they are weighted and added: a
convex combination (arXiv 2210.11934), whose best weights hardly move with the corpus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.retrieval.names import query_form as query_form
from farspan.retrieval.stores import Scores, Vectors

Voice = Literal["bm25", "model", "encoder"]
System = Literal["bm25", "model", "encoder", "fused"]
SYSTEM_NAMES: dict[System, str] = {
    "bm25": "keyword search (BM25)",
    "model": "vector search",
    "encoder": "vector search by the encoder",
    "fused": "hybrid search",
}
VOICE_NAMES: dict[Voice, str] = {
    "bm25": "BM25",
    "model": "the run's vectors",
    "encoder": "the encoder's vectors",
}
#: Documents that vectors propose for a query; others get nothing from them.
DEPTH = 100
#: Passages that are asked for to find them: a document may hold several of the nearest.
CHUNKS = 4 * DEPTH

Ints = npt.NDArray[np.integer[Any]]
#: What gives the passages nearest to a vector, this many at most: their documents, and cosines.
Nearest = Callable[[Vectors, int], tuple[Ints, Scores]]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Mix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of voices that add up to 1; a voice of weight 0 is not asked."""

    bm25: Weight = 1.0
    model: Weight = 0.0
    encoder: Weight = 0.0

    def __post_init__(self) -> None:
        if abs(self.bm25 + self.model + self.encoder - 1) > 1e-6:
            raise ValueError("the weights of voices do not add up to 1")

    @property
    def voices(self) -> tuple[Voice, ...]:
        """Voices that count, the heaviest first."""
        weights = self.weights
        return tuple(sorted(weights, key=lambda voice: -weights[voice]))

    @property
    def weights(self) -> dict[Voice, float]:
        """The weights above 0."""
        every: dict[Voice, float] = {
            "bm25": self.bm25,
            "model": self.model,
            "encoder": self.encoder,
        }
        return {voice: weight for voice, weight in every.items() if weight > 0}

    def without(self, voice: Voice) -> Mix:
        """Return the mix of the other voices, in the same proportions; BM25 where none is left."""
        kept = {name: weight for name, weight in self.weights.items() if name != voice}
        total = sum(kept.values())
        if not total:
            return WORDS_ALONE
        shares = {name: weight / total for name, weight in kept.items()}
        return Mix(**({"bm25": 0.0} | shares))

    def __str__(self) -> str:
        weights = self.weights
        return " + ".join(f"{weights[voice]:.2g} x {VOICE_NAMES[voice]}" for voice in self.voices)


WORDS_ALONE = Mix()


class VoiceScores(NamedTuple):
    """One query's scores of documents (N) by a voice, 0 for those that it did not find, and the
    standard deviation of all that it scores."""

    scores: Scores
    deviation: float


def score_words(scores_N: Scores) -> VoiceScores:
    """Return BM25 of documents, with its deviation over all of them."""
    return VoiceScores(scores_N, float(scores_N.std()))


def vector_scores(nearest: Nearest, vector_E: Vectors, count: int) -> Scores:
    """Cosines by document, from the CHUNKS passages nearest to a query, of `count` documents."""
    return best_by_document(*nearest(vector_E, CHUNKS), count)


def cosine_deviation(covariance_EE: npt.NDArray[np.floating], vector_E: Vectors) -> float:
    """Return the standard deviation of a query's cosines with all passages, from the covariance of
    the passages' vectors."""
    return math.sqrt(max(float(vector_E @ covariance_EE @ vector_E), 0.0))


def best_by_document(documents: Ints, similarities: npt.NDArray[np.floating], count: int) -> Scores:
    """Scores of `count` documents from the similarities of chunks: a document's best, kept for the
    DEPTH best only.

    `documents[i]` is the document of chunk i. Documents without a chunk, beyond DEPTH or unlike the
    query get 0.
    """
    scores_N = np.zeros(count, np.float32)
    np.maximum.at(scores_N, documents, similarities.astype(np.float32))
    if count > DEPTH:
        scores_N[scores_N < np.partition(scores_N, -DEPTH)[-DEPTH]] = 0
    return scores_N


def normalize_scores(voice: Voice, scored: VoiceScores) -> Scores:
    """Return one query's scores of a voice in standard deviations; 0 for what it did not find.

    Cosines count from the lowest that was found, as the others are not known.
    """
    scores_N, deviation = scored
    found_N = scores_N > 0
    if deviation <= 0 or not found_N.any():
        return np.zeros_like(scores_N)
    lowest = 0.0 if voice == "bm25" else float(scores_N[found_N].min())
    return np.where(found_N, (scores_N - np.float32(lowest)) / np.float32(deviation), 0)


def fuse_scores(scores: Mapping[Voice, VoiceScores], mix: Mix) -> Scores:
    """Return the weighted sum of normalized scores. What any voice found stays above 0."""
    first, *_ = scores.values()
    fused_N = np.zeros(len(first.scores), np.float32)
    found_N = np.zeros(len(first.scores), bool)
    for voice, weight in mix.weights.items():
        if voice in scores:
            fused_N += np.float32(weight) * normalize_scores(voice, scores[voice])
            found_N |= scores[voice].scores > 0
    return np.maximum(fused_N, found_N * np.float32(1e-6))
