"""Scripts of characters: those without spaces, and the languages that are written in them."""

from __future__ import annotations

import functools
import itertools
import unicodedata
from bisect import bisect_right

from farspan.retrieval.names import LAST_SCRIPT, class_of

#: Where the blocks of a script begin; "" is for blocks of no script of interest.
_BLOCKS: tuple[tuple[int, str], ...] = (
    (0x0000, "Latin"),
    (0x0370, "Greek"),
    (0x0400, "Cyrillic"),
    (0x0530, "Armenian"),
    (0x0590, "Hebrew"),
    (0x0600, "Arabic"),
    (0x0700, ""),
    (0x0750, "Arabic"),
    (0x0780, ""),
    (0x0860, "Arabic"),
    (0x0900, "Devanagari"),
    (0x0980, "Bengali"),
    (0x0A00, "Gurmukhi"),
    (0x0A80, "Gujarati"),
    (0x0B00, "Oriya"),
    (0x0B80, "Tamil"),
    (0x0C00, "Telugu"),
    (0x0C80, "Kannada"),
    (0x0D00, "Malayalam"),
    (0x0D80, "Sinhala"),
    (0x0E00, "Thai"),
    (0x0E80, "Lao"),
    (0x0F00, "Tibetan"),
    (0x1000, "Myanmar"),
    (0x10A0, "Georgian"),
    (0x1100, "Hangul"),
    (0x1200, "Ethiopic"),
    (0x13A0, ""),
    (0x1780, "Khmer"),
    (0x1800, ""),
    (0x1950, "TaiLe"),
    (0x19E0, ""),
    (0x1A20, "TaiTham"),
    (0x1AB0, ""),
    (0x1B00, "Balinese"),
    (0x1B80, ""),
    (0x1C80, "Cyrillic"),
    (0x1C90, "Georgian"),
    (0x1CC0, ""),
    (0x1D00, "Latin"),
    (0x1F00, "Greek"),
    (0x2000, ""),
    (0x2C60, "Latin"),
    (0x2C80, ""),
    (0x2D00, "Georgian"),
    (0x2D30, ""),
    (0x2D80, "Ethiopic"),
    (0x2DE0, "Cyrillic"),
    (0x2E00, ""),
    (0x2E80, "Han"),
    (0x2FE0, ""),
    (0x3005, "Han"),
    (0x3008, ""),
    (0x3021, "Han"),
    (0x302A, ""),
    (0x3031, "Kana"),
    (0x3036, ""),
    (0x3038, "Han"),
    (0x303D, ""),
    (0x3041, "Kana"),
    (0x3100, "Han"),
    (0x3130, "Hangul"),
    (0x3190, "Han"),
    (0x31F0, "Kana"),
    (0x3200, ""),
    (0x3400, "Han"),
    (0x4DC0, ""),
    (0x4E00, "Han"),
    (0xA000, "Yi"),
    (0xA4D0, ""),
    (0xA640, "Cyrillic"),
    (0xA6A0, ""),
    (0xA720, "Latin"),
    (0xA800, ""),
    (0xA8E0, "Devanagari"),
    (0xA900, ""),
    (0xA960, "Hangul"),
    (0xA980, "Javanese"),
    (0xA9E0, "Myanmar"),
    (0xAA00, ""),
    (0xAA60, "Myanmar"),
    (0xAA80, "TaiViet"),
    (0xAAE0, ""),
    (0xAB30, "Latin"),
    (0xAB70, ""),
    (0xAC00, "Hangul"),
    (0xD800, ""),
    (0xF900, "Han"),
    (0xFB00, "Latin"),
    (0xFB13, "Armenian"),
    (0xFB1D, "Hebrew"),
    (0xFB50, "Arabic"),
    (0xFE00, ""),
    (0xFE70, "Arabic"),
    (0xFF00, "Latin"),
    (0xFF66, "Kana"),
    (0xFFA0, "Hangul"),
    (0xFFE0, ""),
    (0x1AFF0, "Kana"),
    (0x1B170, ""),
    (0x20000, "Han"),
    (0x33480, ""),
)
_STARTS = [start for start, _ in _BLOCKS]
#: Scripts that put no spaces between words.
UNSPACED = frozenset(
    [
        "Han",
        "Kana",
        "Thai",
        "Lao",
        "Myanmar",
        "Khmer",
        "TaiLe",
        "TaiTham",
        "TaiViet",
        "Balinese",
        "Javanese",
        "Yi",
    ]
)
#: The language of a script that one language alone is written in, or by far the most text.
LANGUAGE_OF_SCRIPT = {
    "Greek": "el",
    "Armenian": "hy",
    "Hebrew": "he",
    "Bengali": "bn",
    "Gurmukhi": "pa",
    "Gujarati": "gu",
    "Oriya": "or",
    "Tamil": "ta",
    "Telugu": "te",
    "Kannada": "kn",
    "Malayalam": "ml",
    "Sinhala": "si",
    "Thai": "th",
    "Lao": "lo",
    "Tibetan": "bo",
    "Myanmar": "my",
    "Georgian": "ka",
    "Hangul": "ko",
    "Ethiopic": "am",
    "Khmer": "km",
    "Kana": "ja",
    "Han": "zh",
}
#: Languages of scripts that several share; all others are written in Latin letters.
_SHARED_SCRIPTS = {
    "Cyrillic": ("ba", "be", "bg", "kk", "ky", "mk", "mn", "ru", "sr", "tg", "tt", "uk"),
    "Arabic": ("ar", "ckb", "fa", "ku", "ps", "sd", "ug", "ur"),
    "Devanagari": ("hi", "mr", "ne", "sa"),
}
_SCRIPT_OF_LANGUAGE = {language: script for script, language in LANGUAGE_OF_SCRIPT.items()}
_SCRIPT_OF_LANGUAGE["yi"] = "Hebrew"
for _script, _codes in _SHARED_SCRIPTS.items():
    _SCRIPT_OF_LANGUAGE.update(dict.fromkeys(_codes, _script))


@functools.lru_cache(1 << 14)
def script_of(character: str) -> str:
    """Return the script of a letter; "" for one of no script of interest."""
    return _BLOCKS[bisect_right(_STARTS, ord(character)) - 1][1]


def script_of_language(language: str) -> str:
    """Return the script that a language (ISO 639-1) is written in."""
    return _SCRIPT_OF_LANGUAGE.get(language, "Latin")


def _is_word_character(code: int) -> bool:
    character = chr(code)
    return character.isalnum() or unicodedata.category(character)[0] == "M"


@functools.cache
def unspaced_letters() -> str:
    """Return the class of letters and marks of scripts without spaces."""
    codes: list[int] = []
    for (start, script), (end, _) in itertools.pairwise(_BLOCKS):
        if script in UNSPACED and start < LAST_SCRIPT:
            codes += filter(_is_word_character, range(start, end))
    return class_of((*codes, *range(LAST_SCRIPT, 0x33480)))


@functools.cache
def spaced_letters() -> str:
    """Return the class of letters, digits, marks and the underscore of all other scripts."""
    codes = []
    for code in range(LAST_SCRIPT):
        if _is_word_character(code) and script_of(chr(code)) not in UNSPACED:
            codes.append(code)
    return rf"_{class_of((*codes, *range(0xE0100, 0xE01F0)))}"
