"""What it costs in tokens that replicas keep separate optimizer state and meet now and then.

Published runs give the loss above synchronous training's, as a share; a scaling law turns it into
tokens. Between the published sizes and replica counts the share is linear in their logarithms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

from farspan.domain.plan import Plan
from farspan.estimate.scaling_law import tokens_for

#: Evaluation loss by parameters: synchronous, then 2, 4 and 8 replicas that synchronize every 30
#: steps, at 20 tokens a parameter of C4 (Charles et al., arXiv 2503.09799, table 4).
LOSSES: dict[float, tuple[float, float, float, float]] = {
    35e6: (3.485, 3.508, 3.554, 3.621),
    90e6: (3.167, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.957, 2.981, 3.019),
    335e6: (2.784, 2.788, 2.808, 2.841),
    550e6: (2.653, 2.657, 2.673, 2.698),
    1.3e9: (2.460, 2.464, 2.472, 2.493),
    2.4e9: (2.326, 2.323, 2.332, 2.351),
}
EXCESS: dict[int, dict[float, float]] = {
    replicas: {size: losses[column] / losses[0] - 1 for size, losses in LOSSES.items()}
    for column, replicas in enumerate((2, 4, 8), start=1)
}
#: What meeting every 100 steps instead of 30 adds, by replicas: the mean over six sizes from 35M to
#: 1B, among which no trend shows (arXiv 2501.18512, tables 5 and 6; 0.3 to 0.9 % for 2 replicas,
#: 1.0 to 1.2 % for 4). Figure 9 of arXiv
#: 2503.09799 goes on to 300 about as steeply in log steps, and falls a little from 30 to 5; it
#:   prints no numbers.
LATER = {2: 0.0068, 4: 0.0112}
USUAL, LATE, LATEST, SOONEST = 30, 100, 300, 5
#: How far the two papers' shares lie apart at most where they ran the same setting. Their exchanges
#: in 4 bits differ from those in 32 by less (arXiv 2501.18512, figure 11), so bits cost nothing
#: here.
SPREAD = 0.006
#: Tokens a parameter of all these runs; with 4 and 16 times as many the shares stay (arXiv
#: 2503.09799, figure 11).
TOKENS_A_PARAMETER = 20


class TokenEfficiency(NamedTuple):
    """Tokens of synchronous training that one token of a plan is worth, bounds, and whether
    published runs in this setting stand behind them."""

    tokens: float
    interval: tuple[float, float]
    evidence: bool


def token_efficiency(plan: Plan, parameters: float) -> TokenEfficiency:
    """Return the token efficiency of a plan; outside the published settings its bounds are
    wider."""
    if plan.sync is None or len(plan.replicas) < 2:
        return TokenEfficiency(1.0, (1.0, 1.0), True)
    replicas, every = len(plan.replicas), plan.sync.every
    sizes, counts = tuple(LOSSES), tuple(EXCESS)
    share = excess(parameters, replicas, every)
    inside = excess(
        min(max(parameters, sizes[0]), sizes[-1]), min(replicas, counts[-1]), min(every, LATE)
    )
    spread = SPREAD + abs(share - inside)
    evidence = (
        sizes[0] <= parameters <= sizes[-1]
        and replicas <= counts[-1]
        and SOONEST <= every <= min(LATEST, plan.train.steps)
    )
    low, high = _worth(share + spread, parameters), _worth(share - spread, parameters)
    return TokenEfficiency(_worth(share, parameters), (low, high), evidence)


def excess(parameters: float, replicas: int, every: int) -> float:
    """Return the loss above synchronous training's, as a share, of replicas that synchronize every
    `every` steps."""
    by_count = {count: _linear(of_size, parameters) for count, of_size in EXCESS.items()}
    later = max(0.0, math.log(every / USUAL) / math.log(LATE / USUAL))
    return _linear(by_count, replicas) + later * _linear(LATER, replicas)


def _worth(share: float, parameters: float) -> float:
    return 1 / tokens_for(share, parameters, TOKENS_A_PARAMETER * parameters)


def _linear(points: Mapping[Any, float], at: float) -> float:
    """Return the broken line through the points over the logarithm of their keys, its ends
    prolonged."""
    keys = sorted(points)
    place = min(max(1, bisect_left(keys, at)), len(keys) - 1)
    x0, x1 = keys[place - 1], keys[place]
    share = math.log(at / x0) / math.log(x1 / x0)
    return points[x0] + share * (points[x1] - points[x0])
