"""The inner dynamic program of Alpa's stage search (arXiv 2201.12023, eq. 3), over arrays.

`f[place, hosts, num_stages, blocks]` is the least sum of stage times from a place of the device
order on: `hosts` of the stage that starts there, `num_stages` still to come (this one included),
and `blocks` of the model before it. All stages that start at one place with the same number of
hosts are computed at once, over all `num_stages` and all `blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.techniques._search.slices import DeviceRange

Floats = NDArray[np.float64]


class StageCostTable(NamedTuple):
    """Costs of a stage on one device range, by number of stages to come and number of blocks.

    `seconds`: a microbatch; `cycle`: the rest of a step; `picks`: the index of the option.
    """

    seconds: Floats
    cycle: Floats
    picks: NDArray[np.int64]


class StartRows(NamedTuple):
    """Rows of the stacked tables that start at one place and have the same number of hosts.

    Rows [first, middle) are followed by other stages, whose least sums are the rows `rest` of
    `StageDP.rest`. Rows [middle, last) end the order.
    """

    first: int
    middle: int
    last: int
    rest: NDArray[np.int64]


class StageCosts:
    """All cost tables of an order, stacked by the place where they start and by their hosts."""

    def __init__(
        self,
        places: int,
        max_stages: int,
        layers: int,
        tables: Mapping[DeviceRange, Sequence[StageCostTable]],
        hosts: Mapping[DeviceRange, int],
    ) -> None:
        self.places = places
        self.max_stages = max_stages
        self.layers = layers
        self.hosts = hosts
        #: Device range and table of each row.
        self.rows: list[tuple[DeviceRange, StageCostTable]] = []
        #: By place: the rows that start there, by number of hosts.
        self.starts: list[dict[int, StartRows]] = [{} for _ in range(places)]
        #: By place: the row of `StageDP.rest` for ranges that end there, by number of hosts.
        self.rest_rows: list[dict[int, int]] = [{} for _ in range(places)]
        self.num_rest_rows = 0

        grouped: dict[tuple[int, int], list[DeviceRange]] = {}
        for devices in tables:
            if tables[devices]:
                grouped.setdefault((devices.start, hosts[devices]), []).append(devices)
        for (place, count), ranges in grouped.items():
            rows = []
            for devices in ranges:
                rows += [(devices, table) for table in tables[devices]]
            self._add_rows(place, count, rows)

        self.longest = self._longest_pipelines()
        self.seconds, self.cycle = self._stack_tables()

    def _add_rows(
        self, place: int, hosts: int, rows: list[tuple[DeviceRange, StageCostTable]]
    ) -> None:
        first = len(self.rows)
        rest = []
        for devices, _ in rows:
            if devices.stop < self.places:
                row = self.rest_rows[devices.stop].setdefault(hosts, self.num_rest_rows)
                self.num_rest_rows = max(self.num_rest_rows, row + 1)
                rest.append(row)
        middle = first + len(rest)
        last = first + len(rows)
        self.starts[place][hosts] = StartRows(first, middle, last, np.array(rest, dtype=np.int64))
        self.rows += rows

    def _longest_pipelines(self) -> list[int]:
        """Return the most stages from each place on: `max_stages` less the fewest before it."""
        longest = [0] * (self.places + 1)
        for devices, _ in reversed(self.rows):
            longest[devices.start] = max(longest[devices.start], 1 + longest[devices.stop])
        fewest = [0, *[self.max_stages] * self.places]
        for devices, _ in self.rows:
            fewest[devices.stop] = min(fewest[devices.stop], 1 + fewest[devices.start])
        for place, before in enumerate(fewest):
            longest[place] = max(0, min(self.max_stages - before, longest[place]))
        return longest

    def _stack_tables(self) -> tuple[Floats, Floats]:
        """Return seconds and cycles by row, blocks and stages to come.

        The last dim is 1 where memory lets every stage hold all microbatches in flight.
        """
        shape = (len(self.rows), self.max_stages, self.layers + 1)
        seconds = np.array([table.seconds for _, table in self.rows]).reshape(shape)
        cycle = np.array([table.cycle for _, table in self.rows]).reshape(shape)
        if (seconds == seconds[:, :1]).all() and (cycle == cycle[:, :1]).all():
            seconds = seconds[:, :1]
            cycle = cycle[:, :1]
        seconds = np.ascontiguousarray(seconds.transpose(0, 2, 1))
        cycle = np.ascontiguousarray(cycle.transpose(0, 2, 1))
        return seconds, cycle

    def max_blocks(self, allowed: NDArray[np.bool_]) -> float:
        """Return the most blocks that stages over the whole order hold.

        `allowed`: the numbers of blocks that each row may have (rows, layers + 1).
        """
        blocks = np.where(allowed.any(axis=1), last_true(allowed), -math.inf).tolist()
        most = [-math.inf] * self.places + [0.0]
        for (devices, _), row_blocks in zip(reversed(self.rows), reversed(blocks), strict=True):
            total = row_blocks + most[devices.stop]
            most[devices.start] = max(most[devices.start], total)
        return most[0]


def last_true(rows: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the index of the last true value of each row."""
    last: NDArray[np.int64] = rows.shape[1] - 1 - rows[:, ::-1].argmax(axis=1)
    return last


