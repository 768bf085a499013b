"""Times the units of a model on one device, as a worker runs them: embedding, block, and head with the loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from farspan import models
from farspan.domain.cluster import DType, UnitTime
from farspan.domain.model import ModelSpec
from farspan.runtime.device import settle
from farspan.runtime.model import Decoder
from farspan.runtime.state import TrainState

#: Seconds that all units' passes are taken over, how many at least, and those before, while memory is first touched.
TIMED_S, LEAST, WARMUP = 1.5, 8, 3
#: Slow devices make no more than one pass after so many seconds.
MOST_S = 5.0
#: A pass that takes longer is not repeated with more rows: time is then in proportion to them.
LONG_S = 1.0
#: Blocks that are timed together, so that no cache holds the one that comes next.
BLOCKS = 4


def unit_times(
    device: torch.device, spec: ModelSpec, seq_len: int, rows: Sequence[int], dtypes: Sequence[DType]
) -> tuple[UnitTime, ...]:
    """Forward and backward seconds of every unit over so many sequences, by dtype; without those that do not fit."""
    blocks = min(BLOCKS, spec.layers)
    ends = {"embedding": (0, 1), "block": (1, 1 + blocks), "head": (spec.layers + 1, spec.layers + 2)}
    hash_, found = models.graph(spec).units_hash, list[UnitTime]()
    for dtype in dtypes:
        units = {name: _Unit(device, spec, which, dtype) for name, which in ends.items()}
        for count in sorted(rows):
            try:
                times = _timed(units, (count, seq_len), spec.vocab_size, device)
            except torch.OutOfMemoryError:
                break
            for name, (forward, backward) in times.items():
                share = blocks if name == "block" else 1
                found.append(UnitTime(
                    model=hash_, unit=name, dtype=dtype, rows=count, seq_len=seq_len,  # type: ignore[arg-type]
                    forward_s=forward / share, backward_s=backward / share,
                ))  # fmt: skip
            if sum(map(sum, times.values())) > LONG_S:
                break
    return tuple(found)


class _Unit:
    """A stage of one unit, or of some blocks, with small random weights."""

    def __init__(self, device: torch.device, spec: ModelSpec, units: tuple[int, int], dtype: DType) -> None:
        self._device = device
        self._first, self._last = units[0] == 0, units[1] == spec.layers + 2
        self._model = Decoder(spec, units=units)
        for parameter in self._model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self._model.to(device)
        self._state = TrainState(self._model, dtype)
        self._x = self._y = torch.empty(0)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        self._x = x if self._first else x.detach().requires_grad_()
        y = self._model.advance(self._x)
        self._y = self._model.finish(y, targets) if self._last else y
        settle(self._device)
        return self._y

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        self._y.backward(torch.ones_like(self._y) if gradient is None else gradient)
        settle(self._device)
        return self._x.grad

    def clear(self) -> None:
        self._state.clear()


def _timed(
    units: dict[str, _Unit], shape: tuple[int, int], vocabulary: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Mean seconds of each unit's forward and backward pass, one unit after another as in a step, each finding caches
    as the others left them. Means, since where workers share a core a short pass takes one turn or two."""
    tokens = torch.randint(vocabulary, shape, device=device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in units}
    began, passes = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < TIMED_S or passes < WARMUP + LEAST:
        if spent > MOST_S and passes > 1:
            break
        for name, both in _pass(units, tokens).items():
            times[name].append(both)
        passes += 1
    for unit in units.values():
        unit.clear()
    kept = min(WARMUP, passes - 1)
    return {
        name: (statistics.fmean(f for f, _ in found[kept:]), statistics.fmean(b for _, b in found[kept:]))
        for name, found in times.items()
    }


def _pass(units: dict[str, _Unit], tokens: Tensor) -> dict[str, tuple[float, float]]:
    x, forward, backward = tokens, dict[str, float](), dict[str, float]()
    for name, unit in units.items():
        began = time.perf_counter()
        x = unit.forward(x, tokens)
        forward[name] = time.perf_counter() - began
    gradient = None
    for name, unit in reversed(units.items()):
        began = time.perf_counter()
        gradient = unit.backward(gradient)
        backward[name] = time.perf_counter() - began
    return {name: (forward[name], backward[name]) for name in units}
