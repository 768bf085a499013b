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

    known = techniques.names()
    for name in (*(given.diff or ()), given.pick):
        if not _is_file(name) and not name.isdigit() and name not in (*known, "chosen"):
            raise _unknown(name, known)


def say_views(given: argparse.Namespace, ranking: Ranking, console: Console) -> dict[str, Any]:
    """Show what was asked for; returns what of it `--json` has besides the candidates."""
    from farspan.cli import plan_table
    from farspan.planning.why import why

    answer: dict[str, Any] = {}
    plan_table.say_ranking(ranking, console, everything=given.all, more="add --all")
    if given.why:
        reasons = why(ranking)
        answer["why"] = reasons.as_json()
        plan_table.say_why(reasons, console)
    if given.diff:
        from farspan.planning.diff import difference

        a, b = (_side(name, ranking) for name in given.diff)
        answer["diff"] = difference(a, b, ranking.cluster)
        console.say()
        plan_table.say_difference(answer["diff"], console)
    if not (given.show or given.html or given.out):
        return answer
    index = _index(given.pick, ranking)
    if given.show and index is not None:
        candidate = ranking.candidates[index]
        plan_table.say_picture(_picture(candidate, ranking), candidate, console)
    if given.html:
        _write_page(given.html, ranking, index, console)
    if given.out and index is not None:
        from farspan.app.plans import write_plan

        write_plan(ranking.candidates[index].plan, ranking.cluster, Path(given.out))
        console.say(f"\nthe plan is in {given.out}")
    return answer


def _write_page(path: Path, ranking: Ranking, index: int | None, console: Console) -> None:
    from farspan.cli.plan_table import told
    from farspan.report.plan_page import write_plan_page

    shown = None if index is None else _picture(ranking.candidates[index], ranking)
    write_plan_page(shown, told(ranking, index), path)
    console.say(f"\nthe page is {path}")


def _picture(candidate: Candidate, ranking: Ranking) -> Picture:
    from farspan.planning.why import costs_of
    from farspan.report.plan_picture import picture

    return picture(candidate.plan, candidate.estimate, costs_of(candidate.plan, ranking.cluster))


def _index(name: str, ranking: Ranking) -> int | None:
    """Return the place of a candidate; None if the chosen one is meant and nothing is chosen."""
    if name == "chosen":
        return ranking.chosen
    for i, listed in enumerate(ranking.listed):
        if name in (listed.technique, str(i + 1)):
            if isinstance(listed, Refused):
                raise Refusal.of(listed.problem)
            return i
    raise _unknown(name, [listed.technique for listed in ranking.listed], len(ranking.listed))


def _side(name: str, ranking: Ranking) -> PlanSide:
    """Price a candidate, or the plan in a file."""
    from farspan import models
    from farspan.app.plans import check_cluster, read_plan
    from farspan.domain.engine import engine
    from farspan.estimate.price import estimate
    from farspan.planning.diff import PlanSide
    from farspan.planning.ranking import called

    if _is_file(name):
        plan = read_plan(Path(name))
        check_cluster(
            plan, ranking.cluster, Path(name), "give --cluster the one that the plan was made for"
        )
        priced = estimate(plan, models.graph(plan.model), ranking.cluster, engine(plan.engine))
        return PlanSide(name=f"{plan.technique} in {Path(name).name}", plan=plan, estimate=priced)
    index = _index(name, ranking)
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
        name=called(candidate),
        plan=candidate.plan,
        estimate=candidate.estimate,
        queue_s=candidate.queue_s,
    )


def _is_file(name: str) -> bool:
    return name.endswith(".json") or "/" in name or Path(name).is_file()


def _unknown(name: str, known: Any, count: int = 0) -> Refusal:
    names = list(dict.fromkeys((*known, "chosen")))
    numbers = f", numbers 1 to {count}" if count else ", a number of the table, or a plan file"
    return Refusal(
        "out-of-range",
        what=f"there is no candidate {name!r}",
        where="farspan plan",
        fact=f"known: {', '.join(names)}{numbers}",
        remedy=advise(name, names, fix=command("plan", "--help")),
    )
