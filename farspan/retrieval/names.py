"""Names and words of a text as an embedder reads them: split at dots, underscores and camel case.

Also a file of the folders that farspan exports, where farspan may not be installed: nothing but the
standard library is imported here.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable

_SEPARATOR = re.compile(r"[._]+")
#: Between a small letter or digit and a capital, and before the last capital of a run unless that
#: has a plural's s behind it: CrossEntropy, HTTPServer, but GPUs.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z](?!s(?![a-z]))[a-z])")
#: Letters and marks lie below this code point, Han characters and variation selectors aside.
LAST_SCRIPT = 0x20000
#: Variation selectors for Han characters.
_MORE_MARKS = range(0xE0100, 0xE01F0)


def class_of(characters: Iterable[int]) -> str:
    """Return the inside of a character class of a regular expression, from code points in order."""
    ranges: list[list[int]] = []
    for code in characters:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


@functools.cache
def combining_marks() -> str:
    r"""Return the class of combining marks, which `\w` lacks: vowel signs of Hindi, points of
    Arabic, accents of decomposed text."""
    codes = itertools.chain(range(LAST_SCRIPT), _MORE_MARKS)
    return class_of(code for code in codes if unicodedata.category(chr(code))[0] == "M")


@functools.cache
def name_pattern() -> re.Pattern[str]:
    """Return the pattern of a word or a name with dots, letters with their combining marks."""
    letter = rf"[\w{combining_marks()}]"
    return re.compile(rf"{letter}+(?:\.{letter}+)*")


def split_case(name: str) -> list[str]:
    """Split a name without changing it: `torch.nn.CrossEntropyLoss` into torch, nn, Cross, Entropy,
    Loss."""
    pieces: list[str] = []
    for piece in _SEPARATOR.split(name):
        pieces += _CAMEL.split(piece)
    return [piece for piece in pieces if piece]


def split_name(name: str) -> list[str]:
    """Split a name into lower-case parts."""
    return [piece.lower() for piece in split_case(name)]


def spread(text: str) -> str:
    """Return a text's words in lower case, names split, one space before each as inside a text."""
    matches = name_pattern().finditer(text)
    pieces = itertools.chain.from_iterable(split_name(match[0]) for match in matches)
    return "".join(f" {part}" for part in pieces)


def query_form(text: str) -> str:
    """Return a query as it is embedded: names split, one space before each word as inside a
    text."""
    pieces = itertools.chain.from_iterable(map(split_name, text.split()))
    return "".join(f" {part}" for part in pieces)
