"""How well counts of three tokens in a row, and what a piece of text has said before, predict the validation tokens, of
how much text: what the difficulty of a text is known by before a model has read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]
Probabilities = npt.NDArray[np.float64]

#: Tokens counted at most (a few seconds), and validation tokens that are predicted.
MOST_TOKENS, VAL_TOKENS = 1 << 21, 1 << 16
#: Text is drawn in pieces of so many tokens, in an order of this seed: the first of a file say little of the rest.
PIECE, SEED = 256, 0
#: Steps of expectation and maximization to the shares of the three predictions (`mixed_nats`): they stand by then.
ROUNDS = 20
#: Pieces that are compared with themselves at once: 64 KiB each.
AT_ONCE = 32
#: What every count is discounted by, as usual (Chen and Goodman 1999, section 2.8).
DISCOUNT = 0.75
ORDER = 3


def counted(train: Tokens, val: Tokens, vocab_size: int, tokens: float) -> tuple[tuple[float, float], ...]:
    """(tokens, nats a token of `val`) of counts over a sixteenth, a quarter and all of so many tokens of `train`; of
    fewer where there are not so many."""
    pieces, held_out = _drawn(train, min(tokens, MOST_TOKENS)), _drawn(val, VAL_TOKENS)
    if not (len(pieces) and len(held_out)):
        return ()
    cached = cache_probabilities(held_out)
    sizes = sorted({max(1, len(pieces) // part) for part in (16, 4, 1)})
    told = (trigram_probabilities(pieces[:size].ravel(), held_out.ravel(), vocab_size) for size in sizes)
    return tuple((float(size * PIECE), mixed_nats(p, cached)) for size, p in zip(sizes, told, strict=True))


def _drawn(tokens: Tokens, count: float) -> Tokens:
    """At most so many tokens (int64), in pieces of all over, in a seeded order, (pieces, PIECE)."""
    pieces = tokens[: len(tokens) // PIECE * PIECE].reshape(-1, PIECE)
    order = np.random.default_rng(SEED).permutation(len(pieces))[: int(count) // PIECE]
    return pieces[order].astype(np.int64)


def trigram_probabilities(train: Tokens, val: Tokens, vocab_size: int) -> Probabilities:
    """Of each token of `val` (int64) but the first two, by interpolated Kneser-Ney counts of `train`.

    p_n(w|h) = max(c(hw) - d, 0) / c(h) + d N(h) / c(h) p_(n-1)(w|h'), for n = 1 to 3, where c counts tokens at the
    highest order and distinct tokens before them at the others, and N(h) the distinct tokens after h (Chen and Goodman
    1999, equations 25 to 28).
    """
    probability = np.full(len(val) - ORDER + 1, 1.0 / vocab_size)
    for n in range(1, ORDER + 1):
        grams = _grams(train, n, vocab_size)
        if n < ORDER:  # The distinct tokens before each: of longer ones, what follows their first token.
            grams = np.unique(_grams(train, n + 1, vocab_size)) % vocab_size**n
        seen, counts = np.unique(grams, return_counts=True)
        histories, of = np.unique(seen // vocab_size, return_inverse=True)
        totals, kinds = np.bincount(of, weights=counts), np.bincount(of)
        wanted = _grams(val, n, vocab_size)[ORDER - n :]
        known, at = _found(seen, wanted)
        before, place = _found(histories, wanted // vocab_size)
        total = np.where(before, totals[place], 1.0)
        own = np.maximum(np.where(known, counts[at], 0) - DISCOUNT, 0.0) / total
        probability = own + np.where(before, DISCOUNT * kinds[place] / total, 1.0) * probability
    return probability


def cache_probabilities(pieces: Tokens) -> tuple[Probabilities, Probabilities]:
    """Of each token but the first two by counts of its own piece so far, 0 where they know nothing: of the tokens, and
    of what followed the token before it (Kuhn and De Mori 1990)."""
    single, pair = np.zeros(pieces.shape), np.zeros(pieces.shape)
    earlier = np.tril(np.ones((PIECE, PIECE), bool), -1)
    for start in range(0, len(pieces), AT_ONCE):
        part = pieces[start : start + AT_ONCE]
        same = (part[:, :, None] == part[:, None, :]) & earlier
        single[start : start + AT_ONCE] = same.sum(2) / np.maximum(1, np.arange(PIECE))
        before = same[:, :-1, :-1]  # At [i, j]: the tokens before i + 1 and j + 1 are the same.
        known = before.sum(2)
        pair[start : start + AT_ONCE, 1:] = (same[:, 1:, 1:] & before).sum(2) / np.maximum(1, known)
    return single.ravel()[ORDER - 1 :], pair.ravel()[ORDER - 1 :]


def mixed_nats(counts: Probabilities, cached: tuple[Probabilities, Probabilities]) -> float:
    """Cross-entropy under the mixture of the three that predicts best, nats a token."""
    every, shares = np.stack([counts, *cached]), np.full(3, 1 / 3)
    for _ in range(ROUNDS):
        own = shares[:, None] * every
        shares = (own / own.sum(0)).mean(1)
    return -float(np.mean(np.log(shares @ every)))


def _grams(tokens: Tokens, n: int, vocab_size: int) -> Tokens:
    """Each n tokens in a row as one number, (tokens - n + 1,)."""
    grams = np.zeros(len(tokens) - n + 1, np.int64)
    for i in range(n):
        grams = grams * vocab_size + tokens[i : len(tokens) - n + 1 + i]
    return grams


def _found(values: Tokens, wanted: Tokens) -> tuple[Tokens, Tokens]:
    """Whether each wanted number is among sorted `values`, and where it is or would be."""
    at = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    return values[at] == wanted, at
