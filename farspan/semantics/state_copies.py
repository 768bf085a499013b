"""Which workers of a plan hold the same state."""

from __future__ import annotations

from farspan.domain.cluster import Cluster
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


def share_made_again(plan: Plan, cluster: Cluster) -> float:
    """Return the share of lost hosts after which the steps since the newest checkpoint are made
    again: none where the other hosts hold all of the state and see rank 0's run folder, and one of
    all where that lies on rank 0's own disk."""
    hosts = [device.host for device in plan.devices]
    if not has_copies(plan):
        return 1.0
    for stage in plan.replicas[0].stages:
        if any(len({hosts[rank] for rank in group}) < 2 for group in stage.mesh.transposed):
            return 1.0
    folders = {host.name: host.folder for host in cluster.machines}
    return 0.0 if folders[hosts[0]] is None else 1 / len(set(hosts))


def _count_copies(stage: Stage) -> int:
    """Count the workers that hold a part of a stage's state: ZeRO divides it over the data axis."""
    sites = stage.mesh.size("site")
    return sites if stage.zero else sites * stage.mesh.size("data")
