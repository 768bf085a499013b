"""Cut a model into pipeline stages over a device order, by dynamic programming.

Over a given order of devices, stages are ranges of neighbours. The objective is Alpa's
(arXiv 2201.12023, eq. 2) with point-to-point communication:

    sum_s (t_s + latency_s) + max_s max((m - 1) t_s + once_s, (m - 1) occupancy_s)

`t_s` is the forward and backward pass of a microbatch; `once_s` comes once a step (exposed gradient
sync, the update); `latency_s` is the time to the next stage and back; `occupancy_s` is how long a
message keeps the link, which the pairs of hosts of the smaller stage share.

The place in the order is part of the state (`stage_dp`): it names the remaining devices, not only
their number. The outer search lowers the bound on the slowest stage from one Pareto point to the
next, so it meets every optimum of the objective. It ends where the sum, which only grows, plus the
lower bound of the slowest stage exceeds the best objective so far.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from farspan.semantics.kernel_choice import BYTES
from farspan.techniques._search.slices import (
    EVERY_RUN,
    MOST_STAGES,
    DeviceRange,
    Ends,
    Option,
    PassTable,
    Tables,
    slices,
)
from farspan.techniques._search.stage_dp import StageCosts, StageCostTable, StageDP
from farspan.techniques._task import Task

#: Up to this number of devices every Pareto point is met. Beyond, the bound falls by BOUND_FACTOR
#: at least: what lies between is closer than the objective is to the full estimator.
MAX_DEVICES_EXACT = 6
BOUND_FACTOR = 0.95
#: The bound of `quick_upper_bound`, relative to the least cycle of any slowest stage. Results do
#: not depend on it.
QUICK_BOUND = 1.5
#: A bound that falls by less than this factor shows no more that a search is hopeless.
MIN_SHRINKAGE = 0.9
ROUNDING = 1e-9


class StageChoice(NamedTuple):
    """One stage of a solution: devices, units, option, and microbatches that fit in flight."""

    ranks: tuple[int, ...]
    units: tuple[int, int]
    option: Option
    depth: int


class StageLink(NamedTuple):
    """Between two stages: seconds there and back, and seconds that one message keeps the link."""

    p2p_latency: float
    p2p_occupancy: float


class Solution(NamedTuple):
    objective: float
    cuts: tuple[StageChoice, ...]


#: A sum, its slowest cycle, and its stages.
Solved = tuple[float, float, tuple[StageChoice, ...]]


class StageSearch:
    """All pipelines over one device order with one number of microbatches."""

    def __init__(self, task: Task, order: Sequence[int], tables: Tables) -> None:
        self.task = task
        self.order = tuple(order)
        self.tables = tables
        self.microbatches = tables.microbatches
        self.layers = task.graph.layers
        n = len(order)
        self.max_stages = min(n, task.graph.units, n if n <= EVERY_RUN else MOST_STAGES)
        self.ranges = slices(task, order)
        hosts = task.costs.network.hosts
        self.hosts = {}
        for devices in self.ranges:
            self.hosts[devices] = len({hosts[order[place]] for place in range(*devices)})
        self.stage_costs = {devices: self._stage_costs(devices) for devices in self.ranges}
        self._costs = StageCosts(n, self.max_stages, self.layers, self.stage_costs, self.hosts)
        self._links: dict[tuple[int, int], StageLink] = {}
        self._bound_factor = 1.0 if n <= MAX_DEVICES_EXACT else BOUND_FACTOR

    def ends(self, devices: DeviceRange) -> Ends:
        """Return which ends of the model a stage on this range has."""
        return Ends(devices.start == 0, devices.stop == len(self.order))

    def _stage_costs(self, devices: DeviceRange) -> list[StageCostTable]:
        """Return the options of a range that fit in memory, by stages to come.

        On more than MAX_DEVICES_EXACT devices they are merged: for each number of blocks the
        option whose whole step is the fastest.
        """
        passes = self.tables.of(self.order[devices.start : devices.stop], self.ends(devices))
        is_exact = len(self.order) <= MAX_DEVICES_EXACT
        key = ("stage costs", id(passes), self.max_stages, is_exact)
        memo = self.task.memo
        if key not in memo:
            costs = [self._cost_table(number, table) for number, table in enumerate(passes)]
            memo[key] = costs if is_exact or len(costs) < 2 else [merge_fastest(costs)]
        tables: list[StageCostTable] = memo[key]
        return tables

    def _cost_table(self, number: int, passes: PassTable) -> StageCostTable:
        # The stage with k stages to come keeps min(m, k) microbatches in flight (1F1B).
        in_flight = np.minimum(self.microbatches, np.arange(1, self.max_stages + 1))[:, None]
        fits = passes.depth >= in_flight
        seconds = np.where(fits, passes.seconds, np.inf)
        cycle = np.where(fits, passes.cycle, np.inf)
        return StageCostTable(seconds, cycle, np.full(seconds.shape, number))

    def link(self, place: int, hosts: int) -> StageLink:
        """Return the link from the device before a place to the one there.

        `hosts`: pairs of hosts that share a message. No link is at the end of the order.
        """
        if place == len(self.order):
            return StageLink(0.0, 0.0)
        key = (place, hosts)
        if key not in self._links:
            task = self.task
            size = task.graph.size("bsd", b=self.tables.rows, s=task.train.seq_len)
            nbytes = size * BYTES[task.train.precision] / hosts
            source = self.order[place - 1]
            target = self.order[place]
            network = task.costs.network
            streams = task.streams(source, target)
            hop = network.wire(source, target, collective=False, streams=streams)
            occupancy = network.send_s(hop, nbytes)
            copies_s = hop.copy_byte_s * nbytes
            self._links[key] = StageLink(2 * (hop.delay_s + occupancy + copies_s), occupancy)
        return self._links[key]

    def partition_stages(self, limit: float = math.inf) -> Iterator[Solution]:
        """Yield Pareto points of (sum, slowest stage) with objectives of up to `limit`."""
        best = limit
        solved = self._first_solution(limit)
        while solved is not None:
            total, slowest, cuts = solved
            objective = total + slowest
            yield Solution(objective, cuts)
            best = min(best, objective)
            bound = self._bound_factor * slowest
            # The sum only grows as the bound falls: below this nothing can win any more.
            if total >= best or total + self.least_cycle > limit or bound <= self.least_cycle:
                return
            solved = self._solve_below(bound)

    def _first_solution(self, limit: float) -> Solved | None:
        """Return the Pareto point that falling bounds meet first with an objective up to `limit`.

        Without a limit, or with exact bounds, it is the least sum below the bound.
        """
        bound = self._bound_within(limit)
        if bound is None:
            return None
        if bound == math.inf or self._bound_factor == 1.0:
            return self._solve_below(bound)
        solved = None
        above = self._solve_below(bound)
        while above is not None and above != solved:
            # The least sum of all bounds up to a whole factor above it cannot be stepped over.
            solved = above
            above = self._solve_below((1 + ROUNDING) * above[1] / self._bound_factor)
        return solved

    def _bound_within(self, limit: float) -> float | None:
        """Return a bound above the slowest cycle of every solution up to `limit`; None for none.

        The sum of a solution is at least the least sum under any bound above its slowest cycle, so
        the cycle is at most the limit less that sum. Each bound gives a smaller one.
        """
        bound = math.inf
        total = 0.0
        while limit - total < MIN_SHRINKAGE * bound:
            bound = (1 + ROUNDING) * (limit - total)
            if bound <= self.least_cycle:
                return None
            total, _, _ = self._stage_dp(bound).least_sum()
        return bound if self.least_cycle < math.inf else None

    def quick_upper_bound(self) -> float:
        """Return the objective of one solution with a bound slightly above the least cycle."""
        if self.least_cycle == math.inf:
            return math.inf
        solved = self._solve_below(QUICK_BOUND * self.least_cycle)
        return math.inf if solved is None else solved[0] + solved[1]

    @functools.cached_property
    def least_cycle(self) -> float:
        """Seconds that no slowest cycle falls below.

        In fewer, stages over all devices hold too few blocks, or a message keeps a link for longer
        that every pipeline has: no range lies on both of its sides.
        """
        cycle = self._costs.cycle.min(axis=2)
        times = np.unique(cycle[np.isfinite(cycle)])

        def holds_all_blocks(seconds: float) -> bool:
            return self._costs.max_blocks(cycle <= seconds) >= self.layers

        index = bisect.bisect_left(times, True, key=holds_all_blocks)
        if index == len(times):
            return math.inf

        inside: set[int] = set()
        for devices in self.ranges:
            inside.update(range(devices.start + 1, devices.stop))
        occupancy = 0.0
        for place in range(1, len(self.order)):
            if place not in inside:
                link = self.link(place, self._max_host_pairs(place))
                occupancy = max(occupancy, link.p2p_occupancy)
        return max(float(times[index]), (self.microbatches - 1) * occupancy)

    def _max_host_pairs(self, place: int) -> int:
        """Return the most pairs of hosts that may send at a place at once."""
        before = [self.hosts[devices] for devices in self.ranges if devices.stop == place]
        after = [self.hosts[devices] for devices in self.ranges if devices.start == place]
        return min(max(before, default=1), max(after, default=1))

    def _solve_below(self, bound: float) -> Solved | None:
        """Return the least sum with every stage and message below `bound`; None for none."""
        dp = self._stage_dp(bound)
        total, hosts, num_stages = dp.least_sum()
        if not math.isfinite(total):
            return None
        slowest, cuts = self._read_stages(dp, hosts, num_stages)
        return total, slowest, cuts

    def _stage_dp(self, bound: float) -> StageDP:
        def p2p_latency(place: int, before: int, after: int) -> float:
            link = self.link(place, min(before, after))
            cycle = (self.microbatches - 1) * link.p2p_occupancy
            return link.p2p_latency if cycle < bound else math.inf

        return StageDP(self._costs, bound, p2p_latency)

    def _read_stages(
        self, dp: StageDP, hosts: int, num_stages: int
    ) -> tuple[float, tuple[StageChoice, ...]]:
        """Return the slowest cycle of a least sum, and its stages."""
        place = 0
        blocks_before = 0
        slowest = 0.0
        cuts = []
        for to_come in range(num_stages, 0, -1):
            # The stage itself.
            row, blocks = dp.first_stage(place, hosts, to_come, blocks_before)
            devices, costs = self._costs.rows[row]
            ranks = self.order[devices.start : devices.stop]
            ends = self.ends(devices)
            passes = self.tables.of(ranks, ends)[int(costs.picks[to_come - 1, blocks])]
            units = ends.units(self.layers, blocks, blocks_before + 1)
            depth = int(passes.depth[blocks])
            cuts.append(StageChoice(ranks, units, passes.option, depth))
            slowest = max(slowest, float(costs.cycle[to_come - 1, blocks]))
            # The link to the next stage.
            blocks_before += blocks
            place = devices.stop
            if to_come > 1:
                hosts = dp.hosts_after(devices, to_come - 1, blocks_before)
                link = self.link(place, min(self.hosts[devices], hosts))
                slowest = max(slowest, (self.microbatches - 1) * link.p2p_occupancy)
        return slowest, tuple(cuts)


def merge_fastest(tables: Sequence[StageCostTable]) -> StageCostTable:
    """Return, for each number of blocks, the costs of the option whose whole step is fastest."""
    seconds = np.stack([table.seconds for table in tables])
    cycle = np.stack([table.cycle for table in tables])
    picks = np.stack([table.picks for table in tables])
    best = (seconds + cycle).argmin(axis=0)[None]
    return StageCostTable(
        np.take_along_axis(seconds, best, axis=0)[0],
        np.take_along_axis(cycle, best, axis=0)[0],
        np.take_along_axis(picks, best, axis=0)[0],
    )
