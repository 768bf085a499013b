"""Choosing by evidence: predict every plan, run those that could be the best for a few steps,
learn, predict again.

A trial is a measured plan. A plan is tried as long as it could be better than the best so far (its
interval reaches below it) and the budget lasts; first the one that could be best of all, so that
what nobody has seen yet goes before variants of what was seen (optimism in the face of uncertainty:
Lai and Robbins 1985). After each trial the slowdowns of devices, links and kinds of parallelism are
learned from all of them (`learn_slowdowns`), and every technique plans for the cluster that they
show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Device, Host
from farspan.domain.engine import Engine
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.objective import TOLERANCE, Objective
from farspan.domain.plan import Plan
from farspan.domain.train import TrainSpec
from farspan.domain.trial import Trial
from farspan.estimate.estimate_plan import with_loss
from farspan.planning.candidate import Candidate
from farspan.planning.learn_slowdowns import Observation, learn_slowdowns, parts_of
from farspan.planning.rank_plans import objective_key, order_candidates, rank_plans
from farspan.planning.ranking import Ranking, time_bounds_s
from farspan.semantics.identity import plan_key

#: Trials take this share of the run that they are for, and at least these seconds.
SHARE = 0.03
LEAST_S = 60.0
#: A plan that could be better by less than this is not tried: repeats of one plan differ by as
#: much.
REPEAT_NOISE = 0.03
#: Factors on a trial's step between which the run's are expected, and on a prediction for devices
#: and links that all took part in a trial. Choices that hold the median repeat (2 % apart) and
#: nearly all predictions (5 % off in the median, 22 % at most with a small model) of
#: benchmarks/results/wan.jsonl.
TRIAL_INTERVAL = (0.95, 1.05)
CALIBRATED_INTERVAL = (0.8, 1.3)
#: A plan that was not tried is chosen if its prediction is better than the best trial by more than
#: this.
UNTRIED = 0.15
#: After a plan ran out of memory, others may fill its fullest device to this share of what that one
#: was predicted to.
OOM_MEMORY_DERATE = 0.9
#: Seconds that a trial takes in addition to its steps until one was made: workers start, connect
#: and end.
TRIAL_S = 20.0

Ended = Literal["clear", "unpaid", "budget"]


class Measure(Protocol):
    """Runs a plan for a few steps that are predicted to take `step_s` each; ends it when it takes
    far longer."""

    def __call__(self, plan: Plan, step_s: float) -> Trial: ...


class SelectionTask(msgspec.Struct, frozen=True, kw_only=True):
    """What is chosen for: as `rank` takes it."""

    model: ModelSpec
    train: TrainSpec
    engine: Engine
    objective: Objective = "time"
    allow: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    corpus: str = ""
    parts: bool = True
    #: Only plans with the first device are run: its host holds the run's folder, and nothing can
    #: send it elsewhere.
    here: bool = False

    def rank(self, cluster: Cluster) -> Ranking:
        ranking = rank_plans(
            self.model,
            cluster,
            self.train,
            self.engine,
            objective=self.objective,
            allow=self.allow,
            tolerance=self.tolerance,
            corpus=self.corpus,
            parts=self.parts,
        )
        if not self.here:
            return ranking
        reason = f"{cluster.machines[0].name}, which holds the run's folder, takes no part"
        candidates = []
        for candidate in ranking.candidates:
            if candidate.eligible and 0 not in candidate.places:
                candidate = replace(candidate, barred=reason)
            candidates.append(candidate)
        return self.reorder(ranking, candidates)

    def reorder(self, ranking: Ranking, candidates: Sequence[Candidate]) -> Ranking:
        """Return the ranking with these candidates, in their order by the objective."""
        best_first, chosen = order_candidates(candidates, self.objective, self.tolerance)
        return replace(ranking, candidates=best_first, chosen=chosen)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The ranking after the last trial (its cluster keeps the learned slowdowns); what was tried,
    as it was predicted just before and as it was measured, in this order; and why no more was:
    nothing else could be better (`clear`), would have paid (`unpaid`), or was in the `budget`."""

    ranking: Ranking
    tried: tuple[tuple[Candidate, Trial], ...]
    spent_s: float
    budget_s: float
    ended: Ended


