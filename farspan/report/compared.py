"""Measured against predicted: a run's steps, each device's memory, and one traced step beside the
simulated one."""

from __future__ import annotations

from statistics import median, quantiles

import msgspec

from farspan.domain.problems import Refusal
from farspan.domain.results import IN_STEP
from farspan.domain.run import RunFolder
from farspan.domain.units import counted
from farspan.domain.words import joined
from farspan.estimate.stage import Costs
from farspan.report import expected as predicting
from farspan.report.drift import Drift, drifts
from farspan.report.expected import Expected
from farspan.report.history import RunHistory
from farspan.report.plan_picture import Mark, part_words
from farspan.report.traces import Traces

PARTS = {"compute": "compute", "communication": "communication", "waiting": "waiting for others"}
ALIGNED = (
    "A row begins where its device began the step: clocks of hosts are not compared. Communication "
    "holds the waiting "
    "for devices that come to it later."
)


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: the measured median, between which two half of the steps lie, predicted
    with its bounds."""

    measured_s: float
    half: tuple[float, float]
    predicted_s: float
    bounds: tuple[float, float]

    @property
    def inside(self) -> bool:
        return self.bounds[0] <= self.measured_s <= self.bounds[1]


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One device. What its missing log would say is None or empty."""

    rank: int
    name: str
    words: str
    stage: int
    memory: int | None
    memory_predicted: int
    measured: tuple[Mark, ...] = ()
    predicted: tuple[Mark, ...] = ()


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the step of the slowest device, in seconds; None is not predicted."""

    name: str
    predicted_s: float | None
    measured_s: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All that is told of a run of several devices. `traced` is the step whose marks the rows hold,
    None without any; `slowest` the row whose step `parts` split."""

    steps: Steps
    rows: tuple[DeviceRow, ...]
    traced: int | None
    traced_s: float
    slowest: DeviceRow | None
    parts: tuple[StepPart, ...]
    drifts: tuple[Drift, ...]
    notes: tuple[str, ...]
    #: What planning again with the measured paces would give, by the planner.
    again: str = ""

    @property
    def ends(self) -> float:
        """Seconds of the longest row."""
        return max(
            (mark.end for row in self.rows for mark in (*row.measured, *row.predicted)), default=0.0
        )

    @property
    def drawn(self) -> list[DeviceRow]:
        """Rows with a measured step."""
        return [row for row in self.rows if row.measured]


def compare(run: RunHistory) -> Comparison | None:
    """None for a run of one device, and for one without a step or an estimate of its devices."""
    estimate = run.history.estimate
    used = sum(len(stage.mesh.ranks) for replica in run.plan.replicas for stage in replica.stages)
    if used < 2 or estimate is None or len(estimate.memory) != used or not run.history.steps:
        return None
    costs, problem = _costs(run)
    devices = predicting.expected(run.plan, costs) if costs is not None else {}
    split, traces = predicting.split(run.plan, estimate, costs), Traces(run)
    shown = traces.steps[-1] if traces.steps else None
    rows = _rows(run, costs, devices, traces, shown)
    slowest, parts = _split(run, rows, traces, shown, split, devices)
    drifting = (
        drifts(run, traces, estimate, split.step_s, devices, costs) if costs is not None else ()
    )
    low, high = estimate.interval
    return Comparison(
        steps=_steps(run, split.step_s, (low * split.step_s, high * split.step_s)),
        rows=rows,
        traced=shown,
        traced_s=0.0 if shown is None else traces.of(traces.ranks[0], shown)[1].step_s,
        slowest=slowest,
        parts=parts,
        drifts=drifting,
        notes=_notes(run, rows, traces, devices, problem),
    )


def _costs(run: RunHistory) -> tuple[Costs | None, str]:
    """What the plan was priced with; or why that cannot be said, for a run of another version."""
    try:
        return predicting.costs_of_run(RunFolder(run.folder), run.plan), ""
    except Refusal as refusal:
        return None, f"No predicted rows: {refusal.problem.what} ({refusal.problem.where})."


