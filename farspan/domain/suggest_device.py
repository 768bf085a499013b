"""Which kinds of the catalogue a device's name may mean: as drivers, data sheets, clouds and people
write it, and slices of a divided GPU (MIG).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from farspan.domain import catalog
from farspan.domain.escapes import yaml_word
from farspan.domain.suggest import MAX_CANDIDATES, MIN_PART, any_of, suggest
from farspan.domain.units import parse_bytes

#: Makers and families, which say nothing that a model's number does not.
MAKERS = {
    *("nvidia", "geforce", "rtx", "gtx", "tesla", "quadro", "amd", "instinct", "radeon", "apple"),
    *("gpu", "graphics", "card", "generation", "gen", "edition", "core", "tensor"),
}
#: Names of what joins a GPU to its host, in all their generations.
FORMS = re.compile(r"(sxm|pcie|nvl|oam)\d*")
FORM_OF = {"nvlink": {"sxm", "nvlink"}, "pcie": {"pcie"}}
#: A slice of a divided GPU, as its driver names it: `MIG 3g.20gb`, `mig-1g.10gb`.
SLICE = re.compile(r"(?:\bmig[\s-]*)?\b(\d)g\.(\d+)gb(?:\+\w+)*", re.IGNORECASE)
#: Eighths of a GPU's memory that a slice of so many sevenths of its cores has ("MIG User Guide",
#: table of profiles of A100 and H100).
MEMORY_EIGHTHS = {1: (1, 2), 2: (2,), 3: (4,), 4: (4,), 7: (8,)}
CORE_SEVENTHS = 7
#: The driver keeps some memory of each slice for itself: a slice of an eighth of 141 GB has 18.
SLICE_TOLERANCE = 0.07
#: The command that shows every kind.
LIST = "farspan cluster list"
#: GPUs that can be divided so.
DIVISIBLE = re.compile(r"(a100|h100|h200|gh200|b200|b300)\b")
#: Words that make a device another than the one of the same number.
OTHER_MODELS = {"ti", "super", "laptop", "mobile", "max", "maxq", "q", "ada", "pro", "ultra", "d"}
#: Names with fewer letters are compared with none: each letter says which product it is.
MIN_LETTERS = 3


class Slice(NamedTuple):
    """A slice of a GPU: sevenths of its cores, and bytes."""

    cores: int
    memory: int


def suggest_device(name: str, own: Iterable[str] = ()) -> tuple[str, ...]:
    """The kinds that a name may mean, of the catalogue and of a cluster file's `own`; empty where
    none is like it."""
    found = SLICE.search(name)
    divided = slice_of(name)
    if divided is None or found is None:
        return _suggest_whole(name, own)
    rest = f"{name[: found.start()]} {name[found.end() :]}".strip()
    rest = re.sub(r"\bmig\b", "", rest, flags=re.IGNORECASE).strip()
    kinds = catalog.devices()
    whole = _suggest_whole(rest, own) if rest else tuple(filter(DIVISIBLE.match, sorted(kinds)))
    if rest.lower() in kinds:
        whole = tuple(kind for kind in sorted(kinds) if f"{kind}-".startswith(f"{rest.lower()}-"))
    memories = {kind: kinds[kind].memory for kind in whole if kind in kinds}
    fitting = [
        kind for kind, text in memories.items() if text and _can_have(parse_bytes(text), divided)
    ]
    return tuple(fitting) or whole


def slice_of(name: str) -> Slice | None:
    """The slice of a GPU that a name says it is, if it does."""
    match = SLICE.search(name)
    return Slice(int(match[1]), int(match[2]) * 10**9) if match else None


def advise_device(name: str, own: Iterable[str] = ()) -> str:
    """The remedy for a kind that is unknown: `write a100-40 or a100-80`; for a slice of a GPU the
    device that it is."""
    kinds = suggest_device(name, own)
    divided = slice_of(name)
    if not kinds:
        near = neighbours(name)
        return f"farspan cluster list   # among them {any_of(near)}" if near else LIST
    if divided is None:
        return f"write {any_of(kinds)}"
    memory = divided.memory // 10**9
    share = divided.cores / CORE_SEVENTHS
    return "write " + " or ".join(
        f"{{kind: {yaml_word(kind)}, memory: {memory:d}GB, share: {share:.0%}}}" for kind in kinds
    )


def neighbours(name: str) -> tuple[str, ...]:
    """Kinds that differ from a name in its last digit alone: other products, so none is meant, but
    a reader who slipped sees which there are."""
    typed = _squashed(name)
    stem = re.fullmatch(r"(.*?)\d(\D*)", typed)
    if stem is None:
        return ()
    same_stem = re.compile(rf"{re.escape(stem[1])}\d{re.escape(stem[2])}")
    return tuple(kind for kind in sorted(catalog.devices()) if same_stem.fullmatch(_squashed(kind)))


def _suggest_whole(name: str, own: Iterable[str]) -> tuple[str, ...]:
    kinds = catalog.devices()
    known = sorted({*kinds, *own})
    # A kind, or a driver's name of one, in other letters or with other separators.
    typed = _squashed(name)
    same = [kind for kind in known if _squashed(kind) == typed]
    driver = [kind for kind, entry in kinds.items() if typed in map(_squashed, entry.match)]
    label = [kind for kind, entry in kinds.items() if typed in map(_squashed, entry.labels)]
    # A driver's name without its maker.
    bare = [
        kind
        for kind, entry in kinds.items()
        if _essence(name) and _essence(name) in map(_essence, entry.match)
    ]
    for found in (same, driver, label, bare):
        if found:
            return tuple(found)
    # All that a name says is true of the kind: its model, memory, form.
    words = _words(name)
    if words:
        exact = [kind for kind in known if _words(kind) == words]
        fitting = [kind for kind in known if words <= _traits(kind, kinds.get(kind))]
        # `a100 80gb` leaves the form open, `3090` is no 3090 Ti.
        found = fitting if _says_memory(name) else exact or fitting
        if found:
            return tuple(found) if len(found) <= MAX_CANDIDATES else ()
    # A name that says more than the kind does: an H200 NVL is an h200.
    if not words & OTHER_MODELS:
        less = [kind for kind in known if words and _words(kind) < words]
        most = max((len(_words(kind)) for kind in less), default=0)
        if less:
            return tuple(kind for kind in less if len(_words(kind)) == most)
    begun = [kind for kind in known if _squashed(kind).startswith(typed)]
    if begun and len(typed) >= MIN_PART:
        return tuple(begun) if len(begun) <= MAX_CANDIDATES else ()
    # One letter is another product: a B100 is no h100.
    if len(re.findall(r"[a-z]", name.lower())) < MIN_LETTERS:
        return ()
    return suggest(name, known, ())


def _squashed(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _essence(name: str) -> tuple[str, ...]:
    """A driver's name without makers, in its order."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return tuple(word for word in words if word not in MAKERS)


