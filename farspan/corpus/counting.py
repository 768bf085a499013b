"""How well counts of three tokens in a row predict the validation tokens, of how much text: what the difficulty of a
text is known by before a model has read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]

#: Tokens counted at most (a few seconds), and validation tokens that are predicted.
MOST_TOKENS, VAL_TOKENS = 1 << 21, 1 << 16
#: Text is drawn in pieces of so many tokens, in an order of this seed: the first of a file say little of the rest.
PIECE, SEED = 256, 0
#: What every count is discounted by, as usual (Chen and Goodman 1999, section 2.8).
DISCOUNT = 0.75
ORDER = 3


def counted(train: Tokens, val: Tokens, vocab_size: int, tokens: float) -> tuple[tuple[float, float], ...]:
    """(tokens, nats a token of `val`) of counts over a sixteenth, a quarter and all of so many tokens of `train`; of
    fewer where there are not so many."""
    pieces, held_out = _drawn(train, min(tokens, MOST_TOKENS)), _drawn(val, VAL_TOKENS).ravel()
    sizes = sorted({max(1, len(pieces) // part) for part in (16, 4, 1)}) if len(pieces) else []
    return tuple(
        (float(size * PIECE), trigram_nats(pieces[:size].ravel(), held_out, vocab_size)) for size in sizes
    )  # fmt: skip


def _drawn(tokens: Tokens, count: float) -> Tokens:
    """At most so many tokens (int64), in pieces of all over, in a seeded order, (pieces, PIECE)."""
    pieces = tokens[: len(tokens) // PIECE * PIECE].reshape(-1, PIECE)
    order = np.random.default_rng(SEED).permutation(len(pieces))[: int(count) // PIECE]
    return pieces[order].astype(np.int64)


def trigram_nats(train: Tokens, val: Tokens, vocab_size: int) -> float:
    """Cross-entropy of `val` (int64) under interpolated Kneser-Ney counts of `train`, nats a token.

    p_n(w|h) = max(c(hw) - d, 0) / c(h) + d N(h) / c(h) p_(n-1)(w|h'), for n = 1 to 3, where c counts tokens at the
    highest order and distinct tokens before them at the others, and N(h) the distinct tokens after h (Chen and Goodman
    1999, equations 25 to 28).
    """
    if len(val) < ORDER:
        return float(np.log(vocab_size))
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
    return -float(np.mean(np.log(probability)))


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
