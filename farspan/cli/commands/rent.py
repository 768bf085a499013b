"""Rank the catalogue's devices, in several counts, by the time and the dollars that a run takes."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.plan_flags import plan_query, takes_question
from farspan.domain.units import format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from farspan.planning.rent import Rent

HELP = "say which devices to rent, by time and dollars"
#: Offers off the frontier that are shown; `--json` has all.
OTHERS_SHOWN = 12


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
    group.add_argument("--preemption", help="how often a host is taken away, as 0.1/h")
    group.add_argument("--lease", help="time until the hosts are taken back, as 24h")


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import predictions

    rented = predictions.rank_rentals(
        plan_query(given),
        hours=given.hours,
        usd=given.usd,
        kinds=given.device,
        network=given.network,
        preemption=given.preemption,
        lease=given.lease,
    )
    print_rent(rented, given, console)
    candidates = []
    for offer in rented.offers:
        candidate = {
            **predictions.candidate_as_json(offer.best, offer.cluster),
            "kind": offer.kind,
            "count": offer.count,
            "usd_per_hour": offer.usd_per_hour,
            "price": {"source": offer.source, "checked": offer.checked},
            "meets_budget": offer.meets,
            "pipelines_searched": offer.searched,
        }
        candidates.append(candidate)
    console.answer({"candidates": candidates, "chosen": rented.chosen, "frontier": rented.frontier})


def print_rent(rented: Rent, given: argparse.Namespace, console: Console) -> None:
    """Print the frontier, the cheapest others, and what all of it assumes."""
    from farspan.cli.paint import text_width
    from farspan.domain.model import count_parameters
    from farspan.domain.plan_words import join_words
    from farspan.planning.candidate import Candidate
    from farspan.planning.plan_question import model_of
    from farspan.planning.ranking import candidate_name, interruptions_note
    from farspan.report.tables import table_lines

    model = model_of(given.model)
    limited = any(limit is not None for limit in (given.hours, given.usd, given.lease))
    size = format_count(count_parameters(model))
    console.write_line(
        f"{model.family} of {size} parameters; * is the choice, + the "
        "frontier of time against dollars\n"
    )

    # The frontier, then those that meet the budget, then the others.
    offers = rented.offers
    fitting = [i for i, offer in enumerate(offers) if offer.time_s < math.inf]
    others = [i for i in fitting if i not in rented.frontier]
    others.sort(key=lambda i: not offers[i].meets)
    heads = ("", "devices", "technique", "time", "cost", "an hour", "GB/device", "budget")
    rows = []
    for place in (*rented.frontier, *others[:OTHERS_SHOWN]):
        mark = "*" if place == rented.chosen else ""
        if place in rented.frontier:
            mark += "+"
        offer = offers[place]
        candidate = offer.best
        assert isinstance(candidate, Candidate)
        meets = "meets" if offer.meets else "beyond"
        gigabytes = candidate.estimate.memory_bytes / 1e9
        row = (
            mark,
            candidate.where,
            candidate.technique,
            format_seconds(candidate.time_s),
            f"${offer.usd:,.2f}",
            f"${offer.usd_per_hour:,.2f}",
            f"{gigabytes:.1f}",
            meets if limited else "",
            offer.checked,
        )
        rows.append(row)
    for line in table_lines((*heads, "price of"), rows, right={3, 4, 5, 6}, width=text_width()):
        console.write_line(line)

    if rented.chosen is not None:
        best = offers[rented.chosen].best
        assert isinstance(best, Candidate)
        if note := interruptions_note(best):
            console.write_line(f"\n{candidate_name(best)}: {note}.")

    # What is left out, and what is assumed.
    misfits = len(offers) - len(fitting)
    counts = f"{len(offers)} offers; {misfits} have too little memory"
    if limited:
        counts += f"; {sum(offer.meets for offer in offers)} meet the budget"
    console.write_line(f"\n{counts}")
    dates = sorted(offer.checked for offer in offers)
    bandwidth = format_rate(rented.bandwidth)
    rtt = format_seconds(rented.rtt_s)
    console.write_line(
        f"Assumes list prices of {dates[0]} to {dates[-1]} (catalog/devices.yaml names each "
        f"source), hosts of up to 8 devices,\n{bandwidth} and a round trip of {rtt} between hosts."
    )
    for machine in dict.fromkeys(rented.known.values()):
        kinds = [kind for kind, network in rented.known.items() if network == machine]
        rate = format_rate(machine.rate)
        console.write_line(
            f"{rate} between hosts of 8 x {join_words(kinds)}, as of a {machine.machine}; "
            "--network RATE asks about another."
        )
