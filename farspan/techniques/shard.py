"""Intra-operator parallelism: a tensor axis inside hosts, the batch over the rest.

The search of Alpa's intra-operator pass (arXiv 2201.12023, section 4) over meshes (data, tensor) of
every width that the hosts allow, and every ZeRO level over the data axis. Width 1 is data
parallelism, so this is never slower than it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from farspan.domain.plan import Mesh, Plan, Zero
from farspan.domain.problems import Problem
from farspan.techniques import data, fsdp, hsdp, zero1, zero2
from farspan.techniques._fastest_fitting import fastest_plan_that_fits
from farspan.techniques._search.ilp import Infeasible
from farspan.techniques._search.one_stage import one_device, plans, relabelled, stage_rows
from farspan.techniques._search.operators import Assignment
from farspan.techniques._search.slices import cheapest_splits
from farspan.techniques._task import Task

ZEROS: tuple[Zero, ...] = (0, 1, 2, 3)


def plan(task: Task) -> Plan | Problem:
    """Return the best mesh of (data, tensor), or the shortage of data parallelism."""
    return one_device(task, "shard") or task.answer("shard", _best_plan)


def _best_plan(task: Task) -> Plan | Problem:
    candidates: list[Plan] = []
    problems: list[Problem] = []
    for other in (data, zero1, zero2, fsdp, hsdp):
        answer = other.plan(task)
        (problems if isinstance(answer, Problem) else candidates).append(answer)
    for ways in widths(task):
        candidates += _plans_of_width(task, ways)
    if candidates:
        return relabelled(fastest_plan_that_fits(task, candidates), "shard")
    if problems[0].code != "out-of-memory":
        return problems[0]
    # The smallest shortage of all levels: the refusal names the nearest thing that would fit.
    mesh = Mesh(ranks=tuple(task.ranks), shape=(len(task.ranks),), axes=("data",))
    for zero in ZEROS:
        candidates += plans(task, "shard", mesh, zero=zero)
    return fastest_plan_that_fits(task, candidates)


def widths(task: Task) -> tuple[int, ...]:
    """Return sizes of a tensor axis, from 2 on, that divide every host into groups of one kind."""
    hosts = task.costs.network.hosts
    alike = task.costs.alike
    groups = itertools.groupby(task.ranks, key=lambda rank: (hosts[rank], alike[rank]))
    lengths = [len(list(group)) for _, group in groups]
    common = math.gcd(*lengths)
    return tuple(ways for ways in range(2, common + 1) if common % ways == 0)


def _plans_of_width(task: Task, ways: int) -> list[Plan]:
    """Return the plans of one width: for each ZeRO level the cheapest division that fits."""
    coordinates = len(task.ranks) // ways
    if task.train.batch < coordinates:
        return []
    ranks = tuple(task.ranks)
    if coordinates > 1:
        mesh = Mesh(ranks=ranks, shape=(coordinates, ways), axes=("data", "tensor"))
        levels = ZEROS
    else:
        mesh = Mesh(ranks=ranks, shape=(ways,), axes=("tensor",))
        levels = ZEROS[:1]
    candidates: list[Plan] = []
    for zero in levels:
        for splits in assignments(task, mesh, zero):
            candidates += plans(task, "shard", mesh, zero=zero, splits=splits)
    return candidates


def assignments(task: Task, mesh: Mesh, zero: Zero) -> list[dict[str, str]]:
    """Return splits of every operator for the whole model on this mesh.

    The cheapest, and the cheapest that divide no rows where memory wants small microbatches. Where
    neither fits one sequence at a time, the cheapest that do.
    """
    coordinates = len(mesh.batch)
    rows = stage_rows(task, mesh, {}, task.train.batch)[0]

    def block_s(group: Sequence[int]) -> tuple[float, float]:
        return task.costs.unit_s(group[0], task.graph.block, max(rows), {}, 1)

    slowest = max(mesh.batch, key=block_s)
    fitting = []
    for by_rows in (True, False):
        splits = cheapest_splits(task, slowest, rows, coordinates, by_rows=by_rows)
        candidates = plans(task, "shard", mesh, zero=zero, splits=splits)
        replicas = [candidate.replicas[0] for candidate in candidates]
        fits = [task.fits(replica) for replica in replicas]
        if any(fits):
            fitting.append(splits)
        is_whole = all(fits) and all(replica.microbatches == 1 for replica in replicas)
        if is_whole or "b" not in splits.values():
            break
    if fitting:
        return fitting

    capacity = min(task.capacity(rank) for rank in mesh.ranks)
    smallest = Assignment(
        task,
        (0, task.graph.units),
        slowest,
        1,
        zero=zero,
        data=mesh.size("data"),
        microbatches=max(rows),
        concurrent=coordinates,
    )
    solved = smallest.solve(capacity)
    return [] if isinstance(solved, Infeasible) else [solved[0]]
