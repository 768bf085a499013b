"""Choosing by evidence: predict every plan, run those that could be the best for a few steps,
learn, predict again.

A trial is a measured plan. A plan is tried as long as it could be better than what is best by now
(its interval reaches below it) and the budget lasts; first the one that could be best of all, so
that what nobody has seen yet goes before variants of what was seen (optimism in the face of
uncertainty: Lai and Robbins 1985). After each trial the paces of devices, links and ways of
dividing the work are learned from all of them (`learn`), and every technique plans anew for the
cluster that they show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Device, Host
from farspan.domain.engine import Engine
from farspan.domain.model import ModelSpec, parameters
from farspan.domain.objective import TOLERANCE, Objective
from farspan.domain.plan import Plan
from farspan.domain.train import TrainSpec
from farspan.domain.trial import Trial
from farspan.estimate.price import with_loss
from farspan.planning.candidate import Candidate
from farspan.planning.learn import Observation, learn, parts_of
from farspan.planning.rank import by, ordered, rank
from farspan.planning.ranking import Ranking, bounds
from farspan.semantics.identity import plan_key

#: Trials take this share of the run that they are for, and at least so many seconds.
SHARE = 0.03
LEAST_S = 60.0
#: A plan that could be better by less than this is not tried: repeats of one plan differ by as
#: much.
SAME = 0.03
#: Factors on a trial's step between which the run's are expected, and on a prediction for devices
#: and links that all took part in a trial. Choices that hold the median repeat (2 % apart) and
#: nearly all predictions (5 % off in the median, 22 % at most with a small model) of
#: benchmarks/results/wan.jsonl.
MEASURED = (0.95, 1.05)
LEARNED = (0.8, 1.3)
#: A plan that was not tried is chosen if its prediction is better than the best trial by more than
#: this.
UNTRIED = 0.15
#: After a plan ran out of memory, others may fill its fullest device to so much less than that one
#: was predicted to.
LESS = 0.9
#: Seconds that a trial takes beside its steps until one was made: workers start, meet and end.
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
        ranking = rank(
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
        candidates, chosen = ordered(
            [
                replace(candidate, barred=reason)
                if candidate.eligible and 0 not in candidate.places
                else candidate
                for candidate in ranking.candidates
            ],
            self.objective,
            self.tolerance,
        )
        return replace(ranking, candidates=candidates, chosen=chosen)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The ranking after the last trial (its cluster keeps the learned paces); what was tried, as it
    was predicted just before and as it was measured, in this order; and why no more was: nothing
    else could be better (`clear`), would have paid (`unpaid`), or was in the `budget`."""

    ranking: Ranking
    tried: tuple[tuple[Candidate, Trial], ...]
    spent_s: float
    budget_s: float
    ended: Ended


def select(
    cluster: Cluster,
    asked: SelectionTask,
    measure: Measure,
    *,
    budget_s: float | None = None,
    paying: bool = False,
    say: Callable[[Candidate, Trial], None] = lambda candidate, trial: None,
) -> Selection:
    """The best plan, by trials of which none begins after `budget_s` seconds of them (by default
    SHARE of the run, LEAST_S at least).

    With `paying`, only trials are made that may save the run more time than they take. A trial that
    fails is a result: its plan is not chosen.
    """
    tried: dict[str, tuple[Candidate, Trial]] = {}
    ranking = asked.rank(cluster)
    spent = 0.0
    ended: Ended = "clear"
    while contenders := _contenders(ranking, asked):
        took = [
            trial.took_s for _, trial in tried.values() if trial.took_s
        ]  # None of those that were kept.
        each = spent / len(took) if took else TRIAL_S
        if spent >= (_share(ranking) if budget_s is None else budget_s):
            ended = "budget"
            break
        if paying and _gain(ranking, contenders) < each * min(2, len(contenders)):
            ended = "unpaid"
            break
        candidate = contenders[0]
        trial = measure(candidate.plan, candidate.estimate.step_s)
        spent += trial.took_s
        tried[plan_key(candidate.plan)] = (candidate, trial)
        say(candidate, trial)
        ranking = _with_evidence(cluster, asked, tried)
    return Selection(
        ranking=_settled(ranking, asked),
        tried=tuple(tried.values()),
        spent_s=spent,
        budget_s=_share(ranking) if budget_s is None else budget_s,
        ended=ended,
    )


def _share(ranking: Ranking) -> float:
    """Seconds that trials may take, of the run as the best plan is known by now."""
    chosen = None if ranking.chosen is None else ranking.candidates[ranking.chosen].estimate
    return max(LEAST_S, SHARE * (0.0 if chosen is None else chosen.run_s))


# -- what is still open
#   ------------------------------------------------------------------------------------------------


def _contenders(ranking: Ranking, asked: SelectionTask) -> list[Candidate]:
    """The untried plans that could be the best, the one whose best case is best first; none where
    that is clear."""
    eligible = [candidate for candidate in ranking.candidates if candidate.eligible]
    if not eligible:
        return []
    key = by(asked.objective, ranking.candidates, asked.tolerance)
    known = [candidate for candidate in eligible if candidate.trial is not None]
    # What is certain by now: the best trial, or what the best prediction takes at worst.
    sure = (1 - SAME) * min(map(key, known)) if known else key(_at(eligible[0], 1))
    fast = (1 - SAME) * min(candidate.time_s for candidate in known) if known else math.inf
    open_ = []
    for candidate in eligible:
        at_best = _at(candidate, 0)
        # Where few devices are asked for, a plan that is faster than all others says how slow the
        # few may be.
        tells = asked.objective == "fewest_devices" and at_best.time_s < fast
        if candidate.trial is None and (key(at_best) < sure or tells):
            open_.append(candidate)
    # One that stands alone needs no trial, unless others have failed theirs.
    alone = open_ == eligible[:1] and not any(candidate.trial for candidate in ranking.candidates)
    return [] if alone else sorted(open_, key=lambda candidate: key(_at(candidate, 0)))


