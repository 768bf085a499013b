"""The headings of a document: Markdown's `#` lines, and lines underlined as in reStructuredText."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_FENCE = re.compile(r"^[ \t]*(```|~~~)")
_ATX = re.compile(r"^(#{1,6})[ \t]+(.*?)[ \t#]*$")
_UNDERLINE = re.compile(r"^([=\-~^\"'*+#`:.])\1{2,}[ \t]*$")
#: A longer line above a rule is a paragraph.
_MOST_CHARS = 120


class Heading(msgspec.Struct, frozen=True):
    """Its first character in the text, its level from 1 on, and what it says."""

    start: int
    level: int
    title: str


def outline(text: str) -> list[Heading]:
    """Headings in order. Underlined ones have the level of their character, by its first
    appearance."""
    headings: list[Heading] = []
    levels: dict[str, int] = {}
    at, before, before_at, fence = 0, "", 0, ""
    for line in text.split("\n"):
        if marked := _FENCE.match(line):
            fence = "" if fence == marked[1] else fence or marked[1]
        elif not fence:
            if found := _ATX.match(line):
                if found[2]:
                    headings.append(Heading(at, len(found[1]), found[2]))
            elif (found := _UNDERLINE.match(line)) and _is_title(before):
                level = levels.setdefault(found[1], len(levels) + 1)
                headings.append(Heading(before_at, level, before.strip()))
        before, before_at = line, at
        at += len(line) + 1
    return headings


def _is_title(line: str) -> bool:
    return (
        len(line) <= _MOST_CHARS
        and line[:1].strip() != ""
        and any(map(str.isalnum, line))
        and not _ATX.match(line)
    )


def path(headings: Sequence[Heading], at: int) -> tuple[str, ...]:
    """The headings that what begins at a character lies under, outermost first; its own heading is
    one of them."""
    above: list[Heading] = []
    for heading in headings:
        if heading.start > at:
            break
        above = [other for other in above if other.level < heading.level] + [heading]
    return tuple(heading.title for heading in above)
