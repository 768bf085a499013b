"""Find what fits a cluster: the largest model, the largest batch computed at once, or the least
memory that each device needs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.plan_flags import plan_query, takes_question
from farspan.domain.problems import Refusal, command
from farspan.domain.units import counted, format_bytes, format_count

if TYPE_CHECKING:
    from farspan.planning.fit import LargestModels

HELP = "say which model or batch fits, or how much memory is enough"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("model", "batch", "memory"),
        help=(
            "the largest model (of --model's family), the most sequences at once, or the least\n"
            "memory a device"
        ),
    )
    parser.add_argument("--cluster", required=True, help="a cluster file, or a known cluster")
    takes_question(parser, "the training")


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import predictions

    if given.what != "model" and given.model is None:
        words = ("fit", given.what, "--model", "gpt2m", "--cluster", given.cluster)
        raise Refusal(
            "usage",
            what=f"fit {given.what} needs --model",
            where="farspan fit",
            fact="no --model was given",
            remedy=command(*words),
        )
    fit = predictions.find_limit(given.what, plan_query(given, cluster=given.cluster))
    print_fit(fit, given.cluster, console)
    console.answer(fit.as_json())


def print_fit(fit: LargestModels, cluster: str, console: Console) -> None:
    """Print the answer in sentences, and each technique's own limit."""
    from farspan.app.predictions import is_reproducible
    from farspan.cli.paint import text_width
    from farspan.report.tables import table_lines

    # The answer.
    best = fit.best
    model = fit.best.plan.model
    shape = f"{model.family}, {model.layers} layers x {model.d_model}"
    amount = _format_amount(fit, best.amount)
    if fit.asked == "model":
        console.write_line(f"largest model that fits: {shape}, {amount}")
    elif fit.asked == "batch":
        seq_len = best.plan.train.seq_len
        console.write_line(f"largest batch computed at once: {amount} of {seq_len} tokens")
        console.write_line(
            f"  {best.micro_rows} on the busiest device; gradients are not accumulated, pipelines "
            "not counted"
        )
    else:
        console.write_line(f"least memory a device: {amount}, every device alike, for {shape}")

    # Its plan, what binds there, and what the next one lacks.
    again = ", computing activations again" if best.recompute else ""
    console.write_line(f"  by {best.technique} on {best.where}{again}")
    console.write_line(f"  fullest: {best.binds}")
    if fit.next_amount is not None:
        following = _format_amount(fit, fit.next_amount)
        console.write_line(f"  next: {following}, which nothing fits; by {best.technique} then")
        console.write_line(f"        {fit.next_lacks}")
    console.write_line()

    # Each technique's limit.
    extreme = "most" if fit.asked != "memory" else "least"
    heads = ("technique", "where", extreme, "at once", "recompute", "fullest")
    rows = []
    for limit in fit.limits:
        amount = _format_amount(fit, limit.amount)
        recompute = "yes" if limit.recompute else "no"
        fullest = str(limit.binds).split(" usable")[0]
        micro_rows = str(limit.micro_rows)
        rows.append((limit.technique, limit.where, amount, micro_rows, recompute, fullest))
    for line in table_lines(heads, rows, right={2, 3}, width=text_width()):
        console.write_line(line)
    if fit.asked == "model" and is_reproducible(best):
        words = command("plan", "--model", best.typed, "--cluster", cluster)
        console.write_line(f"\nprice it: {words}")


def _format_amount(fit: LargestModels, amount: int) -> str:
    if fit.asked == "model":
        return f"{format_count(amount)} parameters"
    return format_bytes(amount) if fit.asked == "memory" else counted(amount, "sequence")
