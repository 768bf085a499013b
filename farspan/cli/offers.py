"""`farspan plan --fit`, `--rent` and `--export`, and what is said where nothing fits."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import msgspec

from farspan.app import pricing
from farspan.app.pricing import PlanQuery
from farspan.cli.console import Console
from farspan.cli.paint import width
from farspan.domain.model import ModelSpec, parameters
from farspan.domain.problems import Refusal, command
from farspan.domain.units import counted, format_bytes, format_count, format_rate, format_seconds
from farspan.domain.words import joined
from farspan.planning.candidate import Candidate
from farspan.planning.question import Question, model_of
from farspan.report.tables import table_lines

if TYPE_CHECKING:
    from farspan.domain.plan import Plan
    from farspan.planning.fit import Fit, Limit
    from farspan.planning.rent import Offer, Rent

#: Offers beside the frontier that are shown; `--json` has all.
SHOWN = 12


def asked_of(given: argparse.Namespace) -> PlanQuery:
    """What the flags ask."""
    question = Question(
        model=given.model or "",
        tokens=given.tokens,
        batch=given.batch,
        seq_len=given.seq_len,
        precision=given.precision,
        attention=given.attention,
        recompute=given.recompute,
        wan_bits=given.wan_bits,
    )
    return PlanQuery(
        question=question,
        cluster=given.cluster,
        objective=given.objective,
        allow=tuple(given.technique),
        tolerance=given.tolerance,
    )


def answered(given: argparse.Namespace, query: PlanQuery, console: Console) -> bool:
    """Answers a question of this page that needs no ranking; whether there was one."""
    if given.export:
        pricing.exporter(given.export)
    if given.plan and not given.export:
        raise Refusal(
            "usage",
            what="--plan needs --export",
            where="farspan plan",
            fact="a plan that is made already is not ranked again",
            remedy=command("plan", "--plan", given.plan, "--export", "torchtitan"),
        )
    if given.fit:
        _need(given, *(("cluster",) if given.fit == "model" else ("cluster", "model")))
        fit = pricing.fit(given.fit, query)
        say_fit(fit, given, console)
        console.answer(fit.as_json())
    elif given.rent:
        _rent(given, query, console)
    elif given.export and given.plan:
        from farspan.app.plans import read_plan

        console.answer({"export": write_export(read_plan(given.plan), given, console)})
    else:
        return False
    return True


# -- what fits
#   ------------------------------------------------------------------------------------------------


def _need(given: argparse.Namespace, *flags: str) -> None:
    for flag in flags:
        if getattr(given, flag) is None:
            question = f"--fit {given.fit}" if given.fit else "--rent"
            examples = {
                "model": given.model or "gpt2m",
                "cluster": given.cluster or "fabric/gat-amst",
            }
            words = [word for name in flags for word in (f"--{name}", examples[name])]
            raise Refusal(
                "usage",
                what=f"{question} needs --{flag}",
                where="farspan plan",
                fact=f"no --{flag} was given",
                remedy=command("plan", *question.split(), *words),
            )


def say_fit(fit: Fit, given: argparse.Namespace, console: Console) -> None:
    """The answer in sentences, and each technique's own limit."""
    best, model = fit.best, fit.best.plan.model
    shape = f"{model.family}, {model.layers} layers x {model.d_model}"
    if fit.asked == "model":
        console.say(f"largest model that fits: {shape}, {format_count(best.amount)} parameters")
    elif fit.asked == "batch":
        console.say(
            f"largest batch computed at once: {counted(best.amount, 'sequence')} of "
            f"{best.plan.train.seq_len} tokens"
        )
        console.say(
            f"  {best.micro_rows} on the busiest device; gradients are not accumulated, pipelines "
            "not counted"
        )
    else:
        console.say(
            f"least memory a device: {format_bytes(best.amount)}, every device alike, for {shape}"
        )
    again = ", computing activations again" if best.recompute else ""
    console.say(f"  by {best.technique} on {best.where}{again}")
    console.say(f"  fullest: {best.binds}")
    if fit.next_amount is not None:
        console.say(
            f"  next: {_amount(fit, fit.next_amount)}, which nothing fits; by {best.technique} then"
        )
        console.say(f"        {fit.next_lacks}")
    console.say()
    rows: list[tuple[str, ...]] = [
        (
            "technique",
            "where",
            "most" if fit.asked != "memory" else "least",
            "at once",
            "recompute",
            "fullest",
        )
    ]
    rows += [_row(fit, limit) for limit in fit.limits]
    for line in table_lines(rows[0], rows[1:], right={2, 3}, width=width()):
        console.say(line)
    if fit.asked == "model" and pricing.reproduced(best):
        console.say(
            f"\nprice it: {command('plan', '--model', best.typed, '--cluster', given.cluster)}"
        )


