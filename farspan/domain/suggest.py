"""What a typed word may have meant: the field's synonyms first, then beginnings and parts of names,
then likeness.

Several names are offered where several fit, and none where nothing is like enough. A number is part
of what a name means: no likeness changes one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from farspan.domain.escapes import key_word, shell_word
from farspan.domain.synonyms import KEY_SYNONYMS, NOT_OFFERED, VALUE_SYNONYMS, NotOffered, Rows

#: Names at least as like as this may be meant. At 2/3 one letter of three may be wrong; below,
#: short names of other things pass: `ddp` for `hsdp`, at 1/2
#: [fitted: tests/domain/test_suggest.py].
MIN_LIKENESS = 2 / 3
#: A slip of the pen is one letter too many, too few, wrong, or two in the wrong order. A longer
#: word may have two of them: two in `docs` would make `pydocs` of it.
MAX_SLIPS = 2
LONG_WORD = 6
#: The shortest words that are looked for at the beginnings of names, and of parts of names: shorter
#: ones are in too many.
MIN_BEGINNING = 2
MIN_PART = 3
#: What stands between the parts of a name.
SEPARATORS = re.compile(r"[-_\s/:+.]+")
#: More names than these are a list, not advice.
MAX_CANDIDATES = 6


def normal_form(word: str) -> str:
    """Drop case and separators from a name: `Learning-Rate` and `learning_rate` are the same."""
    return re.sub(r"[-_\s/:+]+", "", word.casefold())


def suggest(word: str, known: Iterable[str], synonyms: Rows = VALUE_SYNONYMS) -> tuple[str, ...]:
    """Suggest the known names that a word may mean, best first; empty where none is like enough.

    `synonyms` are the field's; () for names that people choose themselves, such as those of files.
    """
    typed = normal_form(word)
    if not typed:
        return ()
    by_name = {name: name for name in known}
    same = _find_same(typed, by_name)
    if same:
        return tuple(same)
    meanings = _find_meanings(typed, synonyms)
    meant = [name for name in dict.fromkeys(meanings) if name in by_name]
    if meant:
        return tuple(meant)
    if synonyms and not_offered(word, by_name) is not None:
        return ()
    return tuple(_find_alike(typed, by_name))


def suggest_key(key: str, known: Iterable[str]) -> tuple[str, ...]:
    """Suggest the dotted keys that a dotted key may mean: its own folder goes before others."""
    folder, _, last = key.rpartition(".")
    typed = normal_form(last)
    last_parts: dict[str, str] = {}
    in_folder: dict[str, str] = {}
    for path in sorted(set(known)):
        path_folder, _, last_parts[path] = path.rpartition(".")
        if path_folder == folder:
            in_folder[path] = last_parts[path]
    keys = (
        _find_same(typed, in_folder)
        or _find_meant_keys(typed, in_folder)
        or _find_meant_keys(typed, last_parts)
        or _find_same(typed, last_parts)
        or _find_alike(typed, in_folder)
        or _find_alike(typed, last_parts)
    )
    return tuple(keys[:MAX_CANDIDATES])


def not_offered(word: str, known: Iterable[str]) -> NotOffered | None:
    """Find what farspan does not do that a word is the field's name of; None for another word."""
    typed = normal_form(word)
    known = set(known)
    for group in NOT_OFFERED:
        if group.beside in known and typed in group.words.split():
            return group
    return None


def known_names(word: str, known: Sequence[str], label: str = "known") -> str:
    """Write a fact: the names that there are, and why `word`, if the field has it, is none."""
    listed = f"{label}: {', '.join(known)}"
    missing = not_offered(word, known)
    return listed if missing is None else f"{missing.reason}; {listed}"


def any_of(choices: Sequence[object], option: str = "") -> str:
    """Names for a remedy, each quoted: `a, b or c`; with an option before each of them."""
    lead = f"{option} " if option else ""
    return _join_alternatives([f"{lead}{shell_word(choice)}" for choice in choices])


