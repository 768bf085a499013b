"""Make a folder searchable, before anything is trained: words in seconds, vectors of a ready
encoder in minutes. Type it again to follow the text."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli.arguments import check_store, takes_encoder
from farspan.cli.console import Console

HELP = "make a folder searchable, without training"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="FOLDER",
        help="a folder or file with text, another source, or an index to bring up to its text",
    )
    parser.add_argument(
        "--into",
        metavar="FOLDER",
        type=Path,
        help="where the index is made (default: indexes/NAME, by the name of the text)",
    )
    takes_encoder(parser)
    parser.add_argument(
        "--no-eval",
        action="store_true",
        help="do not measure how well it finds documents, nor choose how it answers",
    )
    parser.add_argument(
        "--refit", action="store_true", help="choose and fit again, over the text of today"
    )
    parser.add_argument(
        "--queries",
        metavar="FILE",
        type=Path,
        help='with --refit, queries of your own: lines as {"_id": "q1", "text": "..."}',
    )
    parser.add_argument(
        "--qrels",
        metavar="FILE",
        type=Path,
        help="the documents that answer them: lines as q1 <tab> TITLE <tab> 1",
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
    parser.add_argument("--store", metavar="NAME[:LOCATION]", help="where vectors are stored")


def run(given: argparse.Namespace, console: Console) -> None:
    check_store(given)
    from farspan.app.index_folders import make_index_folder
    from farspan.app.indexing import update_index
    from farspan.cli.answers import report_indexed
    from farspan.cli.show_updates import Show
    from farspan.retrieval.vector_file import files_of

    if given.to is not None:
        files_of(given.to)
    folder = make_index_folder(given.source, given.into, encoder=given.encoder, store=given.store)
    with Show(console) as show:
        indexed = update_index(
            folder,
            show,
            evaluate=not given.no_eval,
            tune=given.refit,
            queries=given.queries,
            qrels=given.qrels,
        )
    report_indexed(folder, indexed, given.to, console)
