"""Times the units of a model on one device, as a worker runs them: embedding, block, and head with the loss."""

from __future__ import annotations

import itertools
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

#: Seconds that each figure is taken over, and how often at least; passes before those, while memory is first touched.
TIMED_S, LEAST, WARMUP = 1.0, 8, 3
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
    units = {"embedding": (0, 1), "block": (1, 1 + blocks), "head": (spec.layers + 1, spec.layers + 2)}
    hash_, found = models.graph(spec).units_hash, list[UnitTime]()
    for dtype, (name, which) in itertools.product(dtypes, units.items()):
        passes, share = _Passes(device, spec, which, dtype, seq_len), blocks if name == "block" else 1
        for count in sorted(rows):
            try:
                forward, backward = passes.time(count)
            except torch.OutOfMemoryError:
                break
            found.append(UnitTime(
                model=hash_, unit=name, dtype=dtype, rows=count, seq_len=seq_len,  # type: ignore[arg-type]
                forward_s=forward / share, backward_s=backward / share,
            ))  # fmt: skip
            if forward + backward > LONG_S:
                break
    return tuple(found)


class _Passes:
    """A stage of some units of a model, with small random weights."""

    def __init__(
        self, device: torch.device, spec: ModelSpec, units: tuple[int, int], dtype: DType, seq_len: int
    ) -> None:
        self._device, self._spec, self._seq_len = device, spec, seq_len
        self._first, self._last = units[0] == 0, units[1] == spec.layers + 2
        self._model = Decoder(spec, units=units)
        for parameter in self._model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self._model.to(device)
        self._state = TrainState(self._model, dtype)

    def time(self, rows: int) -> tuple[float, float]:
        """Mean seconds of a forward and of a backward pass: where workers share a core, a short one takes one turn or
        two."""
        shape = rows, self._seq_len
        tokens = torch.randint(self._spec.vocab_size, shape, device=self._device)
        working = next(self._model.parameters()).dtype
        stream = torch.randn(*shape, self._spec.d_model, device=self._device, dtype=working)
        times = list[tuple[float, float]]()
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < TIMED_S or len(times) < WARMUP + LEAST:
            if spent > MOST_S and len(times) > 1:
                break
            x = tokens if self._first else stream.detach().requires_grad_()
            times.append(self._pass(x, tokens))
        self._state.clear()
        kept = times[min(WARMUP, len(times) - 1) :]
        return statistics.fmean(one[0] for one in kept), statistics.fmean(one[1] for one in kept)

    def _pass(self, x: Tensor, targets: Tensor) -> tuple[float, float]:
        began = time.perf_counter()
        y = self._model.advance(x)
        if self._last:
            y = self._model.finish(y, targets)
        settle(self._device)
        between = time.perf_counter()
        y.backward(torch.ones_like(y))
        settle(self._device)
        return between - began, time.perf_counter() - between
