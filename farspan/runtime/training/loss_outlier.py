"""Detection of a worker with a loss far from the others'.

All workers of a replica hold one model and read sequences drawn at random, so their losses differ
by chance alone. One that stays far above the others has a model, a corpus or a processor that is
not theirs, and its gradient spoils the common one. One such step may be strange text; several in a
row are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from farspan.domain.plan import Replica

#: How many times the spread that was seen so far, and at least how many nats a token, a strayed
#: loss is above others'.
SPREADS = 8.0
LEAST_NATS = 0.5
#: Steps that are looked at before anything is judged, and over which the spread is a mean.
FIRST_STEPS = 20
WINDOW_STEPS = 200
#: Steps on end after which a worker is taken for faulty.
PATIENCE = 3


@dataclass(frozen=True)
class LossOutlier:
    """A worker with a loss far above the others': nats a token of both, and the number of steps in
    a row."""

    rank: int
    loss: float
    others: float
    steps: int


class LossOutliers:
    """Looks at the losses of the workers of a replica, step by step; each worker of it sees the
    same."""

    def __init__(self, replica: Replica, seq_len: int) -> None:
        last = replica.stages[-1]
        #: Tokens of each worker that counts a loss.
        self._tokens = dict[int, int]()
        for group, rows in zip(last.mesh.batch, last.rows, strict=True):
            if rows:
                self._tokens[group[0]] = rows * seq_len
        self._seen = 0
        self._variance = 0.0
        self._steps = 0
        self._last: int | None = None

    def find_outlier(self, by_rank: dict[int, float]) -> LossOutlier | None:
        """Return the outlier of a step, given the summed loss of each worker; None before enough
        steps were seen."""
        if len(self._tokens) < 2:
            return None
        if not all(math.isfinite(by_rank[rank]) for rank in self._tokens):
            return None
        scores = {rank: self._against_others(by_rank, rank) for rank in self._tokens}
        rank = max(scores, key=lambda worker: scores[worker][2])
        loss, others, deviation = scores[rank]
        threshold = SPREADS * math.sqrt(self._variance)
        is_far = deviation >= threshold and loss - others >= LEAST_NATS
        if self._seen < FIRST_STEPS or not is_far:
            self._seen += 1
            squares = sum(score[2] ** 2 for score in scores.values())
            change = squares / len(scores) - self._variance
            self._variance += change / min(self._seen, WINDOW_STEPS)
            self._last = None
            self._steps = 0
            return None
        self._steps = self._steps + 1 if rank == self._last else 1
        self._last = rank
        return LossOutlier(rank, loss, others, self._steps)

    def _against_others(self, by_rank: dict[int, float], rank: int) -> tuple[float, float, float]:
        """Return nats a token of a worker and of all others together, and their scaled difference:
        by chance a difference of means over n and m tokens has the variance of a token's loss times
        1/n + 1/m."""
        n = self._tokens[rank]
        m = sum(self._tokens.values()) - n
        loss = by_rank[rank] / n
        others_sum = sum(by_rank[other] for other in self._tokens if other != rank)
        others = others_sum / m
        deviation = (loss - others) / math.sqrt(1 / n + 1 / m)
        return loss, others, deviation
