"""Colours of a terminal, where there is one, and the width that text may take."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap

from farspan.domain.escapes import escape_controls

#: SGR codes (ECMA-48) by what is painted; stages take the numbered ones in turn.
CODES = {
    "good": "1;32",
    "soft": "2",
    "strong": "1",
    "bad": "31",
    "warn": "33",
    "0": "34",
    "1": "33",
    "2": "32",
    "3": "35",
    "4": "36",
    "5": "31",
}
#: Where no terminal says how wide it is, and the bounds within which one is believed.
DEFAULT_WIDTH = 100
NARROWEST = 76
WIDEST = 110
#: What stands between the facts of a line, what their further lines begin with, and the space at
#: which none is broken.
FACT = " · "
INDENT = "  "
UNBREAKABLE = "\N{NO-BREAK SPACE}"


def text_width() -> int:
    """Columns for tables and paragraphs."""
    return max(NARROWEST, min(WIDEST, terminal_columns()))


def terminal_columns() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns


def fold_line(text: str, columns: int) -> str:
    """Break text into lines of a terminal, between its facts (` · `) and then between words; never
    between a number and its unit."""
    lines: list[str] = []
    for fact in text.split(FACT):
        joint = f"{lines[-1]}{FACT}{fact}" if lines else fact
        if len(joint) <= columns:
            lines[-1:] = [joint]
            continue
        if len(INDENT) + len(fact) > columns and lines:
            fact = f"{lines.pop().strip()}{FACT}{fact}"
        # A quantity is one word while the others are parted: `13.9 M`, `1 min 05 s`.
        fact = re.sub(r"(?<=\d) (?=[^\W\d])", UNBREAKABLE, fact)
        after_min_or_h = rf"(?<=\d{UNBREAKABLE}min) (?=\d)|(?<=\d{UNBREAKABLE}h) (?=\d)"
        fact = re.sub(after_min_or_h, UNBREAKABLE, fact)
        indent = INDENT if lines else ""
        broken = textwrap.wrap(
            fact,
            columns,
            initial_indent=indent,
            subsequent_indent=INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
        lines += [line.replace(UNBREAKABLE, " ") for line in broken]
    return "\n".join(lines)


def wants_colours(*, json: bool) -> bool:
    """Whether colours are wanted: there is a terminal, and no NO_COLOR (no-color.org)."""
    stream = sys.stderr if json else sys.stdout
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def paint(text: str, tint: str, on: bool) -> str:
    """Text in a colour where one is wanted; control characters of the text become escapes."""
    text = escape_controls(text)
    if on and tint and text:
        return f"\033[{CODES[tint]}m{text}\033[0m"
    return text
