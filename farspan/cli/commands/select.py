"""Choose technique and machines by evidence: predict every plan, run the close ones for a few
steps, keep the best.

`--algorithm paper` is Algorithm 1 of arXiv 2602.02632 as printed, for two machines.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from farspan.app.extensions import load_extension
from farspan.app.preflight_checks import refuse_file, unused_file
from farspan.app.resolving import Resolved, resolve_run
from farspan.cli.arguments import load_config, takes_config, words_again
from farspan.cli.console import Console
from farspan.cli.plan_flags import takes_objective
from farspan.cli.plan_table import print_ranking, wrap_paragraph
from farspan.domain.objective import TOLERANCE
from farspan.domain.plan import Plan
from farspan.domain.problems import command
from farspan.domain.units import parse_duration
from farspan.planning.candidate import Refused
from farspan.planning.quantities import parse_positive

if TYPE_CHECKING:
    from farspan.planning.select_by_trials import Selection

HELP = "choose the technique and the machines by trials"
#: The algorithm of this package; others are found by entry point.
OWN = "farspan"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    parser.add_argument(
        "--algorithm", default=OWN, metavar="NAME", help=f"{OWN}, or paper (default: {OWN})"
    )
    takes_objective(parser)
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help=(
            "for all trials: none begins when it is spent (default: 3 %% of the predicted run, "
            "1m at least)"
        ),
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="make trials that were made on this cluster before again",
    )
    paper = parser.add_argument_group("--algorithm paper")
    paper.add_argument(
        "--epsilon", metavar="N", help="of every plan: '20 steps', '2 epochs' (default: 10 steps)"
    )
    paper.add_argument(
        "--delta", type=float, help="share by which the better must be better (default: 0.1)"
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="PLAN.JSON",
        type=Path,
        help="where to write the plan (default: plan.json)",
    )


def _trial_options(given: argparse.Namespace) -> list[object]:
    """Return the options that were given, but for those of `words_again` and `-o`."""
    options: list[object] = []
    for name in ("algorithm", "budget", "objective", "tolerance", "epsilon", "delta"):
        value = getattr(given, name)
        if value not in (None, OWN, TOLERANCE):
            options += [f"--{name}", value]
    return options


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import choose_plan
    from farspan.app.predictions import check_tolerance
    from farspan.cli.show_updates import Show
    from farspan.planning.selection_outcome import explain_selection, nothing_runs

    config = load_config(given)
    out = given.out or Path("plan.json")
    free = unused_file(out)
    refuse_file(out, command("select", *words_again(given), *_trial_options(given), "-o", free))
    other = None if given.algorithm == OWN else load_algorithm(given.algorithm)
    if other is not None:
        other.check(given)
    elif given.epsilon is not None or given.delta is not None:
        load_algorithm("paper").check(
            given
        )  # Wrong values are refused also where nothing reads them.
    check_tolerance(given.tolerance)
    budget_s = None
    if given.budget is not None:
        budget_s = parse_positive(parse_duration, given.budget, "--budget", "2m")
    parallel = config.parallel
    if given.objective:
        parallel = msgspec.structs.replace(parallel, objective=given.objective)
    with Show(console) as show:
        resolved = resolve_run(config, show, trial=True)
    if other is not None:
        plan, answer = other.select(given, resolved, parallel, console)
        written = _write_plan(plan, resolved, given, out, console)
        return console.answer({**answer, "plan": written})
    with Show(console) as show:
        selection = choose_plan.choose_plan(
            resolved,
            parallel,
            show,
            paying=False,
            budget_s=budget_s,
            tolerance=given.tolerance,
            again=given.again,
        )
    ranking = selection.ranking
    console.write_line()
    print_ranking(ranking, console)
    console.write_line()
    console.write_line(wrap_paragraph(explain_selection(selection)))
    if ranking.chosen is None:
        question = choose_plan.selection_task_of(
            resolved, parallel, given.tolerance, choose_plan.MAX_DEVICES_OF_SELECTION
        )
        raise nothing_runs(ranking, selection.tried, question)
    plan = ranking.candidates[ranking.chosen].plan
    answer = as_json(selection)
    answer["plan"] = _write_plan(plan, resolved, given, out, console)
    return console.answer(answer)


def load_algorithm(name: str) -> ModuleType:
    """Load another package's way to choose: a module with `check(given)`, which refuses wrong
    arguments, and `select(given, resolved, asked, console)`, which returns the plan and what
    `--json` has of it."""
    what = f"there is no algorithm {name!r}"
    module: ModuleType = load_extension(
        "algorithms", name, what, option="--algorithm", code="usage", own=(OWN,)
    )
    return module


def as_json(selection: Selection) -> dict[str, Any]:
    """Return the answer: candidates as `farspan plan` gives them, each with its trial."""
    from farspan.app import predictions
    from farspan.planning.selection_outcome import explain_selection

    ranking = selection.ranking
    candidates = []
    for listed in ranking.listed:
        priced = predictions.candidate_as_json(listed, ranking.cluster)
        trial = None if isinstance(listed, Refused) else listed.trial
        candidates.append({**priced, "trial": trial})
    tried = []
    for candidate, trial in selection.tried:
        facts = {
            "technique": candidate.technique,
            "where": candidate.where,
            "predicted_s": candidate.estimate.step_s,
            "trial": trial,
        }
        tried.append(facts)
    return {
        "candidates": candidates,
        "chosen": ranking.chosen,
        "tried": tried,
        "spent_s": selection.spent_s,
        "budget_s": selection.budget_s,
        "ended": selection.ended,
        "why": explain_selection(selection),
    }


def _write_plan(
    plan: Plan, resolved: Resolved, given: argparse.Namespace, out: Path, console: Console
) -> str:
    from farspan.app.plans import write_plan

    write_plan(plan, resolved.cluster, out)
    train = command("train", *words_again(given), "--plan", out)
    console.write_line(f"written: {out}; run it: {train}")
    return str(out)
