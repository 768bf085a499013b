"""`farspan reproduce fabric`: the published plans of arXiv 2602.02632 priced under the engine that
ran them.

Every row of the published file becomes a `Cell`: minutes for the 20 epochs, TFLOP/s a GPU by the
paper's formula, and whether it fits. What is said about the cells (errors, verdicts, intervals) is
computed from them alone.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.cost import Estimate
from farspan.domain.engine import Engine
from farspan.domain.graph import OpGraph
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan
from farspan.domain.train import TrainSpec
from farspan.domain.units import format_bytes
from farspan.estimate.estimate_plan import estimate
from farspan_studies.papers.calibrate import constant, fit, with_constants
from farspan_studies.papers.published import (
    COUNTED,
    OPEN,
    Row,
    alpa_tflops,
    fabric,
    mean_error,
    published_plan,
)

#: Our own best plan for a model, a cluster and a run, or None where nothing fits.
Best = Callable[[ModelSpec, Cluster, TrainSpec], Estimate | None]
#: Constants of the engine that minutes were fitted on, and verdicts.
TIMES = ("flops_per_watt", "message_s")
VERDICTS = ("overhead", "undivided")
#: What is moved by 20 % in the sensitivity table: every constant that some cell depends on, fitted
#: or cited.
MOVED = (
    *TIMES,
    "window",
    "host_rate",
    "local_rate",
    "launch_s",
    "bandwidth",
    "collective_bytes",
    "send_bytes",
    *VERDICTS,
    "framework",
    "host_state",
)


class Case(NamedTuple):
    """A row with all that its price follows from."""

    row: Row
    model: ModelSpec
    graph: OpGraph
    cluster: Cluster
    plan: Plan

    @property
    def counted(self) -> bool:
        """One of the twelve cells: gpt2m on all GPUs of the first three slices."""
        return self.row.slice in COUNTED and self.row.devices == 4 and self.row.model == "gpt2m"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the paper beside its prediction. `interval` multiplies the predicted minutes."""

    slice: str
    gpus: str
    devices: int
    model: str
    technique: str
    published_minutes: float | None
    minutes: float
    error: float | None
    interval: tuple[float, float]
    published_tflops: float | None
    tflops: float
    compute_s: float
    communication_s: float
    bubble_s: float
    published_status: str
    status: Literal["ok", "oom"]
    memory_bytes: int
    #: What is short where the status is "oom".
    short: str | None
    counted: bool
    source: str
    #: Minutes of our own best plan under our own engine on the same devices, and the same data.
    best_minutes: float | None = None

    @property
    def inside(self) -> bool | None:
        """Whether the published minutes lie in the predicted interval."""
        if self.published_minutes is None:
            return None
        return self.interval[0] <= self.published_minutes / self.minutes <= self.interval[1]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Out-of-memory verdicts: how many agree, and what simpler rules and the paper's own
    contradictions allow."""

    right: int
    of: int
    balanced: float
    #: Rows right by "gpt2L fails, the rest runs".
    baseline: int
    #: Most that any rule can have right that knows GPUs, model and technique, but not the slice.
    ceiling: int


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every row of the published file with its plan."""
    built = []
    published = fabric()
    for row in published.rows:
        model = models.preset(row.model).spec
        cluster = published.cluster(row.slice, row.devices)
        plan = published_plan(
            row.technique, published.plans[row.technique], model, cluster, published.settings
        )
        built.append(Case(row, model, models.graph(model), cluster, plan))
    return tuple(built)


def cells(engine: Engine, best: Best | None = None) -> tuple[Cell, ...]:
    """Every row priced under an engine; `best` adds what our own best plan would take."""
    own: dict[tuple[str, str, int], float | None] = {}
    priced = []
    for case in cases():
        cell = _cell(case, engine)
        key = (case.row.slice, case.row.model, case.row.devices)
        if best is not None and key not in own:
            ours = best(case.model, case.cluster, case.plan.train)
            steps = case.plan.train.steps
            own[key] = None if ours is None else steps * ours.step_s / ours.token_efficiency / 60
        priced.append(msgspec.structs.replace(cell, best_minutes=own.get(key)))
    return tuple(priced)


def minutes(case: Case, engine: Engine) -> float:
    """Minutes of the 20 epochs: steps alone, as the paper counts them, without validation or
    start-up."""
    priced = estimate(case.plan, case.graph, case.cluster, engine)
    return case.plan.train.steps * priced.step_s / 60


