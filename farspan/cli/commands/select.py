"""Choose technique and machines by evidence: predict every plan, run the close ones for a few steps, keep the best.

`--algorithm paper` is Algorithm 1 of arXiv 2602.02632 as printed, for two machines.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farspan.app.checks import refuse_file
from farspan.app.resolving import Resolved, resolve
from farspan.cli.arguments import load_config, takes_config, words_again
from farspan.cli.console import Console
from farspan.cli.planning import paragraph, say_ranking
from farspan.domain.config import ParallelConfig
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.units import parse_seconds, short_time
from farspan.planning.quantities import positive
from farspan.planning.rank import OBJECTIVES, TOLERANCE

if TYPE_CHECKING:
    from farspan.domain.trial import Trial
    from farspan.planning.algorithm1 import Candidate, Found
    from farspan.planning.select import Selection

HELP = "choose the technique and the machines by trials"
#: Of the paper's algorithm: what is run of each plan, and by how much one must exceed the other.
EPSILON, DELTA = "10 steps", 0.1
#: Steps of a candidate at most: what takes longer is no trial.
MOST_STEPS = 1_000_000


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    parser.add_argument("--algorithm", choices=("farspan", "paper"), default="farspan", help="(default: farspan)")
    parser.add_argument("--objective", choices=OBJECTIVES, help="what is best (default: time)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="how much slower fewest_devices may be")
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="for all trials: none begins when it is spent (default: 3 %% of the predicted run, 1m at least)",
    )
    parser.add_argument("--again", action="store_true", help="make trials that were made on this cluster before again")
    paper = parser.add_argument_group("--algorithm paper")
    paper.add_argument(
        "--epsilon", default=EPSILON, metavar="N", help=f"of every plan: '20 steps', '2 epochs' (default: {EPSILON})"
    )
    paper.add_argument(
        "--delta", type=float, default=DELTA, help=f"share by which the better must be better (default: {DELTA})"
    )
    parser.add_argument(
        "-o", "--out", metavar="PLAN.JSON", type=Path, help="where to write the plan (default: plan.json)"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import choosing
    from farspan.cli.show import Show
    from farspan.planning.outcome import nothing_runs, why

    config, out = load_config(given), given.out or Path("plan.json")
    refuse_file(out, command("select", *words_again(given), "-o", out.with_stem(f"{out.stem}-2")))
    if not 0 < given.delta <= 1:
        raise _refused("--delta", given.delta, "it lies above 0 and is at most 1", f"--delta {DELTA}")
    if not 0 <= given.tolerance <= 10:
        raise _refused("--tolerance", given.tolerance, "it lies between 0 and 10", f"--tolerance {TOLERANCE}")
    budget_s = None if given.budget is None else positive(parse_seconds, given.budget, "--budget", "2m")
    asked = config.parallel
    if given.objective:
        asked = msgspec.structs.replace(asked, objective=given.objective)
    steps = epsilon(given.epsilon)
    with Show(console) as show:
        resolved = resolve(config, show, trial=True)
    if given.algorithm == "paper":
        _by_paper(given, resolved, asked, steps(resolved), out, console)
        return
    with Show(console) as show:
        selection = choosing.choose(
            resolved, asked, show, paying=False, budget_s=budget_s, tolerance=given.tolerance, again=given.again
        )
    ranking = selection.ranking
    console.say()
    say_ranking(ranking, console, more="farspan plan --all")
    console.say()
    console.say(paragraph(why(selection)))
    plan = None if ranking.chosen is None else ranking.candidates[ranking.chosen].plan
    if plan is None:
        question = choosing.question_of(resolved, asked, given.tolerance, choosing.PARTS)
        raise nothing_runs(ranking, selection.tried, question)
    console.answer({**as_json(selection), **_write(plan, resolved, given, out, console)})


def as_json(selection: Selection) -> dict[str, Any]:
    """The answer: candidates as `farspan plan` gives them, each with its trial."""
    from farspan.app import pricing
    from farspan.planning.outcome import why

    ranking = selection.ranking
    return {
        "candidates": [{**pricing.as_json(one, ranking), "trial": one.trial} for one in ranking.candidates],
        "chosen": ranking.chosen,
        "tried": [
            {"technique": one.technique, "where": one.where, "predicted_s": one.estimate and one.estimate.step_s,
             "trial": made}
            for one, made in selection.tried
        ],
        "spent_s": selection.spent_s, "budget_s": selection.budget_s, "ended": selection.ended, "why": why(selection),
    }  # fmt: skip


def _write(plan: Plan, resolved: Resolved, given: argparse.Namespace, out: Path, console: Console) -> dict[str, Any]:
    from farspan.app.plans import write_plan

    write_plan(plan, resolved.cluster, out)
    console.say(f"written: {out}; run it: {command('train', *words_again(given), '--plan', out)}")
    return {"plan": str(out)}


def epsilon(text: str) -> Callable[[Resolved], int]:
    """How many steps `20 steps` or `2 epochs` are of a run's text. Raises Refusal (out-of-range)."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(steps?|epochs?)\s*", text)
    number = float(match[1]) if match and match[1].count(".") <= 1 and match[1] != "." else 0.0
    if match is None or not 0 < number <= MOST_STEPS:
        raise _refused("--epsilon", text, "it is a number of steps or epochs above 0", f"--epsilon {EPSILON!r}")

    def steps(resolved: Resolved) -> int:
        of_one = 1.0
        if match[2].startswith("epoch"):
            of_one = resolved.corpus.train.tokens / resolved.train.tokens_per_step
        count = max(1, round(number * of_one))
        if count > MOST_STEPS:
            raise _refused("--epsilon", text, f"that is {count:,} steps of each plan", f"--epsilon {EPSILON!r}")
        return count

    return steps


