"""Times the units of a model on one device, as a worker runs them: embedding, block, and head with
the loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from farspan import models
from farspan.domain.cluster import DType, UnitTime
from farspan.domain.engine import load_engine
from farspan.domain.graph import OpGraph
from farspan.domain.model import ModelSpec
from farspan.domain.probe_requests import LeftOut, UnitTimes
from farspan.domain.train import TrainSpec
from farspan.estimate.memory import kept_per_row, logits_bytes
from farspan.runtime.device import free_memory, memory_is_full, release_memory, synchronize_device
from farspan.runtime.model.compiled_blocks import BlockInputs, compile_or_restore
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.model.kernel_selection import select_kernels
from farspan.runtime.state.train_state import TrainState
from farspan.semantics.kernel_choice import BYTES

#: Seconds that all units' passes are taken over, how many at least, and those before, while memory
#: is first touched.
UNITS_S = 1.5
LEAST = 8
NUM_WARMUP_PASSES = 3
#: Slow devices make no more than one pass after so many seconds.
MOST_S = 5.0
#: A pass that takes longer is not repeated with more rows: time is then in proportion to them.
LONG_S = 1.0
#: Blocks that are timed together, so that no cache holds the one that comes next.
BLOCKS = 4
#: Bytes a parameter of a unit with its state (`TrainState`): weights as made and as used, masters,
#: gradients, two moments.
UNIT_STATE_BYTES: dict[DType, int] = {"fp32": 20, "tf32": 20, "bf16": 22, "fp16": 22}


def unit_times(
    device: torch.device,
    spec: ModelSpec,
    seq_len: int,
    rows: Sequence[int],
    dtypes: Sequence[DType],
    allowed: int,
    *,
    compiled: bool = False,
) -> UnitTimes:
    """Time the forward and backward pass of every unit, by dtype and number of sequences (`rows`),
    in `allowed` bytes; what would need more is left out. Blocks that are to be `compiled` are
    before the clock runs; where that fails nothing is timed."""
    blocks = _count_alike(models.graph(spec))
    head = spec.layers + 1
    ends = {"embedding": (0, 1), "block": (1, 1 + blocks), "head": (head, head + 1)}
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
                if not units:
                    for name, which in ends.items():
                        units[name] = _Unit(device, spec, which, dtype)
                if compiled and not units["block"].compile_rows(count, seq_len):
                    break
                tokens = torch.randint(spec.vocab_size, (count, seq_len), device=device)
                times = _time_units(units, tokens)
            except (MemoryError, RuntimeError) as error:
                if not memory_is_full(error):
                    raise
                what = f"units in {dtype}"
                not_timed = tuple(sorted(rows)[place:])
                free = max(0, free)
                left_out.append(LeftOut(what=what, rows=not_timed, needed=needed, free=free))
                break
            for name, (forward, backward) in times.items():
                share = blocks if name == "block" else 1
                time_ = UnitTime(
                    model=hash_,
                    unit=name,  # type: ignore[arg-type]
                    dtype=dtype,
                    rows=count,
                    seq_len=seq_len,
                    forward_s=forward / share,
                    backward_s=backward / share,
                    compiled=compiled or msgspec.UNSET,
                )
                measured.append(time_)
            release_memory(device)
            if sum(map(sum, times.values())) > LONG_S:
                break
        while units:
            units.popitem()[1].end()
        release_memory(device)
    return UnitTimes(times=tuple(measured), left_out=tuple(left_out))


def bytes_needed(
    spec: ModelSpec, seq_len: int, rows: int, dtype: DType, backend: str
) -> tuple[int, int]:
    """Return the bytes of the timed units' state, and of passes over `rows` sequences."""
    graph = models.graph(spec)
    train = TrainSpec(steps=1, batch=rows, seq_len=seq_len, precision=dtype)
    blocks = _count_alike(graph)
    weights = 0
    frozen = 0
    largest = 0
    kept = 0.0
    for unit, count in ((graph.embedding, 1), (graph.block, blocks), (graph.head, 1)):
        kept += count * kept_per_row(graph, unit, train, {}, 1, backend)
        for op in unit:
            for weight in op.weights:
                size = graph.size(weight.dims)
                if weight.frozen:
                    frozen += count * size
                    continue
                weights += count * size
                largest = max(largest, size)
    # A block's backward pass makes gradients of what the block keeps, one block at a time.
    kept += kept_per_row(graph, graph.block, train, {}, 1, backend)
    passing = rows * kept + logits_bytes(graph, train, rows, load_engine("farspan"), backend)
    # A weight's new gradient is kept in addition to the sum that it is added to.
    # Frozen weights are made in fp32, and used in the precision.
    state = weights * UNIT_STATE_BYTES[dtype] + frozen * (4 + BYTES[dtype])
    return round(state), round(passing + 4 * largest)


