"""Small changes of a pipeline, taken while the full estimator finds the step shorter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from farspan.domain.plan import Replica, Stage
from farspan.estimate.estimate_plan import step
from farspan.techniques._bounds import stages_s
from farspan.techniques._search.slices import Tables, stage_of
from farspan.techniques._task import Task

#: Moves that are taken.
MAX_MOVES = 64
#: Up to this number of devices stages also try other meshes, ZeRO levels and recompute, and give
#: each other a device.
ALL_MOVES = 6
#: A move pays if it shortens the step by more than rounding.
MAX_TIME_RATIO = 0.9999


def improved(task: Task, seconds: float, replica: Replica) -> tuple[float, Replica]:
    """Return the step and the replica after every move that pays.

    Moves are cuts by one unit, depths by one microbatch, and on few devices the other options of a
    stage and devices from one stage to the next.
    """
    for _ in range(MAX_MOVES):
        better = _first_better(task, seconds, replica)
        if better is None:
            break
        seconds, replica = better
    return seconds, replica


def _first_better(task: Task, seconds: float, replica: Replica) -> tuple[float, Replica] | None:
    limit = MAX_TIME_RATIO * seconds
    for other in _neighbours(task, replica):
        if stages_s(other, task.costs) >= limit:
            continue
        other_s = step(other, task.costs).seconds
        if other_s < limit and task.fits(other):
            return other_s, other
    return None


def _neighbours(task: Task, replica: Replica) -> Iterator[Replica]:
    # A cut by one unit.
    for index, (first, second) in enumerate(itertools.pairwise(replica.stages)):
        start, cut = first.units
        end = second.units[1]
        for moved in (cut - 1, cut + 1):
            if start < moved < end:
                shorter = msgspec.structs.replace(first, units=(start, moved))
                longer = msgspec.structs.replace(second, units=(moved, end))
                yield _replace_stages(replica, index, [shorter, longer])
    # One more microbatch in flight.
    for index, depth in enumerate(replica.in_flight):
        if depth < replica.microbatches:
            deeper = list(replica.in_flight)
            deeper[index] += 1
            yield msgspec.structs.replace(replica, in_flight=tuple(deeper))
    if len(task.ranks) > ALL_MOVES:
        return
    # Another option of a stage, or a device for its neighbour.
    tables = Tables(task, replica.microbatches)
    for index, stage in enumerate(replica.stages):
        for other in _stages_on(tables, stage.mesh.ranks, stage, replica):
            yield _replace_stages(replica, index, [other])
    for index, (first, second) in enumerate(itertools.pairwise(replica.stages)):
        for pair in _moved_device(task, tables, first, second, replica):
            yield _replace_stages(replica, index, pair)


def _replace_stages(replica: Replica, index: int, stages: list[Stage]) -> Replica:
    changed = (*replica.stages[:index], *stages, *replica.stages[index + len(stages) :])
    return msgspec.structs.replace(replica, stages=changed)


def _stages_on(
    tables: Tables, ranks: tuple[int, ...], stage: Stage, replica: Replica
) -> Iterator[Stage]:
    """Yield every way to run a stage's units on these ranks."""
    for option in tables.options(ranks):
        yield stage_of(ranks, option, stage.units, replica.microbatches)


def _moved_device(
    task: Task, tables: Tables, first: Stage, second: Stage, replica: Replica
) -> Iterator[list[Stage]]:
    """Yield both stages after one has given the other its nearest device, inside one site."""
    sites = task.costs.network.sites
    ranks = (*first.mesh.ranks, *second.mesh.ranks)
    size = len(first.mesh.ranks)
    for count in (size - 1, size + 1):
        parts = (ranks[:count], ranks[count:])
        if any(len({sites[rank] for rank in part}) != 1 for part in parts):
            continue
        for before in _stages_on(tables, parts[0], first, replica):
            for after in _stages_on(tables, parts[1], second, replica):
                yield [before, after]
