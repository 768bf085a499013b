"""Cross-entropy of the validation tokens under unigram and bigram counts.

A model's loss is printed with these yardsticks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from farspan.corpus.token_files import Tokens

Array = npt.NDArray[Any]

#: Tokens looked at: all of a corpus up to this size, else blocks spread evenly over it, so that
#: memory is bounded.
_TRAIN_TOKENS = 1 << 26
EXACT_TOKENS = 1 << 19
_BLOCK = 1 << 16
#: Beside a validation there is less time: about a second for so many tokens of the training split.
_FEW_TRAIN_TOKENS = 1 << 24
_LARGE_BLOCK = 1 << 20
#: Weights of the unigram in the bigram estimate; the best one is reported, which favours the
#: yardstick.
_PRIOR_COUNTS = (3, 10, 30, 100, 300, 1000, 3000)


def ngram_entropies(train: Tokens, val: Tokens, vocab_size: int) -> tuple[float, float]:
    """Return the (unigram, bigram) cross-entropy of `val` under the counts of `train`, in nats a
    token: of all of it where it has EXACT_TOKENS at most.

    Unigram: p1(b) = (count(b) + 1) / (N + V). Bigram, Dirichlet-smoothed towards it: p(b|a) =
    (count(ab) + w p1(b)) / (count(a) + w), for the w of a few that fits best. Bigrams are counted
    only for the pairs that occur in `val`: exact, without a table of V^2.
    """
    held_out = list(_spread_blocks(val, EXACT_TOKENS, _BLOCK))
    pairs = np.concatenate([_pair_ids(block, vocab_size) for block in held_out])
    blocks = _spread_blocks(train, _TRAIN_TOKENS, _BLOCK)
    return _cross_entropies(blocks, pairs, np.concatenate(held_out), vocab_size)


def ngram_entropies_of(
    train: Tokens, contexts: Array, targets: Array, vocab_size: int
) -> tuple[float, float]:
    """Return `ngram_entropies` of these tokens (n,) alone, each after its context (n,)."""
    pairs = contexts.astype(np.int64) * vocab_size + targets
    return _cross_entropies(
        _spread_blocks(train, _FEW_TRAIN_TOKENS, _LARGE_BLOCK), pairs, targets, vocab_size
    )


def _cross_entropies(
    train: Iterable[Array], held_out: Array, targets: Array, vocab_size: int
) -> tuple[float, float]:
    """Return the cross-entropy of single tokens and of pairs under the counts of token blocks."""
    wanted, times = np.unique(held_out, return_counts=True)
    singles = np.zeros(vocab_size, np.int64)
    pairs = np.zeros(len(wanted), np.int64)
    for block in train:
        singles += np.bincount(block, minlength=vocab_size)
        block_pairs = np.sort(_pair_ids(block, vocab_size))
        pairs += np.searchsorted(block_pairs, wanted, side="right")
        pairs -= np.searchsorted(block_pairs, wanted, side="left")
    logs = np.log((singles + 1) / (singles.sum() + vocab_size))
    unigram = -float(np.mean(logs[targets]))
    if not len(wanted):
        return unigram, unigram
    first_counts = singles[wanted // vocab_size]
    second_p1 = np.exp(logs[wanted % vocab_size])
    bigrams = []
    for w in _PRIOR_COUNTS:
        probabilities = (pairs + w * second_p1) / (first_counts + w)
        bigrams.append(-float(np.average(np.log(probabilities), weights=times)))
    return unigram, min(bigrams)


def _spread_blocks(tokens: Tokens, limit: int, size: int) -> Iterator[Array]:
    """Yield the tokens in blocks of `size`; of more than `limit` tokens, evenly spread blocks of
    that sum."""
    stride = max(1, -(-len(tokens) // limit))
    for start in range(0, len(tokens), size)[::stride]:
        yield np.asarray(tokens[start : start + size]).astype(np.int64)


def _pair_ids(block: Array, vocab_size: int) -> Array:
    return block[:-1] * vocab_size + block[1:]
