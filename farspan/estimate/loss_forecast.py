"""The validation loss at a run's end: before it from counts of its own text, and on the way from
what it has reached.

    L(D, S) = a + b ln r + c ln S + d ln min(D, U) + e C2 + f C2' + g C6' + h ln N
    r = 1 + R (1 - exp(-(D / U - 1) / R)), at least 1

C2, C2' and C6' are cross-entropies of counts over min(D, U) tokens (`domain.forecast.Counted`),
which know how hard the text is: of two tokens in a row, of these and the same piece's text
before, of six in a row and the same. D are the tokens read in S steps, U those that there are, N
parameters. r are the epochs as far as they help: what is read again teaches less each time
(Muennighoff et al. 2023, arXiv 2305.16264, equation 5). On the way, a loss v after a share x of the
run is above L(x D, x S) by G(x), which goes with the learning rate, and by what this run does
worse, which lasts the more the later it is seen:

    L_end = L(D, S) + x (v - L(x D, x S) - G(x))
"""

from __future__ import annotations

import math

import msgspec

from farspan.domain.forecast import Counted, Forecast
from farspan.domain.train import Schedule
from farspan.semantics.lr_schedule import learning_rate

#: a to h of L. [fitted] by benchmarks/fit_forecast.py on the recipe's runs over eleven texts, in
#: benchmarks/results/learning.jsonl and many_epochs.jsonl.
FACTORS = (3.2770, -0.6722, -0.1591, -0.3165, 1.0562, 0.7280, -0.4051, -0.04)
#: G is so much times the schedule's share of the peak rate. [fitted] on the same.
GAP = -0.1236
#: R. [fitted] on the same.
USEFUL_REPEATS = 2.0
#: Half of the interval before training, and from a fifth of the run on: twice the standard
#: deviation of what the fit leaves of a text that it has not seen. [fitted] on the same.
BEFORE, ON_THE_WAY = 0.3, 0.25
#: From this share of a run on its own losses say more than the fit.
EARLIEST = 0.2


def forecast(
    counted: tuple[Counted, ...],
    *,
    parameters: float,
    unique_tokens: float,
    tokens: float,
    steps: float,
    bigram_nats: float,
) -> Forecast | None:
    """Forecast the loss of a run; None where the text is too short to be counted."""
    if not counted:
        return None
    counted_forecast = Forecast(
        loss=0.0,
        interval=(0.0, 0.0),
        parameters=parameters,
        unique_tokens=unique_tokens,
        tokens=tokens,
        steps=steps,
        counted=counted,
        bigram_nats=bigram_nats,
    )
    loss = expected(counted_forecast)
    return msgspec.structs.replace(
        counted_forecast, loss=loss, interval=(loss - BEFORE, loss + BEFORE)
    )


def revised(
    before: Forecast, schedule: Schedule, share: float, loss: float, bigram_nats: float | None
) -> tuple[float, float] | None:
    """(loss at the end, half of its interval) from a validation's loss after a share of the run, on
    tokens whose bigram entropy is `bigram_nats`; None before EARLIEST, and of a schedule that is
    neither linear nor a cosine."""
    if schedule.kind not in ("linear", "cosine") or not EARLIEST <= share < 1:
        return None
    easier = 0.0 if bigram_nats is None else before.bigram_nats - bigram_nats
    worse = loss + easier - expected(before, share) - GAP * rate(schedule, share)
    return before.loss + share * worse, ON_THE_WAY * (1 - share)


def expected(of: Forecast, share: float = 1.0) -> float:
    """L of a run that ends after this share of another's tokens and steps."""
    return sum(
        factor * feature for factor, feature in zip(FACTORS, features(of, share), strict=True)
    )


def features(of: Forecast, share: float = 1.0) -> tuple[float, ...]:
    """Return the features that the factors a to h multiply."""
    tokens = share * of.tokens
    again = max(0.0, tokens / of.unique_tokens - 1)
    useful = 1 + USEFUL_REPEATS * (1 - math.exp(-again / USEFUL_REPEATS))
    distinct = min(tokens, of.unique_tokens)
    return (
        1.0,
        math.log(useful),
        math.log(share * of.steps),
        math.log(distinct),
        *_nats(of.counted, distinct),
        math.log(of.parameters),
    )


def rate(schedule: Schedule, share: float) -> float:
    """Return the learning rate after a share of a run, of the peak's; warm-up and floor left
    out."""
    plain = msgspec.structs.replace(schedule, warmup_steps=0, floor=0.0)
    return learning_rate(plain, 1.0, round(share * 1000), 1001)


def _nats(counted: tuple[Counted, ...], tokens: float) -> tuple[float, float, float]:
    """C2, C2' and C6', linear in ln(tokens) between what was counted, and on from the last two."""
    if len(counted) == 1:
        (only,) = counted
        return only.few, only.few_again, only.many_again
    upper = next(
        (i for i in range(1, len(counted) - 1) if counted[i].tokens >= tokens), len(counted) - 1
    )
    less, more = counted[upper - 1], counted[upper]
    part = math.log(tokens / less.tokens) / math.log(more.tokens / less.tokens)
    return (
        less.few + part * (more.few - less.few),
        less.few_again + part * (more.few_again - less.few_again),
        less.many_again + part * (more.many_again - less.many_again),
    )
