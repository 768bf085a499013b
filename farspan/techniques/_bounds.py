"""Lower bounds of a step's time, by which searches leave out plans that cannot be the best.

Both are admissible. From the first stage's start to its next one, the first microbatch comes down
to some stage, which makes all its passes, and the last one goes back up. Waiting and exposed
communication only add to that.
"""

from __future__ import annotations

from collections.abc import Sequence

from farspan.domain.plan import Replica
from farspan.estimate.between_stages import edges
from farspan.estimate.estimate_plan import timed_stage
from farspan.estimate.stage import Costs

#: Both sides are sums of the same figures, in another order.
ROUNDING = 1 - 1e-9


def passes_s(replica: Replica, costs: Costs) -> float:
    """Return seconds that the passes of a step take, as if nothing else took any."""
    seconds = []
    for stage in replica.stages:
        passes = costs.passes(stage, stage.rows, replica.microbatches)
        seconds.append(passes.forward + passes.backward)
    return _pipeline_s(seconds, [0.0] * len(replica.edges), replica.microbatches)


def stages_s(replica: Replica, costs: Costs) -> float:
    """Return seconds of the stages of a step, with their gradient sync, updates and messages."""
    times = [timed_stage(replica, index, costs) for index in range(len(replica.stages))]
    seconds = [time.passes.forward + time.passes.backward for time in times]
    latencies = []
    for down, up in zip(*edges(replica, costs), strict=True):
        latencies.append(down.busy + down.delay + up.busy + up.delay)
    pipeline_s = _pipeline_s(seconds, latencies, replica.microbatches)
    pipeline_s += ROUNDING * (times[0].exposed + times[0].update)
    slowest_s = 0.0
    for stage_s, time in zip(seconds, times, strict=True):
        alone_s = replica.microbatches * stage_s + time.exposed + time.update
        slowest_s = max(slowest_s, alone_s)
    return max(pipeline_s, ROUNDING * slowest_s)


def _pipeline_s(seconds: Sequence[float], latencies: Sequence[float], microbatches: int) -> float:
    """Return seconds until all microbatches went through the slowest stage, one of them through
    all before it, there and back."""
    bound = 0.0
    before = 0.0
    for stage_s, latency in zip(seconds, (*latencies, 0.0), strict=True):
        bound = max(bound, before + microbatches * stage_s)
        before = before + stage_s + latency
    return ROUNDING * bound
