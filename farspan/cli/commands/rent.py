"""Rank the catalogue's devices, in several counts, by the time and the dollars that a run takes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.plan_flags import plan_query, takes_question
from farspan.domain.units import format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from farspan.planning.rent import Offer, Rent

HELP = "say which devices to rent, by time and dollars"
#: Offers beside the frontier that are shown; `--json` has all.
SHOWN = 12


def configure(parser: argparse.ArgumentParser) -> None:
    takes_question(parser, "the training", needs_model=True)
    group = parser.add_argument_group("what to rent")
    group.add_argument("--hours", type=float, help="hours that the run may take")
    group.add_argument("--usd", type=float, help="dollars that the run may cost")
    group.add_argument(
        "--device", action="append", default=[], help="this kind only; may be repeated"
    )
    group.add_argument(
        "--network",
        help="between hosts of 8 (default: a known machine's of that shape, else 10Gbit/s)",
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import pricing

    rented = pricing.rent(
        plan_query(given),
        hours=given.hours,
        usd=given.usd,
        kinds=given.device,
        network=given.network,
    )
    say_rent(rented, given, console)
    candidates = [
        {
            **pricing.as_json(offer.best, offer.cluster),
            "kind": offer.kind,
            "count": offer.count,
            "usd_per_hour": offer.usd_per_hour,
            "price": {"source": offer.source, "checked": offer.checked},
            "meets_budget": offer.meets,
            "pipelines_searched": offer.searched,
        }
        for offer in rented.offers
    ]
    console.answer({"candidates": candidates, "chosen": rented.chosen, "frontier": rented.frontier})


def say_rent(rented: Rent, given: argparse.Namespace, console: Console) -> None:
    """Print the frontier, the cheapest others, and what all of it assumes."""
    from farspan.cli.paint import width
    from farspan.domain.model import parameters
    from farspan.domain.words import joined
    from farspan.planning.question import model_of
    from farspan.report.tables import table_lines

    model = model_of(given.model)
    limited = given.hours is not None or given.usd is not None
    console.say(
        f"{model.family} of {format_count(parameters(model))} parameters; * is the choice, + the "
        "frontier of time against dollars\n"
    )

    # The frontier, then those that meet the budget, then the others.
    fitting = [i for i, offer in enumerate(rented.offers) if offer.time_s < float("inf")]
    others = [i for i in fitting if i not in rented.frontier]
    others.sort(key=lambda i: not rented.offers[i].meets)
    heads = ("", "devices", "technique", "time", "cost", "an hour", "GB/device", "budget")
    rows = []
    for place in (*rented.frontier, *others[:SHOWN]):
        chosen = "*" if place == rented.chosen else ""
        mark = chosen + ("+" if place in rented.frontier else "")
        rows.append(_offer_row(mark, rented.offers[place], limited=limited))
    for line in table_lines((*heads, "price of"), rows, right={3, 4, 5, 6}, width=width()):
        console.say(line)

    # What is left out, and what is assumed.
    misfits = len(rented.offers) - len(fitting)
    counts = f"{len(rented.offers)} offers; {misfits} have too little memory"
    if limited:
        counts += f"; {sum(offer.meets for offer in rented.offers)} meet the budget"
    console.say(f"\n{counts}")
    dates = sorted(offer.checked for offer in rented.offers)
    console.say(
        f"Assumes list prices of {dates[0]} to {dates[-1]} (catalog/devices.yaml names each "
        f"source), hosts of up to 8 devices,\n{format_rate(rented.bandwidth)} and a round trip of "
        f"{format_seconds(rented.rtt_s)} between hosts."
    )
    for machine in dict.fromkeys(rented.known.values()):
        kinds = [kind for kind, network in rented.known.items() if network == machine]
        console.say(
            f"{format_rate(machine.rate)} between hosts of 8 x {joined(kinds)}, as of a "
            f"{machine.machine}; --network RATE asks about another."
        )


def _offer_row(mark: str, offer: Offer, *, limited: bool) -> tuple[str, ...]:
    from farspan.planning.candidate import Candidate

    candidate = offer.best
    assert isinstance(candidate, Candidate)
    meets = "meets" if offer.meets else "beyond"
    return (
        mark,
        candidate.where,
        candidate.technique,
        format_seconds(candidate.time_s),
        f"${offer.usd:,.2f}",
        f"${offer.usd_per_hour:,.2f}",
        f"{candidate.estimate.memory_bytes / 1e9:.1f}",
        meets if limited else "",
        offer.checked,
    )
