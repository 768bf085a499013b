"""Price a run before it starts: model, steps, time, memory, money."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from farspan.cli import job
from farspan.cli.console import Console
from farspan.cli.runs import load_config, takes_config
from farspan.domain.codec import save
from farspan.domain.model import train_flops_per_token

HELP = "say what a run would take"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    parser.add_argument("--resolved", action="store_true", help="show each value and where it came from")
    parser.add_argument("--out", metavar="PLAN.JSON", help="write the plan to this file")


def run(given: argparse.Namespace, console: Console) -> None:
    planned = job.plan(load_config(given), console)
    job.say_plan(planned, console)
    if given.resolved:
        for key, (value, origin) in resolved(planned).items():
            console.say(f"  {key:22} {value!s:20} {origin}")
    if given.out:
        save(planned.plan, Path(given.out))
    console.answer({"candidates": [candidate(planned)], "chosen": 0})


def resolved(planned: job.Planned) -> dict[str, tuple[Any, str]]:
    """Dotted key -> value and origin, for every value that was chosen or given."""
    values = {"model": msgspec.to_builtins(planned.plan.model), "train": msgspec.to_builtins(planned.plan.train)}
    values["train"].update(values["train"].pop("optimizer"), **values["train"].pop("schedule"))
    found = {}
    for part, fields in values.items():
        for key, value in fields.items():
            name = f"{part}.{key}"
            found[name] = (value, planned.origin.get(name, planned.origin.get(part, "default")))
    return found


def candidate(planned: job.Planned) -> dict[str, Any]:
    plan, estimate = planned.plan, planned.estimate
    flops = estimate.tokens_per_s * train_flops_per_token(plan.model, plan.train.seq_len)
    devices = [f"{device.host}/{device.backend}:{device.index}" for device in plan.devices]
    return {
        "technique": plan.technique,
        "devices": devices,
        "fits": True,
        "problem": None,
        "estimate": {
            **msgspec.to_builtins(estimate),
            "minutes": estimate.run_s / 60,
            "tflops_per_device": flops / len(plan.devices) / 1e12,
            "memory_bytes": dict.fromkeys(devices, estimate.memory_bytes),
        },
        "plan": msgspec.to_builtins(plan),
        "resolved": {key: {"value": value, "origin": origin} for key, (value, origin) in resolved(planned).items()},
    }
