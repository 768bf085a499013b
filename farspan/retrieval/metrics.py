"""Ranks of relevant documents, hit rate, MRR, recall, nDCG, and paired bootstrap intervals.

The bootstrap is that of Efron and Tibshirani 1993, ch. 13.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def relevant_ranks(scores_N: npt.NDArray[np.floating], relevant: Sequence[int]) -> Ints:
    """Return the ranks from 1 of the relevant ones among N scored documents, best first.

    A document that ties with a relevant one counts as ranked before it, so that ties never help.
    """
    own = np.sort(scores_N[list(relevant)])[::-1]
    others = np.delete(scores_N, list(relevant))
    better = [np.count_nonzero(others >= score) for score in own]
    return np.arange(1, len(own) + 1) + np.array(better, np.int64)


def hit_rate(ranks_R: Ints, k: int) -> float:
    """Return 1 if any relevant document is among the first k."""
    return float(ranks_R[0] <= k)


def mrr(ranks_R: Ints, k: int) -> float:
    """Return one over the rank of the first relevant document; 0 if that is beyond k."""
    return 1 / float(ranks_R[0]) if ranks_R[0] <= k else 0.0


def recall(ranks_R: Ints, k: int) -> float:
    """Return the share of the relevant documents that are among the first k."""
    return float(np.mean(ranks_R <= k))


def ndcg(ranks_R: Ints, k: int) -> float:
    """Return the normalized discounted cumulative gain among the first k; gains are 0 and 1."""
    ideal_ranks = np.arange(1, min(len(ranks_R), k) + 1)
    gain = (1 / np.log2(1 + ranks_R[ranks_R <= k])).sum()
    ideal_gain = (1 / np.log2(1 + ideal_ranks)).sum()
    return float(gain / ideal_gain)


def bootstrap_interval(
    differences_Q: Floats, *, seed: int, resamples: int = 10_000
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of paired differences.

    The Q queries are resampled with replacement.
    """
    generator = np.random.default_rng(seed)
    Q = len(differences_Q)
    means = [differences_Q[generator.integers(0, Q, Q)].mean() for _ in range(resamples)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
