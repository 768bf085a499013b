"""Intra-operator parallelism: a tensor axis inside hosts, the batch over the rest, operators
divided by an ILP.

The search of Alpa's intra-operator pass (arXiv 2201.12023, section 4) over meshes (data, tensor) of
every width that the hosts allow, and every ZeRO level over the data axis. Width 1 is data
parallelism, so this is never slower than it.
"""

from __future__ import annotations

from farspan.domain.plan import Axis, Mesh, Plan, Zero
from farspan.domain.problems import Problem
from farspan.techniques import data, fsdp, hsdp, zero1, zero2
from farspan.techniques._out_of_memory import best
from farspan.techniques._search.ilp import Infeasible
from farspan.techniques._search.one_stage import one_device, plans, relabelled, stage_rows
from farspan.techniques._search.operators import Assignment
from farspan.techniques._search.slices import cheapest_splits
from farspan.techniques._task import Task

ZEROS: tuple[Zero, ...] = (0, 1, 2, 3)


def plan(task: Task) -> Plan | Problem:
    """The best mesh of (data, tensor); raises nothing: what does not fit is told as data
    parallelism tells it."""
    return one_device(task, "shard") or task.answer("shard", _plan)


def _plan(task: Task) -> Plan | Problem:
    candidates: list[Plan] = []
    problems: list[Problem] = []
    for other in (data, zero1, zero2, fsdp, hsdp):
        answer = other.plan(task)
        (problems if isinstance(answer, Problem) else candidates).append(answer)
    for ways in widths(task):
        candidates += _plans(task, ways)
    if not candidates:
        if any(problem.code != "out-of-memory" for problem in problems[:1]):
            return problems[0]
        mesh = Mesh(ranks=tuple(task.ranks), shape=(len(task.ranks),), axes=("data",))
        # What lacks least of all levels, so that the refusal names the nearest thing that would
        # fit.
        return best(
            task,
            [candidate for zero in ZEROS for candidate in plans(task, "shard", mesh, zero=zero)],
        )
    return relabelled(best(task, candidates), "shard")


def widths(task: Task) -> tuple[int, ...]:
    """Sizes of a tensor axis that divide every host into groups of like devices, 2 and more."""
    network = task.costs.network
    runs: list[int] = []
    previous = None
    for rank, host in enumerate(network.hosts):
        key = (host, task.costs.alike[rank])
        if key == previous:
            runs[-1] += 1
        else:
            runs.append(1)
        previous = key
    return tuple(ways for ways in range(2, min(runs) + 1) if all(run % ways == 0 for run in runs))


def _plans(task: Task, ways: int) -> list[Plan]:
    """The plans of one width: for each ZeRO level the cheapest division under the memory that is
    left."""
    coordinates = len(task.ranks) // ways
    if task.train.batch < coordinates:
        return []
    ranks = tuple(task.ranks)
    axes: tuple[Axis, ...] = ("data", "tensor") if coordinates > 1 else ("tensor",)
    mesh = Mesh(ranks=ranks, shape=(coordinates, ways) if coordinates > 1 else (ways,), axes=axes)
    levels = ZEROS if coordinates > 1 else ZEROS[:1]
    candidates: list[Plan] = []
    for zero in levels:
        for splits in assignments(task, mesh, zero):
            candidates += plans(task, "shard", mesh, zero=zero, splits=splits)
    return candidates


def assignments(task: Task, mesh: Mesh, zero: Zero) -> list[dict[str, str]]:
    """Splits of every operator for the whole model on this mesh: the cheapest, and the cheapest
    that divide no rows where memory wants these in small parts; or, where neither fits one sequence
    at a time, the cheapest that do."""
    coordinates = len(mesh.batch)
    rows = stage_rows(task, mesh, {}, task.train.batch)[0]
    slowest = max(
        mesh.batch,
        key=lambda group: task.costs.unit_s(group[0], task.graph.block, max(rows), {}, 1),
    )
    fitting = []
    for by_rows in (True, False):
        splits = cheapest_splits(task, slowest, rows, coordinates, by_rows=by_rows)
        replicas = [
            candidate.replicas[0]
            for candidate in plans(task, "shard", mesh, zero=zero, splits=splits)
        ]
        if any(map(task.fits, replicas)):
            fitting.append(splits)
        if "b" not in splits.values() or all(
            replica.microbatches == 1 and task.fits(replica) for replica in replicas
        ):
            break
    if fitting:
        return fitting
    tightest = min(task.capacity(rank) for rank in mesh.ranks)
    least = Assignment(
        task,
        (0, task.graph.units),
        slowest,
        1,
        zero=zero,
        data=mesh.size("data"),
        microbatches=max(rows),
        concurrent=coordinates,
    ).solve(tightest)
    return [] if isinstance(least, Infeasible) else [least[0]]
