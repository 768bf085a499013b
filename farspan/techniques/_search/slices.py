"""What a run of neighbouring devices can be as a pipeline stage: its meshes, and tables of what
they take.

A table holds, for every number of blocks, what a microbatch takes, what the rest of a step takes,
and how many microbatches memory lets be in flight. Blocks are alike, so it does not matter which
they are, and a few priced stages give the whole table: almost everything is affine in their number.
Whether a stage has the embedding or the head follows from where its devices stand in the order: at
its start and at its end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.domain.plan import Axis, GradSync, Mesh, Stage, Zero
from farspan.estimate.stage_time import stage_time
from farspan.techniques._search.ilp import Infeasible
from farspan.techniques._search.one_stage import BUCKET_BYTES, rows_by_speed
from farspan.techniques._search.operators import Assignment
from farspan.techniques._task import Task

#: Stages at most of a pipeline over more devices than EVERY_RUN: bubbles grow with them, and the
#: search.
MOST_STAGES = 16
#: Up to so many layers every number of blocks is priced; beyond, the fewest and all of them, and
#: what lies between is taken from the line: only what hides behind the backward pass bends it.
PRICED_LAYERS = 8
#: Up to so many devices every run of neighbours inside a site may be a stage; beyond, runs are
#: whole hosts or equal parts of one.
EVERY_RUN = 16


class DeviceRange(NamedTuple):
    """Places [start, stop) of a device order."""

    start: int
    stop: int


class Ends(NamedTuple):
    """Which ends of the model a stage has."""

    embedding: bool
    head: bool

    def units(self, layers: int, blocks: int, first: int = 1) -> tuple[int, int]:
        """The units of a stage of so many blocks: with the embedding from the first on, with the
        head to the last, else from block `first` on."""
        if self.embedding:
            return 0, blocks + 1 + self.head
        return (layers + 1 - blocks, layers + 2) if self.head else (first, first + blocks)

    def fewest(self, layers: int) -> int:
        """Blocks at least: all where the stage is the whole model, one where it has neither end."""
        return layers if self.embedding and self.head else int(not any(self))


class Option(NamedTuple):
    """One way to run a stage on a slice: tensor width, splits, ZeRO level, recompute, rows of a
    microbatch."""

    ways: int
    splits: dict[str, str]
    zero: Zero
    recompute: bool
    rows: tuple[int, ...]


class PassTable(NamedTuple):
    """By blocks: seconds a microbatch (both passes), seconds of the other microbatches and of what
    comes once a step, and microbatches in flight that fit (0: does not fit)."""

    option: Option
    seconds: NDArray[np.float64]
    cycle: NDArray[np.float64]
    depth: NDArray[np.int64]


def slices(task: Task, order: Sequence[int]) -> list[DeviceRange]:
    """The runs of an order that may be a stage: inside one site, and of one host or several whole
    ones. Kept, as every number of microbatches asks for them."""
    key = ("slices", task.only, *order)
    if key not in task.memo:
        task.memo[key] = _slices(task, order)
    runs: list[DeviceRange] = task.memo[key]
    return runs


def _slices(task: Task, order: Sequence[int]) -> list[DeviceRange]:
    network = task.costs.network
    runs = []
    n = len(order)
    hosts = [network.hosts[rank] for rank in order]
    starts = [i for i in range(n) if i == 0 or hosts[i] != hosts[i - 1]]
    ends = [*starts[1:], n]
    for start in range(n):
        for stop in range(start + 1, n + 1):
            if network.sites[order[start]] != network.sites[order[stop - 1]]:
                break
            one_host = hosts[start] == hosts[stop - 1]
            whole = start in starts and stop in ends
            if n <= EVERY_RUN or whole or (one_host and _aligned(start, stop, starts, ends)):
                runs.append(DeviceRange(start, stop))
    return [run for run in runs if run.stop - run.start >= n // (4 * MOST_STAGES)]


def _aligned(start: int, stop: int, starts: Sequence[int], ends: Sequence[int]) -> bool:
    """Whether a run is one of the equal parts of its host."""
    at = next(k for k, end in enumerate(ends) if start < end)
    size = stop - start
    whole = ends[at] - starts[at]
    return whole % size == 0 and (start - starts[at]) % size == 0


class Tables:
    """Tables of slices, one for each kind of slice: those whose devices and inner links are alike
    share theirs."""

    def __init__(self, task: Task, microbatches: int) -> None:
        self.task = task
        self.microbatches = microbatches
        self.rows = task.train.batch // microbatches
        self._options: dict[int, list[Option]] = {}
        self._room: dict[tuple[object, ...], tuple[float, float]] = {}

    def of(self, ranks: Sequence[int], ends: Ends) -> list[PassTable]:
        """The tables of a slice's options that can be of use to a stage with these ends of the
        model."""
        key = ("tables", self.task.likeness(ranks), self.microbatches, self.rows, ends)
        memo = self.task.memo
        if key not in memo:
            memo[key] = self._all(ranks, ends)
        tables: list[PassTable] = memo[key]
        return tables

    def _all(self, ranks: Sequence[int], ends: Ends) -> list[PassTable]:
        """A table for every option that can be best: computing again is of use only where memory is
        short without."""
        tables: list[PassTable] = []
        full = None
        for option in self.options(ranks):
            if (
                option.recompute
                and not self.task.train.recompute
                and full is not None
                and full.all()
            ):
                continue
            table = self._table(ranks, option, ends)
            full = (
                table.depth[np.isfinite(table.seconds)] >= self.microbatches
                if table.depth.any()
                else None
            )
            tables += [table] if table.depth.any() else []
        return tables

    def options(self, ranks: Sequence[int]) -> list[Option]:
        """Every way to run a stage on a slice."""
        like = self.task.likeness(ranks)
        if like not in self._options:
            self._options[like] = self._every_option(ranks)
        return self._options[like]

    def _every_option(self, ranks: Sequence[int]) -> list[Option]:
        options = []
        for ways in tensor_widths(self.task, ranks):
            coordinates = len(ranks) // ways
            if coordinates > self.rows:
                continue
            rows = self._rows(ranks, ways)
            levels: tuple[Zero, ...] = (0, 1) if coordinates > 1 else (0,)
            splits = self._splits(ranks, ways, rows)
            for zero in levels:
                for recompute in (True,) if self.task.train.recompute else (False, True):
                    options.append(Option(ways, splits, zero, recompute, rows))
        return options

    def _rows(self, ranks: Sequence[int], ways: int) -> tuple[int, ...]:
        groups = [ranks[i : i + ways] for i in range(0, len(ranks), ways)]
        typical = max(1, self.rows // len(groups))
        costs = self.task.costs
        block = self.task.graph.block
        pace = {
            r: sum(costs.unit_s(r, block, typical, {}, 1))
            for r in {costs.alike[rank]: rank for rank in ranks}.values()
        }
        by_kind = {costs.alike[rank]: seconds for rank, seconds in pace.items()}
        return tuple(
            rows_by_speed(
                self.rows, [max(by_kind[costs.alike[r]] for r in group) for group in groups]
            )
        )

    def _splits(self, ranks: Sequence[int], ways: int, rows: Sequence[int]) -> dict[str, str]:
        """The cheapest strategies of all operators over a tensor axis, for units of every kind;
        memory is the table's matter. Rows count by their power of two: which division is best
        hardly depends on them."""
        if ways == 1:
            return {}
        return cheapest_splits(self.task, ranks[:ways], rows, len(ranks) // ways)

    def _table(self, ranks: Sequence[int], option: Option, ends: Ends) -> PassTable:
        """Priced by the number of blocks."""
        layers = self.task.graph.layers
        fewest = ends.fewest(layers)
        knots = range(fewest, layers + 1) if layers <= PRICED_LAYERS else sorted({fewest, layers})
        priced = [self._priced(ranks, option, ends.units(layers, blocks)) for blocks in knots]
        counts = np.arange(fewest, layers + 1)
        time, cycle, fixed, each = (
            np.interp(counts, knots, values) for values in zip(*priced, strict=True)
        )
        deep = np.where(
            fixed > 0, 0, np.minimum(self.microbatches, -fixed // np.maximum(each, 1.0))
        )
        seconds, spans = np.full((2, layers + 1), np.inf)
        table = PassTable(option, seconds, spans, np.zeros(layers + 1, dtype=np.int64))
        table.seconds[fewest:] = time
        table.cycle[fewest:] = cycle
        table.depth[fewest:] = deep
        return table

    def _priced(
        self, ranks: Sequence[int], option: Option, units: tuple[int, int]
    ) -> tuple[float, ...]:
        """Seconds of a microbatch; of all others and what comes once a step; bytes of the fullest
        device that stay (less its capacity); bytes that a microbatch adds."""
        task = self.task
        parts = self.microbatches
        stage = stage_of(ranks, option, units, parts)
        time = stage_time(task.costs, stage, stage.rows, parts)
        seconds = time.passes.forward + time.passes.backward
        cycle = (parts - 1) * seconds + time.exposed + time.update
        worst = (-math.inf, 0.0)
        for c in {
            task.costs.alike[group[0]]: c for c, group in enumerate(stage.mesh.batch)
        }.values():
            empty, single = self._bytes(stage, option.rows[c], c)
            worst = max(
                worst, (empty - task.capacity(stage.mesh.batch[c][0]), float(single - empty))
            )
        return seconds, cycle, *worst

    def _bytes(self, stage: Stage, rows: int, coordinate: int) -> tuple[float, float]:
        """Bytes of a device with no microbatch in flight, and with one: wherever the others of its
        stage are."""
        mesh = stage.mesh
        costs = self.task.costs
        kind = costs.alike[mesh.batch[coordinate][0]]
        key = (
            kind,
            rows,
            stage.units,
            mesh.shape,
            stage.zero,
            stage.recompute,
            *stage.splits.items(),
        )
        if key not in self._room:
            memory = (costs.memory_of(stage, rows, depth, coordinate).total for depth in (0, 1))
            self._room[key] = next(memory), next(memory)
        return self._room[key]


def cheapest_splits(
    task: Task, group: Sequence[int], rows: Sequence[int], concurrent: int, *, by_rows: bool = True
) -> dict[str, str]:
    """Strategies of all operators over a tensor axis, memory aside; rows are divided only if all
    are even, and never without `by_rows`. Rows count by their power of two: which division is best
    hardly depends on them."""
    ways = len(group)
    typical = 2 ** round(math.log2(max(rows)))
    even = by_rows and all(row % ways == 0 for row in rows)
    key = ("splits", task.likeness(group), typical, even)
    if key not in task.memo:
        rounded = (
            max(ways, typical - typical % ways) if even else max(1, typical - (typical % ways == 0))
        )
        solved = Assignment(
            task, (0, task.graph.units), group, rounded, concurrent=concurrent
        ).solve()
        task.memo[key] = {} if isinstance(solved, Infeasible) else solved[0]
    splits: dict[str, str] = task.memo[key]
    return splits


def tensor_widths(task: Task, ranks: Sequence[int]) -> list[int]:
    """Tensor widths of a slice: 1, and what divides every run of like devices of one host in it,
    and some operator."""
    network = task.costs.network
    costs = task.costs
    runs = []
    previous = None
    for rank in ranks:
        key = (network.hosts[rank], costs.alike[rank])
        if key == previous:
            runs[-1] += 1
        else:
            runs.append(1)
        previous = key
    sizes = [task.graph.sizes[dim] for op in task.graph.block for dim in op.divisible]
    return [
        ways
        for ways in range(1, min(runs) + 1)
        if all(run % ways == 0 for run in runs) and any(size % ways == 0 for size in sizes)
    ]


def stage_of(
    ranks: Sequence[int], option: Option, units: tuple[int, int], microbatches: int
) -> Stage:
    """The stage that an option means on these ranks."""
    return Stage(
        units=units,
        mesh=_mesh(tuple(ranks), option.ways),
        zero=option.zero,
        splits=option.splits,
        rows=tuple(row * microbatches for row in option.rows),
        recompute=option.recompute,
        grad_sync=GradSync(bucket_bytes=BUCKET_BYTES),
    )


@functools.lru_cache(maxsize=4096)
def _mesh(ranks: tuple[int, ...], ways: int) -> Mesh:
    """One mesh for all stages of these ranks, so that it knows its groups."""
    data = len(ranks) // ways
    axes: tuple[Axis, ...] = ("data",) if ways == 1 else ("data", "tensor")
    return Mesh(ranks=ranks, shape=(data,) if ways == 1 else (data, ways), axes=axes)
