"""Write a run's model as a Hugging Face folder that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli import job
from farspan.cli.console import Console
from farspan.cli.runs import find_run, takes_run
from farspan.domain.problems import command

HELP = "write the model as a Hugging Face folder"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument("--out", metavar="FOLDER", help="folder to write (default: RUN/export)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    out = Path(given.out) if given.out else folder.path / "export"
    job.refuse_existing(out, command("export", folder.path, "--out", f"{out}-2"))
    from farspan.runtime.huggingface import export
    from farspan.runtime.inference import load

    trained = load(folder)
    out.mkdir(parents=True, exist_ok=True)
    export(
        out, trained.model.state_dict(), trained.model.spec, tokenizer=folder.tokenizer,
        end_of_text=trained.tokenizer.end_of_text, dtype=given.dtype,
    )  # fmt: skip
    console.say(f"wrote {out}; load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")
    console.answer({"run": str(folder.path), "folder": str(out), "step": trained.step})
