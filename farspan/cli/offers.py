"""`farspan plan --fit`, `--rent` and `--export`, and what is said where nothing fits."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farspan.cli import clusters
from farspan.cli.console import Console
from farspan.domain.model import ModelSpec, parameters
from farspan.domain.problems import Refusal, command
from farspan.domain.units import format_bytes, format_count, format_rate, format_seconds, parse_rate

if TYPE_CHECKING:
    from farspan.domain.cluster import Cluster
    from farspan.domain.plan import Plan
    from farspan.domain.train import TrainSpec
    from farspan.planning.fit import Fit, Limit
    from farspan.planning.ladders import Ground
    from farspan.planning.misfit import Misfit
    from farspan.planning.rank import Ranking
    from farspan.planning.rent import Offer, Rent

#: Offers beside the frontier that are shown; `--json` has all.
SHOWN = 12


def takes_offers(parser: argparse.ArgumentParser) -> None:
    """The arguments of the three questions."""
    asked = parser.add_argument_group("other questions")
    asked.add_argument(
        "--fit", choices=("model", "batch", "memory"),
        help="the largest model (of --model's family), the most sequences at once, or the least\nmemory a device",
    )  # fmt: skip
    asked.add_argument(
        "--rent", action="store_true", help="rank the catalogue's devices and counts by time and dollars"
    )
    asked.add_argument("--hours", type=float, help="with --rent: hours that the run may take")
    asked.add_argument("--usd", type=float, help="with --rent: dollars that the run may cost")
    asked.add_argument("--device", action="append", default=[], help="with --rent: this kind only; may be repeated")
    asked.add_argument("--network", default="10Gbit/s", help="with --rent: between hosts of 8 (default: 10Gbit/s)")
    asked.add_argument("--export", metavar="SYSTEM", help="the plan as torchtitan's or deepspeed's own configuration")
    asked.add_argument("--export-to", metavar="FILE", type=Path, help="where --export writes (default: its usual name)")
    asked.add_argument("--plan", metavar="PLAN.JSON", type=Path, help="export this plan; nothing is ranked")


def answered(given: argparse.Namespace, console: Console) -> bool:
    """Answers a question of this page that needs no ranking; whether there was one."""
    if given.export:
        from farspan.planning.export import system

        system(given.export)
    if given.plan and not given.export:
        raise Refusal(
            "usage", what="--plan needs --export", where="farspan plan",
            fact="a plan that is made already is not ranked again",
            remedy=command("plan", "--plan", given.plan, "--export", "torchtitan"),
        )  # fmt: skip
    if given.fit:
        _fit(given, console)
    elif given.rent:
        _rent(given, console)
    elif given.export and given.plan:
        from farspan.cli.planfile import read

        console.answer({"export": write_export(read(given.plan), given, console)})
    else:
        return False
    return True


# -- what fits ---------------------------------------------------------------------------------------------------------


def train_for(given: argparse.Namespace) -> Callable[[ModelSpec, Cluster], TrainSpec]:
    """The training that the flags mean, for any model on any cluster."""
    from farspan.planning.question import Question, train_of

    question = Question(
        model=given.model or "", tokens=given.tokens, batch=given.batch, seq_len=given.seq_len,
        precision=given.precision, attention=given.attention, recompute=given.recompute, wan_bits=given.wan_bits,
    )  # fmt: skip
    return lambda model, cluster: train_of(question, model, cluster)


def _ground(given: argparse.Namespace) -> Ground:
    from farspan.domain.engine import engine
    from farspan.planning.ladders import Ground

    cluster = clusters.find(given.cluster)
    return Ground(cluster, engine("farspan"), train_for(given), tuple(given.technique))


def _need(given: argparse.Namespace, *flags: str) -> None:
    for flag in flags:
        if getattr(given, flag) is None:
            asked = f"--fit {given.fit}" if given.fit else "--rent"
            examples = {"model": given.model or "gpt2m", "cluster": given.cluster or "fabric/gat-amst"}
            words = [word for name in flags for word in (f"--{name}", examples[name])]
            raise Refusal(
                "usage", what=f"{asked} needs --{flag}", where="farspan plan", fact=f"no --{flag} was given",
                remedy=command("plan", *asked.split(), *words),
            )  # fmt: skip


def _fit(given: argparse.Namespace, console: Console) -> None:
    from farspan.planning import fit
    from farspan.planning.choose_model import DEFAULT_FAMILY
    from farspan.planning.question import CONTEXT, VOCABULARY, model_of

    _need(given, *(("cluster",) if given.fit == "model" else ("cluster", "model")))
    ground = _ground(given)
    model = None if given.model is None else model_of(given.model)
    if given.fit == "model":
        shape = (
            (DEFAULT_FAMILY, VOCABULARY, CONTEXT) if model is None else (model.family, model.vocab_size, model.context)
        )
        found = fit.largest_model(ground, *shape)
    else:
        assert model is not None
        found = (fit.largest_batch if given.fit == "batch" else fit.least_memory)(ground, model)
    if found is None:
        raise nothing_fits(given, ground, model)
    say_fit(found, given, console)
    console.answer(found)


def say_fit(found: Fit, given: argparse.Namespace, console: Console) -> None:
    """The answer in sentences, and each technique's own limit."""
    best, model = found.best, found.best.plan.model
    shape = f"{model.family}, {model.layers} layers x {model.d_model}"
    if found.asked == "model":
        console.say(f"largest model that fits: {shape}, {format_count(best.amount)} parameters")
    elif found.asked == "batch":
        console.say(f"largest batch computed at once: {best.amount} sequences of {best.plan.train.seq_len} tokens")
        console.say(f"  {best.micro_rows} on the busiest device; gradients are not accumulated, pipelines not counted")
    else:
        console.say(f"least memory a device: {format_bytes(best.amount)}, every device alike, for {shape}")
    again = ", computing activations again" if best.recompute else ""
    console.say(f"  by {best.technique} on {best.where}{again}")
    console.say(f"  fullest: {best.binds}")
    if found.next_amount is not None:
        console.say(f"  next: {_amount(found, found.next_amount)}, which nothing fits; by {best.technique} then")
        console.say(f"        {found.next_lacks}")
    console.say()
    rows: list[tuple[str, ...]] = [
        ("technique", "where", "most" if found.asked != "memory" else "least", "at once", "recompute", "fullest")
    ]
    rows += [_row(found, limit) for limit in found.limits]
    say_table(rows, console, right={2, 3})
    if found.asked == "model" and _reproduced(best):
        console.say(f"\nprice it: {command('plan', '--model', best.typed, '--cluster', given.cluster)}")


