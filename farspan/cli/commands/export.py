"""Write a run's model as a Hugging Face folder that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli.arguments import find_run, takes_run
from farspan.cli.console import Console

HELP = "write the model as a Hugging Face folder"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument("--out", metavar="FOLDER", help="folder to write (default: RUN/export)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default: fp32)")


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    from farspan.app.using import export

    out, step = export(folder, Path(given.out) if given.out else None, dtype=given.dtype)
    console.say(f"wrote {out}; load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")
    console.answer({"run": str(folder.path), "folder": str(out), "step": step})
