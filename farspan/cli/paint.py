"""Colours of a terminal, where there is one, and the width that text may take."""

from __future__ import annotations

import os
import shutil
import sys

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
WIDTH, NARROWEST, WIDEST = 100, 76, 110


def width() -> int:
    """Columns for tables and paragraphs."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDTH, 24)).columns))


def painter(*, json: bool) -> bool:
    """Whether colours are wanted: there is a terminal, and nobody has said no (no-color.org)."""
    stream = sys.stderr if json else sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, tint: str, on: bool) -> str:
    """Text in a colour where one is wanted; control characters of the text become escapes."""
    text = escape_controls(text)
    return f"\033[{CODES[tint]}m{text}\033[0m" if on and tint and text else text
