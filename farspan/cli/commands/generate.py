"""Let a trained model write after a prompt."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import find_run, parse_positive, refuse_run_as_text, takes_run
from farspan.cli.console import Console

HELP = "let the model write"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        default="",
        help="what the text begins with (default: nothing)",
    )
    takes_run(parser)
    parser.add_argument(
        "--tokens", type=parse_positive, default=100, help="tokens to write (default: 100)"
    )
    parser.add_argument(
        "--temperature",
        type=not_negative,
        default=0.8,
        help="0 takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=parse_positive, default=50, help="tokens to choose from (default: 50)"
    )
    parser.add_argument("--seed", type=int, default=0, help="what chance follows from (default: 0)")


def not_negative(text: str) -> float:
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


def run(given: argparse.Namespace, console: Console) -> None:
    refuse_run_as_text(given, "generate", given.prompt)
    folder = find_run(given, console)
    from farspan.app.model_use import generate_text

    text, step = generate_text(
        folder,
        given.prompt,
        lambda update: console.write_line(str(update)),
        tokens=given.tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        seed=given.seed,
    )
    console.write_line(given.prompt + text)
    console.answer({"prompt": given.prompt, "text": text, "step": step})
