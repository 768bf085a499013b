"""The time of one stage of a plan in a step: its passes, the gradient sums that overlap with them,
its update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from farspan.domain.engine import Engine
from farspan.domain.plan import Stage
from farspan.estimate.gradient_sync import SyncTimes, gradient_sync_times
from farspan.estimate.optimizer_update import optimizer_update_s
from farspan.estimate.stage import Costs, Pass


class StageTime(NamedTuple):
    """Seconds of one stage. `exposed` is what its gradient sums and gathers add after the last
    backward pass."""

    passes: Pass
    exposed: float
    update: float
    #: Bytes that leave each site in a step, by its name.
    sent: dict[str, float]


def stage_time(costs: Costs, stage: Stage, rows: Sequence[int], microbatches: int) -> StageTime:
    """Return all of a stage's times for `rows` of each batch coordinate, with ZeRO's gathers and
    sums where its level has them; kept, as searches ask for the same stages among others again."""
    key = (
        stage.units,
        stage.mesh,
        stage.zero,
        stage.recompute,
        stage.grad_sync,
        tuple(stage.splits.items()),
        tuple(rows),
        microbatches,
    )
    if key not in costs.stage_times:
        costs.stage_times[key] = _stage_time(costs, stage, rows, microbatches)
    known: StageTime = costs.stage_times[key]
    return known


def _stage_time(costs: Costs, stage: Stage, rows: Sequence[int], microbatches: int) -> StageTime:
    engine, passes, sums = (
        costs.engine,
        costs.passes(stage, rows, microbatches),
        _sync(costs, stage, microbatches),
    )
    forward, backward = _contended(engine, stage, passes, sums, microbatches)
    if stage.zero == 3:
        # arXiv 2304.11277: gathered before each pass, the next unit's while one computes; scattered
        # after each.
        forward += _exposed(engine, sums.gather, forward, sums.each)
        backward += _exposed(engine, sums.gather + sums.reduce, backward, sums.each)
        tail = sums.rest
    elif stage.zero == 2 and microbatches > 1:
        backward += _exposed(engine, sums.reduce, backward, sums.each)
        tail = sums.gather + sums.rest
    else:
        cover = engine.overlap * (passes.backward + sums.busy)
        tail = sums.exposed(sums.reduce + sums.rest, cover) + sums.gather
    waits = (forward - passes.forward, backward - passes.backward)
    adjusted = Pass(
        forward, backward, passes.forward_wait + waits[0], passes.backward_wait + waits[1]
    )
    # A device that waits for weights in its passes moves bytes meanwhile.
    tail += max(0.0, sums.busy - microbatches * sum(waits))
    return StageTime(adjusted, tail, optimizer_update_s(costs, stage), sums.sent)


def _sync(costs: Costs, stage: Stage, microbatches: int) -> SyncTimes:
    """`gradient_sync_times`, kept: whose rows these are does not matter to it, nor, where
    gradients are summed once a step, how many microbatches there are."""
    often = microbatches if stage.zero >= 2 else 1
    key = stage.units, stage.mesh, stage.zero, stage.grad_sync, tuple(stage.splits.items()), often
    if key not in costs.syncs:
        costs.syncs[key] = gradient_sync_times(costs, stage, microbatches)
    known: SyncTimes = costs.syncs[key]
    return known


def _exposed(engine: Engine, seconds: float, cover: float, last: float) -> float:
    """Return the seconds of a series of messages that `cover` seconds of arithmetic do not hide: at
    least the last one, which is such a share of them."""
    return max(seconds * last, seconds - engine.overlap * cover) if seconds else 0.0


def _contended(
    engine: Engine, stage: Stage, passes: Pass, sync: SyncTimes, microbatches: int
) -> tuple[float, float]:
    """Return the passes, longer where collectives of the batch axes overlap with them: sums during
    the backward pass (the last microbatch's, unless they are scattered each time), gathers the
    forward pass too."""
    slower = engine.contention
    gathers = slower if stage.zero >= 2 and sync.gather else 0.0
    sums = slower / (1 if stage.zero >= 2 else microbatches) if sync.reduce else 0.0
    return passes.forward * (1 + gathers), passes.backward * (1 + sums)