def _reproduced(limit: Limit) -> bool:
    """Whether `--model` with the answer's size makes the same shape."""
    from farspan.planning.question import model_of

    return model_of(limit.typed) == limit.plan.model


def _amount(found: Fit, amount: int) -> str:
    if found.asked == "model":
        return f"{format_count(amount)} parameters"
    return format_bytes(amount) if found.asked == "memory" else f"{amount} sequences"


def _row(found: Fit, limit: Limit) -> tuple[str, ...]:
    return (
        limit.technique, limit.where, _amount(found, limit.amount), str(limit.micro_rows),
        "yes" if limit.recompute else "no", str(limit.binds).split(" usable")[0],
    )  # fmt: skip


def nothing_fits(given: argparse.Namespace, ground: Ground, model: ModelSpec | None) -> Refusal:
    """Why a model fits nowhere on a cluster, and the nearest thing that does."""
    from farspan.planning.misfit import misfit

    found = None if model is None else misfit(ground, model)
    if model is None or found is None:
        return Refusal(
            "cannot-plan", what="no technique has a plan for these devices", where=f"--cluster {given.cluster}",
            fact="memory is not what is lacking", remedy="farspan plan, with the same arguments: it says why for each",
        )  # fmt: skip
    count = format_count(parameters(model))
    return Refusal(
        "out-of-memory",
        what=f"{model.family} of {count} parameters fits nowhere here; least is lacking by {found.technique}",
        where=found.lacks.name, fact=f"{_short_of(found)}. {_nearest(found)}", remedy=_remedy(given, found),
    )  # fmt: skip


