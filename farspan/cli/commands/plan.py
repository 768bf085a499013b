"""Price a run before it starts: what each technique would take, which is best, and why.

With a run.yaml, or with --model and --cluster alone: then neither text nor machines nor PyTorch are needed.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from farspan.cli import clusters, job, offers
from farspan.cli.console import Console
from farspan.cli.planfile import lasting
from farspan.cli.planviews import check, say_views, takes_views
from farspan.cli.runs import load_config, takes_config
from farspan.domain.config import ParallelConfig
from farspan.planning.rank import OBJECTIVES, TOLERANCE, Candidate, Ranking, rank

HELP = "say what each technique would take, and which is best"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    asked = parser.add_argument_group("a question without run.yaml")
    asked.add_argument("--model", help="a preset, a Hugging Face folder, a plan.json, or parameters such as 124M")
    asked.add_argument("--tokens", default="20x_params", help="tokens to train on (default: 20x_params)")
    asked.add_argument("--batch", help="a step's sequences, or tokens such as '256k tokens' (default: by the tokens)")
    asked.add_argument("--seq-len", type=int, help="tokens of a sequence (default: the model's context)")
    asked.add_argument("--precision", default="auto", help="auto, bf16, fp16 or fp32")
    asked.add_argument("--attention", default="sdpa", choices=("sdpa", "vanilla"), help="flash, or the textbook's")
    asked.add_argument("--recompute", action="store_true", help="keep only the blocks' inputs of the forward pass")
    asked.add_argument("--wan-bits", type=int, default=32, choices=(8, 16, 32), help="of a number between sites")
    parser.add_argument("--objective", choices=OBJECTIVES, help="what is best (default: time)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="how much slower fewest_devices may be")
    parser.add_argument("--technique", action="append", default=[], help="price this one only; may be repeated")
    parser.add_argument("--resolved", action="store_true", help="show each value of run.yaml and where it came from")
    takes_views(parser)
    offers.takes_offers(parser)
    parser.add_argument("-o", "--out", metavar="PLAN.JSON", help="write the chosen plan to this file")


def run(given: argparse.Namespace, console: Console) -> None:
    check(given)
    if offers.answered(given, console):
        return
    resolved = None
    if given.model is not None:
        ranking = answer(given)
    else:
        config = load_config(given)
        resolved = job.resolve(config, console, trial=config.parallel.cluster is None)
        ranking = rank_resolved(given, resolved, config.parallel)
        if given.resolved:
            for key, (value, origin) in values(resolved).items():
                console.say(f"  {key:22} {value!s:20} {origin}")
    views = say_views(given, ranking, console)
    found: dict[str, Any] = {
        "candidates": [as_json(one, ranking) for one in ranking.candidates], "chosen": ranking.chosen, **views,
    }  # fmt: skip
    offers.demand_a_fit(given, ranking)
    if given.export:
        found["export"] = offers.export_chosen(given, ranking, console)
    if resolved is not None:
        told = values(resolved).items()
        found["resolved"] = {key: {"value": value, "origin": origin} for key, (value, origin) in told}
    console.answer(found)


def answer(given: argparse.Namespace) -> Ranking:
    """The ranking for --model and --cluster."""
    from farspan.domain.engine import engine
    from farspan.domain.problems import Refusal
    from farspan.planning.question import model_of

    if given.cluster is None:
        raise Refusal(
            "usage", what="--model needs --cluster", where="farspan plan",
            fact="without it there is nothing to plan for",
            remedy=f"farspan plan --model {given.model} --cluster fabric/gat-amst",
        )  # fmt: skip
    model, cluster = model_of(given.model), clusters.find(given.cluster)
    return rank(
        model, cluster, offers.train_for(given)(model, cluster), engine("farspan"),
        objective=given.objective or "time", allow=given.technique, tolerance=given.tolerance,
    )  # fmt: skip


def rank_resolved(given: argparse.Namespace, resolved: job.Resolved, asked: ParallelConfig) -> Ranking:
    """The ranking for a run.yaml; flags go before its keys."""
    from farspan.domain.engine import engine

    return rank(
        resolved.model, resolved.cluster, resolved.train, engine("farspan"),
        objective=given.objective or asked.objective, allow=given.technique or job.allowed(asked),
        tolerance=given.tolerance, corpus=resolved.corpus.hash,
    )  # fmt: skip


def values(resolved: job.Resolved) -> dict[str, tuple[Any, str]]:
    """Dotted key -> value and origin, for every value that was chosen or given."""
    parts = {"model": msgspec.to_builtins(resolved.model), "train": msgspec.to_builtins(resolved.train)}
    parts["train"].update(parts["train"].pop("optimizer"), **parts["train"].pop("schedule"))
    found = {}
    for part, fields in parts.items():
        for key, value in fields.items():
            name = f"{part}.{key}"
            found[name] = (value, resolved.origin.get(name, resolved.origin.get(part, "default")))
    return found


def as_json(one: Candidate, ranking: Ranking) -> dict[str, Any]:
    """A candidate as the command's answer has it."""
    names = [
        f"{host.name}/{device.backend}:{i}" for host in ranking.cluster.hosts for i, device in enumerate(host.devices)
    ]
    devices = [names[place] for place in one.places]
    found: dict[str, Any] = {
        "technique": one.technique, "where": one.where, "devices": devices, "fits": one.plan is not None,
        "problem": one.problem, "unchosen": one.unchosen, "estimate": None,
        "plan": one.plan and lasting(one.plan, ranking.cluster),
    }  # fmt: skip
    if one.estimate is not None:
        memory = dict(zip(devices, (part.total for part in one.estimate.memory), strict=True))
        found["estimate"] = {
            **msgspec.to_builtins(one.estimate), "minutes": one.time_s / 60, "memory_bytes": memory,
        }  # fmt: skip
    return found