def _steps(run: RunHistory, predicted_s: float, bounds: tuple[float, float]) -> Steps:
    """As `measure` takes it, with the middle half of the steps."""
    seconds = [timed.step.step_s for timed in run.history.timed]
    quarters = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Steps(
        measured_s=median(seconds),
        half=(quarters[0], quarters[2]),
        predicted_s=predicted_s,
        bounds=bounds,
    )


def _rows(
    run: RunHistory,
    costs: Costs | None,
    devices: dict[int, Expected],
    traces: Traces,
    shown: int | None,
) -> tuple[DeviceRow, ...]:
    """The devices that the plan uses, by rank."""
    estimate, rows = run.history.estimate, []
    assert estimate is not None
    stages = [stage for replica in run.plan.replicas for stage in replica.stages]
    places = {rank: number for number, stage in enumerate(stages) for rank in stage.mesh.ranks}
    for rank, memory in zip(sorted(places), estimate.memory, strict=True):
        device, history = run.plan.devices[rank], run.histories.get(rank)
        words, expected = part_words(run.plan, places[rank]), devices.get(rank)
        if expected is not None and len(stages[expected.stage].rows) > 1:
            words += f"; {counted(expected.rows, 'row')}"
        kind = costs.network.devices[rank].kind if costs is not None else device.backend
        rows.append(
            DeviceRow(
                rank=rank,
                name=f"rank {rank}, {kind} in {device.host}",
                words=words,
                stage=places[rank],
                memory=history.memory_bytes if history and history.memory_bytes else None,
                memory_predicted=memory.total,
                measured=traces.marks(rank, shown)
                if shown is not None and rank in traces.ranks
                else (),
                predicted=expected.marks if expected is not None else (),
            )
        )
    return tuple(rows)


def _split(
    run: RunHistory,
    rows: tuple[DeviceRow, ...],
    traces: Traces,
    shown: int | None,
    split: predicting.StepSplit,
    devices: dict[int, Expected],
) -> tuple[DeviceRow | None, tuple[StepPart, ...]]:
    """The device that computed longest in the traced step, and what its step was made of. None
    where one was not seen, or its spans may end before its work does."""
    if shown is None or any(
        not row.measured or run.plan.devices[row.rank].backend not in IN_STEP for row in rows
    ):
        return None, ()
    slowest = max(rows, key=lambda row: traces.parts(row.rank, shown)["compute"])
    seconds = traces.parts(slowest.rank, shown)
    inside = devices[slowest.rank].inside_s if slowest.rank in devices else 0.0
    predicted = {
        "compute": split.compute_s + inside,
        "communication": max(0.0, split.communication_s - inside),
        "waiting": split.bubble_s,
    }
    parts = [
        StepPart(name=name, predicted_s=predicted[part], measured_s=seconds[part])
        for part, name in PARTS.items()
    ]
    return slowest, (
        *parts,
        StepPart(name="not recorded", predicted_s=None, measured_s=seconds["rest"]),
    )


def _notes(
    run: RunHistory,
    rows: tuple[DeviceRow, ...],
    traces: Traces,
    devices: dict[int, Expected],
    problem: str,
) -> tuple[str, ...]:
    """What a reader has to know of the rows."""
    notes = [problem] if problem else []
    if traces.steps:
        notes.append(ALIGNED)
    if run.plan.sync is not None:
        notes.append("Steps are told without the replicas' meetings.")
    if any(rank in devices and devices[rank].inside_s for rank in traces.ranks):
        notes.append("Passes hold the communication inside them, measured and predicted.")
    if any(run.plan.devices[rank].backend not in IN_STEP for rank in traces.ranks):
        notes.append(
            "A GPU works on after its pass was handed to it: its marks show when orders were given."
        )
    if missing := [row.rank for row in rows if row.rank not in run.histories]:
        hosts = joined(list(dict.fromkeys(run.plan.devices[rank].host for rank in missing)))
        ranks = f"rank{'s' * (len(missing) > 1)} {joined(list(map(str, missing)))}"
        notes.append(f"No log of {ranks} lies here: {hosts} kept what was recorded there.")
    return tuple(notes)