class StageDP:
    """The least sums with every stage and message below `bound` seconds.

    `p2p_latency(place, hosts_before, hosts_after)`: seconds between the stages on both sides of a
    place; infinite where the message takes the bound or longer.
    """

    def __init__(
        self, costs: StageCosts, bound: float, p2p_latency: Callable[[int, int, int], float]
    ) -> None:
        self.costs = costs
        self._p2p_latency = p2p_latency
        layers = costs.layers
        self.seconds = np.where(costs.cycle < bound, costs.seconds, np.inf)
        #: The most blocks that each row may have.
        feasible: NDArray[np.bool_] = np.isfinite(self.seconds).max(axis=2)
        self._max_blocks = np.where(feasible.any(axis=1), last_true(feasible), 0)
        #: By place and hosts: (stages to come, blocks before).
        self.f: list[dict[int, Floats]] = [{} for _ in range(costs.places)]
        #: The least sum of what follows a range; infinite beyond all blocks.
        rest_shape = (costs.num_rest_rows, costs.max_stages + 1, 2 * layers + 1)
        self.rest = np.full(rest_shape, np.inf)
        for place in range(costs.places - 1, -1, -1):
            self._solve_place(place)

    def _solve_place(self, place: int) -> None:
        """Fill `f[place]`, then `rest` of the ranges that end there."""
        costs = self.costs
        f = self.f[place]
        for hosts, start in costs.starts[place].items():
            f[hosts] = np.full((costs.max_stages + 1, costs.layers + 1), np.inf)
            if place == 0:
                self._solve_first_stage(f[hosts], place, start)
            else:
                self._solve_later_stage(f[hosts], place, start)
        if not f:
            return

        to_come = slice(1, costs.longest[place] + 1)
        for hosts_before, row in costs.rest_rows[place].items():
            rest = self.rest[row, to_come, : costs.layers + 1]
            for hosts, sums in f.items():
                latency = self._p2p_latency(place, hosts_before, hosts)
                if latency < math.inf:
                    np.minimum(rest, sums[to_come] + latency, out=rest)

    def _solve_first_stage(self, f: Floats, place: int, start: StartRows) -> None:
        """Solve for the stage that starts the order: no blocks are before it."""
        layers = self.costs.layers
        longest = self.costs.longest[place]
        if start.middle > start.first and longest > 1:
            rest = self.rest[start.rest, 1:longest, : layers + 1].transpose(0, 2, 1)
            total = self._followed_seconds(start, longest) + rest
            f[2 : longest + 1, 0] = total.min(axis=(0, 1))
        if start.last > start.middle:
            f[1, 0] = self.seconds[start.middle : start.last, layers, 0].min()

    def _solve_later_stage(self, f: Floats, place: int, start: StartRows) -> None:
        """Solve for a stage that follows others, by the number of blocks before it."""
        layers = self.costs.layers
        longest = self.costs.longest[place]
        max_blocks = 0
        if start.middle > start.first and longest > 1:
            max_blocks = int(self._max_blocks[start.first : start.middle].max())
        if max_blocks:
            rest = self.rest[start.rest, 1:longest]
            num_rows, num_stages, width = rest.shape
            # A view without a copy: rest[row, stage, blocks before + own blocks], from 1 own block
            # on. A copy would be `layers` times as large.
            shape = (num_rows, max_blocks, num_stages, layers + 1)
            strides = (8 * num_stages * width, 8, 8 * width, 8)
            after = np.ndarray(shape, buffer=rest, offset=8, strides=strides)
            own = self._followed_seconds(start, longest)[:, 1 : max_blocks + 1, :, None]
            total = (own + after).reshape(num_rows * max_blocks, -1)
            f[2 : longest + 1] = total.min(axis=0).reshape(num_stages, -1)
        if start.last > start.middle:
            f[1] = self.seconds[start.middle : start.last, ::-1, 0].min(axis=0)

    def _followed_seconds(self, start: StartRows, longest: int) -> Floats:
        """Return seconds of the rows that others follow, by blocks and stages to come from 2 on."""
        seconds = self.seconds[start.first : start.middle]
        return seconds if seconds.shape[2] == 1 else seconds[:, :, 1:longest]

    def least_sum(self) -> tuple[float, int, int]:
        """Return the least sum, the hosts of its first stage, and its number of stages."""
        best = (math.inf, 0, 0)
        for hosts, f in self.f[0].items():
            for num_stages in range(self.costs.max_stages + 1):
                best = min(best, (float(f[num_stages, 0]), hosts, num_stages))
        return best

    def first_stage(
        self, place: int, hosts: int, num_stages: int, blocks_before: int
    ) -> tuple[int, int]:
        """Return the row and the number of blocks of the stage that starts a least sum."""
        start = self.costs.starts[place][hosts]
        layers = self.costs.layers
        remaining = layers - blocks_before
        if num_stages == 1:
            seconds = self.seconds[start.middle : start.last, remaining, 0]
            return start.middle + int(seconds.argmin()), remaining
        column = min(num_stages, self.seconds.shape[2]) - 1
        own = self.seconds[start.first : start.middle, : remaining + 1, column]
        rest = self.rest[start.rest, num_stages - 1, blocks_before : layers + 1]
        total = own + rest
        row, blocks = divmod(int(total.argmin()), total.shape[1])
        return start.first + row, blocks

    def hosts_after(self, devices: DeviceRange, num_stages: int, blocks_before: int) -> int:
        """Return the hosts of the stage after a range, with `num_stages` to come."""
        hosts_before = self.costs.hosts[devices]
        f = self.f[devices.stop]

        def total(hosts: int) -> float:
            latency = self._p2p_latency(devices.stop, hosts_before, hosts)
            return float(f[hosts][num_stages, blocks_before]) + latency

        return min(f, key=total)
