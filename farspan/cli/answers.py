"""What a search found, for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.cli.console import Console

#: Places of exact copies that a result names.
PLACES_SHOWN = 3

if TYPE_CHECKING:
    from farspan.domain.corpus import Place
    from farspan.retrieval.search import Answer, Result


def say_answer(answer: Answer, console: Console) -> None:
    """Rank, score, title, where it is from, and the beginning of its text."""
    console.say(f"searched with {answer.system}: {answer.why}")
    for rank, result in enumerate(answer.results, 1):
        console.say(f"{rank:3}. {result.score:6.3f}  {result.title}  [{place(result)}]")
        if result.also:
            console.say(f"             also: {also(result)}")
        console.say(f"             {result.text[:150]}")
    if not answer.results:
        console.say("nothing found")


def also(result: Result) -> str:
    """The first places of exact copies, and how many more there are."""
    shown = result.also[:PLACES_SHOWN]
    more = result.copies - len(shown)
    return ", ".join(map(_where, shown)) + (f" and {more:,} more" if more else "")


def place(result: Result) -> str:
    """Where a passage stands, as one would cite it: `notes/a.md:12, Methods > Sampling` or `a.pdf,
    page 3`."""
    above = f", {' > '.join(result.headings)}" if result.headings else ""
    return f"{_where(result)}{above}"


def _where(one: Result | Place) -> str:
    line = f":{one.line}" if one.line and not one.page else ""
    page = f", page {one.page}" if one.page else ""
    return f"{one.origin}{line}{page}"