def _short_of(found: Misfit) -> str:
    room = found.lacks
    text = f"needs {format_bytes(room.used)}, may use {format_bytes(room.usable)}: short of {format_bytes(-room.spare)}"
    return f"{text}; {found.host}" if found.host is not None and found.host != room else text


def _nearest(found: Misfit) -> str:
    fits = []
    if found.smaller is not None:
        model = found.smaller.plan.model
        size = f"{format_count(found.smaller.amount)} parameters ({model.layers} layers x {model.d_model})"
        fits.append(f"{size} by {found.smaller.technique} on {found.smaller.where}")
    if found.seq_len is not None:
        fits.append(f"sequences of {found.seq_len} tokens")
    if found.devices is not None:
        fits.append(f"{found.devices} devices (every host {found.times} times)")
    return f"What fits: {'; or '.join(fits)}" if fits else "Nothing near it fits: rent more, farspan plan --rent"


def _remedy(given: argparse.Namespace, found: Misfit) -> str:
    if found.seq_len is not None:
        return command("plan", "--model", given.model, "--cluster", given.cluster, "--seq-len", found.seq_len)
    if found.smaller is not None and _reproduced(found.smaller):
        return command("plan", "--model", found.smaller.typed, "--cluster", given.cluster)
    if found.smaller is not None:
        return command("plan", "--fit", "model", "--model", given.model, "--cluster", given.cluster)
    return command("plan", "--rent", "--model", given.model)


def demand_a_fit(given: argparse.Namespace, ranking: Ranking) -> None:
    """Refuses where no technique has a plan on any part because memory is short."""
    if given.model is None or any(one.plan is not None for one in ranking.candidates):
        return
    if any(one.problem and one.problem.code == "out-of-memory" for one in ranking.candidates):
        raise nothing_fits(given, _ground(given), ranking.model)


# -- what to rent ------------------------------------------------------------------------------------------------------


def _rent(given: argparse.Namespace, console: Console) -> None:
    from farspan.cli.commands.plan import as_json
    from farspan.domain.engine import engine
    from farspan.planning.quantities import positive
    from farspan.planning.question import model_of
    from farspan.planning.rank import Ranking
    from farspan.planning.rent import Budget, rent

    _need(given, "model")
    model = model_of(given.model)
    budget = Budget(
        *(scale * positive(float, value, f"--{name}", "24") if value is not None else float("inf")
          for name, value, scale in (("hours", given.hours, 3600.0), ("usd", given.usd, 1.0)))
    )  # fmt: skip
    found = rent(
        model, train_for(given), engine("farspan"), budget=budget, allow=given.technique, kinds=given.device,
        bandwidth=positive(parse_rate, given.network, "--network", "100Gbit/s"),
    )  # fmt: skip
    say_rent(found, model, budget, console)
    answer: dict[str, Any] = {"candidates": [], "chosen": found.chosen, "frontier": found.frontier}
    for offer in found.offers:
        ranking = Ranking(model=model, cluster=offer.cluster, objective="cost", candidates=(), chosen=None)
        answer["candidates"].append({
            **as_json(offer.candidate, ranking), "kind": offer.kind, "count": offer.count,
            "usd_per_hour": offer.usd_per_hour, "price": {"source": offer.source, "checked": offer.checked},
            "meets_budget": offer.meets, "pipelines_searched": offer.searched,
        })  # fmt: skip
    console.answer(answer)