def any_key(keys: Sequence[str]) -> str:
    """Dotted keys for a remedy: `a.x, a.y or b`."""
    return _join_alternatives(list(map(key_word, keys)))


def _join_alternatives(words: list[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def advise(
    word: str,
    known: Iterable[str],
    *,
    verb: str = "use",
    option: str = "",
    fix: str | None = None,
    synonyms: Rows = VALUE_SYNONYMS,
) -> str:
    """Write a remedy for a name that is unknown: `use a100-40 or a100-80`, or `--technique data`.

    Where nothing is like it, `fix`, or else what there is.
    """
    choices = tuple(dict.fromkeys(known))
    candidates = suggest(word, choices, synonyms)
    lead = "" if option else f"{verb} "
    if candidates:
        return f"{lead}{any_of(candidates, option)}"
    if fix is not None:
        return fix
    if len(choices) > MAX_CANDIDATES:
        return f"name one of those that are known, as {any_of(choices[:1], option)}"
    return f"{lead}{any_of(choices, option)}"


def _find_meanings(typed: str, synonyms: Rows) -> list[str]:
    meanings: list[str] = []
    for words, meant in synonyms:
        if typed in words.split():
            meanings += meant
    return meanings


def _find_same(typed: str, name_of: dict[str, str]) -> list[str]:
    """Find the keys of `name_of` whose values differ from a word in case and separators alone."""
    return [key for key, name in name_of.items() if normal_form(name) == typed]


def _find_meant_keys(typed: str, paths: Iterable[str]) -> list[str]:
    """Find the dotted keys that end in what the field's word means."""
    keys = []
    for meaning in dict.fromkeys(_find_meanings(typed, KEY_SYNONYMS)):
        keys += [path for path in paths if f".{path}".endswith(f".{meaning}")]
    return keys


def _find_alike(typed: str, name_of: dict[str, str]) -> list[str]:
    """Find the keys of `name_of` whose values begin with a word, or else have a part that does, or
    else are most like it."""
    for fits in (_begins_with, _has_part):
        candidates = [key for key, name in name_of.items() if fits(typed, name)]
        if candidates:
            break
    else:
        scores = {key: likeness(typed, normal_form(name)) for key, name in name_of.items()}
        best = max(scores.values(), default=0.0)
        candidates = [key for key, score in scores.items() if score == best >= MIN_LIKENESS]
    return candidates if len(candidates) <= MAX_CANDIDATES else []


def _begins_with(typed: str, name: str) -> bool:
    """Return whether a name continues where a word ends: `cos` and `cosine`."""
    return len(typed) >= MIN_BEGINNING and normal_form(name).startswith(typed)


def _has_part(typed: str, name: str) -> bool:
    """Return whether a word begins after a separator of a name: `amst` in `fabric/gat-amst`."""
    if len(typed) < MIN_PART:
        return False
    parts = SEPARATORS.split(name)
    for place in range(1, len(parts)):
        if normal_form("".join(parts[place:])).startswith(typed):
            return True
    return False


def likeness(typed: str, name: str) -> float:
    """1 less the share of letters that are slips of the pen; 0 where numbers differ, or where the
    typed word has too many slips."""
    if re.findall(r"\d+", typed) != re.findall(r"\d+", name):
        return 0.0
    slips = _count_slips(typed, name)
    if slips > (MAX_SLIPS if len(typed) >= LONG_WORD else 1):
        return 0.0
    return 1 - slips / max(len(typed), len(name), 1)


def _count_slips(a: str, b: str) -> int:
    """Count letters left out, added, replaced, or swapped with their neighbour, from one word to
    the other: the distance of optimal string alignment."""
    rows = [list(range(len(b) + 1))]
    for i, letter in enumerate(a, 1):
        above = rows[-1]
        row = [i]
        for j, other in enumerate(b, 1):
            replaced = above[j - 1] + int(letter != other)
            cost = min(above[j] + 1, row[j - 1] + 1, replaced)
            is_swap = letter == b[j - 2] and a[i - 2] == other
            if is_swap and i > 1 and j > 1:
                cost = min(cost, rows[i - 2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
