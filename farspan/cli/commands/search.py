"""Search the documents of a run or an index, in the way that was measured to find them best."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import (
    compute_on_one_thread,
    find_home,
    parse_positive,
    refuse_run_as_text,
    takes_run,
)
from farspan.cli.console import Console

HELP = "search the documents"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "query", metavar="QUERY", nargs="?", help="what to search for; not with --eval"
    )
    takes_run(parser)
    parser.add_argument("-k", type=parse_positive, default=5, help="results to show (default: 5)")
    parser.add_argument(
        "--system",
        choices=("bm25", "model", "encoder", "fused"),
        help="search this way, whatever was measured",
    )
    parser.add_argument(
        "--where",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="only documents with this value in this field, such as title or a column;\n"
        "also year>=2020, lang=de,en, lang!=fr, date=2021-01..2021-06",
    )
    parser.add_argument(
        "--eval", action="store_true", help="show how well each way of searching was measured to do"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    compute_on_one_thread()
    from farspan.app.indexing import rebuild, refuse_query, search_home
    from farspan.cli.answers import evaluation_text, print_answer

    if given.eval:
        # It takes no query: the only word is the run.
        if given.run is None and given.run_option is None:
            given.run = given.query
    else:
        refuse_run_as_text(given, "search", given.query)
        refuse_query(given.query or "")
    home = find_home(given, console)
    if given.eval:
        from farspan.retrieval.index import read_manifest

        manifest = read_manifest(home.index, rebuild(home))
        console.write_line(evaluation_text(manifest))
        console.answer({"run": str(home.path), "evaluation": manifest.evaluation})
        return
    answer = search_home(
        home,
        given.query,
        given.k,
        given.system,
        given.where,
        lambda update: console.write_line(str(update)),
    )
    print_answer(answer, console)
    console.answer({"run": str(home.path), "answer": answer})
