"""Tokens of a text, and their parts in the form that words are compared in."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from typing import Literal, NamedTuple

from farspan.retrieval.names import combining_marks, split_case
from farspan.retrieval.scripts import UNSPACED, script_of, spaced_letters, unspaced_letters

#: Longer words are of no language, and are cut: base64, hashes, runs of one letter.
MAX_WORD_CHARS = 64
#: A name joined of more parts is rather a sentence: `out-of-the-box`.
_MAX_JOINED_PARTS = 3

_ZWNJ = "\u200c"
#: Invisible characters: soft hyphen, zero-width space and joiners, directions, word joiner,
#: byte-order mark.
_INVISIBLE = "\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff"
_SELECTORS = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_IGNORED = re.compile(f"[{_INVISIBLE}{_SELECTORS}]")
_HYPHEN = re.compile("[-\u2010\u2011]")
_APOSTROPHE = re.compile("['\u2019]")
_JOINTS = r"\-'" + "\u2010\u2011\u2019"
#: Stemmers do not see it: they know endings behind vowels.
_PLURAL_ACRONYM = re.compile("[A-Z]{2,}s")
_ASCII_WORD = re.compile("[0-9a-z]+")
#: Points and strokes that writers leave out: of Hebrew and Arabic, with Arabic's lengthening
#: stroke; stress marks; and the dot that a casefolded dotted capital I leaves.
_POINTS = re.compile(
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e8\u06ea-\u06ed\u0300\u0301\u0307]"
)
_GREEK = re.compile("[\u0370-\u03ff\u1f00-\u1fff]")
_ACCENTS = re.compile("[\u0300-\u036f]")
_ARABIC = re.compile("[\u0600-\u06ff]")
#: Letters that writers and keyboards exchange. They are folded after stemming, as stemmers tell
#: them apart.
_FOLDED = str.maketrans("ıёىیکأإآٱةۀ", "iеييكااااهه")
#: Nasals of Devanagari that are written in several forms, and the dot below: Lucene's
#: HindiNormalizer folds them, too.
_NASAL = re.compile("ँ|न्(?=[क-ह])")
_NUKTA = "़"
_HANGUL = re.compile("([\u1100-\u11ff\ua960-\ua97f\uac00-\ud7ff]+)")


class WordPart(NamedTuple):
    """A part of a token in the compared form; `kind` is how it becomes words."""

    kind: Literal["word", "name", "hangul", "run"]
    text: str


def is_unspaced(token: str) -> bool:
    """Return True for a run of a script without spaces."""
    return token[0] > "\u0dff" and script_of(token[0]) in UNSPACED


@functools.cache
def token_pattern(is_ascii: bool) -> re.Pattern[str]:
    """Return the pattern of tokens: runs of scripts without spaces; `.NET`; words and names, those
    of one letter with `++` or `#` behind it. For ASCII text it is a shorter one."""
    letter = r"0-9A-Z_a-z" if is_ascii else spaced_letters()
    inside = letter if is_ascii else letter + _INVISIBLE
    joints = r"\-'" if is_ascii else _JOINTS
    name = rf"[{letter}][{inside}]*(?:[.{joints}][{letter}][{inside}]*)*"
    language = rf"(?:(?<![{letter}][A-Za-z])(?<=[A-Za-z])(?:\+\+|#(?![{letter}])))?"
    dotnet = rf"(?<![{letter}.)\]])\.(?i:net)(?![{letter}])"
    pattern = f"{name}{language}|{dotnet}"
    if not is_ascii:
        run = unspaced_letters()
        pattern = f"[{run}][{run}{_INVISIBLE}{_SELECTORS}\u0300-\u036f]*|{pattern}"
    return re.compile(pattern)


def count_words(text: str) -> int:
    """Return the number of words of a text; two characters count as one in scripts without
    spaces."""
    count = 0
    for token in token_pattern(text.isascii()).findall(text):
        count += (len(token) + 1) // 2 if is_unspaced(token) else 1
    return count


def split_token(token: str) -> list[WordPart]:
    """Split a token into its parts in the compared form, then the names that it is as a whole."""
    if is_unspaced(token):
        text = fold_run(token)
        return [WordPart("run", text)] if text else []
    if token[0] == ".":
        return [WordPart("name", ".net")]
    if not token.isascii():
        token = unicodedata.normalize("NFKC", token)
        # Persian writes the parts of a word apart with it; in other scripts it shapes letters.
        if _ZWNJ in token and _ARABIC.search(token):
            token = token.replace(_ZWNJ, "-")
        token = _IGNORED.sub("", token)
    parts: list[WordPart] = []
    suffix = "++" if token.endswith("++") else "#" * token.endswith("#")
    pieces = []
    for piece in _HYPHEN.split(token.removesuffix(suffix)):
        # What stands next to an apostrophe alone is grammar: l'eau, don't, d'une, reader's.
        shares = _APOSTROPHE.split(piece)
        longer = [share for share in shares if len(share) > 1]
        if len(shares) > 1 and longer:
            shares = longer
        pieces.append("".join(shares))
        for share in shares:
            parts += _split_name(share, is_alone=len(shares) == 1)
    if len(pieces) > 1:
        # Of `k-means`, `x-ray` and `Objective-C` a single letter is no word.
        parts = [part for part in parts if len(part.text) > 1 or part.text.isdigit()] or parts
        is_plain = pieces[0][:1].isalpha() and not any("." in p or "_" in p for p in pieces)
        if len(pieces) <= _MAX_JOINED_PARTS and is_plain:
            joined = fold_word("".join(pieces))[:MAX_WORD_CHARS]
            parts += _split_hangul(joined)
    if suffix:
        letter = pieces[-1][-1:].lower()
        parts = [part for part in parts if part.text != letter]
        parts.append(WordPart("name", letter + suffix))
    return parts


def _split_name(name: str, *, is_alone: bool) -> Iterator[WordPart]:
    """Yield the words of a name, and the name where it has several; `is_alone` where no apostrophe
    stands next to it."""
    name = name.strip("_.")
    shares = split_case(name)
    for share in shares:
        if share == "NET" and f".{share}" in name:
            yield WordPart("name", ".net")
            continue
        if _PLURAL_ACRONYM.fullmatch(share):
            share = share[:-1]
        # Compatibility forms may hold what parts words, as fractions do.
        folded = fold_word(share)
        pattern = _ASCII_WORD if folded.isascii() else _word_pattern()
        for text in pattern.findall(folded):
            yield from _split_hangul(text[:MAX_WORD_CHARS])
    if len(shares) > 1 and is_alone:
        yield WordPart("name", fold_letters(fold_word(name))[:MAX_WORD_CHARS])


def _split_hangul(word: str) -> Iterator[WordPart]:
    """Yield the parts of a word that are Korean and those that are not: particles stand behind
    names of any script."""
    if word.isascii():
        yield WordPart("word", word)
        return
    for text in filter(None, _HANGUL.split(word)):
        yield WordPart("hangul" if _HANGUL.match(text) else "word", text)


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    return re.compile(rf"[{spaced_letters().removeprefix('_')}{unspaced_letters()}]+")


def fold_word(word: str) -> str:
    """Return a word without differences of case, width, composition, points and Greek accents."""
    if word.isascii():
        return word.lower()
    folded = unicodedata.normalize("NFKC", word.casefold())
    folded = _POINTS.sub("", folded)
    if _GREEK.search(folded):
        bare = _ACCENTS.sub("", unicodedata.normalize("NFD", folded))
        folded = unicodedata.normalize("NFC", bare)
    return folded


def fold_letters(word: str) -> str:
    """Return a folded word or stem without differences of letters that are exchanged freely."""
    if word.isascii():
        return word
    return _NASAL.sub("ं", word.translate(_FOLDED)).replace(_NUKTA, "")


@functools.cache
def _unit_pattern() -> re.Pattern[str]:
    return re.compile(rf".[{combining_marks()}]*", re.DOTALL)


def split_units(run: str) -> list[str]:
    """Split a folded run of a script without spaces into characters with their marks."""
    return _unit_pattern().findall(run)


@functools.cache
def _composed_pattern() -> re.Pattern[str]:
    # Voiced sound marks of half width compose with the character before them, too.
    marks = rf"{combining_marks()}{_INVISIBLE}\uff9e\uff9f"
    return re.compile(rf".[{marks}]*", re.DOTALL)


def locate_units(run: str) -> list[tuple[str, int, int]]:
    """Return the units of a run as it stands in a text, each with its span in the run."""
    origins: list[tuple[int, int]] = []
    folded: list[str] = []
    for match in _composed_pattern().finditer(run):
        form = fold_run(match[0])
        folded.append(form)
        origins += [match.span()] * len(form)
    located = []
    at = 0
    for unit in split_units("".join(folded)):
        located.append((unit, origins[at][0], origins[at + len(unit) - 1][1]))
        at += len(unit)
    return located


def fold_run(run: str) -> str:
    """Return a run of a script without spaces in the compared form."""
    return _IGNORED.sub("", unicodedata.normalize("NFKC", run))
