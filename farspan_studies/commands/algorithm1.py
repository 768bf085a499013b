"""`farspan select --algorithm paper`: Algorithm 1 of arXiv 2602.02632 as printed, for two
machines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from farspan.app.resolving import Resolved
from farspan.cli.arguments import words_again
from farspan.cli.console import Console
from farspan.cli.plan_table import wrap_paragraph
from farspan.domain.config import ParallelConfig
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.units import short_time

if TYPE_CHECKING:
    from farspan.domain.trial import Trial
    from farspan_studies.papers.algorithm1 import Candidate, Found

#: What is run of each plan, and by how much one must exceed the other.
EPSILON = "10 steps"
DELTA = 0.1
#: Steps of a candidate at most: what takes longer is no trial.
MOST_STEPS = 1_000_000


def epsilon(text: str) -> Callable[[Resolved], int]:
    """How many steps `20 steps` or `2 epochs` are of a run's text. Raises Refusal
    (out-of-range)."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(steps?|epochs?)\s*", text)
    number = float(match[1]) if match and match[1].count(".") <= 1 and match[1] != "." else 0.0
    if match is None or not 0 < number <= MOST_STEPS:
        raise _refused(
            "--epsilon", text, "it is a number of steps or epochs above 0", f"--epsilon {EPSILON!r}"
        )

    def steps(resolved: Resolved) -> int:
        of_one = 1.0
        if match[2].startswith("epoch"):
            of_one = resolved.corpus.train.tokens / resolved.train.tokens_per_step
        count = max(1, round(number * of_one))
        if count > MOST_STEPS:
            raise _refused(
                "--epsilon", text, f"that is {count:,} steps of each plan", f"--epsilon {EPSILON!r}"
            )
        return count

    return steps


def check(given: argparse.Namespace) -> None:
    """Refuse arguments that the algorithm cannot use."""
    if not 0 < _delta(given) <= 1:
        raise _refused(
            "--delta", given.delta, "it lies above 0 and is at most 1", f"--delta {DELTA}"
        )
    epsilon(given.epsilon or EPSILON)


def _delta(given: argparse.Namespace) -> float:
    return DELTA if given.delta is None else float(given.delta)


def select(
    given: argparse.Namespace, resolved: Resolved, asked: ParallelConfig, console: Console
) -> tuple[Plan, dict[str, Any]]:
    """Return the plan that the algorithm chooses, and all that it measured. Raises Refusal where it
    chooses nothing."""
    delta = _delta(given)
    steps = epsilon(given.epsilon or EPSILON)(resolved)
    from farspan.app import choose_plan, clusters
    from farspan.app.trial_cache import TrialCache
    from farspan.launch.trial import trial_limits
    from farspan_studies.papers.algorithm1 import choose

    trials = TrialCache(resolved, clusters.find_launcher(asked), again=given.again)

    def measure(plan: Plan, step_s: float) -> Trial:
        return trials.run_trial(plan, trial_limits(plan, resolved.cluster, step_s, steps))

    console.write_line(
        f"epsilon: {steps} steps of each; delta: {delta:g}; T in TFLOP/s a device, 0 for what fails"
    )
    result = choose(
        resolved.cluster,
        choose_plan.selection_task_of(resolved, asked),
        measure,
        delta,
        say=lambda candidate: console.write_line(f"  {said(candidate)}"),
    )
    console.write_line(f"  {'Tz':5} {result.speeds.tz:.4g}")
    console.write_line(wrap_paragraph(sentence(result, delta)))
    answer = {"algorithm": "paper", **msgspec.to_builtins(result)}
    if result.plan is None:
        what = "Algorithm 1 chooses nothing"
        failed = failures(result)
        # A worker that the kernel killed is lost, as problems go, and out of memory as a trial.
        killed = any(
            candidate.trial is not None and candidate.trial.status == "oom"
            for candidate in result.candidates
        )
        short = killed or any(problem.code == "out-of-memory" for problem in failed)
        detail = f" The first: {failed[0].what} ({failed[0].fact})." if failed else ""
        raise Refusal(
            "out-of-memory" if short else "cannot-plan",
            what=f"{what}: more GPU memory is needed"
            if short
            else f"{what}: all of its plans failed",
            where="--algorithm paper",
            fact=f"{sentence(result, delta)}{detail}",
            remedy=command("select", *words_again(given), "--algorithm", "farspan"),
        )
    return result.plan, answer


def failures(result: Found) -> list[Problem]:
    """Why plans did not run, or could not be made."""
    tried = [
        candidate.problem or (None if candidate.trial is None else candidate.trial.problem)
        for candidate in result.candidates
    ]
    return [problem for problem in tried if problem is not None]


def said(candidate: Candidate) -> str:
    """`Tp    0.0123  pipeshard on both: 1.2 s a step`."""
    where = ("both machines", "machine 1", "machine 2")[candidate.machine]
    if candidate.trial is not None and candidate.trial.step_s is not None:
        outcome = f"{short_time(candidate.trial.step_s)} a step"
    else:
        outcome = (
            "no plan"
            if candidate.problem is None
            else f"{candidate.problem.what} ({candidate.problem.fact})"
        )
    return (
        f"{candidate.name.capitalize():5} {candidate.tflops:<8.4g} {candidate.technique} on "
        f"{where}: {outcome}"
    )


def sentence(result: Found, delta: float) -> str:
    """Why the algorithm chose what it chose, with its numbers."""
    tp = result.speeds.tp
    tz = result.speeds.tz
    chosen = result.decision
    if chosen.step == "1":
        return f"Pipeshard on both: (Tp - Tz) / Tz = {(tp - tz) / tz:.2f} > {delta:g}."
    if chosen.step == "2":
        name = str(chosen.technique).capitalize()
        share = (tz - tp) / tp
        return f"{name} on machine {chosen.machine}: (Tz - Tp) / Tp = {share:.2f} > {delta:g}."
    if tp > 0 and tz > 0:
        reason = (
            f"Neither of Tp = {tp:.4g} and Tz = {tz:.4g} exceeds the other by more than {delta:g}"
        )
    else:
        reason = f"{'Tz' if tz == 0 else 'Tp'} is 0, so that neither is compared with it"
    return f"{reason}: ZeRO2 on both{'' if chosen.technique else ', which does not run'}."


def _refused(flag: str, value: object, fact: str, remedy: str) -> Refusal:
    return Refusal(
        "out-of-range",
        what=f"{flag} = {value} cannot be used",
        where=flag,
        fact=fact,
        remedy=remedy,
    )
