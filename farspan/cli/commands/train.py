"""Train the model that a run.yaml asks for: text to tokens, a plan, pretraining, a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli import job, planfile
from farspan.cli.console import Console
from farspan.cli.runs import default_name, load_config, takes_config
from farspan.domain.problems import command

HELP = "train a model as run.yaml says"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    parser.add_argument("--run", metavar="FOLDER", help="run directory to make (default: runs/NAME)")
    parser.add_argument("--plan", metavar="PLAN.JSON", type=Path, help="run this plan, of farspan plan RUN.YAML -o")


def run(given: argparse.Namespace, console: Console) -> None:
    config = load_config(given)
    path = Path(given.run) if given.run else Path("runs") / default_name(config)
    another = command("train", given.config, "--run", f"{path}-2")
    job.refuse_existing(path, f"{another}, or to go on: {command('resume', path)}")
    if given.plan is None:
        folder = job.start(path, config, console)
    else:
        folder = job.make(path, config, planfile.planned(given.plan, config, given.config, console), console)
    measured = job.train(folder, console)
    console.answer({"run": str(path), "measurement": measured})
