"""Search a run's documents, with the way of searching that was measured to find them best."""

from __future__ import annotations

import argparse

from farspan.cli.console import Console
from farspan.cli.runs import find_run, positive, takes_run
from farspan.domain.problems import Refusal, command

HELP = "search the documents"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", metavar="QUERY", nargs="?")
    takes_run(parser, "--run", nargs=None)
    parser.add_argument("-k", type=positive, default=5, help="results to show (default: 5)")
    parser.add_argument("--system", choices=("bm25", "model", "fused"), help="search this way, whatever was measured")
    parser.add_argument("--eval", action="store_true", help="show how well each way of searching was measured to do")


def run(given: argparse.Namespace, console: Console) -> None:
    if not given.eval and not (given.query or "").strip():
        raise Refusal(
            "usage", what="there is nothing to search for", where="farspan search", fact="the query is empty",
            remedy='farspan search "read a file line by line"',
        )  # fmt: skip
    folder = find_run(given, console)
    from farspan.cli.retrieve import opened, say_answer
    from farspan.retrieval.evaluate import table
    from farspan.retrieval.index import read_manifest
    from farspan.retrieval.search import not_evaluated, search

    if given.eval:
        manifest = read_manifest(folder.index, command("embed", folder.path))
        evaluation = manifest.evaluation
        console.say(table(evaluation) if evaluation else f"not evaluated: {not_evaluated(manifest.recipe)}")
        console.answer({"run": str(folder.path), "evaluation": evaluation})
        return
    with opened(folder) as index:
        answer = search(index, given.query, given.k, given.system)
    say_answer(answer, console)
    console.answer({"run": str(folder.path), "answer": answer})
