"""`farspan plan --price`: what one plan would take, that a person wrote or farspan did."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.cli.arguments import load_config
from farspan.cli.console import Console
from farspan.cli.paint import paint, painter, width
from farspan.cli.plan_table import paragraph, say_drawing
from farspan.domain.escapes import key_word
from farspan.domain.problems import Refusal, command
from farspan.domain.units import counted, format_bytes
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.app.given_plans import PricedPlan

#: Options of `farspan plan` that ask something else.
OTHERS = (
    "model",
    "fit",
    "rent",
    "export",
    "plan",
    "diff",
    "html",
    "technique",
    "objective",
    "all",
    "resolved",
)


def priced(given: argparse.Namespace, console: Console) -> bool:
    """Answer `--price`; return whether it was asked."""
    if given.price is None:
        if given.engine is not None:
            raise Refusal(
                "usage",
                what="--engine needs --price",
                where="farspan plan",
                fact="techniques plan for farspan's own",
                remedy=command("plan", "--price", "plan.yaml", "--engine", given.engine),
            )
        return False
    if other := next((name for name in OTHERS if getattr(given, name)), None):
        raise Refusal(
            "usage",
            what=f"--{other} does not go with --price",
            where="farspan plan",
            fact="a plan that is given is priced as it is",
            remedy=f"leave out --{key_word(other)}",
        )
    from farspan.app.given_plans import price_given
    from farspan.cli.show import Show

    # Without run.yaml nothing names a cluster: it is this machine.
    asked = given.set or given.config.exists() or given.config.name != "run.yaml"
    config = load_config(given) if asked and given.cluster is None else None
    with Show(console) as progress:
        found = price_given(given.price, given.cluster, given.engine, progress, config)
    say(found, console, pictures=given.show)
    if given.out:
        from farspan.app.plans import write_plan

        write_plan(found.plan, found.cluster, Path(given.out))
        console.say(f"\nthe plan is in {given.out}")
    console.answer(found.as_json())
    return True


def say(found: PricedPlan, console: Console, *, pictures: bool) -> None:
    """Print the plan and its figures, what runs where, what it sends, and what all of that
    assumes; with `pictures` also a step in time."""
    from farspan.estimate.traffic import traffic
    from farspan.planning.diff import PlanSide, configuration, figures
    from farspan.planning.why import costs_of, exchange_row
    from farspan.report.plan_picture import picture
    from farspan.report.plan_terminal import cluster, memory, show

    colours = painter(json=console.json)
    plan = found.plan
    side = PlanSide(name=plan.technique, plan=plan, estimate=found.estimate)
    rows = list(configuration(plan, found.cluster).items())
    rows += [(row.what, row.a) for row in figures(side, side, found.cluster)]
    for line in table_lines(("plan", ""), rows, width=width(), wrap=(1,), colours=colours):
        console.say(line, painted=True)
    costs = costs_of(plan, found.cluster)
    drawn = picture(plan, found.estimate, costs)
    views = (show,) if pictures else (cluster, memory)
    for view in views:
        console.say()
        say_drawing(view(drawn, width()), console)
    console.say(paragraph(_verdict(found)))
    sent = [exchange_row(exchange, costs) for exchange in traffic(plan, costs)]
    heads = ("", "between", "a step", "rate", "latency", "takes")
    table = table_lines(heads, sent, right=range(2, 6), width=width(), wrap=(1,), colours=colours)
    assumed = [paragraph(f"- {assumption}", hang=2) for assumption in found.assumptions]
    for heading, lines in (("What it sends", table if sent else []), ("Assumed", assumed)):
        if lines:
            console.say(f"\n{paint(heading, 'strong', colours)}", painted=True)
        for line in lines:
            console.say(line, painted=True)


def _verdict(found: PricedPlan) -> str:
    pairs = zip(found.memory, found.capacity, strict=True)
    lacking = [part.total - most for part, most in pairs if part.total > most]
    if not lacking:
        return "It fits: every device has room for what it holds."
    short = counted(len(lacking), "device")
    return f"It does not fit: {short} short of memory, of {format_bytes(max(lacking))} at most."
