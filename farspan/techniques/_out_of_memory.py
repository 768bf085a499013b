"""Whether plans fit, and the refusal where none does: which device is short, by how much, and of
what."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from farspan.domain.plan import Plan, Replica
from farspan.domain.problems import Problem
from farspan.domain.results import Estimate
from farspan.domain.units import format_bytes
from farspan.estimate.price import price, step
from farspan.techniques._bounds import passes_s
from farspan.techniques._task import Task


def shortage(task: Task, plan: Plan, estimate: Estimate) -> tuple[float, int]:
    """Bytes that the fullest device lacks (negative: has to spare), and its rank."""
    used = sorted(
        rank for replica in plan.replicas for stage in replica.stages for rank in stage.mesh.ranks
    )
    return max(
        (memory.total - task.capacity(rank), rank)
        for rank, memory in zip(used, estimate.memory, strict=True)
    )


def best(task: Task, plans: Sequence[Plan]) -> Plan | Problem:
    """The fastest plan that fits every device; where none does, what the one that lacks least is
    short of."""
    if all(plan.sync is None and len(plan.replicas) == 1 for plan in plans):
        fastest = fastest_fitting(task, [plan.replicas[0] for plan in plans])
        if fastest is not None:
            return plans[fastest]
    priced = [(plan, price(plan, task.costs, brief=True)) for plan in plans]
    fitting = [
        (plan, estimate) for plan, estimate in priced if shortage(task, plan, estimate)[0] <= 0
    ]
    if fitting:
        return min(fitting, key=lambda pair: pair[1].step_s / pair[1].token_efficiency)[0]
    plan, estimate = min(priced, key=lambda pair: shortage(task, *pair)[0])
    return out_of_memory(task, plan, estimate)


def fastest_fitting(task: Task, replicas: Sequence[Replica]) -> int | None:
    """The place of the fastest replica that fits, the first of several; None where none does. What
    cannot be faster than one that fits is not priced."""
    least = [passes_s(replica, task.costs) for replica in replicas]
    fastest = (math.inf, -1)
    for place in sorted(range(len(replicas)), key=least.__getitem__):
        if least[place] <= fastest[0] and task.fits(replicas[place]):
            fastest = min(fastest, (step(replicas[place], task.costs).seconds, place))
    return None if fastest[1] < 0 else fastest[1]


def out_of_memory(task: Task, plan: Plan, estimate: Estimate) -> Problem:
    """What is short, on which device, and by how much."""
    lacking, rank = shortage(task, plan, estimate)
    device, at = task.costs.network.devices[rank], task.devices[rank]
    used = sorted(
        r for replica in plan.replicas for stage in replica.stages for r in stage.mesh.ranks
    )
    memory = estimate.memory[used.index(rank)]
    parts = sorted(msgspec.structs.asdict(memory).items(), key=lambda part: -part[1])[:3]
    most = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    return Problem(
        code="out-of-memory",
        what=f"{device.kind} is short of {format_bytes(lacking)}, one sequence at a time",
        where=f"{at.host}, device {at.index}",
        fact=f"needs {format_bytes(memory.total)} ({most}), usable "
        f"{format_bytes(task.capacity(rank))} "
        f"of {format_bytes(device.memory)}",
        remedy=_remedy(task, device.backend, memory.total, rank),
    )


def _remedy(task: Task, backend: str, needed: float, rank: int) -> str:
    # Workers on CPUs share their host's memory: fewer of them have more each.
    everywhere = len(task.devices)
    if (
        backend == "cpu"
        and (fitting := int(task.capacity(rank) * everywhere // needed)) >= 1
        and everywhere > 1
    ):
        return f"set parallel.workers: {fitting:d}"
    return "ask what fits: farspan fit model, with the same cluster"
