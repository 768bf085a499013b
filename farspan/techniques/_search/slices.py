"""Device ranges that can be a pipeline stage, their options, and tables of what these cost.

A table holds, for every number of blocks, the seconds of a microbatch, the seconds of the rest of a
step, and the microbatches in flight that memory holds. Blocks are alike, so it does not matter
which they are, and a few priced stages give the whole table: almost everything is affine in their
number. Whether a stage has the embedding or the head follows from the place of its devices: at the
start and at the end of the order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.domain.plan import Axis, GradSync, Mesh, Stage, Zero
from farspan.estimate.stage_time import stage_time
from farspan.techniques._search.ilp import Infeasible
from farspan.techniques._search.one_stage import BUCKET_BYTES, divide_rows_by_speed
from farspan.techniques._search.operators import Assignment
from farspan.techniques._task import Task

#: Stages of a pipeline over more than EVERY_RUN devices: bubbles grow with them, and the search.
MOST_STAGES = 16
#: Up to this number of layers every number of blocks is priced. Beyond, the fewest and all of them
#: are, and the rest is interpolated: only what overlaps the backward pass is not affine.
PRICED_LAYERS = 8
#: Up to this number of devices every range of neighbours inside a site may be a stage. Beyond,
#: ranges are whole hosts or equal parts of one.
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
        """Return the units of a stage with `blocks` blocks, from block `first` on without ends."""
        if self.embedding:
            return 0, blocks + 1 + self.head
        if self.head:
            return layers + 1 - blocks, layers + 2
        return first, first + blocks

    def fewest(self, layers: int) -> int:
        """Return the fewest blocks: all for the whole model, 1 for a stage without an end."""
        if self.embedding and self.head:
            return layers
        return int(not self.embedding and not self.head)


class Option(NamedTuple):
    """One way to run a stage: tensor width, splits, ZeRO level, recompute, rows of a microbatch."""

    ways: int
    splits: dict[str, str]
    zero: Zero
    recompute: bool
    rows: tuple[int, ...]


class PassTable(NamedTuple):
    """Costs of a stage by its number of blocks.

    `seconds`: both passes of a microbatch; `cycle`: the other microbatches, and what comes once a
    step; `depth`: microbatches in flight that memory holds (0: does not fit).
    """

    option: Option
    seconds: NDArray[np.float64]
    cycle: NDArray[np.float64]
    depth: NDArray[np.int64]


def slices(task: Task, order: Sequence[int]) -> list[DeviceRange]:
    """Return the ranges of an order that may be a stage.

    They lie inside one site, on one host or on several whole ones. Every number of microbatches
    asks for them, so the task keeps them.
    """
    key = ("slices", task.only, *order)
    if key not in task.memo:
        task.memo[key] = _find_ranges(task, order)
    ranges: list[DeviceRange] = task.memo[key]
    return ranges


def _find_ranges(task: Task, order: Sequence[int]) -> list[DeviceRange]:
    network = task.costs.network
    n = len(order)
    hosts = [network.hosts[rank] for rank in order]
    host_starts = [place for place in range(n) if place == 0 or hosts[place] != hosts[place - 1]]
    host_ends = [*host_starts[1:], n]
    min_size = n // (4 * MOST_STAGES)
    ranges = []
    for start in range(n):
        for stop in range(start + 1, n + 1):
            if network.sites[order[start]] != network.sites[order[stop - 1]]:
                break
            is_allowed = n <= EVERY_RUN or (start in host_starts and stop in host_ends)
            if not is_allowed and hosts[start] == hosts[stop - 1]:
                is_allowed = _is_equal_part(start, stop, host_starts, host_ends)
            if is_allowed and stop - start >= min_size:
                ranges.append(DeviceRange(start, stop))
    return ranges


def _is_equal_part(
    start: int, stop: int, host_starts: Sequence[int], host_ends: Sequence[int]
) -> bool:
    """Return whether a range is one of the equal parts of its host."""
    host = next(index for index, end in enumerate(host_ends) if start < end)
    size = stop - start
    host_size = host_ends[host] - host_starts[host]
    return host_size % size == 0 and (start - host_starts[host]) % size == 0


class Tables:
    """Cost tables of device ranges; ranges whose devices and inner links are alike share theirs."""

    def __init__(self, task: Task, microbatches: int) -> None:
        self.task = task
        self.microbatches = microbatches
        self.rows = task.train.batch // microbatches
        self._options: dict[int, list[Option]] = {}
        self._bytes: dict[tuple[object, ...], tuple[float, float]] = {}

    def of(self, ranks: Sequence[int], ends: Ends) -> list[PassTable]:
        """Return the tables of a range's options for a stage with these ends of the model."""
        key = ("tables", self.task.likeness(ranks), self.microbatches, self.rows, ends)
        memo = self.task.memo
        if key not in memo:
            memo[key] = self._price_options(ranks, ends)
        tables: list[PassTable] = memo[key]
        return tables

    def _price_options(self, ranks: Sequence[int], ends: Ends) -> list[PassTable]:
        """Return a table for every option that can be best.

        Recompute helps only where memory is short without it.
        """
        tables: list[PassTable] = []
        all_fit = False
        for option in self.options(ranks):
            if option.recompute and not self.task.train.recompute and all_fit:
                continue
            table = self._price_option(ranks, option, ends)
            all_fit = False
            if table.depth.any():
                depths = table.depth[np.isfinite(table.seconds)]
                all_fit = bool((depths >= self.microbatches).all())
                tables.append(table)
        return tables

    def options(self, ranks: Sequence[int]) -> list[Option]:
        """Return every way to run a stage on a range."""
        likeness = self.task.likeness(ranks)
        if likeness not in self._options:
            self._options[likeness] = self._find_options(ranks)
        return self._options[likeness]

    def _find_options(self, ranks: Sequence[int]) -> list[Option]:
        options = []
        for ways in tensor_widths(self.task, ranks):
            coordinates = len(ranks) // ways
            if coordinates > self.rows:
                continue
            rows = self._rows_by_speed(ranks, ways)
            levels: tuple[Zero, ...] = (0, 1) if coordinates > 1 else (0,)
            splits = {}
            if ways > 1:
                splits = cheapest_splits(self.task, ranks[:ways], rows, coordinates)
            for zero in levels:
                for recompute in (True,) if self.task.train.recompute else (False, True):
                    options.append(Option(ways, splits, zero, recompute, rows))
        return options

    def _rows_by_speed(self, ranks: Sequence[int], ways: int) -> tuple[int, ...]:
        """Return the rows of each coordinate, by the speed of its slowest device."""
        costs = self.task.costs
        groups = [ranks[first : first + ways] for first in range(0, len(ranks), ways)]
        typical = max(1, self.rows // len(groups))
        block_s: dict[int, float] = {}
        for rank in ranks:
            if costs.alike[rank] not in block_s:
                passes = costs.unit_s(rank, self.task.graph.block, typical, {}, 1)
                block_s[costs.alike[rank]] = sum(passes)
        seconds = [max(block_s[costs.alike[rank]] for rank in group) for group in groups]
        return tuple(divide_rows_by_speed(self.rows, seconds))

    def _price_option(self, ranks: Sequence[int], option: Option, ends: Ends) -> PassTable:
        layers = self.task.graph.layers
        fewest = ends.fewest(layers)
        priced_blocks = sorted({fewest, layers})
        if layers <= PRICED_LAYERS:
            priced_blocks = list(range(fewest, layers + 1))
        prices = [self._price_stage(ranks, option, ends.units(layers, n)) for n in priced_blocks]

        counts = np.arange(fewest, layers + 1)
        interpolated = [
            np.interp(counts, priced_blocks, values) for values in zip(*prices, strict=True)
        ]
        seconds, cycle, excess, microbatch_bytes = interpolated
        in_flight = np.minimum(self.microbatches, -excess // np.maximum(microbatch_bytes, 1.0))
        table = PassTable(
            option,
            np.full(layers + 1, np.inf),
            np.full(layers + 1, np.inf),
            np.zeros(layers + 1, dtype=np.int64),
        )
        table.seconds[fewest:] = seconds
        table.cycle[fewest:] = cycle
        table.depth[fewest:] = np.where(excess > 0, 0, in_flight)
        return table

    def _price_stage(
        self, ranks: Sequence[int], option: Option, units: tuple[int, int]
    ) -> tuple[float, float, float, float]:
        """Return seconds of a microbatch, seconds of the rest of a step, and bytes of the fullest
        device: what stays (less its capacity), and what a microbatch adds."""
        task = self.task
        stage = stage_of(ranks, option, units, self.microbatches)
        time = stage_time(task.costs, stage, stage.rows, self.microbatches)
        seconds = time.passes.forward + time.passes.backward
        cycle = (self.microbatches - 1) * seconds + time.exposed + time.update

        fullest = (-math.inf, 0.0)
        coordinates = {}
        for coordinate, group in enumerate(stage.mesh.batch):
            coordinates[task.costs.alike[group[0]]] = coordinate
        for coordinate in coordinates.values():
            empty, single = self._device_bytes(stage, option.rows[coordinate], coordinate)
            excess = empty - task.capacity(stage.mesh.batch[coordinate][0])
            fullest = max(fullest, (excess, float(single - empty)))
        return seconds, cycle, *fullest

    def _device_bytes(self, stage: Stage, rows: int, coordinate: int) -> tuple[float, float]:
        """Return bytes of a device with no microbatch in flight, and with one.

        They do not depend on where the other devices of its stage are.
        """
        mesh = stage.mesh
        costs = self.task.costs
        kind = costs.alike[mesh.batch[coordinate][0]]
        shape = (stage.units, mesh.shape, stage.zero, stage.recompute)
        key = (kind, rows, *shape, *stage.splits.items())
        if key not in self._bytes:
            empty = costs.memory_of(stage, rows, 0, coordinate).total
            single = costs.memory_of(stage, rows, 1, coordinate).total
            self._bytes[key] = (empty, single)
        return self._bytes[key]


def cheapest_splits(
    task: Task, group: Sequence[int], rows: Sequence[int], concurrent: int, *, by_rows: bool = True
) -> dict[str, str]:
    """Return the cheapest strategies of all operators over a tensor axis, memory aside.

    Rows are divided only if all are even, and never without `by_rows`. They count by their power of
    two: the best division hardly depends on them.
    """
    ways = len(group)
    typical = 2 ** round(math.log2(max(rows)))
    is_even = by_rows and all(row % ways == 0 for row in rows)
    key = ("splits", task.likeness(group), typical, is_even)
    if key not in task.memo:
        remainder = typical % ways
        rounded = max(ways, typical - remainder)
        if not is_even:
            rounded = max(1, typical - (remainder == 0))
        units = (0, task.graph.units)
        solved = Assignment(task, units, group, rounded, concurrent=concurrent).solve()
        task.memo[key] = {} if isinstance(solved, Infeasible) else solved[0]
    splits: dict[str, str] = task.memo[key]
    return splits


def tensor_widths(task: Task, ranks: Sequence[int]) -> list[int]:
    """Return 1, and the tensor widths that divide some operator and each group of a range.

    A group is neighbours of one kind on one host.
    """
    hosts = task.costs.network.hosts
    alike = task.costs.alike
    groups = itertools.groupby(ranks, key=lambda rank: (hosts[rank], alike[rank]))
    lengths = [len(list(group)) for _, group in groups]
    sizes: set[int] = set()
    for op in task.graph.block:
        sizes.update(task.graph.sizes[dim] for dim in op.divisible)
    widths = []
    for ways in range(1, min(lengths) + 1):
        divides_groups = all(length % ways == 0 for length in lengths)
        if divides_groups and any(size % ways == 0 for size in sizes):
            widths.append(ways)
    return widths


def stage_of(
    ranks: Sequence[int], option: Option, units: tuple[int, int], microbatches: int
) -> Stage:
    """Return the stage that an option makes on these ranks."""
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
    """Return one mesh for all stages of these ranks, so that it computes its groups once."""
    data = len(ranks) // ways
    axes: tuple[Axis, ...] = ("data",) if ways == 1 else ("data", "tensor")
    return Mesh(ranks=ranks, shape=(data,) if ways == 1 else (data, ways), axes=axes)
