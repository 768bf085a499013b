"""What a typed word may have meant: the field's synonyms first, then beginnings and parts of names,
then likeness.

Several names are offered where several fit, and none where nothing is like enough. A number is part
of what a name means: no likeness changes one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from farspan.domain.escapes import key_word, shell_word
from farspan.domain.synonyms import KEYS, NAMES, NOT_OFFERED, NotOffered, Rows

#: Names at least as like as this may be meant. At 2/3 one letter of three may be wrong; below,
#: short names of other things pass: `ddp` for `hsdp`, at 1/2
#: [fitted: tests/domain/test_suggest.py].
LIKE = 2 / 3
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
    """A name without case and separators: `Learning-Rate` and `learning_rate` are the same."""
    return re.sub(r"[-_\s/:+]+", "", word.casefold())


def suggest(word: str, known: Iterable[str], synonyms: Rows = NAMES) -> tuple[str, ...]:
    """The known names that a word may mean, best first; empty where none is like enough.

    `synonyms` are the field's; () for names that people choose themselves, such as those of files.
    """
    names = tuple(dict.fromkeys(known))
    typed = normal_form(word)
    if not typed:
        return ()
    by_name = {name: name for name in names}
    same = _same(typed, by_name)
    if same:
        return tuple(same)
    meant = [name for meaning in _meanings(typed, synonyms) for name in names if name == meaning]
    if meant:
        return tuple(dict.fromkeys(meant))
    if synonyms and not_offered(word, names) is not None:
        return ()
    return tuple(_alike(typed, by_name))


def suggest_key(key: str, known: Iterable[str]) -> tuple[str, ...]:
    """The dotted keys that a dotted key may mean: its own folder goes before others."""
    folder, _, last = key.rpartition(".")
    typed = normal_form(last)
    paths = {path: path.rpartition(".")[2] for path in sorted(set(known))}
    own = {path: name for path, name in paths.items() if path.rpartition(".")[0] == folder}
    found = (
        _same(typed, own)
        or _keys_meant(typed, own)
        or _keys_meant(typed, paths)
        or _same(typed, paths)
        or _alike(typed, own)
        or _alike(typed, paths)
    )
    return tuple(found[:MAX_CANDIDATES])


def not_offered(word: str, known: Iterable[str]) -> NotOffered | None:
    """Whether a word is the field's name of something that is not among what is known."""
    typed = normal_form(word)
    names = set(known)
    for group in NOT_OFFERED:
        if group.beside in names and typed in group.words.split():
            return group
    return None


def known_names(word: str, known: Sequence[str], label: str = "known") -> str:
    """A fact: the names that there are, and why none of them is `word` where the field has it."""
    names = f"{label}: {', '.join(known)}"
    missing = not_offered(word, known)
    return names if missing is None else f"{missing.reason}; {names}"


def any_of(names: Sequence[object], option: str = "") -> str:
    """Names for a remedy, each quoted: `a, b or c`; with an option before each of them."""
    lead = f"{option} " if option else ""
    words = [f"{lead}{shell_word(name)}" for name in names]
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def any_key(keys: Sequence[str]) -> str:
    """Dotted keys for a remedy: `a.x, a.y or b`."""
    words = list(map(key_word, keys))
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def advise(
    word: str,
    known: Iterable[str],
    *,
    verb: str = "use",
    option: str = "",
    fix: str | None = None,
    synonyms: Rows = NAMES,
) -> str:
    """A remedy for a name that is unknown: `use a100-40 or a100-80`, or `--technique data`.

    Where nothing is like it, `fix`, or else what there is.
    """
    names = tuple(dict.fromkeys(known))
    candidates = suggest(word, names, synonyms)
    lead = "" if option else f"{verb} "
    if candidates:
        return f"{lead}{any_of(candidates, option)}"
    if fix is not None:
        return fix
    if len(names) > MAX_CANDIDATES:
        return f"name one of those that are known, as {any_of(names[:1], option)}"
    return f"{lead}{any_of(names, option)}"


def _meanings(typed: str, synonyms: Rows) -> list[str]:
    return [name for words, names in synonyms if typed in words.split() for name in names]


def _same(typed: str, names: dict[str, str]) -> list[str]:
    """The keys of `names` whose values differ from a word in case and separators alone."""
    return [key for key, name in names.items() if normal_form(name) == typed]


def _keys_meant(typed: str, names: dict[str, str]) -> list[str]:
    """The dotted keys that end in what the field's word means."""
    return [
        path
        for meaning in dict.fromkeys(_meanings(typed, KEYS))
        for path in names
        if f".{path}".endswith(f".{meaning}")
    ]


def _alike(typed: str, names: dict[str, str]) -> list[str]:
    """The keys of `names` whose values begin with a word, or else have a part that does, or else
    are most like it."""
    for fits in (_begins, _has_part):
        found = [key for key, name in names.items() if fits(typed, name)]
        if found:
            return found if len(found) <= MAX_CANDIDATES else []
    scores = {key: likeness(typed, normal_form(name)) for key, name in names.items()}
    best = max(scores.values(), default=0.0)
    found = [key for key, score in scores.items() if score == best >= LIKE]
    return found if len(found) <= MAX_CANDIDATES else []


def _begins(typed: str, name: str) -> bool:
    """Whether a name goes on where a word ends: `cos` and `cosine`."""
    return len(typed) >= MIN_BEGINNING and normal_form(name).startswith(typed)


def _has_part(typed: str, name: str) -> bool:
    """Whether a word begins behind a separator of a name: `amst` in `fabric/gat-amst`."""
    parts = SEPARATORS.split(name)
    rests = [normal_form("".join(parts[place:])) for place in range(1, len(parts))]
    return len(typed) >= MIN_PART and any(rest.startswith(typed) for rest in rests)


def likeness(typed: str, name: str) -> float:
    """1 less the share of letters that are slips of the pen; 0 where numbers differ, or where the
    typed word has too many slips."""
    if re.findall(r"\d+", typed) != re.findall(r"\d+", name):
        return 0.0
    slips = _slips(typed, name)
    if slips > (MAX_SLIPS if len(typed) >= LONG_WORD else 1):
        return 0.0
    return 1 - slips / max(len(typed), len(name), 1)


def _slips(a: str, b: str) -> int:
    """Letters left out, added, replaced, or swapped with their neighbour, from one word to the
    other: the distance of optimal string alignment."""
    rows = [list(range(len(b) + 1))]
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(
                rows[i - 1][j] + 1, row[j - 1] + 1, rows[i - 1][j - 1] + int(letter != other)
            )
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, rows[i - 2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