def select_by_trials(
    cluster: Cluster,
    asked: SelectionTask,
    measure: Measure,
    *,
    budget_s: float | None = None,
    paying: bool = False,
    on_trial: Callable[[Candidate, Trial], None] = lambda candidate, trial: None,
) -> Selection:
    """Choose the best plan, by trials that begin within `budget_s` seconds of them (by default
    SHARE of the run, LEAST_S at least).

    With `paying`, only trials are made that may save the run more time than they take. A trial that
    fails is a result: its plan is not chosen.
    """
    tried: dict[str, tuple[Candidate, Trial]] = {}
    ranking = asked.rank(cluster)
    spent_s = 0.0
    ended: Ended = "clear"
    while contenders := _find_contenders(ranking, asked):
        if spent_s >= (_default_budget_s(ranking) if budget_s is None else budget_s):
            ended = "budget"
            break
        # Trials that were kept from earlier took no time.
        num_run = sum(trial.took_s > 0 for _, trial in tried.values())
        trial_s = spent_s / num_run if num_run else TRIAL_S
        trials_s = trial_s * min(2, len(contenders))
        if paying and _possible_gain_s(ranking, contenders) < trials_s:
            ended = "unpaid"
            break
        candidate = contenders[0]
        trial = measure(candidate.plan, candidate.estimate.step_s)
        spent_s += trial.took_s
        tried[plan_key(candidate.plan)] = (candidate, trial)
        on_trial(candidate, trial)
        ranking = _with_evidence(cluster, asked, tried)
    return Selection(
        ranking=_prefer_trials(ranking, asked),
        tried=tuple(tried.values()),
        spent_s=spent_s,
        budget_s=_default_budget_s(ranking) if budget_s is None else budget_s,
        ended=ended,
    )


def _default_budget_s(ranking: Ranking) -> float:
    """Return seconds that trials may take, of the run as the best plan is predicted so far."""
    if ranking.chosen is None:
        return LEAST_S
    return max(LEAST_S, SHARE * ranking.candidates[ranking.chosen].estimate.run_s)


# -- what is still open
#   ------------------------------------------------------------------------------------------------


def _find_contenders(ranking: Ranking, asked: SelectionTask) -> list[Candidate]:
    """Return the untried plans that could be the best, the one whose best case is best first; none
    where that is clear."""
    eligible = [candidate for candidate in ranking.candidates if candidate.eligible]
    if not eligible:
        return []
    key = objective_key(asked.objective, ranking.candidates, asked.tolerance)
    known = [candidate for candidate in eligible if candidate.trial is not None]
    # What is certain so far: the best trial, or what the best prediction takes at worst.
    sure = key(_at_bound(eligible[0], 1))
    fast_s = math.inf
    if known:
        sure = (1 - REPEAT_NOISE) * min(map(key, known))
        fast_s = (1 - REPEAT_NOISE) * min(candidate.time_s for candidate in known)
    contenders: list[tuple[float, Candidate]] = []
    for candidate in eligible:
        if candidate.trial is not None:
            continue
        at_best = _at_bound(candidate, 0)
        # Where few devices are asked for, a plan that is faster than all others decides how slow
        # the few may be.
        decides = asked.objective == "fewest_devices" and at_best.time_s < fast_s
        if key(at_best) < sure or decides:
            contenders.append((key(at_best), candidate))
    # A single one needs no trial, unless others have failed theirs.
    untried = not any(candidate.trial for candidate in ranking.candidates)
    if untried and [candidate for _, candidate in contenders] == eligible[:1]:
        return []
    contenders.sort(key=lambda pair: pair[0])
    return [candidate for _, candidate in contenders]


def _at_bound(candidate: Candidate, bound: Literal[0, 1]) -> Candidate:
    """Return the candidate with its time, and its devices' money, at its least or most."""
    return _with_step_s(candidate, candidate.estimate.step_s * candidate.estimate.interval[bound])


def _possible_gain_s(ranking: Ranking, contenders: Sequence[Candidate]) -> float:
    """Return the seconds that another plan than the chosen one could save the run: where either
    takes its least or its most."""
    assert ranking.chosen is not None
    chosen = ranking.candidates[ranking.chosen]
    most_s = time_bounds_s(chosen)[1]
    gains = [0.0]
    for other in contenders:
        if other is not chosen:
            gains.append(max(chosen.time_s - time_bounds_s(other)[0], most_s - other.time_s))
    return max(gains)


# -- what trials change
#   ------------------------------------------------------------------------------------------------


