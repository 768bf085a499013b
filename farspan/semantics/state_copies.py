"""Which workers of a plan hold the same state."""

from __future__ import annotations

from farspan.domain.plan import Plan, Stage


def has_copies(plan: Plan) -> bool:
    """Return whether the run may lose a worker without a part of the state of its last whole step:
    the workers that are left hold all of it, and resume without that worker's own memory.

    Replicas with optimizers of their own, and gradients in fewer than 32 bits with the residual of
    each worker, have no such step.
    """
    if len(plan.replicas) > 1:
        return False
    stages = plan.replicas[0].stages
    if any(stage.grad_sync.bits < 32 for stage in stages):
        return False
    return any(_count_copies(stage) > 1 for stage in stages)


def _count_copies(stage: Stage) -> int:
    """Count the workers that hold a part of a stage's state: ZeRO divides it over the data axis."""
    sites = stage.mesh.size("site")
    return sites if stage.zero else sites * stage.mesh.size("data")
