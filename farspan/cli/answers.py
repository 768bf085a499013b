"""What a search returns, and how well searches do, for a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.domain.problems import command
from farspan.domain.run import RunFolder

#: Places of exact copies that a result names.
PLACES_SHOWN = 3

if TYPE_CHECKING:
    from farspan.app.index_folders import IndexHome
    from farspan.app.indexing import Indexed
    from farspan.retrieval.index import IndexManifest
    from farspan.retrieval.search import Answer, Result


def print_answer(answer: Answer, console: Console) -> None:
    """Print how documents were ranked; then rank, score, title, where it is from, and the beginning
    of its text."""
    console.write_line(answer.ranked_by)
    for rank, result in enumerate(answer.results, 1):
        score = f"{rank:3}. {result.score:6.3f}"
        console.write_line(f"{score}  {result.title}  [{result.place}]")
        if result.also:
            console.write_line(f"             also: {format_copies(result)}")
        console.write_line(f"             {result.text[:150]}")
    if not answer.results:
        console.write_line("nothing found")


def format_copies(result: Result) -> str:
    """Return the first places of exact copies, and how many more there are."""
    shown = result.also[:PLACES_SHOWN]
    more = result.copies - len(shown)
    places = ", ".join(map(str, shown))
    return f"{places} and {more:,} more" if more else places


def report_indexed(home: IndexHome, indexed: Indexed, to: Path | None, console: Console) -> None:
    """Print what an index was measured to do, where its vectors were written to, and what is
    next."""
    from farspan.app.indexing import write_vectors

    if indexed.fitted and indexed.manifest.evaluation is not None:
        console.write_line(evaluation_text(indexed.manifest))
    if to is not None:
        commands = write_vectors(home, to)
        console.write_line(f"vectors: {to}; commands that load them: {commands}")
    is_run = isinstance(home, RunFolder)
    place = home.index if is_run else home.path
    console.write_line(f"index: {place}; next: {command('search', '...', home.path)}")
    answer = {
        "index": str(place),
        "manifest": indexed.manifest,
        "embedded": indexed.embedded,
        "kept": indexed.kept,
    }
    console.answer({"run": str(home.path), **answer} if is_run else answer)


def evaluation_text(manifest: IndexManifest) -> str:
    """Return how well each way of searching was measured to do, or why that was not measured."""
    from farspan.retrieval.evaluate import format_evaluation
    from farspan.retrieval.search import not_evaluated

    measured = f"not evaluated: {not_evaluated(manifest.recipe)}"
    if manifest.evaluation:
        measured = format_evaluation(manifest.evaluation, manifest.lexical)
    return f"{measured}\nno encoder: {manifest.no_encoder}" if manifest.no_encoder else measured