def _with_evidence(
    cluster: Cluster, asked: SelectionTask, tried: Mapping[str, tuple[Candidate, Trial]]
) -> Ranking:
    """Return every technique's plans for the cluster as the trials show it, and every plan that was
    tried."""
    seen = []
    out = []
    updated = []
    for candidate, trial in tried.values():
        if trial.step_s is not None:
            seen.append(Observation(candidate.plan, trial.step_s, trial.compute_s))
        if trial.status == "oom":
            out.append(candidate)
        updated.append(_with_trial(candidate, trial))
    learned = learn_slowdowns(cluster, seen)
    ranking = asked.rank(limit_memory_by_ooms(learned.cluster, asked.engine, out))
    known = parts_of(cluster, seen)
    for candidate in ranking.candidates:
        plan = candidate.plan
        if plan_key(plan) in tried:
            continue
        step_s = candidate.estimate.step_s * learned.slowdown(plan)
        known_all = seen and parts_of(cluster, [Observation(plan, 0.0)]) <= known
        updated.append(_with_step_s(candidate, step_s, CALIBRATED_INTERVAL if known_all else None))
    return replace(asked.reorder(ranking, updated), cluster=learned.cluster)


def limit_memory_by_ooms(cluster: Cluster, engine: Engine, out: Sequence[Candidate]) -> Cluster:
    """Return the cluster whose devices hold less than plans that ran `out` of memory were predicted
    to fill: of each plan the device that is fullest by that prediction, with all others of its kind
    in its host."""
    for candidate in out:
        totals = [part.total for part in candidate.estimate.memory]
        needs = dict(zip(candidate.places, totals, strict=True))
        devices = cluster.devices
        fullest = max(needs, key=lambda place: needs[place] / devices[place].memory)
        cluster = _with_less_memory(
            cluster, fullest, int(OOM_MEMORY_DERATE * needs[fullest] / engine.fill)
        )
    return cluster


def _with_less_memory(cluster: Cluster, place: int, most: int) -> Cluster:
    """Return the cluster whose device in this place, and all of its kind in its host, hold `most`
    bytes at most."""
    kind = cluster.devices[place].kind
    host_names: list[str] = []
    for host in cluster.hosts:
        host_names += [host.name] * len(host.devices)

    def limit_memory(host: Host, index: int) -> Device:
        device = host.devices[index]
        if host.name == host_names[place] and device.kind == kind:
            return replace(device, memory=min(device.memory, most))
        return device

    return cluster.with_devices(limit_memory)


def _with_trial(candidate: Candidate, trial: Trial) -> Candidate:
    """Return a tried candidate: with its measured step, or not to be chosen."""
    if trial.step_s is not None:
        return replace(_with_step_s(candidate, trial.step_s, TRIAL_INTERVAL), trial=trial)
    why = "it ended without a step"
    if trial.problem is not None:
        why = f"{trial.problem.what}: {trial.problem.fact}"
    return replace(candidate, trial=trial, barred=f"its trial failed, {why}")


def _with_step_s(
    candidate: Candidate, step_s: float, interval: tuple[float, float] | None = None
) -> Candidate:
    """Return the candidate with another time of a step, and another interval: what takes time and
    money follows, bytes and memory do not."""
    priced = candidate.estimate
    factor = step_s / priced.step_s
    changed = replace(
        priced,
        step_s=step_s,
        compute_s=priced.compute_s * factor,
        communication_s=priced.communication_s * factor,
        bubble_s=priced.bubble_s * factor,
        interval=interval or priced.interval,
    )
    changed = with_loss(changed, count_parameters(candidate.plan.model))
    time_s = candidate.queue_s + candidate.expected_s(changed.equal_loss_s)
    return replace(candidate, estimate=changed, time_s=time_s)


def _prefer_trials(ranking: Ranking, asked: SelectionTask) -> Ranking:
    """Return the ranking whose choice is the best trial, unless a plan that was not tried is
    predicted to be far better."""
    if ranking.chosen is None or ranking.candidates[ranking.chosen].trial is not None:
        return ranking
    key = objective_key(asked.objective, ranking.candidates, asked.tolerance)
    best = key(ranking.candidates[ranking.chosen])
    for place, candidate in enumerate(ranking.candidates):
        if candidate.eligible and candidate.trial is not None:
            is_far_better = best < (1 - UNTRIED) * key(candidate)
            return ranking if is_far_better else replace(ranking, chosen=place)
    return ranking
