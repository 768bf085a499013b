"""What came of a selection, in sentences: each trial, why the choice, and why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.domain.escapes import yaml_word
from farspan.domain.problems import Problem, Refusal
from farspan.domain.trial import Trial
from farspan.domain.units import format_count, format_seconds, short_time
from farspan.planning.candidate import Candidate
from farspan.planning.misfit import largest_tried
from farspan.planning.ranking import Ranking, called, verdict
from farspan.planning.select import Selection, SelectionTask


def trial_line(candidate: Candidate, trial: Trial) -> str:
    """`tried pipeshard on all devices: 1.21 s a step, predicted 1.18 s`."""
    text, kept = (
        f"tried {called(candidate)}: ",
        "" if trial.took_s else ", kept from an earlier trial",
    )
    if trial.step_s is not None:
        return (
            f"{text}{short_time(trial.step_s)} a step, predicted "
            f"{short_time(candidate.estimate.step_s)}{kept}"
        )
    why = (
        "no step was made"
        if trial.problem is None
        else f"{trial.problem.what} ({trial.problem.fact})"
    )
    return f"{text}{'out of memory' if trial.status == 'oom' else 'failed'}: {why}{kept}"


def why(selection: Selection) -> str:
    """What was tried, what came out, and why it ended there, in a few sentences."""
    ranking, tried = selection.ranking, selection.tried
    done = [candidate for candidate, trial in tried if trial.step_s is not None]
    ended = {
        "clear": "no other plan could be better by its prediction",
        "unpaid": "more trials would take longer than they could save",
        "budget": f"the budget of {format_seconds(selection.budget_s)} for trials is spent",
    }[selection.ended]
    text = f"{len(tried)} of {len(ranking.candidates)} plans tried"
    text += f" in {format_seconds(selection.spent_s)}; {ended}." if tried else f"; {ended}."
    if ranking.chosen is None:
        return f"Nothing is chosen. {text}"
    chosen = ranking.candidates[ranking.chosen]
    how = "measured" if chosen.trial is not None else "predicted"
    head = f"{called(chosen)} is chosen: {short_time(chosen.estimate.step_s)} a step {how}"
    rivals = [
        candidate
        for candidate in ranking.candidates
        if candidate is not chosen
        and candidate.eligible
        and (candidate.trial is not None or not done)
    ]
    if rivals:
        behind = verdict(ranking, rivals[0])
        if ranking.objective == "fewest_devices":
            behind = f"with {len(rivals[0].places)} devices for {len(chosen.places)}, {behind}"
        head += (
            f"; the next, {called(rivals[0])}, takes {short_time(rivals[0].estimate.step_s)}, "
            f"{behind}"
        )
    return f"{head}. {text}"


def nothing_runs(
    ranking: Ranking, tried: Sequence[tuple[Candidate, Trial]], asked: SelectionTask
) -> Refusal:
    """Why no plan can be chosen: what the trials died of, or what is short, and the largest model
    that fits."""
    failed = [(candidate, trial) for candidate, trial in tried if trial.step_s is None]
    ran = [
        candidate
        for candidate in ranking.candidates
        if candidate.trial is not None and candidate.trial.step_s is not None
    ]
    if ran:  # At the pace that was measured it may not be run: a lease ends before it does.
        return Refusal.of(unchosen(ran[0]))
    if failed:
        candidate, trial = failed[0]
        what = f"all {len(failed)} plans that were tried"
        fact = trial.problem.fact if trial.problem else "it made no step"
        if any(trial.status == "oom" for _, trial in failed):
            candidate, trial = next(
                (candidate, trial) for candidate, trial in failed if trial.status == "oom"
            )
            every = all(trial.status == "oom" for _, trial in failed)
            fact = trial.problem.fact if trial.problem else "it made no step"
            how = "ran out of memory" if every else "ran out of memory or failed"
            return _short(f"{what} {how}", called(candidate), fact, tried, asked, ranking)
        return Refusal(
            "cannot-plan",
            what=f"{what} failed",
            where=called(candidate),
            fact=fact,
            remedy="farspan doctor --cluster, with the same cluster",
        )
    if ranking.candidates:
        return Refusal.of(unchosen(ranking.candidates[0]))
    problems = [refused.problem for refused in ranking.refused]
    for problem in problems:
        if problem.code == "out-of-memory":
            return _short(problem.what, problem.where, problem.fact, (), asked, ranking)
    return Refusal.of(problems[0])


def _short(
    what: str,
    where: str,
    fact: str,
    tried: Sequence[tuple[Candidate, Trial]],
    asked: SelectionTask,
    ranking: Ranking,
) -> Refusal:
    """Too little memory, by predictions or by what the trials needed; with the largest model that
    fits."""
    limit, by = (
        largest_tried(ranking.cluster, asked, tried),
        "by what these needed, " if tried else "",
    )
    if limit is None:
        fits, remedy = f"{by}no smaller model of its family fits", "farspan rent"
    else:
        fits = (
            f"{by}{format_count(limit.amount)} parameters fit, with {limit.technique} on "
            f"{limit.where}"
        )
        family_word = yaml_word(asked.model.family)
        remedy = f"in run.yaml, model: {{family: {family_word}, params: {limit.typed}}}"
    return Refusal("out-of-memory", what=what, where=where, fact=f"{fact}; {fits}", remedy=remedy)


def unchosen(candidate: Candidate) -> Problem:
    """Why a plan that fits is not run."""
    return Problem(
        code="cannot-plan",
        what=f"{candidate.technique} is not chosen",
        where=candidate.where,
        fact=candidate.unchosen or "nothing says what it would take",
        remedy="set parallel.technique: data",
    )
