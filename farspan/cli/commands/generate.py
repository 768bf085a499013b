"""Let a trained model write after a prompt."""

from __future__ import annotations

import argparse

from farspan.cli.console import Console
from farspan.cli.runs import find_run, positive, takes_run

HELP = "let the model write"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default="")
    takes_run(parser, "--run", nargs=None)
    parser.add_argument("--tokens", type=positive, default=100)
    parser.add_argument("--temperature", type=not_negative, default=0.8, help="0: the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=positive, default=50)
    parser.add_argument("--seed", type=int, default=0)


def not_negative(text: str) -> float:
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    from farspan.runtime.generate import generate
    from farspan.runtime.inference import load

    trained = load(folder)
    text = generate(
        trained.model, trained.tokenizer, given.prompt, tokens=given.tokens, temperature=given.temperature,
        top_k=given.top_k, seed=given.seed,
    )  # fmt: skip
    console.say(given.prompt + text)
    console.answer({"prompt": given.prompt, "text": text, "step": trained.step})
