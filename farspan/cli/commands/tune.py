"""Fit the vectors of a run's index to its text, and show how well they find documents before and
after."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli.arguments import check_store, find_home, takes_embedding, takes_run
from farspan.cli.console import Console
from farspan.domain.problems import command

HELP = "fit the search to your text, and judge it by your queries"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--queries",
        metavar="FILE",
        type=Path,
        help='queries of your own, to judge by too: lines as {"_id": "q1", "text": "..."}',
    )
    parser.add_argument(
        "--qrels",
        metavar="FILE",
        type=Path,
        help="the documents that answer them: lines as q1 <tab> TITLE <tab> 1",
    )
    takes_embedding(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_home(given, console)
    check_store(given)
    from farspan.app.indexing import update_index
    from farspan.cli.answers import evaluation_text
    from farspan.cli.show_updates import Show

    with Show(console) as show:
        indexed = update_index(
            folder,
            show,
            store=given.store,
            encoder=given.encoder,
            device=given.device,
            processes=given.processes,
            tune=True,
            queries=given.queries,
            qrels=given.qrels,
        )
    console.write_line(evaluation_text(indexed.manifest))
    search = command("search", "...", folder.path)
    console.write_line(f"index: {folder.index}; next: {search}")
    answer = {"run": str(folder.path), "index": str(folder.index), "manifest": indexed.manifest}
    console.answer(answer)