def _cell(case: Case, engine: Engine) -> Cell:
    row = case.row
    train = case.plan.train
    priced = estimate(case.plan, case.graph, case.cluster, engine)
    took = train.steps * priced.step_s / 60
    short = shortage(case, priced, engine)
    kinds = Counter(device.kind for device in case.cluster.devices)
    return Cell(
        slice=row.slice,
        gpus=" + ".join(f"{count} {kind}" for kind, count in kinds.items()),
        devices=row.devices,
        model=row.model,
        technique=row.technique,
        published_minutes=row.minutes,
        minutes=took,
        error=None if row.minutes is None else took / row.minutes - 1,
        interval=priced.interval,
        published_tflops=row.tflops,
        tflops=alpa_tflops(case.model, train.batch, train.seq_len, priced.step_s, row.devices),
        compute_s=priced.compute_s,
        communication_s=priced.communication_s,
        bubble_s=priced.bubble_s,
        published_status=row.status,
        status="oom" if short else "ok",
        memory_bytes=priced.memory_bytes,
        short=short,
        counted=case.counted,
        source=row.source,
    )


def shortage(case: Case, priced: Estimate, engine: Engine) -> str | None:
    """Return what a plan lacks: memory of its fullest device, else of a host; None where it
    fits."""
    devices = case.cluster.devices
    need, have, name = max(
        (
            (memory.total, engine.fill * device.memory, device.kind)
            for memory, device in zip(priced.memory, devices, strict=True)
        ),
        key=lambda demand: demand[0] - demand[1],
    )
    if need > have:
        return f"{name} lacks {format_bytes(need - have)}"
    for host in case.cluster.hosts:
        lacking = host_bytes(case, host.name, engine) - engine.fill * (host.memory or math.inf)
        if lacking > 0:
            return f"{host.name} lacks {format_bytes(lacking)} of its own memory"
    return None


def host_bytes(case: Case, host: str, engine: Engine) -> float:
    """Bytes of a host's own memory while a run starts: a process a stage, the state of the stages
    that it receives, and on the first host the whole state, which is made there."""
    (replica,) = case.plan.replicas
    stages = [
        stage
        for stage in replica.stages
        if host in {case.plan.devices[rank].host for rank in stage.mesh.ranks}
    ]
    held = sum(case.graph.parameters(*stage.units) for stage in stages)
    if case.plan.devices[0].host == host:
        held += case.graph.parameters()
    return len(stages) * engine.host_framework + held * engine.host_state


# -- errors
#   ------------------------------------------------------------------------------------------------


def mape(priced: Sequence[Cell]) -> float:
    """Mean absolute error over the twelve cells."""
    return mean_error(
        [
            (cell.minutes, cell.published_minutes)
            for cell in priced
            if cell.counted and cell.published_minutes
        ]
    )


def score(priced: Sequence[Cell]) -> Score:
    """How many of the definite verdicts agree. Balanced accuracy is the mean of the shares right of
    either verdict."""
    definite = [cell for cell in priced if cell.published_status in ("ok", "oom")]
    shares = []
    for status in ("ok", "oom"):
        own = [cell for cell in definite if cell.published_status == status]
        shares.append(sum(cell.status == status for cell in own) / len(own))
    return Score(
        right=sum(cell.status == cell.published_status for cell in definite),
        of=len(definite),
        balanced=statistics.mean(shares),
        baseline=sum(
            (cell.published_status == "oom") == (cell.model == "gpt2L") for cell in definite
        ),
        ceiling=_majority(definite),
    )


def open_cells(priced: Sequence[Cell]) -> list[Cell]:
    """Return the eight cells of gpt2m on all GPUs of the last two slices."""
    return [
        cell
        for cell in priced
        if cell.slice in OPEN
        and cell.model == "gpt2m"
        and cell.devices == 4
        and cell.published_minutes is not None
    ]


