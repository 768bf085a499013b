"""What a search found, for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.cli.console import Console

#: Places of exact copies that a result names.
PLACES_SHOWN = 3

if TYPE_CHECKING:
    from farspan.retrieval.search import Answer, Result


def say_answer(answer: Answer, console: Console) -> None:
    """How documents were ranked; then rank, score, title, where it is from, and the beginning of
    its text."""
    console.say(answer.ranked_by)
    for rank, result in enumerate(answer.results, 1):
        console.say(f"{rank:3}. {result.score:6.3f}  {result.title}  [{result.place}]")
        if result.also:
            console.say(f"             also: {also(result)}")
        console.say(f"             {result.text[:150]}")
    if not answer.results:
        console.say("nothing found")


def also(result: Result) -> str:
    """Return the first places of exact copies, and how many more there are."""
    shown = result.also[:PLACES_SHOWN]
    more = result.copies - len(shown)
    return ", ".join(map(str, shown)) + (f" and {more:,} more" if more else "")
