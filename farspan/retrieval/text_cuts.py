"""Places where a text can be cut: never inside a character that several code points make."""

from __future__ import annotations

import functools
import re

from farspan.retrieval.names import combining_marks

_ZWJ = "\u200d"
#: What belongs to the character before it besides combining marks: joiners, halves of surrogate
#: pairs, voiced marks of half width, vowels and finals of Korean, skin tones, tags of flags.
_ATTACHED = (
    "\u1160-\u11ff\u200c\u200d\udc00-\udfff\uff9e\uff9f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"
)
#: Two of these make a flag.
_FLAG_LETTERS = re.compile("[\U0001f1e6-\U0001f1ff]")
#: A sequence of more code points is cut: no character is so long.
_MAX_SEQUENCE = 32


@functools.cache
def _attached_pattern() -> re.Pattern[str]:
    return re.compile(f"[{_ATTACHED}{combining_marks()}]")


def is_inside_character(text: str, at: int) -> bool:
    """Return True if code point `at` makes one character with that before it."""
    if not 0 < at < len(text) or text[at].isascii():
        return text[at - 1 : at + 1] == "\r\n" and at > 0
    if text[at - 1] == _ZWJ or _attached_pattern().match(text, at):
        return True
    return bool(_FLAG_LETTERS.match(text, at) and _FLAG_LETTERS.match(text, at - 1))


def whole_character_before(text: str, at: int) -> int:
    """Return the last place up to `at` that is not inside a character; `at` where none is near."""
    for place in range(at, max(at - _MAX_SEQUENCE, 0), -1):
        if not is_inside_character(text, place):
            return place
    return at


def whole_character_behind(text: str, at: int, limit: int) -> int:
    """Return the first place from `at` on that is not inside a character, which the end of the text
    is not; `at` where the next `limit` code points have none."""
    if at >= len(text):
        return len(text)
    for place in range(at, min(at + limit, len(text) + 1)):
        if place == len(text) or not is_inside_character(text, place):
            return place
    return at
