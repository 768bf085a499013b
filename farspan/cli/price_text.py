"""What `farspan price` shows of one plan, that a person wrote or farspan did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.paint import paint, text_width, wants_colours
from farspan.cli.plan_table import print_drawing, wrap_paragraph
from farspan.domain.units import counted, format_bytes
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.app.estimate_given_plan import PricedPlan


def print_priced_plan(priced: PricedPlan, console: Console, *, pictures: bool) -> None:
    """Print the plan and its figures, what runs where, what it sends, and what all of that
    assumes; with `pictures` also a step in time."""
    from farspan.estimate.traffic import traffic
    from farspan.planning.diff import PlanSide, compare_figures, describe_settings
    from farspan.planning.why import costs_of, exchange_row
    from farspan.report.plan_picture import picture
    from farspan.report.plan_terminal import cluster, memory, show

    colours = wants_colours(json=console.json)
    columns = text_width()
    plan = priced.plan
    side = PlanSide(name=plan.technique, plan=plan, estimate=priced.estimate)
    rows = list(describe_settings(plan, priced.cluster).items())
    for row in compare_figures(side, side, priced.cluster):
        rows.append((row.what, row.a))
    table = table_lines(("plan", ""), rows, width=columns, wrap=(1,), colours=colours)
    for line in table:
        console.write_line(line, painted=True)
    costs = costs_of(plan, priced.cluster)
    drawn = picture(plan, priced.estimate, costs)
    views = (show,) if pictures else (cluster, memory)
    for view in views:
        console.write_line()
        print_drawing(view(drawn, columns), console)
    console.write_line(wrap_paragraph(_fit_sentence(priced)))

    # What it sends, and what is assumed.
    parts: dict[str, list[str]] = {}
    sent = [exchange_row(exchange, costs) for exchange in traffic(plan, costs)]
    if sent:
        heads = ("", "between", "a step", "rate", "latency", "takes")
        parts["What it sends"] = table_lines(
            heads, sent, right=range(2, 6), width=columns, wrap=(1,), colours=colours
        )
    assumed = [wrap_paragraph(f"- {assumption}", hang=2) for assumption in priced.assumptions]
    if assumed:
        parts["Assumed"] = assumed
    for heading, lines in parts.items():
        console.write_line(f"\n{paint(heading, 'strong', colours)}", painted=True)
        for line in lines:
            console.write_line(line, painted=True)


def _fit_sentence(priced: PricedPlan) -> str:
    lacking = []
    for needed, capacity in zip(priced.memory, priced.capacity, strict=True):
        if needed.total > capacity:
            lacking.append(needed.total - capacity)
    if not lacking:
        return "It fits: every device has room for what it holds."
    short = counted(len(lacking), "device")
    return f"It does not fit: {short} short of memory, of {format_bytes(max(lacking))} at most."