def _count_alike(graph: OpGraph) -> int:
    """Return how many blocks are timed: the first ones, up to one of another kind."""
    alike = graph.others.layers[0] if graph.others else graph.layers
    return min(BLOCKS, alike)


class _Unit:
    """A stage of one unit, or of some blocks, with small random weights."""

    def __init__(
        self, device: torch.device, spec: ModelSpec, units: tuple[int, int], dtype: DType
    ) -> None:
        self._device = device
        self._is_embedding = units[0] == 0
        self._is_head = units[1] == spec.layers + 2
        self._model = Decoder(spec, units=units)
        for parameter in self._model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self._model.to(device)
        self._state = TrainState(self._model, dtype)
        select_kernels(self._model, device, self._state.dtype)
        self._x = torch.empty(0)
        self._y = self._x

    def compile_rows(self, rows: int, seq_len: int) -> bool:
        """Compile the blocks for a number of rows; return whether that works."""
        inputs = BlockInputs((rows,), seq_len)
        dtype = self._state.dtype
        return not compile_or_restore(self._model, self._device, dtype, inputs)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        self._x = x if self._is_embedding else x.detach().requires_grad_()
        y = self._model.forward_blocks(self._x)
        self._y = self._model.summed_loss(y, targets) if self._is_head else y
        synchronize_device(self._device)
        return self._y

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        if not self._y.requires_grad:  # An embedding that is frozen.
            return None
        self._y.backward(torch.ones_like(self._y) if gradient is None else gradient)
        synchronize_device(self._device)
        return self._x.grad

    def clear(self) -> None:
        self._state.clear_gradients()
        self._x = torch.empty(0)
        self._y = self._x

    def end(self) -> None:
        self._state.remove_hooks()


def _time_units(units: dict[str, _Unit], tokens: Tensor) -> dict[str, tuple[float, float]]:
    """Return the mean seconds of each unit's forward and backward pass, one unit after another as
    in a step, so that each finds the caches that the others left. Means, since a short pass takes
    one time slice or two where workers share a core."""
    forward: dict[str, list[float]] = {name: [] for name in units}
    backward: dict[str, list[float]] = {name: [] for name in units}
    passes = 0
    spent = 0.0
    began = time.perf_counter()
    while spent < UNITS_S or passes < NUM_WARMUP_PASSES + LEAST:
        if spent > MOST_S and passes > 1:
            break
        x = tokens
        for name, unit in units.items():
            unit_began = time.perf_counter()
            x = unit.forward(x, tokens)
            forward[name].append(time.perf_counter() - unit_began)
        gradient = None
        for name, unit in reversed(units.items()):
            unit_began = time.perf_counter()
            gradient = unit.backward(gradient)
            backward[name].append(time.perf_counter() - unit_began)
        passes += 1
        spent = time.perf_counter() - began
    for unit in units.values():
        unit.clear()
    warmup = min(NUM_WARMUP_PASSES, passes - 1)
    mean = statistics.fmean
    return {name: (mean(forward[name][warmup:]), mean(backward[name][warmup:])) for name in units}
