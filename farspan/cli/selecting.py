"""Choosing a plan by trials: what `farspan select`, and `farspan train` without a technique, do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

import farspan
from farspan.cli import job
from farspan.cli.clusters import reached_by
from farspan.cli.console import Console
from farspan.cli.planfile import cluster_hash
from farspan.domain.cluster import Cluster
from farspan.domain.codec import content_hash, load, save
from farspan.domain.config import ParallelConfig
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import cache_folder
from farspan.domain.train import TrainSpec
from farspan.domain.trial import Trial, plan_key
from farspan.domain.units import format_count, format_seconds, short_time
from farspan.launch.trial import Limits, limits, steps_for, trial
from farspan.planning.compare import called, verdict
from farspan.planning.rank import Candidate, Ranking
from farspan.planning.select import Asked, Selection, select

#: Up to so many devices plans for all parts of a cluster are priced, beyond for all of it: few before training, which
#: is to start soon; more where machines are chosen, as those of 64 take 7 s (docs/benchmarks.md), less than one trial.
FEW, PARTS = 16, 64


class Trials:
    """Runs plans of one run for a few steps. What was measured of a plan on a cluster once is kept, and found again."""

    def __init__(self, resolved: job.Resolved, launcher: str, *, again: bool = False) -> None:
        self._resolved, self._launcher, self._again = resolved, launcher, again
        self._kept = cache_folder() / "trials"

    def __call__(self, plan: Plan, step_s: float) -> Trial:
        # How many steps are asked for follows from a prediction, which is another one after each probe.
        return self.run(plan, limits(plan, self._resolved.cluster, step_s, steps_for(step_s)), least=0)

    def run(self, plan: Plan, within: Limits, least: int | None = None) -> Trial:
        """A trial, or one that is kept and has timed so many steps at least, all that are asked for unless said: then
        it took no time."""
        key = content_hash(cluster_hash(self._resolved.cluster), plan_key(plan), farspan.__version__)
        path = self._kept / f"{key}.json"
        if path.exists() and not self._again:
            kept = load(path, Trial)
            if kept.step_s is None or len(kept.steps) >= (within.steps if least is None else least):
                return msgspec.structs.replace(kept, took_s=0.0)
        made = trial(plan, self._resolved.corpus_folder, self._resolved.cluster, self._launcher, within)
        # Another time it may not fail; who was killed may have been so for another program's memory.
        if made.problem is None or made.problem.code == "out-of-memory":
            self._kept.mkdir(parents=True, exist_ok=True)
            save(made, path)
        return made


def question(
    model: ModelSpec, train: TrainSpec, cluster: Cluster, corpus: str, asked: ParallelConfig,
    tolerance: float | None = None, few: int = FEW,
) -> Asked:  # fmt: skip
    """What is chosen for a run: all parts of a cluster of few devices, or of one named technique the whole."""
    from farspan.domain.engine import engine
    from farspan.planning.rank import TOLERANCE

    named = asked.technique != "auto"
    return Asked(
        model=model, train=train, engine=engine("farspan"), objective=asked.objective, allow=job.allowed(asked),
        corpus=corpus, here=launcher(asked) != "local", parts=not named and len(cluster.devices) <= few,
        tolerance=TOLERANCE if tolerance is None else tolerance,
    )  # fmt: skip


def launcher(asked: ParallelConfig) -> str:
    """What starts the workers: that of a cluster which only one launcher reaches, or the one that is asked for."""
    return reached_by(asked.cluster or "") or asked.launcher


def question_of(resolved: job.Resolved, asked: ParallelConfig, tolerance: float | None = None, few: int = FEW) -> Asked:
    """`question` for a run.yaml made concrete."""
    return question(resolved.model, resolved.train, resolved.cluster, resolved.corpus.hash, asked, tolerance, few)


def choose(
    resolved: job.Resolved, asked: ParallelConfig, console: Console, *, paying: bool, budget_s: float | None = None,
    tolerance: float | None = None, again: bool = False,
) -> Selection:  # fmt: skip
    """The selection, each trial said as it ends."""
    job.require_torch()
    few = FEW if paying else PARTS
    return select(
        resolved.cluster, question_of(resolved, asked, tolerance, few), Trials(resolved, launcher(asked), again=again),
        budget_s=budget_s, paying=paying, say=lambda one, made: console.say(trial_line(one, made)),
    )  # fmt: skip


def trial_line(one: Candidate, made: Trial) -> str:
    """`tried pipeshard on all devices: 1.21 s a step, predicted 1.18 s`."""
    assert one.estimate is not None
    text, kept = f"tried {called(one)}: ", "" if made.took_s else ", kept from an earlier trial"
    if made.step_s is not None:
        return f"{text}{short_time(made.step_s)} a step, predicted {short_time(one.estimate.step_s)}{kept}"
    why = "no step was made" if made.problem is None else f"{made.problem.what} ({made.problem.fact})"
    return f"{text}{'out of memory' if made.status == 'oom' else 'failed'}: {why}{kept}"


def why(selection: Selection) -> str:
    """What was tried, what came out, and why it ended there, in a few sentences."""
    ranking, tried = selection.ranking, selection.tried
    done = [one for one, made in tried if made.step_s is not None]
    ended = {
        "clear": "no other plan could be better by its prediction",
        "unpaid": "more trials would take longer than they could save",
        "budget": f"the budget of {format_seconds(selection.budget_s)} for trials is spent",
    }[selection.ended]
    text = f"{len(tried)} of {sum(one.plan is not None for one in ranking.candidates)} plans tried"
    text += f" in {format_seconds(selection.spent_s)}; {ended}." if tried else f"; {ended}."
    if ranking.chosen is None:
        return f"Nothing is chosen. {text}"
    chosen = ranking.candidates[ranking.chosen]
    assert chosen.estimate is not None
    how = "measured" if chosen.trial is not None else "predicted"
    head = f"{called(chosen)} is chosen: {short_time(chosen.estimate.step_s)} a step {how}"
    rivals = [
        one for one in ranking.candidates if one is not chosen and one.eligible and (one.trial is not None or not done)
    ]
    if rivals and rivals[0].estimate is not None:
        behind = verdict(ranking, rivals[0])
        if ranking.objective == "fewest_devices":
            behind = f"with {len(rivals[0].places)} devices for {len(chosen.places)}, {behind}"
        head += f"; the next, {called(rivals[0])}, takes {short_time(rivals[0].estimate.step_s)}, {behind}"
    return f"{head}. {text}"


def nothing_runs(ranking: Ranking, tried: Sequence[tuple[Candidate, Trial]], asked: Asked) -> Refusal:
    """Why no plan can be chosen: what the trials died of, or what is short, and the largest model that fits."""
    failed = [(one, made) for one, made in tried if made.step_s is None]
    ran = [one for one in ranking.candidates if one.trial is not None and one.trial.step_s is not None]
    if ran:  # At the pace that was measured it may not be run: a lease ends before it does.
        return Refusal.of(job.unchosen(ran[0]))
    if failed:
        one, made = failed[0]
        what = f"all {len(failed)} plans that were tried"
        fact = made.problem.fact if made.problem else "it made no step"
        if any(made.status == "oom" for _, made in failed):
            one, made = next((one, made) for one, made in failed if made.status == "oom")
            every = all(made.status == "oom" for _, made in failed)
            fact = made.problem.fact if made.problem else "it made no step"
            how = "ran out of memory" if every else "ran out of memory or failed"
            return _short(f"{what} {how}", called(one), fact, tried, asked, ranking)
        return Refusal(
            "cannot-plan", what=f"{what} failed", where=called(one), fact=fact,
            remedy="farspan doctor --cluster, with the same cluster",
        )  # fmt: skip
    if ranking.candidates[0].plan is not None:
        return Refusal.of(job.unchosen(ranking.candidates[0]))
    problems = [one.problem for one in ranking.candidates if one.problem]
    for problem in problems:
        if problem.code == "out-of-memory":
            return _short(problem.what, problem.where, problem.fact, (), asked, ranking)
    return Refusal.of(problems[0])


def _short(
    what: str, where: str, fact: str, tried: Sequence[tuple[Candidate, Trial]], asked: Asked, ranking: Ranking
) -> Refusal:  # fmt: skip
    """Too little memory, by predictions or by what the trials needed; with the largest model that fits."""
    from farspan.planning.misfit import largest_tried

    limit, by = largest_tried(ranking.cluster, asked, tried), "by what these needed, " if tried else ""
    if limit is None:
        fits, remedy = f"{by}no smaller model of its family fits", "farspan plan --rent"
    else:
        fits = f"{by}{format_count(limit.amount)} parameters fit, with {limit.technique} on {limit.where}"
        remedy = f"in run.yaml, model: {{family: {asked.model.family}, params: {limit.typed}}}"
    return Refusal("out-of-memory", what=what, where=where, fact=f"{fact}; {fits}", remedy=remedy)


def as_json(selection: Selection) -> dict[str, Any]:
    """The answer of `farspan select`: candidates as `farspan plan` gives them, each with its trial."""
    from farspan.cli.commands.plan import as_json as candidate

    ranking = selection.ranking
    return {
        "candidates": [{**candidate(one, ranking), "trial": one.trial} for one in ranking.candidates],
        "chosen": ranking.chosen,
        "tried": [
            {"technique": one.technique, "where": one.where, "predicted_s": one.estimate and one.estimate.step_s,
             "trial": made}
            for one, made in selection.tried
        ],
        "spent_s": selection.spent_s, "budget_s": selection.budget_s, "ended": selection.ended, "why": why(selection),
    }  # fmt: skip
