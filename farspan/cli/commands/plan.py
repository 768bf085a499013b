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
from farspan.domain.objective import OBJECTIVES, TOLERANCE

HELP = "say what each technique would take, and which is best"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    group = parser.add_argument_group("a question without run.yaml")
    group.add_argument(
        "--model", help="a preset, a Hugging Face folder, a plan.json, or parameters such as 124M"
    )
    group.add_argument(
        "--tokens", default="20x_params", help="tokens to train on (default: 20x_params)"
    )
    group.add_argument(
        "--batch",
        help="a step's sequences, or tokens such as '256k tokens' (default: by the tokens)",
    )
    group.add_argument(
        "--seq-len", type=int, help="tokens of a sequence (default: the model's context)"
    )
    group.add_argument("--precision", default="auto", help="auto, bf16, fp16, tf32 or fp32")
    group.add_argument(
        "--attention",
        default="sdpa",
        choices=("sdpa", "vanilla"),
        help="flash, or the textbook's (default: sdpa)",
    )
    group.add_argument(
        "--recompute", action="store_true", help="keep only the blocks' inputs of the forward pass"
    )
    group.add_argument(
        "--wan-bits",
        type=int,
        default=32,
        choices=(8, 16, 32),
        help="of a number between sites (default: 32)",
    )
    parser.add_argument("--objective", choices=OBJECTIVES, help="what is best (default: time)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"how much slower fewest_devices may be (default: {TOLERANCE:g})",
    )
    parser.add_argument(
        "--technique", action="append", default=[], help="price this one only; may be repeated"
    )
    parser.add_argument(
        "--resolved", action="store_true", help="show each value of run.yaml and where it came from"
    )
    _what_to_show(parser)
    _other_questions(parser)
    _own_plan(parser)
    parser.add_argument(
        "-o", "--out", metavar="PLAN.JSON", help="write the chosen plan to this file"
    )


def _what_to_show(parser: argparse.ArgumentParser) -> None:
    """The arguments that `planviews` reads."""
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


def _other_questions(parser: argparse.ArgumentParser) -> None:
    """The arguments that `offers` reads."""
    group = parser.add_argument_group("other questions")
    group.add_argument(
        "--fit",
        choices=("model", "batch", "memory"),
        help=(
            "the largest model (of --model's family), the most sequences at once, or the least\n"
            "memory a device"
        ),
    )
    group.add_argument(
        "--rent",
        action="store_true",
        help="rank the catalogue's devices and counts by time and dollars",
    )
    group.add_argument("--hours", type=float, help="with --rent: hours that the run may take")
    group.add_argument("--usd", type=float, help="with --rent: dollars that the run may cost")
    group.add_argument(
        "--device", action="append", default=[], help="with --rent: this kind only; may be repeated"
    )
    group.add_argument(
        "--network",
        help="with --rent: between hosts of 8 (default: a known machine's of that shape, else "
        "10Gbit/s)",
    )
    group.add_argument(
        "--export",
        metavar="SYSTEM",
        help="the plan as torchtitan's or deepspeed's own configuration",
    )
    group.add_argument(
        "--export-to",
        metavar="FILE",
        type=Path,
        help="where --export writes (default: its usual name)",
    )
    group.add_argument(
        "--plan", metavar="PLAN.JSON", type=Path, help="export this plan; nothing is ranked"
    )


def _own_plan(parser: argparse.ArgumentParser) -> None:
    """The arguments that `given_plan` reads."""
    group = parser.add_argument_group("a plan of your own")
    group.add_argument(
        "--price",
        metavar="PLAN",
        type=Path,
        help="price this plan: one that farspan wrote, or a short form by hand",
    )
    group.add_argument(
        "--engine", help="with --price: the system that runs it (default: the plan's own)"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import pricing
    from farspan.cli import given_plan, offers
    from farspan.cli.planviews import check_names, say_views

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
        from farspan.app.clusters import is_here
        from farspan.app.resolving import resolve
        from farspan.cli.show import Show

        config = load_config(given)
        with Show(console) as show:
            resolved = resolve(config, show, trial=is_here(config.parallel))
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
        plan = pricing.exporter(given.export).exportable(ranking)
        answer["export"] = {} if plan is None else offers.write_export(plan, given, console)
    if resolved is not None:
        values = resolved.values.items()
        answer["resolved"] = {
            key: {"value": value, "origin": origin} for key, (value, origin) in values
        }
    console.answer(answer)
