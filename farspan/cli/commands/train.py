"""Train the model that a run.yaml asks for: text to tokens, a plan, pretraining, a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.app.configs import default_name
from farspan.app.preflight_checks import refuse_existing
from farspan.cli.arguments import load_config, takes_config, words_again
from farspan.cli.console import Console
from farspan.cli.detach import run_detached, takes_detach
from farspan.domain.problems import command
from farspan.domain.run import RunFolder

HELP = "train a model as run.yaml says"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_config(parser)
    parser.add_argument(
        "--run", metavar="FOLDER", help="run directory to make (default: runs/NAME)"
    )
    parser.add_argument(
        "--plan", metavar="PLAN.JSON", type=Path, help="run this plan, of farspan plan RUN.YAML -o"
    )
    takes_detach(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    config = load_config(given)
    path = Path(given.run or Path("runs", default_name(config)))
    remedy = command("train", given.config, "--run", f"{path}-2")
    refuse_existing(path, f"{remedy}, or to go on: {command('resume', path)}")
    if given.detach:
        words = ["train", *words_again(given), "--run", path]
        if given.plan is not None:
            words += ["--plan", given.plan]
        run_detached(words, RunFolder(path), console)
        return
    from farspan.app import training
    from farspan.app.plans import read_planned
    from farspan.cli.report_text import print_result
    from farspan.cli.show_updates import Show

    with Show(console) as show:
        if given.plan is None:
            folder = training.plan_run(path, config, show)
        else:
            planned = read_planned(given.plan, config, given.config, show)
            folder = training.make_run(path, config, planned, show)
        report = training.train_new(folder, show)
    print_result(report, console)
    console.answer({"run": str(path), "measurement": report.measurement})
