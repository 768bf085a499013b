"""Words that carry grammar rather than meaning, by language: a query is searched without them."""

from __future__ import annotations

import functools
from importlib import resources
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

#: bm25s' lists by language; Norwegian has three codes. Others are in the catalog.
_LISTED = {
    "da": "DANISH",
    "de": "GERMAN",
    "en": "EN_PLUS",
    "es": "SPANISH",
    "fr": "FRENCH",
    "it": "ITALIAN",
    "ko": "KOREAN",
    "nb": "NORWEGIAN",
    "nl": "DUTCH",
    "nn": "NORWEGIAN",
    "no": "NORWEGIAN",
    "pt": "PORTUGUESE",
    "ru": "RUSSIAN",
    "sv": "SWEDISH",
    "tr": "TURKISH",
    "zh": "CHINESE",
}
#: Rests of `didn't` and the like in the English list, which are names of languages and of more.
_NOT_ENGLISH = {"d", "m", "o", "s", "t", "y", "ma"}
#: Auxiliary verbs of questions that the English list lacks.
_MORE_ENGLISH = {"could", "would", "may", "might", "must", "shall", "cannot", "also", "us", "let"}


@functools.cache
def stop_words(language: str) -> frozenset[str]:
    """Return the stop words of a language (ISO 639-1); none for one without a list."""
    if language not in _LISTED:
        return _catalog_lists().get(language, frozenset())
    listed = frozenset(getattr(_bm25s_lists(), f"STOPWORDS_{_LISTED[language]}"))
    return (listed - _NOT_ENGLISH) | _MORE_ENGLISH if language == "en" else listed


@functools.cache
def _bm25s_lists() -> Any:
    """Return bm25s' module of stop words, without the package: a search need not wait for SciPy."""
    package = find_spec("bm25s")
    assert package is not None and package.origin is not None
    place = Path(package.origin).with_name("stopwords.py")
    spec = spec_from_file_location("bm25s_stopwords", place)
    assert spec is not None and spec.loader is not None
    lists = module_from_spec(spec)
    spec.loader.exec_module(lists)
    return lists


@functools.cache
def _catalog_lists() -> dict[str, frozenset[str]]:
    """Read the catalog's lists, a line each: `fi: ja tai mutta`."""
    lists = {}
    file = resources.files("farspan.catalog") / "stop_words.txt"
    for line in file.read_text("utf-8").splitlines():
        language, colon, words = line.partition(": ")
        if colon and not line.startswith("#"):
            lists[language] = frozenset(words.split())
    return lists
