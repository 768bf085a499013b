"""Counts of a few tokens in a row, and of a piece so far, against the formulas as they are written,
token by token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from farspan.corpus.counting import (
    DISCOUNT,
    LONG_ORDER,
    PIECE_TOKENS,
    SHORT_ORDER,
    cache_probabilities,
    measure_counts,
    mixed_nats,
    ngram_probabilities,
)

V = 6


def probability(train: list[int], history: tuple[int, ...], word: int, order: int) -> float:
    """Interpolated Kneser-Ney (Chen and Goodman 1999, equations 25 to 28), as it is written."""
    n = len(history) + 1
    grams = [tuple(train[i : i + n]) for i in range(len(train) - n + 1)]
    counts = Counter(grams)
    if n < order:
        longer = {tuple(train[i : i + n + 1]) for i in range(len(train) - n)}
        counts = Counter(gram[1:] for gram in longer)
    lower = probability(train, history[1:], word, order) if history else 1 / V
    total = sum(count for gram, count in counts.items() if gram[:-1] == history)
    if not total:
        return lower
    kinds = sum(gram[:-1] == history for gram in counts)
    own = max(counts[(*history, word)] - DISCOUNT, 0)
    return own / total + DISCOUNT * kinds / total * lower


@pytest.mark.parametrize("order", [SHORT_ORDER, LONG_ORDER])
@pytest.mark.parametrize("seed", range(8))
def test_counts_are_the_textbooks(seed: int, order: int):
    rng = np.random.default_rng(seed)
    train, val = (
        rng.choice(V, size, p=rng.dirichlet(np.ones(V)))
        for size in (int(rng.integers(LONG_ORDER, 120)), 25)
    )
    told = [
        probability(train.tolist(), tuple(val[max(0, i - order + 1) : i]), val[i], order)
        for i in range(len(val))
    ]
    assert ngram_probabilities(train, val, V, order) == pytest.approx(told, rel=1e-9)


def test_cache_probabilities_are_those_counted_in_the_piece_so_far():
    pieces = np.random.default_rng(0).integers(0, V * V, (3, PIECE_TOKENS))
    single, pair = cache_probabilities(pieces)
    for i in [*range(0, 3 * PIECE_TOKENS, 97), PIECE_TOKENS, PIECE_TOKENS + 1]:
        piece = pieces[i // PIECE_TOKENS].tolist()
        at = i % PIECE_TOKENS
        seen = Counter(piece[:at])
        last = piece[at - 1] if at else None
        follows = Counter(piece[j + 1] for j in range(at - 1) if piece[j] == last)
        assert single[i] == pytest.approx(seen[piece[at]] / max(1, at))
        assert pair[i] == pytest.approx(follows[piece[at]] / max(1, follows.total()))


@pytest.mark.parametrize("seed", range(5))
def test_the_mixture_is_the_best_there_is(seed: int):
    rng = np.random.default_rng(seed)
    counts, single, pair = (rng.beta(a, 3, 2_000) for a in (0.5, 0.3, 0.3))
    told = mixed_nats(counts, (single, pair))
    assert told <= -np.mean(np.log(counts)) + 1e-3
    for shares in rng.dirichlet(np.ones(3), 300):
        assert told <= -np.mean(np.log(shares @ np.stack([counts, single, pair]))) + 1e-3


def test_more_text_predicts_better_and_what_is_not_there_is_not_counted():
    rng = np.random.default_rng(0)
    follows = rng.dirichlet(np.full(50, 0.1), 50)
    tokens = [0]
    for _ in range(20_000):
        tokens.append(int(rng.choice(50, p=follows[tokens[-1]])))
    text = np.array(tokens, np.uint16)
    found = measure_counts(text[:16_000], text[16_000:], 50, 1e9)
    assert [one.tokens for one in found] == [
        16_000 // PIECE_TOKENS // part * PIECE_TOKENS for part in (16, 4, 1)
    ]
    assert found[0].few > found[1].few > found[2].few
    entropy = -float(np.mean(np.sum(follows * np.log(follows + 1e-300), 1)))
    assert entropy - 0.1 < found[2].few < entropy + 0.5
    assert (
        measure_counts(text[:16_000], text[16_000:], 50, 3 * PIECE_TOKENS)[-1].tokens
        == 3 * PIECE_TOKENS
    )
    assert measure_counts(text[:10], text[:10], 50, 1e9) == ()
