"""Cutting a model into pipeline stages over a device order, by dynamic programming.

Over a given order of devices, stages are runs of neighbours; what is minimised is Alpa's objective
(arXiv 2201.12023, eq. 2) with the wires' time:

    sum_s (t_s + wire_s) + max_s max((m - 1) t_s + once_s, (m - 1) busy_s)

t_s being a microbatch's forward and backward pass, once_s what comes once a step (sums of gradients
that nothing hides, the update), wire_s the way to the next stage and back, busy_s how long a
message keeps the wire, which as many pairs of hosts share as the stage with fewer has. The place in
the order is part of the state (`least_sums`): it says which devices are left, not only how many.
The outer search lowers the bound on the slowest stage from one Pareto point to the next, so every
optimum of the objective is met. It ends where the sum, which only grows, and the least that the
slowest stage takes are more than is known.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from farspan.semantics.kernel_choice import BYTES
from farspan.techniques._search.least_sums import LeastSums, RangeTable, Stacked
from farspan.techniques._search.slices import (
    EVERY_RUN,
    MOST_STAGES,
    DeviceRange,
    Ends,
    Option,
    Tables,
    slices,
)
from farspan.techniques._task import Task

#: Up to so many devices every Pareto point is met; beyond, the bound falls by this factor at least:
#: what lies between is closer than the objective is to the full estimator.
EXACT, STEP = 6, 0.95
#: The bound of a first look, by the least cycle of any slowest stage. Results do not depend on it.
GLIMPSE = 1.5
#: A bound that falls by less than this factor shows no more that a search is hopeless.
SHRINKS = 0.9
ROUNDING = 1e-9


class StageChoice(NamedTuple):
    """One stage of a solution: its devices, its units, how it runs, and how deep its memory lets it
    be."""

    ranks: tuple[int, ...]
    units: tuple[int, int]
    option: Option
    depth: int


class StageLink(NamedTuple):
    """Between two slices: seconds there and back, delay included, and how long one message keeps
    the wire."""

    way: float
    busy: float


class Solution(NamedTuple):
    objective: float
    cuts: tuple[StageChoice, ...]


#: A sum, its slowest cycle, and its stages.
Solved = tuple[float, float, tuple[StageChoice, ...]]


class StageSearch:
    """All pipelines over one device order with one number of microbatches."""

    def __init__(self, task: Task, order: Sequence[int], tables: Tables) -> None:
        self.task, self.order, self.tables = task, tuple(order), tables
        self.parts, self.layers, n = tables.microbatches, task.graph.layers, len(order)
        self.most = min(n, task.graph.units, n if n <= EVERY_RUN else MOST_STAGES)
        self.slices = slices(task, order)
        network = task.costs.network
        self.hosts = {
            run: len({network.hosts[order[i]] for i in range(*run)}) for run in self.slices
        }
        self.lanes = {run: self._lanes(run) for run in self.slices}
        self._stacked = Stacked(n, self.most, self.layers, self.lanes, self.hosts)
        self._wires: dict[tuple[int, int], StageLink] = {}
        self._step = 1.0 if n <= EXACT else STEP

    def ends(self, run: DeviceRange) -> Ends:
        """Which ends of the model a stage on this slice has."""
        return Ends(run.start == 0, run.stop == len(self.order))

    def _lanes(self, run: DeviceRange) -> list[RangeTable]:
        """The options of a slice that are deep enough, by stages to come, this one included: each
        by itself, or, on more than EXACT devices, the fastest whole step for each number of
        blocks."""
        tables = self.tables.of(self.order[run.start : run.stop], self.ends(run))
        exact = len(self.order) <= EXACT
        key = ("lanes", id(tables), self.most, exact)
        memo = self.task.memo
        if key not in memo:
            need = np.minimum(self.parts, np.arange(1, self.most + 1))[:, None]
            lanes = [
                RangeTable(
                    np.where(t.depth >= need, t.seconds, np.inf),
                    np.where(t.depth >= need, t.cycle, np.inf),
                    np.full((self.most, *t.depth.shape), number),
                )
                for number, t in enumerate(tables)
            ]
            memo[key] = lanes if exact or len(lanes) < 2 else [_fastest(lanes)]
        deep_enough: list[RangeTable] = memo[key]
        return deep_enough

    def wire(self, place: int, hosts: int) -> StageLink:
        """From the device before a place to the one there, shared by so many pairs of hosts; none
        at the end."""
        if (place, hosts) not in self._wires:
            self._wires[place, hosts] = (
                self._wire(place, hosts) if place < len(self.order) else StageLink(0.0, 0.0)
            )
        return self._wires[place, hosts]

    def _wire(self, place: int, hosts: int) -> StageLink:
        network, train = self.task.costs.network, self.task.train
        width = BYTES[train.precision]
        size = self.task.graph.size("bsd", b=self.tables.rows, s=train.seq_len) * width / hosts
        a, b = self.order[place - 1], self.order[place]
        hop = network.wire(a, b, collective=False, streams=self.task.streams(a, b))
        busy = network.send_s(hop, size)
        return StageLink(2 * (hop.delay_s + busy), busy)

    def solutions(self, limit: float = math.inf) -> Iterator[Solution]:
        """Pareto points of (sum, slowest), by falling bound on the slowest stage, while one may be
        up to `limit`."""
        best, solved = limit, self._first(limit)
        while solved is not None:
            total, slowest, cuts = solved
            objective = total + slowest
            yield Solution(objective, cuts)
            best, bound = min(best, objective), self._step * slowest
            # The sum only grows as the bound falls: below this nothing can win any more.
            if total >= best or total + self.least > limit or bound <= self.least:
                return
            solved = self._under(bound)

    def _first(self, limit: float) -> Solved | None:
        """The least sum under any bound; or the first after it, of those that falling bounds lead
        to, from which on they may be up to `limit`."""
        bound = self._within(limit)
        if bound is None or bound == math.inf or self._step == 1.0:
            return None if bound is None else self._under(bound)
        solved, above = None, self._under(bound)
        while above is not None and above != solved:
            # What is the least sum under all bounds of a whole step above it cannot be stepped
            # over.
            solved, above = above, self._under((1 + ROUNDING) * above[1] / self._step)
        return solved

    def _within(self, limit: float) -> float | None:
        """A bound that every solution up to `limit` is below, None where there is no solution: as
        the sum is at least that under any bound above the slowest cycle, this is at most the limit
        less that sum; and so on."""
        bound, total = math.inf, 0.0
        while limit - total < SHRINKS * bound:
            bound = (1 + ROUNDING) * (limit - total)
            if bound <= self.least:
                return None
            total, _, _ = self._sums(bound).best()
        return bound if self.least < math.inf else None

    def glimpse(self) -> float:
        """The objective of one solution whose slowest stage is hardly above the least: what to
        search first."""
        solved = self._under(GLIMPSE * self.least) if self.least < math.inf else None
        return math.inf if solved is None else solved[0] + solved[1]

    @functools.cached_property
    def least(self) -> float:
        """Seconds that no slowest cycle falls below. In fewer, stages over all devices hold too few
        blocks, or a message keeps a wire for longer that every pipeline has here: no slice lies on
        both of its sides."""
        cycle = self._stacked.cycle.min(axis=2)
        times = np.unique(cycle[np.isfinite(cycle)])
        place = bisect.bisect_left(
            times,
            True,
            key=lambda seconds: self._stacked.most_blocks(cycle <= seconds) >= self.layers,
        )
        inside = {place for run in self.slices for place in range(run.start + 1, run.stop)}
        wires = (
            self.wire(at, self._most_hosts(at))
            for at in range(1, len(self.order))
            if at not in inside
        )
        busy = max((wire.busy for wire in wires), default=0.0)
        return max(float(times[place]), (self.parts - 1) * busy) if place < len(times) else math.inf

    def _most_hosts(self, place: int) -> int:
        """Pairs of hosts that may send at a place at once at most."""
        return min(
            max((self.hosts[run] for run in self.slices if run[end] == place), default=1)
            for end in (1, 0)
        )

    def _under(self, bound: float) -> Solved | None:
        """The least sum with every stage and message below the bound; None where there is none."""
        sums = self._sums(bound)
        total, hosts, stages = sums.best()
        return (total, *self._read(sums, hosts, stages)) if math.isfinite(total) else None

    def _sums(self, bound: float) -> LeastSums:
        """The least sums with every stage and message below the bound."""

        def way(place: int, before: int, after: int) -> float:
            wire = self.wire(place, min(before, after))
            return wire.way if (self.parts - 1) * wire.busy < bound else math.inf

        return LeastSums(self._stacked, bound, way)

    def _read(
        self, sums: LeastSums, hosts: int, stages: int
    ) -> tuple[float, tuple[StageChoice, ...]]:
        """The slowest cycle of a least sum, and its stages."""
        place, before, slowest, cuts = 0, 0, 0.0, []
        for to_come in range(stages, 0, -1):
            row, blocks = sums.choice(place, hosts, to_come, before)
            run, lane = self._stacked.rows[row]
            ranks, at = self.order[run.start : run.stop], (to_come - 1, blocks)
            table = self.tables.of(ranks, self.ends(run))[int(lane.picks[at])]
            units = self.ends(run).units(self.layers, blocks, before + 1)
            cuts.append(StageChoice(ranks, units, table.option, int(table.depth[blocks])))
            slowest, before, place = max(slowest, float(lane.cycle[at])), before + blocks, run.stop
            if to_come > 1:
                hosts = sums.after(run, to_come - 1, before)
                slowest = max(
                    slowest, (self.parts - 1) * self.wire(place, min(self.hosts[run], hosts)).busy
                )
        return slowest, tuple(cuts)


def _fastest(lanes: Sequence[RangeTable]) -> RangeTable:
    """For each number of blocks the lane whose whole step is the fastest."""
    seconds, cycle, picks = (np.stack(parts) for parts in zip(*lanes, strict=True))
    best = (seconds + cycle).argmin(axis=0)[None]
    return RangeTable(
        *(np.take_along_axis(part, best, axis=0)[0] for part in (seconds, cycle, picks))
    )
