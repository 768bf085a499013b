"""Embed a run's documents with its model into a vector database in its folder, and measure how well
that finds them."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli.arguments import check_store, find_run, takes_embedding, takes_run
from farspan.cli.console import Console

HELP = "turn the model into a searchable index"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--no-eval",
        action="store_true",
        help="do not measure how well it finds documents, nor choose how it answers",
    )
    parser.add_argument(
        "--to",
        metavar="FILE",
        type=Path,
        help=(
            "also write vectors and passages to a .parquet, .jsonl or .npy file,\nfor other "
            "databases"
        ),
    )
    takes_embedding(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    check_store(given)
    from farspan.app.indexing import update_index
    from farspan.cli.answers import report_indexed
    from farspan.cli.show_updates import Show
    from farspan.retrieval.vector_file import files_of

    if given.to is not None:
        files_of(given.to)
    with Show(console) as show:
        indexed = update_index(
            folder,
            show,
            evaluate=not given.no_eval,
            store=given.store,
            encoder=given.encoder,
            device=given.device,
            processes=given.processes,
        )
    report_indexed(folder, indexed, given.to, console)
