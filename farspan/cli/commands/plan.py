"""Price a run before it starts: what each technique would take, which is best, and why.

With a run.yaml, or with --model and --cluster alone: then neither text nor machines nor PyTorch are needed.
"""

from __future__ import annotations

import argparse
from typing import Any

from farspan.app import pricing
from farspan.cli import given_plan, offers
from farspan.cli.arguments import load_config, takes_config
from farspan.cli.console import Console
from farspan.cli.planviews import check_names, say_views, takes_views
from farspan.planning.rank import OBJECTIVES, TOLERANCE

HELP = "say what each technique would take, and which is best"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    group = parser.add_argument_group("a question without run.yaml")
    group.add_argument("--model", help="a preset, a Hugging Face folder, a plan.json, or parameters such as 124M")
    group.add_argument("--tokens", default="20x_params", help="tokens to train on (default: 20x_params)")
    group.add_argument("--batch", help="a step's sequences, or tokens such as '256k tokens' (default: by the tokens)")
    group.add_argument("--seq-len", type=int, help="tokens of a sequence (default: the model's context)")
    group.add_argument("--precision", default="auto", help="auto, bf16, fp16, tf32 or fp32")
    group.add_argument(
        "--attention", default="sdpa", choices=("sdpa", "vanilla"), help="flash, or the textbook's (default: sdpa)"
    )
    group.add_argument("--recompute", action="store_true", help="keep only the blocks' inputs of the forward pass")
    group.add_argument(
        "--wan-bits", type=int, default=32, choices=(8, 16, 32), help="of a number between sites (default: 32)"
    )
    parser.add_argument("--objective", choices=OBJECTIVES, help="what is best (default: time)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"how much slower fewest_devices may be (default: {TOLERANCE:g})",
    )
    parser.add_argument("--technique", action="append", default=[], help="price this one only; may be repeated")
    parser.add_argument("--resolved", action="store_true", help="show each value of run.yaml and where it came from")
    takes_views(parser)
    offers.takes_offers(parser)
    given_plan.takes_price(parser)
    parser.add_argument("-o", "--out", metavar="PLAN.JSON", help="write the chosen plan to this file")


def run(given: argparse.Namespace, console: Console) -> None:
    if given_plan.priced(given, console):
        return
    query = offers.asked_of(given)
    query.check()
    check_names(given)
    if offers.answered(given, query, console):
        return
    resolved = None
    if given.model is not None:
        ranking = pricing.price_model(query)
    else:
        from farspan.app.resolving import resolve
        from farspan.cli.show import Show

        config = load_config(given)
        with Show(console) as show:
            resolved = resolve(config, show, trial=config.parallel.cluster is None)
        ranking = pricing.price_resolved(resolved, config.parallel, query)
        if given.resolved:
            for key, (value, origin) in resolved.values.items():
                console.say(f"  {key:22} {value!s:20} {origin}")
    answer: dict[str, Any] = say_views(given, ranking, console)
    answer["candidates"] = [pricing.as_json(listed, ranking.cluster) for listed in ranking.listed]
    answer["chosen"] = ranking.chosen
    if given.model is not None:
        pricing.demand_a_fit(query, ranking)
    if given.export:
        plan = pricing.exportable(ranking, given.export)
        answer["export"] = {} if plan is None else offers.write_export(plan, given, console)
    if resolved is not None:
        values = resolved.values.items()
        answer["resolved"] = {key: {"value": value, "origin": origin} for key, (value, origin) in values}
    console.answer(answer)