def _by_paper(
    given: argparse.Namespace, resolved: Resolved, asked: ParallelConfig, steps: int, out: Path, console: Console
) -> None:
    from farspan.app import choosing, clusters
    from farspan.launch.trial import limits
    from farspan.planning.algorithm1 import choose

    trials = choosing.TrialCache(resolved, clusters.launcher(asked), again=given.again)

    def measure(plan: Plan, step_s: float) -> Trial:
        return trials.run(plan, limits(plan, resolved.cluster, step_s, steps))

    console.say(f"epsilon: {steps} steps of each; delta: {given.delta:g}; T in TFLOP/s a device, 0 for what fails")
    found = choose(
        resolved.cluster, choosing.question_of(resolved, asked), measure, given.delta,
        say=lambda one: console.say(f"  {said(one)}"),
    )  # fmt: skip
    console.say(f"  {'Tz':5} {found.speeds.tz:.4g}")
    console.say(paragraph(sentence(found, given.delta)))
    answer = {"algorithm": "paper", **msgspec.to_builtins(found)}
    if found.plan is None:
        what, failed = "Algorithm 1 chooses nothing", failures(found)
        # A worker that the kernel killed is lost, as problems go, and out of memory as a trial.
        killed = any(one.trial is not None and one.trial.status == "oom" for one in found.candidates)
        short = killed or any(problem.code == "out-of-memory" for problem in failed)
        told = f" The first: {failed[0].what} ({failed[0].fact})." if failed else ""
        raise Refusal(
            "out-of-memory" if short else "cannot-plan",
            what=f"{what}: more GPU memory is needed" if short else f"{what}: all of its plans failed",
            where="--algorithm paper", fact=f"{sentence(found, given.delta)}{told}",
            remedy=command("select", *words_again(given), "--algorithm", "farspan"),
        )  # fmt: skip
    console.answer({**answer, **_write(found.plan, resolved, given, out, console)})


def failures(found: Found) -> list[Problem]:
    """Why plans did not run, or could not be made."""
    tried = [one.problem or (None if one.trial is None else one.trial.problem) for one in found.candidates]
    return [problem for problem in tried if problem is not None]


def said(one: Candidate) -> str:
    """`Tp    0.0123  pipeshard on both: 1.2 s a step`."""
    where = ("both machines", "machine 1", "machine 2")[one.machine]
    if one.trial is not None and one.trial.step_s is not None:
        told = f"{short_time(one.trial.step_s)} a step"
    else:
        told = "no plan" if one.problem is None else f"{one.problem.what} ({one.problem.fact})"
    return f"{one.name.capitalize():5} {one.tflops:<8.4g} {one.technique} on {where}: {told}"


def sentence(found: Found, delta: float) -> str:
    """Why the algorithm chose what it chose, with its numbers."""
    tp, tz, chosen = found.speeds.tp, found.speeds.tz, found.decision
    if chosen.step == "1":
        return f"Pipeshard on both: (Tp - Tz) / Tz = {(tp - tz) / tz:.2f} > {delta:g}."
    if chosen.step == "2":
        name, share = str(chosen.technique).capitalize(), (tz - tp) / tp
        return f"{name} on machine {chosen.machine}: (Tz - Tp) / Tp = {share:.2f} > {delta:g}."
    if tp > 0 and tz > 0:
        told = f"Neither of Tp = {tp:.4g} and Tz = {tz:.4g} exceeds the other by more than {delta:g}"
    else:
        told = f"{'Tz' if tz == 0 else 'Tp'} is 0, so that neither is compared with it"
    return f"{told}: ZeRO2 on both{'' if chosen.technique else ', which does not run'}."


def _refused(flag: str, value: object, fact: str, remedy: str) -> Refusal:
    return Refusal("out-of-range", what=f"{flag} = {value} cannot be used", where=flag, fact=fact, remedy=remedy)
