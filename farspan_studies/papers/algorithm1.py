"""Algorithm 1 of arXiv 2602.02632, as printed: a technique for two machines from a few epochs of
each.

It compares mean TFLOP/s a device. Tp is Pipeshard's on both machines; Td1, Ts1 and Td2, Ts2 are
Data's and Shard's on the first and the second alone; a plan that fails counts as 0. Tz is the best
of the four, and delta the share by which one must exceed the other:

1. Tz > 0 and (Tp - Tz) / Tz > delta: Pipeshard on both.
2. Else Tp > 0 and (Tz - Tp) / Tp > delta: the best of Data and Shard on the machine where it is
  better.
3. Else ZeRO2 on both if it runs, else nothing: more memory is needed.

What it leaves open, `select` closes: with Tz = 0 a Pipeshard that ran is not chosen, with Tp = 0
neither is a machine that worked; a tie takes ZeRO2, however slow; TFLOP/s a device on two devices
and on four do not say who is done first; and there are just two machines.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Literal

import msgspec

from farspan import models, techniques
from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem, Refusal
from farspan.domain.trial import Trial
from farspan.estimate.estimate_plan import price
from farspan.planning.select_by_trials import SelectionTask
from farspan.techniques import Task
from farspan_studies.papers.published import alpa_tflops

Step = Literal["1", "2", "3", "none"]


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """TFLOP/s a device, 0 for what failed: on both machines, on the first, on the second."""

    tp: float
    td1: float
    ts1: float
    td2: float
    ts2: float

    @property
    def tz(self) -> float:
        return max(self.td1, self.td2, self.ts1, self.ts2)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is chosen, where (0 both machines, 1 the first, 2 the second), and by which step; no
    technique is none."""

    technique: Literal["pipeshard", "data", "shard", "zero2"] | None
    machine: Literal[0, 1, 2]
    step: Step


def algorithm1(speeds: Speeds, delta: float, zero2_runs: Callable[[], bool]) -> Decision:
    """Return the choice; `zero2_runs` is asked only where steps 1 and 2 choose nothing. `delta`
    lies in (0, 1]."""
    if not 0 < delta <= 1:
        raise ValueError(f"delta is {delta}, not in (0, 1]")
    tp = speeds.tp
    tz = speeds.tz
    if tz > 0 and (tp - tz) / tz > delta:
        return Decision(technique="pipeshard", machine=0, step="1")
    if tp > 0 and (tz - tp) / tp > delta:
        # Data goes before Shard, and the first machine before the second, where they are equal.
        if max(speeds.td1, speeds.ts1) >= max(speeds.td2, speeds.ts2):
            return Decision(
                technique="data" if speeds.td1 >= speeds.ts1 else "shard", machine=1, step="2"
            )
        return Decision(
            technique="data" if speeds.td2 >= speeds.ts2 else "shard", machine=2, step="2"
        )
    if zero2_runs():
        return Decision(technique="zero2", machine=0, step="3")
    return Decision(technique=None, machine=0, step="none")


# -- measured
#   ------------------------------------------------------------------------------------------------


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One measured T: a plan and its trial, or why there is no plan. `machine` as in Decision."""

    name: str
    technique: str
    machine: Literal[0, 1, 2]
    plan: Plan | None
    trial: Trial | None
    problem: Problem | None
    tflops: float


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """All that the algorithm measured, in its order, and what it chose; `plan` is None where it
    chooses nothing."""

    candidates: tuple[Candidate, ...]
    speeds: Speeds
    decision: Decision
    plan: Plan | None


#: What is measured first, by name: the technique, and where.
FIRST: dict[str, tuple[str, Literal[0, 1, 2]]] = {
    "tp": ("pipeshard", 0),
    "td1": ("data", 1),
    "ts1": ("shard", 1),
    "td2": ("data", 2),
    "ts2": ("shard", 2),
}


def choose(
    cluster: Cluster,
    question: SelectionTask,
    measure: Callable[[Plan, float], Trial],
    delta: float,
    say: Callable[[Candidate], None] = lambda candidate: None,
) -> Found:
    """Algorithm 1 on a cluster of two machines; `measure` runs a plan whose step is predicted.

    Raises Refusal (cannot-plan) for any other number of machines: the algorithm knows two.
    """
    if len(cluster.machines) != 2:
        raise Refusal(
            "cannot-plan",
            what="the paper's algorithm chooses between one machine and two",
            where="--algorithm paper",
            fact=f"the cluster has {len(cluster.machines)}",
            remedy="--algorithm farspan, which takes any number",
        )
    candidates: list[Candidate] = []

    def tried(name: str, technique: str, machine: Literal[0, 1, 2]) -> Candidate:
        candidates.append(_candidate(cluster, question, measure, name, technique, machine))
        say(candidates[-1])
        return candidates[-1]

    speeds = Speeds(**{name: tried(name, *what).tflops for name, what in FIRST.items()})
    decision = algorithm1(speeds, delta, lambda: tried("zero2", "zero2", 0).tflops > 0)
    chosen = next(
        (
            candidate
            for candidate in candidates
            if (candidate.technique, candidate.machine) == (decision.technique, decision.machine)
        ),
        None,
    )
    return Found(
        candidates=tuple(candidates),
        speeds=speeds,
        decision=decision,
        plan=None if chosen is None else chosen.plan,
    )


def _candidate(
    cluster: Cluster,
    question: SelectionTask,
    measure: Callable[[Plan, float], Trial],
    name: str,
    technique: str,
    machine: Literal[0, 1, 2],
) -> Candidate:
    first = len(cluster.machines[0].devices)
    places = {
        0: range(len(cluster.devices)),
        1: range(first),
        2: range(first, len(cluster.devices)),
    }[machine]
    task = Task(
        question.model,
        models.graph(question.model),
        cluster,
        question.train,
        question.engine,
        question.corpus,
        tuple(places) if machine else None,
    )
    planned = techniques.plan(technique, task)
    if isinstance(planned, Problem):
        return Candidate(
            name=name,
            technique=technique,
            machine=machine,
            plan=None,
            trial=None,
            problem=planned,
            tflops=0.0,
        )
    trial = measure(planned, price(planned, task.costs, brief=True).step_s)
    train = question.train
    speed = 0.0
    if trial.step_s is not None:
        seconds = fmean(trial.steps or (trial.step_s,))
        speed = alpa_tflops(question.model, train.batch, train.seq_len, seconds, len(places))
    return Candidate(
        name=name,
        technique=technique,
        machine=machine,
        plan=planned,
        trial=trial,
        problem=trial.problem,
        tflops=speed,
    )
