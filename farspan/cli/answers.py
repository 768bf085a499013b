"""What a search found, for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farspan.cli.console import Console

if TYPE_CHECKING:
    from farspan.retrieval.search import Answer, Result


def say_answer(answer: Answer, console: Console) -> None:
    """Rank, score, title, where it is from, and the beginning of its text."""
    console.say(f"searched with {answer.system}: {answer.why}")
    for rank, result in enumerate(answer.results, 1):
        console.say(f"{rank:3}. {result.score:6.3f}  {result.title}  [{place(result)}]")
        console.say(f"             {result.text[:150]}")
    if not answer.results:
        console.say("nothing found")


def place(result: Result) -> str:
    """Where a passage stands, as one would cite it: `notes/a.md:12, Methods > Sampling` or `a.pdf,
    page 3`."""
    line = f":{result.line}" if result.line and not result.page else ""
    page = f", page {result.page}" if result.page else ""
    above = f", {' > '.join(result.headings)}" if result.headings else ""
    return f"{result.origin}{line}{page}{above}"
