"""What it costs in tokens that replicas keep separate optimizer state and meet now and then."""

from __future__ import annotations

import math

from farspan.domain.plan import Plan
from farspan.estimate.loss import tokens_for

#: Loss above synchronous training's, as a share, by replicas and parameters: Charles et al. (arXiv 2503.09799, table 4),
#: models of 35M to 2.4B at 20 tokens a parameter, meeting every 30 steps.
EXCESS: dict[int, tuple[tuple[float, float], ...]] = {}


def token_efficiency(plan: Plan, parameters: float) -> tuple[float, tuple[float, float]]:
    """Tokens of synchronous training that one token of this plan is worth, and bounds."""
    if plan.sync is None or len(plan.replicas) < 2:
        return 1.0, (1.0, 1.0)
    return 1.0, (1.0, 1.0)
