"""Cutting a model into pipeline stages over a device order, by dynamic programming.

Over a given order of devices, stages are runs of neighbours; what is minimised is Alpa's objective (arXiv 2201.12023,
eq. 2) with the wires' time:

    sum_s (t_s + wire_s) + (m - 1) max_s max(t_s, busy_s)

t_s being a microbatch's forward and backward pass, wire_s the way to the next stage and back, busy_s how long a message
keeps the wire. The state is (place in the order, stages still to come, first unit): the place says which devices are
left, not only how many. The outer search lowers the bound on the slowest stage from one Pareto point to the next, so
every optimum of the objective is met.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.techniques._search.slices import Option, Slice, Tables, slices
from farspan.techniques._task import Task

#: Stages beyond which pipelines are not searched on more devices than this: bubbles grow, and so does the search.
MOST_STAGES, ANY_STAGES = 16, 16


class Cut(NamedTuple):
    """One stage of a solution: its devices, its units, how it runs, and how deep its memory lets it be."""

    ranks: tuple[int, ...]
    units: tuple[int, int]
    option: Option
    depth: int


class Solution(NamedTuple):
    objective: float
    cuts: tuple[Cut, ...]


class StageSearch:
    """All pipelines over one device order with one number of microbatches."""

    def __init__(self, task: Task, order: Sequence[int], tables: Tables) -> None:
        self.task, self.order, self.tables = task, tuple(order), tables
        self.parts, self.units, n = tables.microbatches, task.graph.units, len(order)
        self.most = min(n, self.units, n if n <= ANY_STAGES else MOST_STAGES)
        self.slices = slices(task, order)
        self.from_start: dict[int, list[Slice]] = {}
        for run in self.slices:
            self.from_start.setdefault(run.start, []).append(run)
        self._best: dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]] = {}
        self.times = {run: self._of(run) for run in self.slices}
        self.wire, self.busy = self._wires()

    def _of(self, run: Slice) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """By stages to come, this one included, and cuts: the least seconds of any option that is deep enough."""
        tables = self.tables.of([self.order[i] for i in range(*run)])
        if id(tables) not in self._best:
            shape = (self.most, self.units + 1, self.units + 1)
            seconds, picks = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
            for number, table in enumerate(tables):
                for to_come in range(self.most):
                    better = (table.depth >= min(self.parts, to_come + 1)) & (table.seconds < seconds[to_come])
                    seconds[to_come][better] = table.seconds[better]
                    picks[to_come][better] = number
            self._best[id(tables)] = (seconds, picks)
        return self._best[id(tables)]

    def _wires(self) -> tuple[list[float], list[float]]:
        """Before each place of the order: seconds from the device before it and back, and the longer message's."""
        network, train = self.task.costs.network, self.task.train
        width = 4 if train.precision == "fp32" else 2
        size = self.task.graph.size("bsd", b=self.tables.rows, s=train.seq_len) * width
        wire, busy = [0.0] * (len(self.order) + 1), [0.0] * (len(self.order) + 1)
        for place in range(1, len(self.order)):
            a, b = self.order[place - 1], self.order[place]
            hop = network.wire(a, b, collective=False, streams=self.task.streams(a, b))
            busy[place] = network.send_s(hop, size)
            wire[place] = 2 * (hop.delay_s + busy[place])
        return wire, busy

    def solutions(self) -> Iterator[Solution]:
        """The Pareto points of (sum, slowest), by falling bound on the slowest stage."""
        bound, best = math.inf, math.inf
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
            bound = slowest

    def _under(self, bound: float) -> tuple[float, float, tuple[Cut, ...]] | None:
        """The least sum with every stage and message below the bound; None where there is none."""
        n, shape = len(self.order), (self.most + 1, self.units + 1)
        value = [np.full(shape, np.inf) for _ in range(n + 1)]
        chosen = [np.zeros((*shape, 2), dtype=np.int64) for _ in range(n)]
        value[n][0, self.units] = 0.0
        for place in range(n - 1, -1, -1):
            for number, run in enumerate(self.from_start.get(place, ())):
                if run.stop < n and self.busy[run.stop] >= bound:
                    continue
                seconds = self.times[run][0]
                rest = value[run.stop][:-1] + (self.wire[run.stop] if run.stop < n else 0.0)
                if not np.isfinite(rest).any():
                    continue
                total = np.where(seconds < bound, seconds, np.inf) + rest[:, None, :]
                last = total.argmin(axis=2)
                least = np.take_along_axis(total, last[..., None], axis=2)[..., 0]
                better = least < value[place][1:]
                value[place][1:][better] = least[better]
                chosen[place][1:][better] = np.stack((np.full_like(last, number), last), axis=-1)[better]
        stages = int(value[0][:, 0].argmin())
        if not math.isfinite(value[0][stages, 0]):
            return None
        return float(value[0][stages, 0]), *self._read(chosen, stages)

    def _read(self, chosen: list[NDArray[np.int64]], stages: int) -> tuple[float, tuple[Cut, ...]]:
        place, first, slowest, cuts = 0, 0, 0.0, []
        for to_come in range(stages, 0, -1):
            number, last = (int(x) for x in chosen[place][to_come, first])
            run = self.from_start[place][number]
            seconds, picks = self.times[run]
            ranks = tuple(self.order[i] for i in range(*run))
            table = self.tables.of(ranks)[int(picks[to_come - 1, first, last])]
            cuts.append(Cut(ranks, (first, last), table.option, int(table.depth[first, last])))
            slowest = max(slowest, float(seconds[to_come - 1, first, last]), self.busy[run.stop])
            place, first = run.stop, last
        return slowest, tuple(cuts)
