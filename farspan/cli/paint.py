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
WIDTH = 100
NARROWEST = 76
WIDEST = 110
#: What stands between the facts of a line, what their further lines begin with, and the space at
#: which none is broken.
FACT = " · "
INDENT = "  "
HELD = "\N{NO-BREAK SPACE}"


def width() -> int:
    """Columns for tables and paragraphs."""
    return max(NARROWEST, min(WIDEST, columns()))


def columns() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def fold(text: str, columns: int) -> str:
    """Text as lines of a terminal, broken between its facts (` · `) and then between words; never
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
        held = re.sub(r"(?<=\d) (?=[^\W\d])", HELD, fact)
        held = re.sub(rf"(?<=\d{HELD}min) (?=\d)|(?<=\d{HELD}h) (?=\d)", HELD, held)
        indent = INDENT if lines else ""
        broken = textwrap.wrap(
            held,
            columns,
            initial_indent=indent,
            subsequent_indent=INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
        lines += [line.replace(HELD, " ") for line in broken]
    return "\n".join(lines)


def painter(*, json: bool) -> bool:
    """Whether colours are wanted: there is a terminal, and no NO_COLOR (no-color.org)."""
    stream = sys.stderr if json else sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, tint: str, on: bool) -> str:
    """Text in a colour where one is wanted; control characters of the text become escapes."""
    text = escape_controls(text)
    return f"\033[{CODES[tint]}m{text}\033[0m" if on and tint and text else text
