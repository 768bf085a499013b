"""Price one plan, that a person wrote or farspan did: what a step takes, holds and sends."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli.arguments import load_config, takes_config
from farspan.cli.console import Console
from farspan.cli.plan_flags import takes_export, write_export

HELP = "say what a plan of your own would take"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan", metavar="PLAN", type=Path, help="one that farspan wrote, or a short form by hand"
    )
    takes_config(parser)
    parser.add_argument("--engine", help="the system that runs it (default: the plan's own)")
    parser.add_argument(
        "--show", action="store_true", help="pictures: what runs where, a step in time, memory"
    )
    takes_export(parser)
    parser.add_argument("-o", "--out", metavar="PLAN.JSON", help="write the plan to this file")


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app.estimate_given_plan import price_given
    from farspan.cli import price_text
    from farspan.cli.show_updates import Show

    # An export of a whole plan needs neither prices nor the cluster.
    is_whole = given.cluster is None and given.plan.suffix == ".json"
    if given.export and is_whole:
        from farspan.app.plans import read_plan

        exported = write_export(read_plan(given.plan), given, console)
        console.answer({"export": exported})
        return
    # Without run.yaml nothing names a cluster: it is this machine.
    has_config = given.config.exists() or given.config.name != "run.yaml"
    config = None
    if given.cluster is None and (given.set or has_config):
        config = load_config(given)
    with Show(console) as progress:
        priced = price_given(given.plan, given.cluster, given.engine, progress, config)
    price_text.print_priced_plan(priced, console, pictures=given.show)
    if given.out:
        from farspan.app.plans import write_plan

        write_plan(priced.plan, priced.cluster, Path(given.out))
        console.write_line(f"\nthe plan is in {given.out}")
    answer = priced.as_json()
    if given.export:
        answer["export"] = write_export(priced.plan, given, console)
    console.answer(answer)