def _words(name: str) -> frozenset[str]:
    """The words of a name that say which device it is: `rtx3090ti` is 3090 and ti, `A100-SXM4-80GB`
    a100, sxm and 80."""
    words = []
    for word in re.findall(r"[a-z0-9.]+", name.lower()):
        word = re.sub(r"^(geforce|rtx|gtx)(?=\d)", "", word)
        word = re.sub(r"^(\d+)(g|gb|gib)$", r"\1", word)
        form = FORMS.fullmatch(word)
        word = form[1] if form else word
        # `3090ti`, `4080super`.
        model = re.fullmatch(r"(\d{4})(ti|super)", word)
        words += list(model.groups()) if model else [word]
    return frozenset(word for word in words if word and word not in MAKERS)


def _traits(kind: str, entry: catalog.CatalogDevice | None) -> frozenset[str]:
    """All words that are true of a kind: of its name, its drivers' names, its memory."""
    names = (kind, *entry.match, *entry.labels) if entry else (kind,)
    traits = set[str]().union(*map(_words, names))
    if entry is not None and entry.memory:
        traits |= _words(entry.memory)
    if entry is not None and entry.interconnect is not None:
        traits |= FORM_OF.get(entry.interconnect.kind, set())
    return frozenset(traits)


def _says_memory(name: str) -> bool:
    return re.search(r"\d+\s*(g|gb|gib)\b", name.lower()) is not None


def _can_have(memory: int, divided: Slice) -> bool:
    """Whether a GPU of so much memory has slices of this kind."""
    parts = (memory * eighths / 8 for eighths in MEMORY_EIGHTHS.get(divided.cores, ()))
    return any(abs(part - divided.memory) <= SLICE_TOLERANCE * part for part in parts)
