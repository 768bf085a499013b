"""Cutting a model into pipeline stages over a device order, by dynamic programming.

Over a given order of devices, stages are runs of neighbours; what is minimised is Alpa's objective (arXiv 2201.12023,
eq. 2) with the wires' time:

    sum_s (t_s + wire_s) + (m - 1) max_s max(t_s, busy_s)

t_s being a microbatch's forward and backward pass, wire_s the way to the next stage and back, busy_s how long a message
keeps the wire, which as many pairs of hosts share as the stage with fewer has. The state is (place in the order, hosts
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

from farspan.techniques._search.slices import EVERY_RUN, MOST_STAGES, Option, Slice, Tables, slices
from farspan.techniques._task import Task

#: Up to so many devices every Pareto point is met; beyond, the bound falls by this factor at least: what lies between
#: is closer than the objective is to the full estimator.
EXACT, STEP = 8, 0.95


class Cut(NamedTuple):
    """One stage of a solution: its devices, its units, how it runs, and how deep its memory lets it be."""

    ranks: tuple[int, ...]
    units: tuple[int, int]
    option: Option
    depth: int


class Wire(NamedTuple):
    """Between two slices: seconds there and back, delay included, and how long one message keeps the wire."""

    way: float
    busy: float


class Solution(NamedTuple):
    objective: float
    cuts: tuple[Cut, ...]


class StageSearch:
    """All pipelines over one device order with one number of microbatches."""

    def __init__(self, task: Task, order: Sequence[int], tables: Tables) -> None:
        self.task, self.order, self.tables = task, tuple(order), tables
        self.parts, self.units, n = tables.microbatches, task.graph.units, len(order)
        self.most = min(n, self.units, n if n <= EVERY_RUN else MOST_STAGES)
        self.slices = slices(task, order)
        network = task.costs.network
        self.hosts = {run: len({network.hosts[order[i]] for i in range(*run)}) for run in self.slices}
        self.times = {run: self._of(run) for run in self.slices}
        #: For each place the slices that start there, by how many hosts they have, with their seconds.
        self.starts: list[dict[int, tuple[list[Slice], NDArray[np.float64]]]] = []
        for place in range(n):
            by_hosts: dict[int, list[Slice]] = {}
            for run in self.slices:
                if run.start == place:
                    by_hosts.setdefault(self.hosts[run], []).append(run)
            self.starts.append({h: (runs, np.stack([self.times[r][0] for r in runs])) for h, runs in by_hosts.items()})
        self._wires: dict[tuple[int, int], Wire] = {}

    def _of(self, run: Slice) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """By stages to come, this one included, and cuts: the least seconds of any option that is deep enough."""
        tables = self.tables.of([self.order[i] for i in range(*run)])
        key = ("fastest", id(tables), self.most)
        memo = self.task.memo
        if key not in memo:
            shape = (self.most, self.units + 1, self.units + 1)
            seconds, picks = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
            for number, table in enumerate(tables):
                for to_come in range(self.most):
                    better = (table.depth >= min(self.parts, to_come + 1)) & (table.seconds < seconds[to_come])
                    seconds[to_come][better] = table.seconds[better]
                    picks[to_come][better] = number
            memo[key] = (seconds, picks)
        found: tuple[NDArray[np.float64], NDArray[np.int64]] = memo[key]
        return found

    def wire(self, place: int, hosts: int) -> Wire:
        """From the device before a place to the one there, shared by so many pairs of hosts; none at the end."""
        if (place, hosts) not in self._wires:
            self._wires[place, hosts] = self._wire(place, hosts) if place < len(self.order) else Wire(0.0, 0.0)
        return self._wires[place, hosts]

    def _wire(self, place: int, hosts: int) -> Wire:
        network, train = self.task.costs.network, self.task.train
        width = 4 if train.precision == "fp32" else 2
        size = self.task.graph.size("bsd", b=self.tables.rows, s=train.seq_len) * width / hosts
        a, b = self.order[place - 1], self.order[place]
        hop = network.wire(a, b, collective=False, streams=self.task.streams(a, b))
        busy = network.send_s(hop, size)
        return Wire(2 * (hop.delay_s + busy), busy)

    def solutions(self, limit: float = math.inf) -> Iterator[Solution]:
        """Pareto points of (sum, slowest), by falling bound on the slowest stage, while one may be below `limit`."""
        bound, best = math.inf, limit
        while True:
            found = self._under(bound)
            if found is None:
                return
            total, slowest, cuts = found
            objective = total + (self.parts - 1) * slowest
            yield Solution(objective, cuts)
            best = min(best, objective)
            # The sum only grows as the bound falls: below this nothing can win any more.
            if total >= best or self.parts == 1:
                return
            bound = slowest * (1.0 if len(self.order) <= EXACT else STEP)

    def _under(self, bound: float) -> tuple[float, float, tuple[Cut, ...]] | None:
        """The least sum with every stage and message below the bound; None where there is none."""
        n, shape = len(self.order), (self.most + 1, self.units + 1)
        # For each place, and hosts of the slice that starts there: the least sum, and which slice and cut it has.
        value: list[dict[int, NDArray[np.float64]]] = [{} for _ in range(n + 1)]
        chosen: list[dict[int, NDArray[np.int64]]] = [{} for _ in range(n)]
        value[n][1] = np.full(shape, np.inf)
        value[n][1][0, self.units] = 0.0
        for place in range(n - 1, -1, -1):
            for hosts, (runs, seconds) in self.starts[place].items():
                rests = [np.min([value[run.stop][h] + self._way(run, h, bound) for h in value[run.stop]], axis=0)
                         for run in runs]  # fmt: skip
                # (run, stages to come, first, last) + (run, stages to come, 1, last)
                total = np.where(seconds < bound, seconds, np.inf) + np.stack(rests)[:, :-1, None, :]
                flat = total.transpose(1, 2, 0, 3).reshape(self.most, self.units + 1, -1)
                chosen[place][hosts] = flat.argmin(axis=2)
                least = np.take_along_axis(flat, chosen[place][hosts][..., None], axis=2)[..., 0]
                value[place][hosts] = np.vstack((np.full((1, self.units + 1), np.inf), least))
        total, hosts, stages = min(
            (float(found[stages, 0]), hosts, stages) for hosts, found in value[0].items() for stages in range(shape[0])
        )
        if not math.isfinite(total):
            return None
        return total, *self._read(value, chosen, hosts, stages, bound)

    def _way(self, run: Slice, hosts: int, bound: float) -> float:
        """Seconds from a slice to the next one, which has so many hosts, and back; infinite at the bound."""
        wire = self.wire(run.stop, min(self.hosts[run], hosts))
        return wire.way if wire.busy < bound else math.inf

    def _read(
        self, value: list[dict[int, NDArray[np.float64]]], chosen: list[dict[int, NDArray[np.int64]]], hosts: int,
        stages: int, bound: float,
    ) -> tuple[float, tuple[Cut, ...]]:  # fmt: skip
        place, first, slowest, cuts = 0, 0, 0.0, []
        for to_come in range(stages, 0, -1):
            number, last = divmod(int(chosen[place][hosts][to_come - 1, first]), self.units + 1)
            run = self.starts[place][hosts][0][number]
            seconds, picks = self.times[run]
            ranks = tuple(self.order[i] for i in range(*run))
            table = self.tables.of(ranks)[int(picks[to_come - 1, first, last])]
            cuts.append(Cut(ranks, (first, last), table.option, int(table.depth[first, last])))
            after = value[run.stop]
            hosts = min(after, key=lambda h: float(after[h][to_come - 1, last]) + self._way(run, h, bound))
            slowest = max(
                slowest, float(seconds[to_come - 1, first, last]), self.wire(run.stop, min(self.hosts[run], hosts)).busy
            )
            place, first = run.stop, last
        return slowest, tuple(cuts)
