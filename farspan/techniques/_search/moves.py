"""Small changes of a pipeline, taken while the full estimator finds the step shorter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from farspan.domain.plan import Replica, Stage
from farspan.estimate.price import step
from farspan.techniques._bounds import stages_s
from farspan.techniques._search.slices import Tables, stage_of
from farspan.techniques._task import Task

#: Moves at most.
MOST_MOVES = 64
#: Up to so many devices stages also try other meshes, ZeRO levels and recompute, and hand each
#: other a device.
ALL_MOVES = 6


def improved(task: Task, seconds: float, replica: Replica) -> tuple[float, Replica]:
    """The step and the replica after every move that pays: cuts by one unit, depths by one
    microbatch, and on few devices the other ways to run a stage and devices from one stage to the
    next."""
    for _ in range(MOST_MOVES):
        better = next(
            (
                (took, other)
                for other in _neighbours(task, replica)
                if stages_s(other, task.costs) < 0.9999 * seconds
                and (took := step(other, task.costs).seconds) < 0.9999 * seconds
                and task.fits(other)
            ),
            None,
        )
        if better is None:
            break
        seconds, replica = better
    return seconds, replica


def _neighbours(task: Task, replica: Replica) -> Iterator[Replica]:
    stages = replica.stages
    for i, (first, second) in enumerate(itertools.pairwise(stages)):
        for cut in (first.units[1] - 1, first.units[1] + 1):
            if first.units[0] < cut < second.units[1]:
                yield _with(
                    replica,
                    i,
                    [
                        msgspec.structs.replace(first, units=(first.units[0], cut)),
                        msgspec.structs.replace(second, units=(cut, second.units[1])),
                    ],
                )
    for i, depth in enumerate(replica.in_flight):
        if depth < replica.microbatches:
            deeper = (*replica.in_flight[:i], depth + 1, *replica.in_flight[i + 1 :])
            yield msgspec.structs.replace(replica, in_flight=deeper)
    if len(task.ranks) <= ALL_MOVES:
        tables = Tables(task, replica.microbatches)
        for i, stage in enumerate(stages):
            yield from (
                _with(replica, i, [other])
                for other in _others(tables, stage.mesh.ranks, stage, replica)
            )
        for i, (first, second) in enumerate(itertools.pairwise(stages)):
            yield from (
                _with(replica, i, pair) for pair in _handed(task, tables, first, second, replica)
            )


def _with(replica: Replica, index: int, stages: list[Stage]) -> Replica:
    """The replica with these stages from `index` on."""
    changed = (*replica.stages[:index], *stages, *replica.stages[index + len(stages) :])
    return msgspec.structs.replace(replica, stages=changed)


def _others(
    tables: Tables, ranks: tuple[int, ...], stage: Stage, replica: Replica
) -> Iterator[Stage]:
    """Every way to run a stage's units on these ranks."""
    for option in tables.options(ranks):
        yield stage_of(ranks, option, stage.units, replica.microbatches)


def _handed(
    task: Task, tables: Tables, first: Stage, second: Stage, replica: Replica
) -> Iterator[list[Stage]]:
    """Both stages after one has handed the other its nearest device, inside one site."""
    both = (*first.mesh.ranks, *second.mesh.ranks)
    for count in (len(first.mesh.ranks) - 1, len(first.mesh.ranks) + 1):
        parts = both[:count], both[count:]
        if not all(parts) or any(
            len({task.costs.network.sites[rank] for rank in part}) > 1 for part in parts
        ):
            continue
        for a in _others(tables, parts[0], first, replica):
            yield from ([a, b] for b in _others(tables, parts[1], second, replica))
