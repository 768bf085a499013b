"""Times the units of a model on one device, as a worker runs them: embedding, block, and head with the loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from farspan import models
from farspan.domain.cluster import DType, UnitTime
from farspan.domain.model import ModelSpec
from farspan.runtime.executor import settling
from farspan.runtime.model import Decoder, initialise
from farspan.runtime.state import TrainState

#: Seconds that each figure is taken over, and how often at least; passes before those, while memory is first touched.
TIMED_S, LEAST, WARMUP = 0.6, 8, 3
#: A pass that takes longer is not repeated with more rows: time is then in proportion to them.
LONG_S = 1.0
#: Blocks that are timed together, so that no cache holds the one that comes next.
BLOCKS = 4


def unit_times(
    device: torch.device, spec: ModelSpec, seq_len: int, rows: Sequence[int], dtypes: Sequence[DType]
) -> tuple[UnitTime, ...]:
    """Forward and backward seconds of every unit over so many sequences, by dtype."""
    blocks = min(BLOCKS, spec.layers)
    units = {"embedding": (0, 1), "block": (1, 1 + blocks), "head": (spec.layers + 1, spec.layers + 2)}
    model, found = models.graph(spec).units_hash, list[UnitTime]()
    for dtype in dtypes:
        for name, which in units.items():
            for count in sorted(rows):
                forward, backward = _passes(device, spec, which, dtype, count, seq_len)
                share = blocks if name == "block" else 1
                found.append(UnitTime(
                    model=model, unit=name, dtype=dtype, rows=count, seq_len=seq_len,  # type: ignore[arg-type]
                    forward_s=forward / share, backward_s=backward / share,
                ))  # fmt: skip
                if forward + backward > LONG_S:
                    break
    return tuple(found)


def _passes(
    device: torch.device, spec: ModelSpec, units: tuple[int, int], dtype: DType, rows: int, seq_len: int
) -> tuple[float, float]:
    """Median seconds of a forward and of a backward pass of a stage with these units."""
    model = Decoder(spec, units=units)
    initialise(model, 0)
    model.to(device)
    state, settle = TrainState(model, dtype), settling(device)
    tokens = torch.randint(spec.vocab_size, (rows, seq_len), device=device)
    stream = torch.randn(rows, seq_len, spec.d_model, device=device, dtype=next(model.parameters()).dtype)
    last = units[1] == spec.layers + 2

    def forward() -> Tensor:
        y = model.advance(tokens if units[0] == 0 else stream.detach().requires_grad_())
        return model.finish(y, tokens) if last else y

    times = list[tuple[float, float]]()
    began = time.perf_counter()
    while len(times) < WARMUP + LEAST or time.perf_counter() - began < TIMED_S:
        y, forward_s = _timed(forward, settle)
        gradient = torch.ones_like(y)
        _, backward_s = _timed(lambda y=y, gradient=gradient: y.backward(gradient), settle)  # type: ignore[misc]
        times.append((forward_s, backward_s))
    state.clear()
    return tuple(statistics.median(kind) for kind in zip(*times[WARMUP:], strict=True))  # type: ignore[return-value]


def _timed(work: Callable[[], Tensor], settle: Callable[[], None]) -> tuple[Tensor, float]:
    began = time.perf_counter()
    found = work()
    settle()
    return found, time.perf_counter() - began