def _amount(fit: Fit, amount: int) -> str:
    if fit.asked == "model":
        return f"{format_count(amount)} parameters"
    return format_bytes(amount) if fit.asked == "memory" else counted(amount, "sequence")


def _row(fit: Fit, limit: Limit) -> tuple[str, ...]:
    return (
        limit.technique,
        limit.where,
        _amount(fit, limit.amount),
        str(limit.micro_rows),
        "yes" if limit.recompute else "no",
        str(limit.binds).split(" usable")[0],
    )


# -- what to rent
#   ------------------------------------------------------------------------------------------------


def _rent(given: argparse.Namespace, query: PlanQuery, console: Console) -> None:
    _need(given, "model")
    rented = pricing.rent(
        query, hours=given.hours, usd=given.usd, kinds=given.device, network=given.network
    )
    model = model_of(given.model)
    limited = given.hours is not None or given.usd is not None
    say_rent(rented, model, console, limited=limited)
    answer: dict[str, Any] = {
        "candidates": [],
        "chosen": rented.chosen,
        "frontier": rented.frontier,
    }
    for offer in rented.offers:
        answer["candidates"].append(
            {
                **pricing.as_json(offer.best, offer.cluster),
                "kind": offer.kind,
                "count": offer.count,
                "usd_per_hour": offer.usd_per_hour,
                "price": {"source": offer.source, "checked": offer.checked},
                "meets_budget": offer.meets,
                "pipelines_searched": offer.searched,
            }
        )
    console.answer(answer)


def say_rent(rented: Rent, model: ModelSpec, console: Console, *, limited: bool) -> None:
    """The frontier, the cheapest others, and what all of it assumes."""
    count = format_count(parameters(model))
    console.say(
        f"{model.family} of {count} parameters; * is the choice, + the frontier of time against "
        "dollars"
    )
    console.say()
    others = [
        i
        for i, offer in enumerate(rented.offers)
        if offer.time_s < float("inf") and i not in rented.frontier
    ]
    others.sort(key=lambda i: (not rented.offers[i].meets, i))
    rows: list[tuple[str, ...]] = [
        ("", "devices", "technique", "time", "cost", "an hour", "GB/device", "budget", "price of")
    ]
    for place in (*rented.frontier, *others[:SHOWN]):
        offer = rented.offers[place]
        mark = ("*" if place == rented.chosen else "") + ("+" if place in rented.frontier else "")
        rows.append(_offer_row(mark, offer, limited=limited))
    for line in table_lines(rows[0], rows[1:], right={3, 4, 5, 6}, width=width()):
        console.say(line)
    misfits = sum(offer.time_s == float("inf") for offer in rented.offers)
    meets = sum(offer.meets for offer in rented.offers)
    console.say(
        f"\n{len(rented.offers)} offers; {misfits} have too little memory"
        + (f"; {meets} meet the budget" if limited else "")
    )
    dates = sorted(offer.checked for offer in rented.offers)
    console.say(
        f"Assumes list prices of {dates[0]} to {dates[-1]} (catalog/devices.yaml names each "
        "source), hosts of up to 8 "
        f"devices,\n{format_rate(rented.bandwidth)} and a round trip of "
        f"{format_seconds(rented.rtt_s)} between hosts."
    )
    for machine in dict.fromkeys(rented.known.values()):
        kinds = [kind for kind, network in rented.known.items() if network == machine]
        console.say(
            f"{format_rate(machine.rate)} between hosts of 8 x {joined(kinds)}, as of a "
            f"{machine.machine}; --network RATE asks about another."
        )


def _offer_row(mark: str, offer: Offer, *, limited: bool) -> tuple[str, ...]:
    candidate = offer.best
    assert isinstance(candidate, Candidate)
    meets = ("meets" if offer.meets else "beyond") if limited else ""
    return (
        mark,
        candidate.where,
        candidate.technique,
        format_seconds(candidate.time_s),
        f"${offer.usd:,.2f}",
        f"${offer.usd_per_hour:,.2f}",
        f"{candidate.estimate.memory_bytes / 1e9:.1f}",
        meets,
        offer.checked,
    )


# -- other systems
#   ------------------------------------------------------------------------------------------------


def write_export(plan: Plan, given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The plan as another system's configuration, in a file; what of it `--json` has."""
    path, exported = pricing.export(plan, given.export, given.export_to)
    console.say(f"\n{path}: {plan.technique} for {exported.version}")
    for note in exported.notes:
        console.say(f"  {note}")
    return {**msgspec.to_builtins(exported), "file": str(path)}
