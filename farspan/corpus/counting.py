"""How well n-gram counts and a cache of the text so far predict the validation tokens.

The difficulty of a text is known by these before a model has read it.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from farspan.domain.forecast import Counted

Tokens = npt.NDArray[Any]
Probabilities = npt.NDArray[np.float64]

#: Tokens counted at most (a few seconds), and validation tokens that are predicted.
MAX_COUNTED_TOKENS = 1 << 21
VAL_TOKENS = 1 << 16
#: Text is drawn in pieces of so many tokens, in an order of this seed: the first of a file say
#: little of the rest.
PIECE_TOKENS = 256
SEED = 0
#: Steps of expectation and maximization to the shares of the three predictions (`mixed_nats`): they
#: stand by then.
EM_ROUNDS = 20
#: Pieces that are compared with themselves at once: 64 KiB each.
PIECES_AT_ONCE = 32
#: What every count is discounted by, as usual (Chen and Goodman 1999, section 2.8).
DISCOUNT = 0.75
#: Tokens in a row. Two are what a model learns first; what texts of one kind repeat, such as
#: licences and synopses, is longer.
SHORT_ORDER = 2
LONG_ORDER = 6


def measure_counts(
    train: Tokens, val: Tokens, vocab_size: int, tokens: float
) -> tuple[Counted, ...]:
    """Measure how well counts over a sixteenth, a quarter and all of at most `tokens` tokens of
    `train` predict `val`."""
    pieces = _draw_pieces(train, min(tokens, MAX_COUNTED_TOKENS))
    held_out = _draw_pieces(val, VAL_TOKENS)
    if not (len(pieces) and len(held_out)):
        return ()
    cached = cache_probabilities(held_out)
    val = held_out.ravel()
    measured = []
    for size in sorted({max(1, len(pieces) // part) for part in (16, 4, 1)}):
        counted_text = pieces[:size].ravel()
        few = ngram_probabilities(counted_text, val, vocab_size, SHORT_ORDER)
        many = ngram_probabilities(counted_text, val, vocab_size, LONG_ORDER)
        counts = Counted(
            tokens=float(size * PIECE_TOKENS),
            few=-float(np.mean(np.log(few))),
            few_again=mixed_nats(few, cached),
            many_again=mixed_nats(many, cached),
        )
        measured.append(counts)
    return tuple(measured)


def _draw_pieces(tokens: Tokens, count: float) -> Tokens:
    """Draw at most `count` tokens (int64) as pieces in a seeded order, (pieces, PIECE)."""
    whole = len(tokens) // PIECE_TOKENS
    pieces = tokens[: whole * PIECE_TOKENS].reshape(-1, PIECE_TOKENS)
    order = np.random.default_rng(SEED).permutation(whole)
    drawn = pieces[order[: int(count) // PIECE_TOKENS]]
    return drawn.astype(np.int64)


class Grams(NamedTuple):
    """The distinct n tokens in a row of a text, numbered from 0: the number of the n - 1 before the
    last of each, where each stands first, and the number at every place of the text and of another
    one, -1 where it is not known."""

    histories: Tokens
    first: Tokens
    own: Tokens
    other: Tokens


def ngram_probabilities(train: Tokens, val: Tokens, vocab_size: int, order: int) -> Probabilities:
    """Predict each token of `val` (int64) by interpolated Kneser-Ney counts of `train`, which has
    `order` tokens or more.

    p_n(w|h) = max(c(hw) - d, 0) / c(h) + d N(h) / c(h) p_(n-1)(w|h'), for n = 1 to `order`, where c
    counts tokens at the highest order and distinct tokens before them at the others, and N(h) the
    distinct tokens after h (Chen and Goodman 1999, equations 25 to 28). Without h in `train`, or n
    - 1 tokens before it in `val`, a token has p_(n-1).
    """
    # The empty gram, of length 0, stands everywhere.
    first = np.zeros(1, np.int64)
    empty = Grams(first, first, np.zeros_like(train), np.zeros_like(val))
    levels = [empty]
    for n in range(order):
        levels.append(_extend_grams(levels[n], train[n:], val[n:], vocab_size))
    probability = np.full(len(val), 1.0 / vocab_size)
    for n, (before, grams) in enumerate(itertools.pairwise(levels), 1):
        # A number per gram: its places, or the distinct tokens before it, which are as many as
        # longer grams end so.
        ends = grams.own if n == order else grams.own[levels[n + 1].first + 1]
        counts = np.bincount(ends, minlength=len(grams.first))
        num_histories = len(before.first)
        totals = np.bincount(grams.histories, weights=counts, minlength=num_histories)
        kinds = np.bincount(grams.histories[counts > 0], minlength=num_histories)
        # c(hw), c(h) and N(h) for each place of `val`; 0 where they are not known.
        history = before.other[: len(grams.other)]
        total = np.where(history >= 0, totals[history], 0.0)
        count = np.where(grams.other >= 0, counts[grams.other], 0)
        own = np.maximum(count - DISCOUNT, 0.0)
        lower = probability[n - 1 :]
        least = np.maximum(total, 1.0)
        backoff = DISCOUNT * kinds[history] / least
        probability[n - 1 :] = np.where(total > 0, own / least + backoff * lower, lower)
    return probability


def _extend_grams(grams: Grams, train: Tokens, val: Tokens, vocab_size: int) -> Grams:
    """Extend the grams to those that are one token longer; `train` and `val` are the tokens behind
    each."""
    own = grams.own[: len(train)] * vocab_size + train
    seen, first, numbers = np.unique(own, return_index=True, return_inverse=True)
    before = grams.other[: len(val)]
    wanted = before * vocab_size + val
    at = np.minimum(np.searchsorted(seen, wanted), len(seen) - 1)
    is_known = (before >= 0) & (seen[at] == wanted)
    other = np.where(is_known, at, -1)
    return Grams(seen // vocab_size, first, numbers, other)


def cache_probabilities(pieces: Tokens) -> tuple[Probabilities, Probabilities]:
    """Predict each token by counts of its own piece so far (Kuhn and De Mori 1990), 0 where they
    have none: of the tokens, and of what followed the token before it."""
    single = np.zeros(pieces.shape)
    pair = np.zeros(pieces.shape)
    earlier = np.tril(np.ones((PIECE_TOKENS, PIECE_TOKENS), bool), -1)
    num_earlier = np.maximum(1, np.arange(PIECE_TOKENS))
    for start in range(0, len(pieces), PIECES_AT_ONCE):
        rows = slice(start, start + PIECES_AT_ONCE)
        part = pieces[rows]
        same = (part[:, :, None] == part[:, None, :]) & earlier
        single[rows] = same.sum(2) / num_earlier
        before = same[:, :-1, :-1]  # At [i, j]: the tokens before i + 1 and j + 1 are the same.
        repeated = same[:, 1:, 1:] & before
        pair[rows, 1:] = repeated.sum(2) / np.maximum(1, before.sum(2))
    return single.ravel(), pair.ravel()


def mixed_nats(counts: Probabilities, cached: tuple[Probabilities, Probabilities]) -> float:
    """Return the cross-entropy under the mixture of the three that predicts best, nats a token."""
    every = np.stack([counts, *cached])
    shares = np.full(3, 1 / 3)
    for _ in range(EM_ROUNDS):
        own = shares[:, None] * every
        shares = (own / own.sum(0)).mean(1)
    return -float(np.mean(np.log(shares @ every)))
