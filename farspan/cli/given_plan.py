"""What `farspan price` shows of one plan, that a person wrote or farspan did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.paint import paint, painter, width
from farspan.cli.plan_table import paragraph, say_drawing
from farspan.domain.units import counted, format_bytes
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.app.given_plans import PricedPlan


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
