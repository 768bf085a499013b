"""What no step falls below: cheap bounds by which searches leave out plans that cannot be the best.

Both are admissible. From the first stage's start to its next one, the first microbatch comes down
to some stage, which makes all its passes, and the last one goes back up. What comes on top only
adds: waiting, and sums that nothing hides.
"""

from __future__ import annotations

from collections.abc import Sequence

from farspan.domain.plan import Replica
from farspan.estimate.between_stages import edges
from farspan.estimate.price import timed_stage
from farspan.estimate.stage import Costs

#: Both sides are sums of the same figures, in another order.
ROUNDING = 1 - 1e-9


def passes_s(replica: Replica, costs: Costs) -> float:
    """Seconds that the passes of a step take, as if nothing else took any."""
    passes = (costs.passes(stage, stage.rows, replica.microbatches) for stage in replica.stages)
    return _piped(
        [p.forward + p.backward for p in passes], [0.0] * len(replica.edges), replica.microbatches
    )


def stages_s(replica: Replica, costs: Costs) -> float:
    """Seconds that the stages of a step take, with what each sums and updates, and the way between
    them."""
    times = [timed_stage(replica, index, costs) for index in range(len(replica.stages))]
    ways = [
        a.busy + a.delay + b.busy + b.delay for a, b in zip(*edges(replica, costs), strict=True)
    ]
    each = [time.passes.forward + time.passes.backward for time in times]
    parts = replica.microbatches
    piped = _piped(each, ways, parts) + ROUNDING * (times[0].exposed + times[0].update)
    alone = (
        parts * seconds + time.exposed + time.update
        for seconds, time in zip(each, times, strict=True)
    )
    return max(piped, ROUNDING * max(alone))


def _piped(each: Sequence[float], ways: Sequence[float], microbatches: int) -> float:
    """Seconds until all microbatches went through some stage, one of them through all before it,
    there and back."""
    least = before = 0.0
    for seconds, way in zip(each, (*ways, 0.0), strict=True):
        least = max(least, before + microbatches * seconds)
        before = before + seconds + way
    return ROUNDING * least
