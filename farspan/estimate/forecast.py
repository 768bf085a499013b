"""The validation loss at a run's end: before it from counts of its own text, and on the way from what it has reached.

    L = a + b ln D + c ln(D / U, at least 1) + d ln N + e C(min(D, U))

C(D) is the cross-entropy of counts of three tokens in a row over D tokens (`corpus.counting`), which knows how hard
the text is; D are the tokens read, U those that there are, N parameters. On the way, a loss v after a share x of the
run is above L(x D) by g(x), which goes with the learning rate, and by what this run does worse, which lasts the more
the later it is seen:

    L_end = L(D) + x (v - L(x D) - g(x))
"""

from __future__ import annotations

import math

import msgspec

from farspan.domain.forecast import Forecast
from farspan.domain.train import Schedule
from farspan.semantics.lr_schedule import learning_rate

#: a to e of L, and g = GAP times the schedule's share of the peak rate. [fitted] by benchmarks/fit_forecast.py on the
#: recipe's runs in benchmarks/results/learning.jsonl and many_epochs.jsonl: two texts, 2.9 M and 6 M parameters.
A, B, C, D, E, GAP = 14.0235, -0.7211, 0.3593, -0.04, 0.2052, -0.1255
#: Half of the interval before training, and from a fifth of the run on: twice the standard deviation of what the fit
#: leaves. [fitted] on the same.
BEFORE, ON_THE_WAY = 0.3, 0.3
#: From this share of a run on its own losses say more than the fit.
EARLIEST = 0.2
#: What repeats beyond so many do is not in the fit.
MOST_REPEATS = 40.0


def forecast(
    counted: tuple[tuple[float, float], ...],
    *,
    parameters: float,
    unique_tokens: float,
    tokens: float,
    bigram_nats: float,
) -> Forecast | None:
    """Of a run that reads so many tokens; None where the text is too short to be counted."""
    if not counted:
        return None
    loss = _loss(counted, parameters, unique_tokens, tokens)
    return Forecast(
        loss=loss, interval=(loss - BEFORE, loss + BEFORE), parameters=parameters, unique_tokens=unique_tokens,
        tokens=tokens, counted=counted, bigram_nats=bigram_nats,
    )  # fmt: skip


def revised(
    before: Forecast, schedule: Schedule, share: float, loss: float, bigram_nats: float | None
) -> tuple[float, float] | None:
    """(loss at the end, half of its interval) from a validation's loss after a share of the run, on tokens whose bigram
    entropy is `bigram_nats`; None before EARLIEST, and of a schedule that is neither linear nor a cosine."""
    if schedule.kind not in ("linear", "cosine") or not EARLIEST <= share < 1:
        return None
    there = _loss(before.counted, before.parameters, before.unique_tokens, share * before.tokens)
    gap = GAP * learning_rate(
        msgspec.structs.replace(schedule, warmup_steps=0, floor=0.0), 1.0, round(share * 1000), 1001
    )
    easier = 0.0 if bigram_nats is None else before.bigram_nats - bigram_nats
    return before.loss + share * (loss + easier - there - gap), ON_THE_WAY * (1 - share)


def _loss(counted: tuple[tuple[float, float], ...], parameters: float, unique: float, tokens: float) -> float:
    repeats = min(MOST_REPEATS, max(1.0, tokens / unique))
    offset = A + B * math.log(tokens) + C * math.log(repeats) + D * math.log(parameters)
    return E * _nats(counted, min(tokens, unique)) + offset


def _nats(counted: tuple[tuple[float, float], ...], tokens: float) -> float:
    """Linear in ln(tokens) between what was counted, and on from the last two."""
    if len(counted) == 1:
        return counted[0][1]
    upper = next((i for i in range(1, len(counted) - 1) if counted[i][0] >= tokens), len(counted) - 1)
    (few, high), (many, low) = counted[upper - 1], counted[upper]
    return high + (low - high) * math.log(tokens / few) / math.log(many / few)
