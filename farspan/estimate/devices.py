"""A step as each device of a plan sees it: a stage takes as long as its slowest batch
coordinate."""

from __future__ import annotations

from typing import NamedTuple

from farspan.domain.plan import Plan, Replica
from farspan.estimate.estimate_plan import timed_stage
from farspan.estimate.stage import Costs, Pass


class DeviceTime(NamedTuple):
    """One device's passes of a microbatch, and its step: `compute_s` are its passes and its update,
    `inside_s` the collectives inside its passes."""

    passes: Pass
    compute_s: float
    inside_s: float


def stage_devices(replica: Replica, index: int, costs: Costs) -> dict[int, DeviceTime]:
    """Return the devices of one stage, by rank."""
    times: dict[int, DeviceTime] = {}
    stage, parts = replica.stages[index], replica.microbatches
    for coordinate, ranks in enumerate(stage.mesh.batch):
        alone = [count if c == coordinate else 0 for c, count in enumerate(stage.rows)]
        own = timed_stage(replica, index, costs, alone)
        waits = own.passes.forward_wait + own.passes.backward_wait
        computing = parts * (own.passes.forward + own.passes.backward - waits) + own.update
        times |= dict.fromkeys(ranks, DeviceTime(own.passes, computing, parts * waits))
    return times


def devices(plan: Plan, costs: Costs) -> dict[int, DeviceTime]:
    """Every device of a plan, by rank."""
    times: dict[int, DeviceTime] = {}
    for replica in plan.replicas:
        for index in range(len(replica.stages)):
            times |= stage_devices(replica, index, costs)
    return times
