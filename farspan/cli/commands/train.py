"""Train the model that a run.yaml asks for: text to tokens, a plan, pretraining, a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli import job
from farspan.cli.console import Console
from farspan.cli.runs import default_name, load_config

HELP = "train a model as run.yaml says"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="RUN.YAML", nargs="?", default="run.yaml")
    parser.add_argument("--run", metavar="FOLDER", help="run directory to make (default: runs/NAME)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of run.yaml")


def run(given: argparse.Namespace, console: Console) -> None:
    config = load_config(Path(given.config), given.set)
    path = Path(given.run) if given.run else Path("runs") / default_name(config)
    job.refuse_existing(path, f"farspan train {given.config} --run {path}-2, or to go on: farspan resume {path}")
    planned = job.plan(config, console)
    job.say_plan(planned, console)
    folder = job.open_run(path, config, planned)
    measured = job.train(folder, console)
    job.say_result(folder, console)
    console.answer({"run": str(path), "measurement": measured})
