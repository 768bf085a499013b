"""Cutting a model into pipeline stages over a device order, by dynamic programming.

Over a given order of devices, stages are runs of neighbours; what is minimised is Alpa's objective (arXiv 2201.12023,
eq. 2) with the wires' time:

    sum_s (t_s + wire_s) + max_s max((m - 1) t_s + once_s, (m - 1) busy_s)

t_s being a microbatch's forward and backward pass, once_s what comes once a step (sums of gradients that nothing hides,
the update), wire_s the way to the next stage and back, busy_s how long a message keeps the wire, which as many pairs of
hosts share as the stage with fewer has. The state is (place in the order, hosts
of the stage that starts there, stages still to come, first unit): the place says which devices are left, not only how
many. The outer search lowers the bound on the slowest stage from one Pareto point to the next, so every optimum of the
objective is met.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.semantics.kernel_choice import BYTES
from farspan.techniques._search.slices import EVERY_RUN, MOST_STAGES, DeviceRange, Option, Tables, slices
from farspan.techniques._task import Task

#: Up to so many devices every Pareto point is met; beyond, the bound falls by this factor at least: what lies between
#: is closer than the objective is to the full estimator.
EXACT, STEP = 6, 0.95


class StageChoice(NamedTuple):
    """One stage of a solution: its devices, its units, how it runs, and how deep its memory lets it be."""

    ranks: tuple[int, ...]
    units: tuple[int, int]
    option: Option
    depth: int


class StageLink(NamedTuple):
    """Between two slices: seconds there and back, delay included, and how long one message keeps the wire."""

    way: float
    busy: float


class RangeTable(NamedTuple):
    """Of one slice, by stages to come and cuts: seconds a microbatch, seconds of the rest of a step, and the table."""

    seconds: NDArray[np.float64]
    cycle: NDArray[np.float64]
    picks: NDArray[np.int64]


class Start(NamedTuple):
    """The lanes that start at one place, with their seconds stacked."""

    both: list[tuple[DeviceRange, RangeTable]]
    seconds: NDArray[np.float64]
    cycle: NDArray[np.float64]


class Solution(NamedTuple):
    objective: float
    cuts: tuple[StageChoice, ...]


class StageSearch:
    """All pipelines over one device order with one number of microbatches."""

    def __init__(self, task: Task, order: Sequence[int], tables: Tables) -> None:
        self.task, self.order, self.tables = task, tuple(order), tables
        self.parts, self.units, n = tables.microbatches, task.graph.units, len(order)
        self.most = min(n, self.units, n if n <= EVERY_RUN else MOST_STAGES)
        self.slices = slices(task, order)
        network = task.costs.network
        self.hosts = {run: len({network.hosts[order[i]] for i in range(*run)}) for run in self.slices}
        self.lanes = {run: self._lanes(run) for run in self.slices}
        #: For each place the slices that start there, by how many hosts they have, with the seconds of their lanes.
        self.starts: list[dict[int, Start]] = []
        for place in range(n):
            by_hosts: dict[int, list[tuple[DeviceRange, RangeTable]]] = {}
            for run in self.slices:
                if run.start == place:
                    by_hosts.setdefault(self.hosts[run], []).extend((run, lane) for lane in self.lanes[run])
            self.starts.append({
                h: Start(both, np.stack([lane.seconds for _, lane in both]), np.stack([lane.cycle for _, lane in both]))
                for h, both in by_hosts.items() if both
            })  # fmt: skip
        self._wires: dict[tuple[int, int], StageLink] = {}

    def _lanes(self, run: DeviceRange) -> list[RangeTable]:
        """The options of a slice that are deep enough, by stages to come, this one included: each by itself, or, on
        more than EXACT devices, the fastest whole step for each cut."""
        tables = self.tables.of([self.order[i] for i in range(*run)])
        exact = len(self.order) <= EXACT
        key = ("lanes", id(tables), self.most, exact)
        memo = self.task.memo
        if key not in memo:
            need = np.minimum(self.parts, np.arange(1, self.most + 1))[:, None, None]
            lanes = [
                RangeTable(np.where(t.depth >= need, t.seconds, np.inf), np.where(t.depth >= need, t.cycle, np.inf),
                     np.full((self.most, *t.depth.shape), number)) for number, t in enumerate(tables)
            ]  # fmt: skip
            memo[key] = lanes if exact or len(lanes) < 2 else [_fastest(lanes)]
        deep_enough: list[RangeTable] = memo[key]
        return deep_enough

    def wire(self, place: int, hosts: int) -> StageLink:
        """From the device before a place to the one there, shared by so many pairs of hosts; none at the end."""
        if (place, hosts) not in self._wires:
            self._wires[place, hosts] = self._wire(place, hosts) if place < len(self.order) else StageLink(0.0, 0.0)
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
        """Pareto points of (sum, slowest), by falling bound on the slowest stage, while one may be below `limit`."""
        bound, best = math.inf, limit
        while True:
            solved = self._under(bound)
            if solved is None:
                return
            total, slowest, cuts = solved
            objective = total + slowest
            yield Solution(objective, cuts)
            best = min(best, objective)
            # The sum only grows as the bound falls: below this nothing can win any more.
            if total >= best:
                return
            bound = slowest * (1.0 if len(self.order) <= EXACT else STEP)

    def _under(self, bound: float) -> tuple[float, float, tuple[StageChoice, ...]] | None:
        """The least sum with every stage and message below the bound; None where there is none."""
        n, shape = len(self.order), (self.most + 1, self.units + 1)
        # For each place, and hosts of the slice that starts there: the least sum, and which slice and cut it has.
        value: list[dict[int, NDArray[np.float64]]] = [{} for _ in range(n + 1)]
        chosen: list[dict[int, NDArray[np.int64]]] = [{} for _ in range(n)]
        value[n][1] = np.full(shape, np.inf)
        value[n][1][0, self.units] = 0.0
        for place in range(n - 1, -1, -1):
            for hosts, start in self.starts[place].items():
                rests = {run: self._rest(value[run.stop], run, bound) for run, _ in start.both}
                # (slice, stages to come, first, last) + (slice, stages to come, 1, last)
                after = np.stack([rests[run] for run, _ in start.both])[:, :-1, None, :]
                total = np.where(start.cycle < bound, start.seconds, np.inf) + after
                flat = total.transpose(1, 2, 0, 3).reshape(self.most, self.units + 1, -1)
                chosen[place][hosts] = flat.argmin(axis=2)
                least = np.take_along_axis(flat, chosen[place][hosts][..., None], axis=2)[..., 0]
                value[place][hosts] = np.vstack((np.full((1, self.units + 1), np.inf), least))
        sums = [(float(v[stages, 0]), hosts, stages) for hosts, v in value[0].items() for stages in range(shape[0])]
        least_sum, hosts, stages = min(sums, default=(math.inf, 0, 0))
        if not math.isfinite(least_sum):
            return None
        return least_sum, *self._read(value, chosen, hosts, stages, bound)

    def _rest(self, after: dict[int, NDArray[np.float64]], run: DeviceRange, bound: float) -> NDArray[np.float64]:
        """The least sum of what follows a slice, and the way there."""
        totals = [least + self._way(run, hosts, bound) for hosts, least in after.items()]
        return np.min(totals, axis=0) if totals else np.full((self.most + 1, self.units + 1), np.inf)

    def _way(self, run: DeviceRange, hosts: int, bound: float) -> float:
        """Seconds from a slice to the next one, which has so many hosts, and back; infinite at the bound."""
        wire = self.wire(run.stop, min(self.hosts[run], hosts))
        return wire.way if (self.parts - 1) * wire.busy < bound else math.inf

    def _read(
        self, value: list[dict[int, NDArray[np.float64]]], chosen: list[dict[int, NDArray[np.int64]]], hosts: int,
        stages: int, bound: float,
    ) -> tuple[float, tuple[StageChoice, ...]]:  # fmt: skip
        place, first, slowest, cuts = 0, 0, 0.0, []
        for to_come in range(stages, 0, -1):
            number, last = divmod(int(chosen[place][hosts][to_come - 1, first]), self.units + 1)
            run, lane = self.starts[place][hosts].both[number]
            ranks = tuple(self.order[i] for i in range(*run))
            at = (to_come - 1, first, last)
            table = self.tables.of(ranks)[int(lane.picks[at])]
            cuts.append(StageChoice(ranks, (first, last), table.option, int(table.depth[first, last])))
            after = value[run.stop]
            hosts = min(after, key=lambda h: float(after[h][to_come - 1, last]) + self._way(run, h, bound))
            busy = self.wire(run.stop, min(self.hosts[run], hosts)).busy
            slowest = max(slowest, float(lane.cycle[at]), (self.parts - 1) * busy)
            place, first = run.stop, last
        return slowest, tuple(cuts)


def _fastest(lanes: Sequence[RangeTable]) -> RangeTable:
    """For each cut the lane whose whole step is the fastest."""
    seconds, cycle, picks = (np.stack(parts) for parts in zip(*lanes, strict=True))
    best = (seconds + cycle).argmin(axis=0)[None]
    return RangeTable(*(np.take_along_axis(part, best, axis=0)[0] for part in (seconds, cycle, picks)))
