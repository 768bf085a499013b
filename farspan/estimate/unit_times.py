"""Units of the model that were timed on a device (`farspan probe`): they take so long together, and
the roofline only divides it among their operators and over a tensor axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from farspan.domain.cluster import Device, UnitTime
from farspan.domain.graph import Operator, OpGraph
from farspan.domain.train import TrainSpec
from farspan.estimate.compute import Kernels

#: On the time of kernels, and on that of launching them.
Factors = tuple[float, float]


class TimedUnits:
    """The times of kinds of devices for the units of one model, at one precision and length of
    sequences.

    `predicted` gives seconds of the forward and the backward pass of an operator on a kind of
    device, for `rows`, without a compiler or with it, at its share of the host: `core_loads` has
    the number of busy devices there, and the slowdown of one by the number of threads.
    """

    def __init__(
        self,
        graph: OpGraph,
        train: TrainSpec,
        devices: Mapping[int, Device],
        core_loads: Mapping[int, tuple[int, float]],
        predicted: Callable[[int, Operator, int, bool], tuple[Kernels, Kernels]],
        compiled: frozenset[int] = frozenset(),
        recorded: frozenset[int] = frozenset(),
    ) -> None:
        """Take the times; kinds in `compiled` have those of compiled units where there are any;
        `recorded` are kinds whose step is one graph, other than when they were timed."""
        self._predicted, self._devices, self._recorded = predicted, devices, recorded
        #: Kinds whose times are of compiled units.
        self._compiled = set[int]()
        named = {"embedding": graph.embedding, "block": graph.block, "head": graph.head}
        self._unit = {op.name: (name, unit) for name, unit in named.items() for op in unit}
        self._times: dict[tuple[int, str], list[UnitTime]] = {}
        model = graph.units_hash if any(device.times.units for device in devices.values()) else ""
        self._asked = model, train.precision, train.seq_len
        for kind, device in devices.items():
            fitting = [unit_time for unit_time in device.times.units if self.fits(unit_time)]
            of_compiled = [unit_time for unit_time in fitting if unit_time.compiled]
            if kind in compiled and of_compiled:
                fitting = of_compiled
                self._compiled.add(kind)
            else:
                fitting = [unit_time for unit_time in fitting if not unit_time.compiled]
            count, load = core_loads[kind]
            crowded = [unit_time for unit_time in fitting if unit_time.together == count]
            for unit_time in crowded or [
                _slowed(unit_time, load) for unit_time in fitting if unit_time.together == 1
            ]:
                self._times.setdefault((kind, unit_time.unit), []).append(unit_time)
        self._found: dict[tuple[int, str, int], tuple[Factors, Factors]] = {}

    def fits(self, unit_time: UnitTime) -> bool:
        """Whether a time is of this model, at this precision and length of sequences."""
        return (unit_time.model, unit_time.dtype, unit_time.seq_len) == self._asked

    def factors(self, kind: int, op: Operator, rows: int) -> tuple[Factors, Factors]:
        """Forward and backward, what the kernels of the operator's unit took over what they were
        predicted to take, and the same of their launches; 1 where it was not timed.

        Launches take their predicted time, but no longer than the unit did; kernels take the rest,
        or all of it where launches overlap with them. So a part of a unit, on a tensor axis,
        launches all of its kernels.
        """
        name, unit = self._unit[op.name]
        times = self._times.get((kind, name))
        if times is None or rows == 0:
            return (1.0, 1.0), (1.0, 1.0)
        key = kind, name, rows
        if key not in self._found:
            is_eager = kind not in self._compiled
            predicted = [self._predicted(kind, operator, rows, is_eager) for operator in unit]
            both = zip(*predicted, strict=True)
            ahead = self._devices[kind].backend != "cpu"
            factors = _recorded_factors if kind in self._recorded else _factors
            forward, backward = (
                factors(timed, passes, ahead)
                for timed, passes in zip(unit_seconds(times, rows), both, strict=True)
            )
            self._found[key] = forward, backward
        return self._found[key]


def _factors(timed: float, predicted: Sequence[Kernels], ahead: bool) -> Factors:
    computing = sum(kernels.computing for kernels in predicted)
    launching = sum(kernels.launching for kernels in predicted)
    launched = min(launching, timed)
    kernels_s = timed if ahead else timed - launched
    return kernels_s / computing if computing else 1.0, launched / launching if launching else 1.0


def _recorded_factors(timed: float, predicted: Sequence[Kernels], ahead: bool) -> Factors:
    """As `_factors`, where nothing is launched any more: of a unit that took as long as its
    launches nothing is known but that its kernels took less."""
    computing, launching = _factors(timed, predicted, ahead)
    if launching < 1.0:
        computing = min(1.0, computing)
    return computing, 1.0


def _slowed(unit_time: UnitTime, times: float) -> UnitTime:
    return msgspec.structs.replace(
        unit_time, forward_s=unit_time.forward_s * times, backward_s=unit_time.backward_s * times
    )


def unit_seconds(times: Sequence[UnitTime], rows: int) -> tuple[float, float]:
    """Forward and backward seconds of a unit over `rows` sequences, from those timed: on the line
    through the nearest two, or in proportion where there is one; beyond the most that was timed
    never less than that took."""
    known = sorted(times, key=lambda unit_time: unit_time.rows)
    if len(known) == 1:
        share = rows / known[0].rows
        return known[0].forward_s * share, known[0].backward_s * share
    above = next(
        (i for i, unit_time in enumerate(known) if i > 0 and unit_time.rows >= rows), len(known) - 1
    )
    a, b = known[above - 1], known[above]
    share = (rows - a.rows) / (b.rows - a.rows)
    forward = a.forward_s + share * (b.forward_s - a.forward_s)
    backward = a.backward_s + share * (b.backward_s - a.backward_s)
    if (
        rows > b.rows
    ):  # Where overheads are all that small ones take, noise would turn the line downwards.
        return max(b.forward_s, forward), max(b.backward_s, backward)
    return max(0.0, forward), max(0.0, backward)
