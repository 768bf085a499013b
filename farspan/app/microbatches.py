"""The largest microbatch that fits, found by trying: where the estimate is unsure a run begins with
the larger one, and resumes with half where its devices lack memory for it.

What did not fit is kept among the trials, so that the next run does not try it again.
"""

from __future__ import annotations

from msgspec.structs import replace

from farspan import models
from farspan.app import clusters
from farspan.app.plans import Planned, planned_devices
from farspan.app.replanning import resolve_rest
from farspan.app.trial_cache import is_known_to_lack_memory, record_lack_of_memory
from farspan.app.updates import Note, Progress, ignore_update
from farspan.domain.cluster import Cluster
from farspan.domain.cost import Estimate
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.domain.run import RunFolder
from farspan.domain.units import format_bytes
from farspan.estimate.estimate_plan import estimate
from farspan.planning.microbatches import (
    double_microbatches,
    halve_microbatches,
    largest_microbatch,
)

#: Of a GPU's memory an estimate is unsure by this share: nothing that was measured says less
#: (docs/benchmarks.md). A choice.
UNSURE_SHARE = 0.1


def price(plan: Plan, cluster: Cluster) -> Estimate:
    return estimate(plan, models.graph(plan.model), cluster, load_engine(plan.engine))


def enlarge_where_unsure(planned: Planned, progress: Progress = ignore_update) -> Planned:
    """Return the plan with microbatches twice as large where its GPUs may hold them: predicted to
    need more than a plan may fill, by less than the estimate's uncertainty, and less than there is.

    It begins the run: its first step is the trial, and `halve_after_oom` its other end.
    """
    cluster = planned.resolved.cluster
    if any(at.backend != "cuda" for at in planned.plan.devices):
        return planned
    larger = double_microbatches(planned.plan)
    if larger is None or is_known_to_lack_memory(larger, cluster):
        return planned
    priced = price(larger, cluster)
    most = load_engine(larger.engine).fill * (1 + UNSURE_SHARE)
    devices = planned_devices(larger, cluster)
    for memory, device in zip(priced.memory, devices, strict=True):
        if memory.total > most * device.memory or memory.total > device.memory:
            return planned
    if priced.step_s >= planned.estimate.step_s:
        return planned
    size = max(map(largest_microbatch, larger.replicas))
    needed = format_bytes(priced.memory_bytes)
    progress(Note(f"trying microbatches of {size:,} sequences, predicted to need {needed}"))
    return replace(planned, plan=larger, estimate=priced)


def halve_after_oom(run: RunFolder, problem: Problem) -> Planned | None:
    """Return the run's plan with microbatches half as large, after a worker lacked memory; None
    where that was another problem, or there is nothing to halve."""
    if problem.code != "out-of-memory":
        return None
    plan = run.load_plan()
    smaller = halve_microbatches(plan, problem.rank)
    if smaller is None:
        return None
    cluster = clusters.cluster_of_run(run)
    record_lack_of_memory(plan, cluster, problem)
    resolved = resolve_rest(run, cluster)
    return Planned(plan=smaller, estimate=price(smaller, cluster), resolved=resolved)


def describe_halving(before: Plan, after: Plan) -> str:
    """Describe the change for people."""
    old = max(map(largest_microbatch, before.replicas))
    new = max(map(largest_microbatch, after.replicas))
    batch = before.train.batch
    return f"microbatches of {new:,} sequences, not {old:,}; the batch stays {batch:,}"
