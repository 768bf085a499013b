"""The order of a stage's passes over its microbatches: one forward, one backward (1F1B, arXiv
1806.03377), whose depth in flight may be less; with all microbatches in flight it is GPipe's (arXiv
1811.06965)."""

from __future__ import annotations

from farspan.domain.plan import Replica


def order_1f1b_passes(microbatches: int, depth: int) -> list[tuple[str, int]]:
    """Return the passes of a stage: `depth` forward passes ahead, then backward and forward in
    turn."""
    ahead = min(depth, microbatches)
    passes = [("forward", i) for i in range(ahead)]
    for i in range(microbatches):
        passes.append(("backward", i))
        if ahead + i < microbatches:
            passes.append(("forward", ahead + i))
    return passes


def depths_in_flight(replica: Replica) -> list[int]:
    """Microbatches that each stage has begun and not finished at most: no stage can have more than
    the one before it lets through, nor more than there are."""
    depths, most = [], replica.microbatches
    for depth in replica.in_flight:
        most = min(most, depth)
        depths.append(most)
    return depths
