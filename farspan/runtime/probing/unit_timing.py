"""Times the units of a model on one device, as a worker runs them: embedding, block, and head with
the loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from farspan import models
from farspan.domain.cluster import DType, UnitTime
from farspan.domain.engine import engine
from farspan.domain.model import ModelSpec
from farspan.domain.probe import LeftOut, UnitTimes
from farspan.domain.train import TrainSpec
from farspan.estimate.memory import kept_per_row, logits_bytes
from farspan.runtime.device import free_memory, memory_is_full, release, settle
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.state.train_state import TrainState

#: Seconds that all units' passes are taken over, how many at least, and those before, while memory
#: is first touched.
TIMED_S = 1.5
LEAST = 8
WARMUP = 3
#: Slow devices make no more than one pass after so many seconds.
MOST_S = 5.0
#: A pass that takes longer is not repeated with more rows: time is then in proportion to them.
LONG_S = 1.0
#: Blocks that are timed together, so that no cache holds the one that comes next.
BLOCKS = 4
#: Bytes a parameter of a unit with its state (`TrainState`): weights as made and as used, masters,
#: gradients, two moments.
STATE_BYTES: dict[DType, int] = {"fp32": 20, "tf32": 20, "bf16": 22, "fp16": 22}


def unit_times(
    device: torch.device,
    spec: ModelSpec,
    seq_len: int,
    rows: Sequence[int],
    dtypes: Sequence[DType],
    allowed: int,
) -> UnitTimes:
    """Forward and backward seconds of every unit over so many sequences, by dtype, in so many
    bytes; what would need more is left out."""
    blocks = min(BLOCKS, spec.layers)
    ends = {
        "embedding": (0, 1),
        "block": (1, 1 + blocks),
        "head": (spec.layers + 1, spec.layers + 2),
    }
    hash_ = models.graph(spec).units_hash
    measured = list[UnitTime]()
    left_out = list[LeftOut]()
    for dtype in dtypes:
        units = dict[str, _Unit]()
        for place, count in enumerate(sorted(rows)):
            state, working = bytes_needed(spec, seq_len, count, dtype, device.type)
            needed = working + (0 if units else state)
            free = free_memory(device, allowed)
            try:
                if needed > free:
                    raise torch.OutOfMemoryError
                units = units or {
                    name: _Unit(device, spec, which, dtype) for name, which in ends.items()
                }
                times = _timed(units, (count, seq_len), spec.vocab_size, device)
            except (MemoryError, RuntimeError) as error:
                if not memory_is_full(error):
                    raise
                left = tuple(sorted(rows)[place:])
                left_out.append(
                    LeftOut(what=f"units in {dtype}", rows=left, needed=needed, free=max(0, free))
                )
                break
            for name, (forward, backward) in times.items():
                share = blocks if name == "block" else 1
                measured.append(
                    UnitTime(
                        model=hash_,
                        unit=name,
                        dtype=dtype,
                        rows=count,
                        seq_len=seq_len,  # type: ignore[arg-type]
                        forward_s=forward / share,
                        backward_s=backward / share,
                    )
                )
            release(device)
            if sum(map(sum, times.values())) > LONG_S:
                break
        while units:
            units.popitem()[1].end()
        release(device)
    return UnitTimes(times=tuple(measured), left_out=tuple(left_out))


def bytes_needed(
    spec: ModelSpec, seq_len: int, rows: int, dtype: DType, backend: str
) -> tuple[int, int]:
    """Bytes that the timed units take: of their state, and of passes over so many sequences."""
    graph = models.graph(spec)
    blocks = min(BLOCKS, spec.layers)
    own = engine("farspan")
    train = TrainSpec(steps=1, batch=rows, seq_len=seq_len, precision=dtype)
    kinds = ((graph.embedding, 1), (graph.block, blocks), (graph.head, 1))
    weights = sum(
        count * graph.size(weight.dims)
        for unit, count in kinds
        for op in unit
        for weight in op.weights
    )
    kept = sum(count * kept_per_row(graph, unit, train, {}, 1, backend) for unit, count in kinds)
    # Of what a block keeps its backward pass makes gradients, one block at a time.
    kept += kept_per_row(graph, graph.block, train, {}, 1, backend)
    passing = rows * kept + logits_bytes(graph, train, rows, own)
    # What a backward pass gives stands beside the sum that it is added to.
    return round(weights * STATE_BYTES[dtype]), round(
        passing
        + 4
        * max(graph.size(weight.dims) for unit, _ in kinds for op in unit for weight in op.weights)
    )


class _Unit:
    """A stage of one unit, or of some blocks, with small random weights."""

    def __init__(
        self, device: torch.device, spec: ModelSpec, units: tuple[int, int], dtype: DType
    ) -> None:
        self._device = device
        self._first = units[0] == 0
        self._last = units[1] == spec.layers + 2
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
        self._x = self._y = torch.empty(0)

    def end(self) -> None:
        self._state.end()


def _timed(
    units: dict[str, _Unit], shape: tuple[int, int], vocabulary: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """Mean seconds of each unit's forward and backward pass, one unit after another as in a step,
    each finding caches as the others left them. Means, since where workers share a core a short
    pass takes one turn or two."""
    tokens = torch.randint(vocabulary, shape, device=device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in units}
    began = time.perf_counter()
    passes = 0
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
        name: (
            statistics.fmean(f for f, _ in pairs[kept:]),
            statistics.fmean(b for _, b in pairs[kept:]),
        )
        for name, pairs in times.items()
    }


def _pass(units: dict[str, _Unit], tokens: Tensor) -> dict[str, tuple[float, float]]:
    x = tokens
    forward = dict[str, float]()
    backward = dict[str, float]()
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
