"""The least sum of stages over a device order, by places: the inner dynamic program of `stages`,
over arrays.

Its state is (place in the order, hosts of the stage that starts there, stages still to come, blocks
before it). Stages that start at one place with as many hosts are computed at once, over all stages
to come and all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.techniques._search.slices import DeviceRange

Floats = NDArray[np.float64]


class RangeTable(NamedTuple):
    """Of one slice, by stages to come and blocks: seconds a microbatch, of the rest of a step, and
    which table."""

    seconds: Floats
    cycle: Floats
    picks: NDArray[np.int64]


class Start(NamedTuple):
    """The lanes that start at one place and have as many hosts, by their rows in the stacked
    tables: from `first` to `middle` other stages follow, what these take stands in rows `rest` of
    `LeastSums.rest`; until `last` none does."""

    first: int
    middle: int
    last: int
    rest: NDArray[np.int64]


class Stacked:
    """Every lane of every slice of an order, stacked by the place where it starts and by its
    hosts."""

    def __init__(
        self,
        places: int,
        most: int,
        layers: int,
        lanes: Mapping[DeviceRange, Sequence[RangeTable]],
        hosts: Mapping[DeviceRange, int],
    ) -> None:
        self.places, self.most, self.layers, self.hosts = places, most, layers, hosts
        #: The slice and the table of each row.
        self.rows: list[tuple[DeviceRange, RangeTable]] = []
        #: By place, what starts there, by its hosts.
        self.starts: list[dict[int, Start]] = [{} for _ in range(places)]
        #: Rows for what follows slices, by where they end and by their hosts.
        self.rests: list[dict[int, int]] = [{} for _ in range(places)]
        self.following = 0
        #: Stages at most from each place on: `most` less the fewest before it.
        self.longest = [*[0] * places, 0]
        together: dict[tuple[int, int], list[DeviceRange]] = {}
        for run in lanes:
            if lanes[run]:
                together.setdefault((run.start, hosts[run]), []).append(run)
        for (place, count), runs in together.items():
            self._add(place, count, [(run, lane) for run in runs for lane in lanes[run]])
        for run, _ in reversed(self.rows):
            self.longest[run.start] = max(self.longest[run.start], 1 + self.longest[run.stop])
        fewest = [0, *[most] * places]
        for run, _ in self.rows:
            fewest[run.stop] = min(fewest[run.stop], 1 + fewest[run.start])
        self.longest = [
            max(0, min(most - few, long)) for few, long in zip(fewest, self.longest, strict=True)
        ]
        self.seconds, self.cycle = self._tables()

    def _add(self, place: int, hosts: int, rows: list[tuple[DeviceRange, RangeTable]]) -> None:
        first, rest = len(self.rows), []
        for run, _ in rows:
            if run.stop < self.places:
                rest.append(self.rests[run.stop].setdefault(hosts, self.following))
                self.following += rest[-1] == self.following
        self.starts[place][hosts] = Start(
            first, first + len(rest), first + len(rows), np.array(rest, dtype=np.int64)
        )
        self.rows += rows

    def _tables(self) -> tuple[Floats, Floats]:
        """Seconds and cycles by row, blocks and stages to come; for any stages to come at once
        where memory lets all stages be as deep as they like."""
        shape = (len(self.rows), self.most, self.layers + 1)
        seconds = np.array([table.seconds for _, table in self.rows]).reshape(shape)
        cycle = np.array([table.cycle for _, table in self.rows]).reshape(shape)
        if (seconds == seconds[:, :1]).all() and (cycle == cycle[:, :1]).all():
            seconds, cycle = seconds[:, :1], cycle[:, :1]
        return np.ascontiguousarray(seconds.transpose(0, 2, 1)), np.ascontiguousarray(
            cycle.transpose(0, 2, 1)
        )

    def most_blocks(self, within: NDArray[np.bool_]) -> float:
        """The most blocks that stages over the whole order can have, where each row may have those
        of `within`."""
        blocks = np.where(
            within.any(axis=1), self.layers - within[:, ::-1].argmax(axis=1), -math.inf
        ).tolist()
        most = [*[-math.inf] * self.places, 0.0]
        for (run, _), own in zip(reversed(self.rows), reversed(blocks), strict=True):
            most[run.start] = max(most[run.start], own + most[run.stop])
        return most[0]


class LeastSums:
    """The least sums with every stage and message below a bound. `way` says what lies between a
    place with so many hosts before and after it, infinite at the bound."""

    def __init__(
        self, stacked: Stacked, bound: float, way: Callable[[int, int, int], float]
    ) -> None:
        self.stacked, self._way = stacked, way
        shape, layers = (stacked.most + 1, stacked.layers + 1), stacked.layers
        self.seconds = np.where(stacked.cycle < bound, stacked.seconds, np.inf)
        #: The most blocks that each row may have.
        possible: NDArray[np.bool_] = np.isfinite(self.seconds).max(axis=2)
        self._blocks = np.where(
            possible.any(axis=1), stacked.layers - possible[:, ::-1].argmax(axis=1), 0
        )
        #: By place and hosts, over stages to come and blocks before.
        self.value: list[dict[int, Floats]] = [{} for _ in range(stacked.places)]
        #: What follows a slice, over the same; beyond all blocks nothing is.
        self.rest = np.full((stacked.following, stacked.most + 1, 2 * layers + 1), np.inf)
        for place in range(stacked.places - 1, -1, -1):
            for hosts, start in stacked.starts[place].items():
                value = self.value[place][hosts] = np.full(shape, np.inf)
                (self._at_start if place == 0 else self._between)(value, place, start)
            for before, row in stacked.rests[place].items() if self.value[place] else ():
                rest, to_come = (
                    self.rest[row, :, : layers + 1],
                    slice(1, stacked.longest[place] + 1),
                )
                for hosts, least in self.value[place].items():
                    if (between := way(place, before, hosts)) < math.inf:
                        np.minimum(rest[to_come], least[to_come] + between, out=rest[to_come])

    def _at_start(self, value: Floats, place: int, start: Start) -> None:
        """The first stage: no blocks are before it."""
        layers, longest = self.stacked.layers, self.stacked.longest[place]
        if start.middle > start.first and longest > 1:
            rest = self.rest[start.rest, 1:longest, : layers + 1].transpose(0, 2, 1)
            value[2 : longest + 1, 0] = (self._own(start, longest) + rest).min(axis=(0, 1))
        if start.last > start.middle:
            value[1, 0] = self.seconds[start.middle : start.last, layers, 0].min()

    def _between(self, value: Floats, place: int, start: Start) -> None:
        """A stage that follows others: its blocks go before those of the rest."""
        layers, longest = self.stacked.layers, self.stacked.longest[place]
        if (
            start.middle > start.first
            and longest > 1
            and (most := int(self._blocks[start.first : start.middle].max()))
        ):
            rest = self.rest[start.rest, 1:longest]
            rows, stages, width = rest.shape
            # rest[row, stages, blocks before + blocks of its own], own blocks from 1 on.
            strides = (8 * stages * width, 8, 8 * width, 8)
            after = np.ndarray(
                (rows, most, stages, layers + 1), buffer=rest, offset=8, strides=strides
            )
            total = self._own(start, longest)[:, 1 : most + 1, :, None] + after
            value[2 : longest + 1] = total.reshape(rows * most, -1).min(axis=0).reshape(stages, -1)
        if start.last > start.middle:
            value[1] = self.seconds[start.middle : start.last, ::-1, 0].min(axis=0)

    def _own(self, start: Start, longest: int) -> Floats:
        """Seconds of the rows that others follow, by blocks and by stages to come from 2 on."""
        own = self.seconds[start.first : start.middle]
        return own if own.shape[2] == 1 else own[:, :, 1:longest]

    def best(self) -> tuple[float, int, int]:
        """The least sum of all, with the hosts of its first stage and its number of stages."""
        stages = range(self.stacked.most + 1)
        sums = (
            (float(value[s, 0]), hosts, s) for hosts, value in self.value[0].items() for s in stages
        )
        return min(sums, default=(math.inf, 0, 0))

    def choice(self, place: int, hosts: int, stages: int, before: int) -> tuple[int, int]:
        """The row and the blocks of the stage that starts a least sum."""
        start, layers = self.stacked.starts[place][hosts], self.stacked.layers
        if stages == 1:
            ending = self.seconds[start.middle : start.last, layers - before, 0]
            return start.middle + int(ending.argmin()), layers - before
        own = self.seconds[start.first : start.middle, :, min(stages, self.seconds.shape[2]) - 1]
        total = (
            own[:, : layers + 1 - before] + self.rest[start.rest, stages - 1, before : layers + 1]
        )
        row, blocks = divmod(int(total.argmin()), total.shape[1])
        return start.first + row, blocks

    def after(self, run: DeviceRange, stages: int, before: int) -> int:
        """The hosts of the stage after a slice, with so many stages to come and blocks before
        them."""
        hosts, after = self.stacked.hosts[run], self.value[run.stop]
        return min(
            after, key=lambda h: float(after[h][stages, before]) + self._way(run.stop, hosts, h)
        )
