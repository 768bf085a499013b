"""Price a run before it starts: what each technique would take, which is best, and why.

With a run.yaml, or with --model and --cluster alone: then neither text nor machines nor PyTorch are
needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from farspan.cli.arguments import load_config, takes_config
from farspan.cli.console import Console
from farspan.cli.plan_flags import (
    plan_query,
    takes_export,
    takes_objective,
    takes_question,
    write_export,
)

HELP = "say what each technique would take, and which is best"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    takes_question(parser, "a question without run.yaml")
    takes_objective(parser)
    parser.add_argument(
        "--resolved", action="store_true", help="show each value of run.yaml and where it came from"
    )
    _add_views(parser)
    takes_export(parser)
    parser.add_argument(
        "-o", "--out", metavar="PLAN.JSON", help="write the chosen plan to this file"
    )


def _add_views(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `planviews` reads."""
    shown = parser.add_argument_group("what to show")
    shown.add_argument(
        "--all",
        action="store_true",
        help="every candidate, not only the best and each technique's best",
    )
    shown.add_argument(
        "--why",
        action="store_true",
        help="why the chosen one wins, what is left out, what is not known",
    )
    shown.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help=(
            "two candidates side by side: techniques, numbers of the table,\n'chosen', or plan "
            "files"
        ),
    )
    shown.add_argument(
        "--show", action="store_true", help="pictures: what runs where, a step in time, memory"
    )
    shown.add_argument(
        "--html", metavar="FILE", type=Path, help="all of it as one page that opens offline"
    )
    shown.add_argument(
        "--pick",
        metavar="A",
        default="chosen",
        help="the candidate that --show, --html and -o are about (default: chosen)",
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import predictions
    from farspan.cli.planviews import check_names, print_views

    query = plan_query(
        given, cluster=given.cluster, objective=given.objective, tolerance=given.tolerance
    )
    check_names(given)
    if given.export:
        predictions.load_exporter(given.export)
    resolved = None
    values: dict[str, tuple[Any, str]] = {}
    if given.model is not None:
        ranking = predictions.price_model(query)
    else:
        from farspan.app.clusters import is_here
        from farspan.app.resolving import resolve_run
        from farspan.cli.show_updates import Show

        config = load_config(given)
        with Show(console) as show:
            resolved = resolve_run(config, show, trial=is_here(config.parallel))
        ranking = predictions.price_resolved(resolved, config.parallel, query)
        values = predictions.resolved_values(resolved, ranking)
        if given.resolved:
            for key, (value, origin) in values.items():
                console.write_line(f"  {key:22} {value!s:20} {origin}")
    answer: dict[str, Any] = print_views(given, ranking, console)
    cluster = ranking.cluster
    answer["candidates"] = [
        predictions.candidate_as_json(listed, cluster) for listed in ranking.listed
    ]
    answer["chosen"] = ranking.chosen
    if given.model is not None:
        predictions.require_fit(query, ranking)
    if given.export:
        plan = predictions.load_exporter(given.export).exportable(ranking)
        answer["export"] = {} if plan is None else write_export(plan, given, console)
    if resolved is not None:
        answer["resolved"] = {}
        for key, (value, origin) in values.items():
            answer["resolved"][key] = {"value": value, "origin": origin}
    console.answer(answer)
