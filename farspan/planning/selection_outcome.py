"""What came of a selection, in sentences: each trial, why the choice, and why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.domain.escapes import yaml_word
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.trial import Trial
from farspan.domain.units import counted, format_count, format_seconds, short_time
from farspan.planning.candidate import Candidate
from farspan.planning.misfit import largest_tried
from farspan.planning.ranking import Ranking, candidate_name, describe_verdict
from farspan.planning.select_by_trials import Selection, SelectionTask

ENDED = {
    "clear": "no other plan is better by its prediction",
    "unpaid": "more trials would take longer than they could save",
    "budget": "the budget for trials is spent",
}


def trial_line(candidate: Candidate, trial: Trial) -> str:
    """Return `tried pipeshard on all devices: 1.21 s a step, predicted 1.18 s`."""
    if trial.step_s is not None:
        predicted = short_time(candidate.estimate.step_s)
        outcome = f"{short_time(trial.step_s)} a step, predicted {predicted}"
    else:
        status = "out of memory" if trial.status == "oom" else "failed"
        problem = trial.problem
        fact = f"{problem.what} ({problem.fact})" if problem else "no step was made"
        outcome = f"{status}: {fact}"
    kept = "" if trial.took_s else ", kept from an earlier trial"
    return f"tried {candidate_name(candidate)}: {outcome}{kept}"


def explain_selection(selection: Selection) -> str:
    """Return the choice, the next plan, the number of trials, and why they ended."""
    ranking = selection.ranking
    tried = selection.tried
    time = f" in {format_seconds(selection.spent_s)}" if tried else ""
    trials = f"{len(tried)} of {len(ranking.candidates)} plans tried{time}"
    ending = f"{trials}; {ENDED[selection.ended]}."
    if ranking.chosen is None:
        return f"Nothing is chosen. {ending}"
    chosen = ranking.candidates[ranking.chosen]
    how = "measured" if chosen.trial is not None else "predicted"
    step = f"{short_time(chosen.estimate.step_s)} a step {how}"
    sentences = [f"{candidate_name(chosen)} is chosen: {step}."]

    # The next plan: a tried one, unless no trial made a step.
    ran = any(trial.step_s is not None for _, trial in tried)
    for rival in ranking.candidates:
        if rival is not chosen and rival.eligible and (rival.trial or not ran):
            step = short_time(rival.estimate.step_s)
            devices = counted(len(rival.places), "device")
            difference = describe_verdict(ranking, rival)
            sentences.append(f"Next: {candidate_name(rival)}, {step} on {devices}, {difference}.")
            break
    problems = [trial.problem for _, trial in tried if trial.problem is not None]
    unreached = [problem for problem in problems if problem.code == "host-unreachable"]
    if unreached:
        sentences.append(
            f"Plans over hosts that do not reach each other failed: {unreached[0].what} "
            f"({unreached[0].fact}); {unreached[0].remedy}."
        )
    sentences.append(ending)
    return " ".join(sentences)


def nothing_runs(
    ranking: Ranking, tried: Sequence[tuple[Candidate, Trial]], asked: SelectionTask
) -> Refusal:
    """Return why no plan can be chosen: what the trials failed by, or what is short, and the
    largest model that fits."""
    # At the speed that was measured it may not be run: a lease ends before it does.
    ran = [each for each in ranking.candidates if each.trial and each.trial.step_s is not None]
    failed = [(candidate, trial) for candidate, trial in tried if trial.step_s is None]
    short = [pair for pair in failed if pair[1].status == "oom"]
    if failed and not ran:
        candidate, trial = (short or failed)[0]
        plans = counted(len(failed), "plan")
        failures = f"{len(short)} ran out of memory, {len(failed) - len(short)} failed"
        problem = Problem(
            code="out-of-memory" if short else "cannot-plan",
            what=f"of {plans} that were tried {failures}",
            where=candidate_name(candidate),
            fact=trial.problem.fact if trial.problem else "it made no step",
            remedy=command("doctor", "--cluster", ranking.cluster.name),
        )
    elif ran or ranking.candidates:
        problem = problem_of_unchosen((*ran, *ranking.candidates)[0])
    else:
        problems = [refused.problem for refused in ranking.refused]
        out = [problem for problem in problems if problem.code == "out-of-memory"]
        problem = (out or problems)[0]
    if problem.code != "out-of-memory":
        return Refusal.of(problem)

    # The largest model that fits, by predictions or by what the trials needed.
    limit = largest_tried(ranking.cluster, asked, tried)
    fits = "no smaller model of its family fits"
    remedy = "farspan rent"
    if limit is not None:
        size = format_count(limit.amount)
        fits = f"{size} parameters fit, with {limit.technique} on {limit.where}"
        family_word = yaml_word(asked.model.family)
        remedy = f"in run.yaml, model: {{family: {family_word}, params: {limit.typed}}}"
    fact = f"{problem.fact}; {fits}"
    return Refusal(problem.code, what=problem.what, where=problem.where, fact=fact, remedy=remedy)


def problem_of_unchosen(candidate: Candidate) -> Problem:
    """Return why a plan that fits is not run."""
    return Problem(
        code="cannot-plan",
        what=f"{candidate.technique} is not chosen",
        where=candidate.where,
        fact=candidate.unchosen or "nothing says what it would take",
        remedy="set parallel.technique: data",
    )
