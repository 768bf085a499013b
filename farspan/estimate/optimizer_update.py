"""What an optimizer's update takes: AdamW streams its state through memory, Muon also multiplies
matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator

from farspan.domain.engine import GpuEngine, UpdateActivity
from farspan.domain.plan import Stage
from farspan.estimate.compute import DeviceSpeed, Kernels, OperatorWork
from farspan.estimate.stage import Costs
from farspan.semantics.kernel_choice import BYTES, matrix_precision
from farspan.semantics.muon_matrices import by_shape

#: Passes over an element of a matrix, of 4 bytes each: master, momentum and gradient are read and
#: written, the gradient twice more; momenta are put side by side, and steps made of the result and
#: taken.
STREAMED = 2 * 3 + 4 + 2 + 4
#: Bytes an element that an average of weights reads and writes.
AVERAGE_BYTES = 12
#: Passes over X, in the width of its products, of what an iteration does beside these: a multiple,
#: and a sum of two.
SUMMED = 5


def optimizer_update_s(costs: Costs, stage: Stage) -> float:
    """Seconds of the optimizer's update on the slowest device of a stage, with the exchange of
    parts of matrices."""
    kinds = {costs.alike[rank]: rank for rank in stage.mesh.ranks}
    exchanged = sum(
        communication.times * costs.network.seconds(communication)
        for communication in costs.batch_axes(stage, 1)
        if communication.purpose == "matrices"
    )
    return exchanged + max(
        _elements_s(costs, stage, rank) + _matrices_s(costs, stage, rank) for rank in kinds.values()
    )


def update_work(costs: Costs, stage: Stage, gpu: GpuEngine) -> OperatorWork:
    """Return the work of a GPU's kernels over lists of tensors: the gradient's norm, AdamW's part,
    and rounded weights."""
    owned = costs.owned(stage)
    counts: dict[UpdateActivity, float] = {
        "norm": owned,
        "adamw": owned - costs.matrices(stage).elements,
        "publish": owned,
    }
    if costs.width == 4:
        del counts["publish"]  # The masters are the weights.
    moved = launches = 0.0
    for activity, elements in counts.items():
        moves = gpu.update[activity]
        moved += elements * moves.bytes(False, costs.width)
        launches += math.ceil(elements / gpu.list_elements) + moves.launches[0]
    if costs.train.optimizer.average:
        moved += owned * AVERAGE_BYTES
        launches += math.ceil(owned / gpu.list_elements)
    return OperatorWork(0.0, 0.0, 1, 1, 1, unhidden=moved, launches=launches)


def _lists_s(costs: Costs, stage: Stage, rank: int, gpu: GpuEngine) -> float:
    """Seconds of these kernels, and of the host's work in a step other than launching: none where
    the step is recorded."""
    speed = costs.rates[costs.alike[rank]]
    kernels = speed.kernels(update_work(costs, stage, gpu))
    if speed.recorded:
        return speed.together(*kernels)
    return gpu.sync_s + speed.together(kernels.computing, kernels.launching + gpu.step_s)


def _elements_s(costs: Costs, stage: Stage, rank: int) -> float:
    """Seconds of AdamW's part, and of an average of all weights."""
    gpu = costs.rates[costs.alike[rank]].gpu
    if gpu is not None:
        return _lists_s(costs, stage, rank, gpu)
    dtype, engine = costs.train.precision, costs.engine
    moved = (
        2 * engine.optimizer_bytes[dtype]
        + 2 * engine.gradient_bytes[dtype]
        + engine.weight_bytes[dtype]
    )
    averaged = AVERAGE_BYTES if costs.train.optimizer.average else 0
    elements = (costs.owned(stage) - costs.matrices(stage).elements) * moved * engine.update_passes
    return costs.stream_s(rank, elements + costs.owned(stage) * averaged)


def _matrices_s(costs: Costs, stage: Stage, rank: int) -> float:
    """Seconds of Muon's part."""
    muon, matrices = costs.train.optimizer.muon, costs.matrices(stage)
    if not muon or not matrices.elements:
        return 0.0
    groups = stage.mesh.groups("site") if stage.zero else stage.mesh.transposed
    same = next(group for group in groups if rank in group)
    precision = matrix_precision(costs.train.precision, (costs.alike[other] for other in same))
    speed = costs.rates[costs.alike[rank]]
    if precision != costs.train.precision:
        device, load = costs.signature[rank]
        speed = DeviceSpeed(device, precision, costs.engine, load)
    made = [
        kernels
        for shape, count in by_shape(matrices.updated).items()
        for kernels in _newton_schulz_kernels(
            speed, min(shape), max(shape), count, BYTES[precision]
        )
    ]
    computing, launching = (muon.iterations * sum(seconds) for seconds in zip(*made, strict=True))
    return costs.stream_s(rank, 4 * STREAMED * matrices.elements) + speed.together(
        computing, launching
    )


def _newton_schulz_kernels(
    speed: DeviceSpeed, n: int, m: int, count: int, width: int
) -> Iterator[Kernels]:
    """Yield one iteration on `count` n x m matrices X, n <= m: X by its transpose, that by itself,
    and that by X; each a kernel for all, and the sums another."""
    for a, b, c in ((n, m, n), (n, n, n), (n, n, m)):
        operands = width * count * (a * b + b * c + a * c)
        yield speed.kernels(OperatorWork(2.0 * count * a * b * c, operands, a, b, c))
    yield speed.kernels(OperatorWork(0.0, SUMMED * width * count * n * m, n, m, n, launches=2))
