"""Arguments that `farspan plan`, `price`, `fit`, `rent` and `select` share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farspan.cli.console import Console
from farspan.domain.objective import OBJECTIVES, TOLERANCE

if TYPE_CHECKING:
    from farspan.app.predictions import PlanQuery
    from farspan.domain.plan import Plan


def takes_question(
    parser: argparse.ArgumentParser, title: str, *, needs_model: bool = False
) -> None:
    """Add the arguments that `plan_query` reads: a model, and how it is trained."""
    group = parser.add_argument_group(title)
    group.add_argument(
        "--model",
        required=needs_model,
        help="a preset, a Hugging Face folder, a plan.json, or parameters such as 124M",
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
    parser.add_argument(
        "--technique", action="append", default=[], help="price this one only; may be repeated"
    )


def plan_query(given: argparse.Namespace, **more: Any) -> PlanQuery:
    """Return the question that the flags ask, checked."""
    from farspan.app.predictions import PlanQuery
    from farspan.planning.plan_question import Question

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
    query = PlanQuery(question=question, allow=tuple(given.technique), **more)
    query.check()
    return query


def takes_objective(parser: argparse.ArgumentParser) -> None:
    """Add what plans are compared by."""
    parser.add_argument("--objective", choices=OBJECTIVES, help="what is best (default: time)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"how much slower fewest_devices may be (default: {TOLERANCE:g})",
    )


def takes_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `write_export` reads."""
    parser.add_argument(
        "--export",
        metavar="SYSTEM",
        help="the plan as torchtitan's or deepspeed's own configuration",
    )
    parser.add_argument(
        "--export-to",
        metavar="FILE",
        type=Path,
        help="where --export writes (default: its usual name)",
    )


def write_export(plan: Plan, given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Write the plan as another system's configuration; return what of it `--json` has."""
    from farspan.app import predictions

    path, exported = predictions.export_plan(plan, given.export, given.export_to)
    console.write_line(f"\n{path}: {plan.technique} for {exported.version}")
    for note in exported.notes:
        console.write_line(f"  {note}")
    return {**msgspec.to_builtins(exported), "file": str(path)}
