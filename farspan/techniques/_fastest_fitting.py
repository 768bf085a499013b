"""The fastest plan that fits, and the refusal where none does: which device is short, by how much,
and of what."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from farspan.domain.cost import Estimate
from farspan.domain.plan import Plan, Replica
from farspan.domain.problems import Problem, command
from farspan.domain.units import format_bytes
from farspan.estimate.estimate_plan import price, step
from farspan.techniques._bounds import passes_s
from farspan.techniques._task import Task


def shortage(task: Task, plan: Plan, estimate: Estimate) -> tuple[float, int]:
    """Return bytes that the fullest device lacks (negative: spare bytes), and its rank."""
    lacking = []
    for rank, memory in zip(plan_ranks(plan), estimate.memory, strict=True):
        lacking.append((memory.total - task.capacity(rank), rank))
    return max(lacking)


def plan_ranks(plan: Plan) -> list[int]:
    """Return the ranks that a plan uses, in order."""
    ranks: list[int] = []
    for replica in plan.replicas:
        for stage in replica.stages:
            ranks += stage.mesh.ranks
    return sorted(ranks)


def fastest_plan_that_fits(task: Task, plans: Sequence[Plan]) -> Plan | Problem:
    """Return the fastest plan that fits; where none does, the shortage of the nearest one."""
    if all(plan.sync is None and len(plan.replicas) == 1 for plan in plans):
        fastest = fastest_fitting(task, [plan.replicas[0] for plan in plans])
        if fastest is not None:
            return plans[fastest]
    priced = []
    for plan in plans:
        estimate = price(plan, task.costs, brief=True)
        lacking, _ = shortage(task, plan, estimate)
        priced.append((lacking, plan, estimate))
    fitting = [(plan, estimate) for lacking, plan, estimate in priced if lacking <= 0]
    if fitting:
        return min(fitting, key=lambda pair: pair[1].step_s / pair[1].token_efficiency)[0]
    _, plan, estimate = min(priced, key=lambda row: row[0])
    return out_of_memory(task, plan, estimate)


def fastest_fitting(task: Task, replicas: Sequence[Replica]) -> int | None:
    """Return the index of the fastest replica that fits, the first of equal ones; None for none.

    A replica that cannot be faster than one that fits is not priced.
    """
    bounds = [passes_s(replica, task.costs) for replica in replicas]
    fastest = (math.inf, -1)
    for index in sorted(range(len(replicas)), key=bounds.__getitem__):
        if bounds[index] <= fastest[0] and task.fits(replicas[index]):
            fastest = min(fastest, (step(replicas[index], task.costs).seconds, index))
    return None if fastest[1] < 0 else fastest[1]


def out_of_memory(task: Task, plan: Plan, estimate: Estimate) -> Problem:
    """Return which device is short of memory, by how much, and for what."""
    lacking, rank = shortage(task, plan, estimate)
    device = task.costs.network.devices[rank]
    place = task.devices[rank]
    capacity = format_bytes(task.capacity(rank))
    memory = estimate.memory[plan_ranks(plan).index(rank)]
    parts = sorted(msgspec.structs.asdict(memory).items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    return Problem(
        code="out-of-memory",
        what=f"{device.kind} is short of {format_bytes(lacking)}, one sequence at a time",
        where=f"{place.host}, device {place.index}",
        fact=f"needs {format_bytes(memory.total)} ({largest}), usable {capacity} "
        f"of {format_bytes(device.memory)}",
        remedy=_remedy(task, device.backend, memory.total, rank),
    )


def _remedy(task: Task, backend: str, needed: float, rank: int) -> str:
    # Workers on CPUs share their host's memory: fewer of them have more each.
    num_devices = len(task.devices)
    fitting = int(task.capacity(rank) * num_devices // needed)
    if backend == "cpu" and num_devices > 1 and fitting >= 1:
        return f"set parallel.workers: {fitting:d}"
    return f"ask what fits: {command('fit', 'model', '--cluster', task.cluster.name)}"
