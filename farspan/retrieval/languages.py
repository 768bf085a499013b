"""The language of texts: by their script where that has one, else by py3langid."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from farspan.retrieval.scripts import LANGUAGE_OF_SCRIPT, script_of, script_of_language

#: Characters that are looked at, in parts from beginning, middle and end: a document's language is
#: known by a few hundred.
_PARTS = 3
_PART_CHARS = 200
#: Texts of fewer letters are too short.
_MIN_LETTERS = 12
#: Japanese has Han characters, too; Chinese has no kana.
_MIN_KANA_SHARE = 0.05


def detect_languages(texts: Iterable[str]) -> list[str]:
    """Return the language of each text (`detect_language`)."""
    return list(map(detect_language, texts))


def detect_language(text: str) -> str:
    """Return the ISO 639-1 code of a text's language; "" for one that is too short.

    A text in several languages has that of its most frequent script.
    """
    sample = _sample(text)
    counts = Counter[str]()
    for character, count in Counter(sample).items():
        if character.isalpha():
            counts[script_of(character)] += count
    if counts["Kana"] > _MIN_KANA_SHARE * (counts["Kana"] + counts["Han"]):
        counts["Kana"] += counts.pop("Han", 0)
    script, letters = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if script in LANGUAGE_OF_SCRIPT:
        return LANGUAGE_OF_SCRIPT[script]
    if letters < _MIN_LETTERS or not script:
        return ""
    ranked = _identifier().rank(sample)
    return next((code for code, _ in ranked if script_of_language(code) == script), "")


def _sample(text: str) -> str:
    if len(text) <= _PARTS * _PART_CHARS:
        return text
    last = len(text) - _PART_CHARS
    starts = [last * part // (_PARTS - 1) for part in range(_PARTS)]
    return "\n".join(text[start : start + _PART_CHARS] for start in starts)


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import (  # type: ignore[import-untyped]
        MODEL_FILE,
        LanguageIdentifier,
    )

    return LanguageIdentifier.from_model_file(MODEL_FILE)
