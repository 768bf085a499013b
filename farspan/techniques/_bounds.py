"""What no step falls below: cheap bounds by which searches leave out plans that cannot be the best.

Each is admissible. Between two steps a stage makes all its passes, and none takes less than its arithmetic; then come
the sums of gradients that nothing hides, and the update. What comes on top only adds: waiting for other stages, for the
gradient's norm, for what a tied table sends.
"""

from __future__ import annotations

from farspan.domain.plan import Replica
from farspan.estimate.stage import Costs
from farspan.estimate.stage_time import stage_time

#: Both sides are sums of the same figures, in another order.
ROUNDING = 1 - 1e-9


def passes_s(replica: Replica, costs: Costs) -> float:
    """Seconds that the passes of the slowest stage take."""
    passes = (costs.passes(stage, stage.rows, replica.microbatches) for stage in replica.stages)
    return ROUNDING * max(replica.microbatches * (p.forward + p.backward) for p in passes)


def stages_s(replica: Replica, costs: Costs) -> float:
    """Seconds that the slowest stage takes, with its sums and its update, as if it waited for no other."""
    times = (stage_time(costs, stage, stage.rows, replica.microbatches) for stage in replica.stages)
    return ROUNDING * max(
        replica.microbatches * (time.passes.forward + time.passes.backward) + time.exposed + time.update
        for time in times
    )