def _at(candidate: Candidate, bound: Literal[0, 1]) -> Candidate:
    """The candidate with its time, and its devices' money, at its least or most."""
    return _taking(candidate, candidate.estimate.step_s * candidate.estimate.interval[bound])


def _gain(ranking: Ranking, contenders: Sequence[Candidate]) -> float:
    """Seconds that another plan than the chosen one could save the run: where either takes its
    least or its most."""
    assert ranking.chosen is not None
    now = ranking.candidates[ranking.chosen]
    others = [other for other in contenders if other is not now]
    return max(
        (max(now.time_s - bounds(other)[0], bounds(now)[1] - other.time_s) for other in others),
        default=0.0,
    )


# -- what trials change
#   ------------------------------------------------------------------------------------------------


def _with_evidence(
    cluster: Cluster, asked: SelectionTask, tried: Mapping[str, tuple[Candidate, Trial]]
) -> Ranking:
    """Every technique's plans for the cluster as the trials show it, and every plan that was
    tried."""
    seen = [
        Observation(candidate.plan, trial.step_s, trial.compute_s)
        for candidate, trial in tried.values()
        if trial.step_s is not None
    ]
    learned = learn(cluster, seen)
    out = [candidate for candidate, trial in tried.values() if trial.status == "oom"]
    ranking = asked.rank(held(learned.cluster, asked.engine, out))
    known = parts_of(cluster, seen)
    updated = [_judged(candidate, trial) for candidate, trial in tried.values()]
    for candidate in ranking.candidates:
        if plan_key(plan := candidate.plan) not in tried:
            candidate = _taking(candidate, candidate.estimate.step_s * learned.way(plan))
            known_all = seen and parts_of(cluster, [Observation(plan, 0.0)]) <= known
            updated.append(_within(candidate, LEARNED) if known_all else candidate)
    candidates, chosen = ordered(updated, asked.objective, asked.tolerance)
    return replace(ranking, cluster=learned.cluster, candidates=candidates, chosen=chosen)


def held(cluster: Cluster, engine: Engine, out: Sequence[Candidate]) -> Cluster:
    """The cluster whose devices hold less than plans that ran `out` of memory were predicted to
    fill; of each plan the device that is fullest by that prediction tells, with all others of its
    kind in its host."""
    for candidate in out:
        needs = {
            place: need.total
            for place, need in zip(candidate.places, candidate.estimate.memory, strict=True)
        }
        fullest = max(needs, key=lambda place: needs[place] / cluster.devices[place].memory)
        cluster = _holding(cluster, fullest, int(LESS * needs[fullest] / engine.fill))
    return cluster


def _holding(cluster: Cluster, place: int, most: int) -> Cluster:
    """The cluster whose device in this place, and all of its kind in its host, hold so many bytes
    at most."""
    kind = cluster.devices[place].kind
    name = [host.name for host in cluster.hosts for _ in host.devices][place]

    def device_of(host: Host, index: int) -> Device:
        device = host.devices[index]
        alike = (host.name, device.kind) == (name, kind)
        return replace(device, memory=min(device.memory, most)) if alike else device

    return cluster.with_devices(device_of)


def _judged(candidate: Candidate, trial: Trial) -> Candidate:
    """A tried candidate: at its measured pace, or not to be chosen."""
    if trial.step_s is None:
        why = (
            "it ended without a step"
            if trial.problem is None
            else f"{trial.problem.what}: {trial.problem.fact}"
        )
        return replace(candidate, trial=trial, barred=f"its trial failed, {why}")
    return replace(_within(_taking(candidate, trial.step_s), MEASURED), trial=trial)


def _within(candidate: Candidate, interval: tuple[float, float]) -> Candidate:
    return replace(candidate, estimate=replace(candidate.estimate, interval=interval))


def _taking(candidate: Candidate, step_s: float) -> Candidate:
    """The candidate with another time of a step: what takes time and money follows, bytes and
    memory do not."""
    priced = candidate.estimate
    factor = step_s / priced.step_s
    changed = replace(
        priced,
        step_s=step_s,
        compute_s=priced.compute_s * factor,
        communication_s=priced.communication_s * factor,
        bubble_s=priced.bubble_s * factor,
    )
    changed = with_loss(changed, parameters(candidate.plan.model))
    return replace(candidate, estimate=changed, time_s=candidate.queue_s + changed.equal_loss_s)


def _settled(ranking: Ranking, asked: SelectionTask) -> Ranking:
    """The ranking whose choice is the best trial, unless a plan that was not tried is predicted to
    be far better."""
    key = by(asked.objective, ranking.candidates, asked.tolerance)
    known = [
        candidate
        for candidate in ranking.candidates
        if candidate.eligible and candidate.trial is not None
    ]
    if ranking.chosen is None or not known or ranking.candidates[ranking.chosen].trial is not None:
        return ranking
    if key(ranking.candidates[ranking.chosen]) < (1 - UNTRIED) * key(known[0]):
        return ranking
    return replace(ranking, chosen=ranking.candidates.index(known[0]))