def _majority(priced: Sequence[Cell]) -> int:
    """Rows right by the more frequent verdict of each (GPUs, model, technique)."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for cell in priced:
        groups.setdefault((cell.gpus, cell.model, cell.technique), []).append(cell.published_status)
    return sum(max(Counter(verdicts).values()) for verdicts in groups.values())


# -- fits
#   ------------------------------------------------------------------------------------------------


def timed(left_out: str = "") -> list[Case]:
    """Return the twelve cells, without those of one slice."""
    return [case for case in cases() if case.counted and case.row.slice != left_out]


def misfit(engine: Engine, over: Sequence[Case]) -> float:
    """Sum of squared logarithms of predicted over published minutes."""
    return math.fsum(
        math.log(minutes(case, engine) / case.row.minutes) ** 2 for case in over if case.row.minutes
    )


def fit_times(engine: Engine, left_out: str = "", rounds: int = 150) -> Engine:
    """Return the engine with `TIMES` fitted on the twelve cells, or on those of two slices."""
    over = timed(left_out)
    return fit(engine, TIMES, lambda tried: misfit(tried, over), rounds)


def fit_verdicts(engine: Engine) -> Engine:
    """Return the engine with `VERDICTS` fitted on the 79 verdicts: the middle of the values that
    get most of them right."""
    tried: list[tuple[int, float, float]] = []
    for undivided in (0.0, 0.5, 0.9, 1.0):
        rough = [round(1.0 + 0.05 * i, 3) for i in range(41)]
        rough += [round(1.9 + 0.0025 * i, 4) for i in range(81)] if undivided == 1.0 else []
        for overhead in rough:
            scored = score(
                cells(with_constants(engine, {"overhead": overhead, "undivided": undivided}))
            )
            tried.append((scored.right, undivided, overhead))
    most = max(tried)[:2]
    middle = statistics.median(
        overhead for right, undivided, overhead in tried if (right, undivided) == most
    )
    return with_constants(engine, {"overhead": float(f"{middle:.4g}"), "undivided": most[1]})


def leave_one_out(engine: Engine, rounds: int = 100) -> dict[str, float]:
    """Mean error on the four cells of each slice across sites when it is left out of the fit."""
    errors = {}
    for name in COUNTED[1:]:
        fitted = fit_times(engine, name, rounds)
        held = [case for case in timed() if case.row.slice == name]
        errors[name] = mean_error(
            [(minutes(case, fitted), case.row.minutes or 0.0) for case in held]
        )
    return errors


def one_cell_known(engine: Engine) -> dict[str, dict[str, float]]:
    """Errors of the other techniques when one Data cell of each link across sites is known.

    What one cell tells of a link is its effective round trip: the one that makes Data come out
    right.
    """
    errors: dict[str, dict[str, float]] = {}
    for name in (*COUNTED[1:], *OPEN):
        own = [
            case
            for case in cases()
            if case.row.slice == name and case.row.devices == 4 and case.row.minutes
        ]
        known = next(case for case in own if case.row.technique == "Data")
        trip = _round_trip(known, engine)
        errors[name] = {
            case.row.technique: minutes(_with_round_trip(case, trip), engine)
            / (case.row.minutes or 0.0)
            - 1
            for case in own
            if case is not known
        }
    return errors


def _round_trip(case: Case, engine: Engine) -> float:
    """Seconds of a round trip with which the case takes its published minutes, by bisection between
    0.1 ms and 10 s."""
    low = math.log(1e-4)
    high = math.log(10.0)
    for _ in range(40):
        middle = (low + high) / 2
        fast = minutes(_with_round_trip(case, math.exp(middle)), engine) < (case.row.minutes or 0.0)
        low, high = (middle, high) if fast else (low, middle)
    return math.exp(low)


def _with_round_trip(case: Case, rtt_s: float) -> Case:
    links = tuple(msgspec.structs.replace(link, rtt_s=rtt_s) for link in case.cluster.links)
    return case._replace(cluster=msgspec.structs.replace(case.cluster, links=links))


def sensitivity(engine: Engine, moved: float = 0.2) -> list[dict[str, object]]:
    """Return what each constant does when it alone is moved: the mean error, the largest change of
    a cell, verdicts right."""
    before = cells(engine)
    rows: list[dict[str, object]] = []
    for name in MOVED:
        for factor in (1 - moved, 1 + moved):
            value = constant(engine, name) * factor
            after = cells(
                with_constants(engine, {name: min(1.0, value) if name == "undivided" else value})
            )
            change = max(
                abs(a.minutes / b.minutes - 1)
                for a, b in zip(after, before, strict=True)
                if b.counted
            )
            rows.append(
                {
                    "constant": name,
                    "factor": factor,
                    "mape": mape(after),
                    "largest_change": change,
                    "verdicts_right": score(after).right,
                }
            )
    return rows