def say_rent(found: Rent, model: ModelSpec, budget: tuple[float, float], console: Console) -> None:
    """The frontier, the cheapest others, and what all of it assumes."""
    count = format_count(parameters(model))
    console.say(f"{model.family} of {count} parameters; * is the choice, + the frontier of time against dollars")
    console.say()
    others = [i for i, offer in enumerate(found.offers) if offer.time_s < float("inf") and i not in found.frontier]
    others.sort(key=lambda i: (not found.offers[i].meets, i))
    rows: list[tuple[str, ...]] = [
        ("", "devices", "technique", "time", "cost", "an hour", "GB/device", "budget", "price of")
    ]
    for place in (*found.frontier, *others[:SHOWN]):
        offer = found.offers[place]
        mark = ("*" if place == found.chosen else "") + ("+" if place in found.frontier else "")
        rows.append(_offer_row(mark, offer, limited=min(budget) < float("inf")))
    say_table(rows, console, right={3, 4, 5, 6})
    misfits = sum(offer.time_s == float("inf") for offer in found.offers)
    meets = sum(offer.meets for offer in found.offers)
    console.say(f"\n{len(found.offers)} offers; {misfits} have too little memory" + (
        f"; {meets} meet the budget" if min(budget) < float("inf") else ""))  # fmt: skip
    dates = sorted(offer.checked for offer in found.offers)
    console.say(
        f"Assumes list prices of {dates[0]} to {dates[-1]} (catalog/devices.yaml names each source), hosts of up to 8 "
        f"devices,\n{format_rate(found.bandwidth)} and a round trip of {format_seconds(found.rtt_s)} between hosts."
    )


def _offer_row(mark: str, offer: Offer, *, limited: bool) -> tuple[str, ...]:
    one = offer.candidate
    assert one.estimate is not None
    meets = ("meets" if offer.meets else "beyond") if limited else ""
    return (
        mark, one.where, one.technique, format_seconds(one.time_s), f"${offer.usd:,.2f}", f"${offer.usd_per_hour:,.2f}",
        f"{one.estimate.memory_bytes / 1e9:.1f}", meets, offer.checked,
    )  # fmt: skip


def say_table(rows: Sequence[Sequence[str]], console: Console, right: set[int]) -> None:
    """Rows under their heading, columns aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        console.say("  ".join(cells).rstrip())


# -- other systems -----------------------------------------------------------------------------------------------------


def write_export(plan: Plan, given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The plan as another system's configuration, in a file; what of it `--json` has."""
    from farspan.domain.codec import write_atomically
    from farspan.planning.export import export

    made = export(plan, given.export)
    path: Path = given.export_to or Path(made.file)
    write_atomically(path, made.text.encode())
    console.say(f"\n{path}: {plan.technique} for {made.version}")
    for note in made.notes:
        console.say(f"  {note}")
    return {**msgspec.to_builtins(made), "file": str(path)}


def export_chosen(given: argparse.Namespace, ranking: Ranking, console: Console) -> dict[str, Any]:
    """The chosen plan in another system's words; a Refusal names the best candidate that it can run."""
    from farspan.planning.export import evened, system

    if ranking.chosen is None:
        return {}
    found = system(given.export)
    plan = ranking.candidates[ranking.chosen].plan
    assert plan is not None
    if reasons := found.reasons(evened(plan)):
        able = next(
            (one for one in ranking.candidates if one.eligible and one.plan and not found.reasons(evened(one.plan))),
            None,
        )
        fact = "it can run none of the other plans either"
        if able is not None:
            fact = f"the best plan it can run: {able.technique} on {able.where}, {format_seconds(able.time_s)}"
        raise Refusal(
            "cannot-export", what=f"{given.export} cannot run {plan.technique}: {'; '.join(reasons)}",
            where=f"--export {given.export}", fact=fact,
            remedy=f"add --technique {able.technique}" if able else "farspan train --plan, which runs any plan",
        )  # fmt: skip
    return write_export(plan, given, console)
