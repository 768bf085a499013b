"""The main job on the built-in corpus, in a few minutes: text, tokens, plan, training, report,
index, searches."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.app.preflight_checks import unused_path
from farspan.cli.console import Console
from farspan.domain.config import BudgetConfig, IndexConfig, RunConfig
from farspan.domain.problems import command
from farspan.domain.units import parse_duration

HELP = "the main job on the built-in corpus"

#: About as large a model as learns the most from this corpus in two minutes on two cores.
SIZE = "tiny"
#: What fitting vectors may take: with all else, and `make demo`'s installation, five minutes.
FIT_TIME = "10s"

QUERIES = (
    "read a file line by line",
    "cross entropy loss of a classifier",
    "wait for several threads to finish",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", metavar="FOLDER", default="runs/demo", help="run directory (default: runs/demo)"
    )
    parser.add_argument("--time", default="50s", help="time to train for (default: 50s)")


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import training
    from farspan.app.indexing import open_index, update_index
    from farspan.cli.answers import evaluation_text, print_answer
    from farspan.cli.report_text import print_result
    from farspan.cli.show_updates import Show
    from farspan.planning.quantities import parse_positive
    from farspan.retrieval.search import search

    parse_positive(parse_duration, given.time, "--time", "50s")
    # A ready encoder finds more, and takes longer than all the rest.
    config = RunConfig(
        data="pydocs",
        name="demo",
        size=SIZE,
        budget=BudgetConfig(time=given.time),
        index=IndexConfig(encoder="own", time=FIT_TIME),
    )
    path = unused_path(Path(given.run))
    console.write_line("== text, tokens, plan")
    with Show(console) as show:
        folder = training.plan_run(path, config, show, table=True)
        console.write_line("\n== training")
        report = training.train_new(folder, show)
        print_result(report, console)
        console.write_line("\n== embeddings and vector database")
        manifest = update_index(folder, show).manifest
    if manifest.evaluation is not None:
        console.write_line(evaluation_text(manifest))
    console.write_line("\n== three searches")
    answers = []
    with open_index(folder) as index:
        for query in QUERIES:
            console.write_line(f"\n> {query}")
            answers.append(search(index, query, 3))
            print_answer(answers[-1], console)
    console.write_line(f"\nyours now: {command('search', '...', path)}   report: {folder.report}")
    answer = {"run": str(path), "measurement": report.measurement}
    console.answer({**answer, "index": manifest, "answers": answers})
