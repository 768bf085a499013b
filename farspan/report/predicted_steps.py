"""What a plan predicts of a step, device by device: the simulated stage as each device of it sees
it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from farspan import models
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.cost import Estimate
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan, Replica
from farspan.domain.run import RunFolder
from farspan.estimate.devices import stage_devices
from farspan.estimate.estimate_plan import step, timed_stage
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs, Pass
from farspan.report.plan_picture import Mark, lanes


class Expected(NamedTuple):
    """One device's step. `compute_s` are its passes and its update, `inside_s` the collectives
    inside its passes; stages count on over replicas."""

    stage: int
    rows: int
    marks: tuple[Mark, ...]
    compute_s: float
    inside_s: float


class StepSplit(NamedTuple):
    """A step as its slowest device sees it, without the replicas' outer sync."""

    step_s: float
    compute_s: float
    communication_s: float
    bubble_s: float


def costs_of_run(folder: RunFolder, plan: Plan) -> Costs | None:
    """Return the costs of the run's plan; None where the run does not name its cluster."""
    if not folder.cluster.exists():
        return None
    pricing_engine = load_engine(plan.engine)
    network = Network(load_cluster_json(folder.cluster), plan.devices, pricing_engine)
    return Costs(models.graph(plan.model), plan.train, network)


def predict_split(plan: Plan, estimate: Estimate, costs: Costs | None) -> StepSplit:
    """Split the predicted step as workers measure theirs: the replicas' outer sync is
    not in them."""
    if plan.sync is None or costs is None:
        return StepSplit(
            estimate.step_s, estimate.compute_s, estimate.communication_s, estimate.bubble_s
        )
    timed = [step(replica, costs) for replica in plan.replicas]
    slowest = max(timed, key=lambda each: each.seconds)
    return StepSplit(slowest.seconds, slowest.compute, slowest.communication, slowest.bubble)


def predict_devices(plan: Plan, costs: Costs) -> dict[int, Expected]:
    """Predict every device's step, by rank.

    A stage's slowest batch coordinate sets its time; others wait.
    """
    devices: dict[int, Expected] = {}
    drawn = iter(lanes(plan, costs))
    for replica in plan.replicas:
        for index, stage in enumerate(replica.stages):
            lane = next(drawn)
            slowest = timed_stage(replica, index, costs)
            rows: dict[int, int] = {}
            for ranks, count in zip(stage.mesh.batch, stage.rows, strict=False):
                rows |= dict.fromkeys(ranks, count)
            for rank, own in stage_devices(replica, index, costs).items():
                marks = _own_marks(lane.marks, slowest.passes, own.passes, replica)
                devices[rank] = Expected(lane.stage, rows[rank], marks, own.compute_s, own.inside_s)
    return devices


def _own_marks(
    marks: tuple[Mark, ...], slowest: Pass, own: Pass, replica: Replica
) -> tuple[Mark, ...]:
    """Fit a stage's marks to the passes of one of its devices: one after another where there is no
    other stage."""
    if slowest.forward_wait or slowest.backward_wait or not slowest.forward:
        return marks
    shares = {"forward": own.forward / slowest.forward, "backward": own.backward / slowest.backward}
    own_marks = []
    end = 0.0
    for mark in marks:
        if mark.kind in shares:
            start = end if len(replica.stages) == 1 else mark.start
            end = start + shares[mark.kind] * (mark.end - mark.start)
            mark = msgspec.structs.replace(mark, start=start, end=end)
        own_marks.append(mark)
    return tuple(own_marks)
