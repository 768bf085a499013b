"""Answer a question from a run's documents, with citations, by a language model of your choice."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import (
    compute_on_one_thread,
    find_home,
    parse_positive,
    refuse_run_as_text,
    takes_run,
)
from farspan.cli.commands.serve import takes_llm
from farspan.cli.console import Console

HELP = "answer a question from the documents, by a language model of your choice"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", metavar="QUESTION", help="what to answer")
    takes_run(parser)
    takes_llm(parser)
    parser.add_argument(
        "-k", type=parse_positive, default=8, help="passages to answer from (default: 8)"
    )
    parser.add_argument(
        "--where",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="only from documents with this value in this field, as for farspan search",
    )


def run(given: argparse.Namespace, console: Console) -> None:
    compute_on_one_thread()
    from farspan.app.indexing import refuse_query
    from farspan.app.serving import ask_home

    refuse_run_as_text(given, "ask", given.question)
    refuse_query(given.question)
    folder = find_home(given, console)
    answer = ask_home(
        folder,
        given.question,
        lambda update: console.write_line(str(update)),
        k=given.k,
        where=given.where,
        llm=given.llm,
        llm_model=given.llm_model,
    )
    console.write_line(answer.answer)
    if answer.note:
        console.write_line(f"({answer.note})")
    for citation in answer.citations:
        console.write_line(f"[{citation.number}] {citation.title}  [{citation.place}]")
    console.answer({"run": str(folder.path), "answer": answer})
