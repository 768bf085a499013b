"""What `farspan plan` shows of a ranking: table, reasons, two plans side by side, pictures; and the
plan as a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farspan.cli.console import Console
from farspan.domain.problems import Refusal, command
from farspan.domain.suggest import advise
from farspan.planning.candidate import Candidate, Refused
from farspan.planning.ranking import Ranking

if TYPE_CHECKING:
    from farspan.planning.diff import PlanSide
    from farspan.report.plan_picture import Picture


def check_names(given: argparse.Namespace) -> None:
    """Refuse names of candidates that cannot be, before anything is priced."""
    from farspan import techniques

    known = techniques.technique_names()
    allowed = {*known, "chosen"}
    for name in (*(given.diff or ()), given.pick):
        if not _is_file(name) and not name.isdigit() and name not in allowed:
            raise _refuse_name(name, known)


def print_views(given: argparse.Namespace, ranking: Ranking, console: Console) -> dict[str, Any]:
    """Show what was asked for; return what of it `--json` has besides the candidates."""
    from farspan.cli import plan_table
    from farspan.planning.why import explain_choice

    answer: dict[str, Any] = {}
    plan_table.print_ranking(ranking, console, everything=given.all, more="add --all")
    if given.why:
        reasons = explain_choice(ranking)
        answer["why"] = reasons.as_json()
        plan_table.print_reasons(reasons, console)
    if given.diff:
        from farspan.planning.diff import compare_plans

        a, b = (_plan_side(name, ranking) for name in given.diff)
        answer["diff"] = compare_plans(a, b, ranking.cluster)
        console.write_line()
        plan_table.print_difference(answer["diff"], console)
    if not (given.show or given.html or given.out):
        return answer
    index = _find_candidate(given.pick, ranking)
    if given.show and index is not None:
        candidate = ranking.candidates[index]
        picture = _draw_candidate(candidate, ranking)
        plan_table.print_picture(picture, candidate, console)
    if given.html:
        from farspan.report.plan_page import write_plan_page

        drawn = None
        if index is not None:
            drawn = _draw_candidate(ranking.candidates[index], ranking)
        write_plan_page(drawn, plan_table.page_text(ranking, index), given.html)
        console.write_line(f"\nthe page is {given.html}")
    if given.out and index is not None:
        from farspan.app.plans import write_plan

        plan = ranking.candidates[index].plan
        write_plan(plan, ranking.cluster, Path(given.out))
        console.write_line(f"\nthe plan is in {given.out}")
    return answer


def _draw_candidate(candidate: Candidate, ranking: Ranking) -> Picture:
    from farspan.planning.why import costs_of
    from farspan.report.plan_picture import picture

    costs = costs_of(candidate.plan, ranking.cluster)
    return picture(candidate.plan, candidate.estimate, costs)


def _find_candidate(name: str, ranking: Ranking) -> int | None:
    """Return the place of a candidate; None if the chosen one is meant and nothing is chosen."""
    if name == "chosen":
        return ranking.chosen
    for i, listed in enumerate(ranking.listed):
        if name in (listed.technique, str(i + 1)):
            if isinstance(listed, Refused):
                raise Refusal.of(listed.problem)
            return i
    known = [listed.technique for listed in ranking.listed]
    raise _refuse_name(name, known, len(known))


def _plan_side(name: str, ranking: Ranking) -> PlanSide:
    """Price a candidate, or the plan in a file."""
    from farspan import models
    from farspan.app.plans import check_cluster, read_plan
    from farspan.domain.engine import load_engine
    from farspan.estimate.estimate_plan import estimate
    from farspan.planning.diff import PlanSide
    from farspan.planning.ranking import candidate_name

    if _is_file(name):
        path = Path(name)
        plan = read_plan(path)
        cluster = ranking.cluster
        check_cluster(plan, cluster, path, "give --cluster the one that the plan was made for")
        graph = models.graph(plan.model)
        priced = estimate(plan, graph, cluster, load_engine(plan.engine))
        return PlanSide(name=f"{plan.technique} in {path.name}", plan=plan, estimate=priced)
    index = _find_candidate(name, ranking)
    if index is None:
        raise Refusal(
            "cannot-plan",
            what="nothing is chosen, so nothing compares with it",
            where=f"--diff {name}",
            fact="the table says why",
            remedy="name two candidates of the table: --diff 1 2",
        )
    candidate = ranking.candidates[index]
    return PlanSide(
        name=candidate_name(candidate),
        plan=candidate.plan,
        estimate=candidate.estimate,
        queue_s=candidate.queue_s,
    )


def _is_file(name: str) -> bool:
    return name.endswith(".json") or "/" in name or Path(name).is_file()


def _refuse_name(name: str, techniques: Any, count: int = 0) -> Refusal:
    known = list(dict.fromkeys((*techniques, "chosen")))
    numbers = f", numbers 1 to {count}" if count else ", a number of the table, or a plan file"
    return Refusal(
        "out-of-range",
        what=f"there is no candidate {name!r}",
        where="farspan plan",
        fact=f"known: {', '.join(known)}{numbers}",
        remedy=advise(name, known, fix=command("plan", "--help")),
    )
