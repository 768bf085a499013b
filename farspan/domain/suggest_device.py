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

#: Makers and families, which add nothing to a model's number.
MAKERS = {
    *("nvidia", "geforce", "rtx", "gtx", "tesla", "quadro", "amd", "instinct", "radeon", "apple"),
    *("gpu", "graphics", "card", "generation", "gen", "edition", "core", "tensor"),
}
#: Names of what joins a GPU to its host, in all their generations.
FORM_FACTORS = re.compile(r"(sxm|pcie|nvl|oam)\d*")
FORM_OF = {"nvlink": {"sxm", "nvlink"}, "pcie": {"pcie"}}
#: A slice of a divided GPU, as its driver names it: `MIG 3g.20gb`, `mig-1g.10gb`.
SLICE = re.compile(r"(?:\bmig[\s-]*)?\b(\d)g\.(\d+)gb(?:\+\w+)*", re.IGNORECASE)
#: Eighths of a GPU's memory that a slice has, by the sevenths of its cores ("MIG User Guide", table
#: of profiles of A100 and H100).
MEMORY_EIGHTHS = {1: (1, 2), 2: (2,), 3: (4,), 4: (4,), 7: (8,)}
CORE_SEVENTHS = 7
#: The driver keeps some memory of each slice for itself: a slice of an eighth of 141 GB has 18.
SLICE_TOLERANCE = 0.07
#: The command that shows every kind.
LIST_COMMAND = "farspan cluster list"
#: GPUs that can be divided so.
DIVISIBLE = re.compile(r"(a100|h100|h200|gh200|b200|b300)\b")
#: Words that make a device another than the one of the same number.
OTHER_MODELS = {"ti", "super", "laptop", "mobile", "max", "maxq", "q", "ada", "pro", "ultra", "d"}
#: Names with fewer letters are compared with none: each letter decides which product it is.
MIN_LETTERS = 3


class Slice(NamedTuple):
    """A slice of a GPU: sevenths of its cores, and bytes."""

    cores: int
    memory: int


def suggest_device(name: str, own: Iterable[str] = ()) -> tuple[str, ...]:
    """Suggest the kinds that a name may mean, of the catalogue and of a cluster file's `own`; empty
    where none is like it."""
    divided = slice_of(name)
    if divided is None:
        return _suggest_whole(name, own)
    rest = re.sub(r"\bmig\b", "", SLICE.sub(" ", name, count=1), flags=re.IGNORECASE).strip()
    model = rest.lower()
    kinds = catalog.load_devices()
    if model in kinds:
        whole = tuple(kind for kind in sorted(kinds) if f"{kind}-".startswith(f"{model}-"))
    elif rest:
        whole = _suggest_whole(rest, own)
    else:
        whole = tuple(filter(DIVISIBLE.match, sorted(kinds)))
    fitting = []
    for kind in whole:
        memory = kinds[kind].memory if kind in kinds else None
        if memory and _can_have(parse_bytes(memory), divided):
            fitting.append(kind)
    return tuple(fitting) or whole


def slice_of(name: str) -> Slice | None:
    """Return the slice of a GPU that a name describes, if it does."""
    match = SLICE.search(name)
    if match is None:
        return None
    return Slice(cores=int(match[1]), memory=int(match[2]) * 10**9)


def advise_device(name: str, own: Iterable[str] = ()) -> str:
    """Write the remedy for a kind that is unknown: `write a100-40 or a100-80`; for a slice of a GPU
    the device that it is."""
    kinds = suggest_device(name, own)
    divided = slice_of(name)
    if not kinds:
        near = neighbour_kinds(name)
        return f"farspan cluster list   # among them {any_of(near)}" if near else LIST_COMMAND
    if divided is None:
        return f"write {any_of(kinds)}"
    memory = divided.memory // 10**9
    share = divided.cores / CORE_SEVENTHS
    return "write " + " or ".join(
        f"{{kind: {yaml_word(kind)}, memory: {memory:d}GB, share: {share:.0%}}}" for kind in kinds
    )


def describe_slice(name: str) -> str:
    """Describe the slice of a GPU that a driver names, as a cluster file has it; empty of a whole
    GPU, and where the catalogue lacks the GPU."""
    if slice_of(name) is None or not suggest_device(name):
        return ""
    return advise_device(name).removeprefix("write ")


def neighbour_kinds(name: str) -> tuple[str, ...]:
    """Kinds that differ from a name in its last digit alone: other products, so none is meant, but
    a reader who slipped sees which there are."""
    typed = _squash_name(name)
    stem = re.fullmatch(r"(.*?)\d(\D*)", typed)
    if stem is None:
        return ()
    same_stem = re.compile(rf"{re.escape(stem[1])}\d{re.escape(stem[2])}")
    return tuple(
        kind for kind in sorted(catalog.load_devices()) if same_stem.fullmatch(_squash_name(kind))
    )


def _suggest_whole(name: str, own: Iterable[str]) -> tuple[str, ...]:
    kinds = catalog.load_devices()
    known = sorted({*kinds, *own})
    # A kind, a driver's name of one, or what Ray calls it, in other letters or with other
    # separators; and a driver's name without its maker.
    typed = _squash_name(name)
    model = _strip_makers(name)
    same = [kind for kind in known if _squash_name(kind) == typed]
    driver = []
    label = []
    bare = []
    for kind, entry in kinds.items():
        if typed in map(_squash_name, entry.match):
            driver.append(kind)
        if typed in map(_squash_name, entry.labels):
            label.append(kind)
        if model and model in map(_strip_makers, entry.match):
            bare.append(kind)
    candidates = same or driver or label or bare
    if candidates:
        return tuple(candidates)
    # All that a name states is true of the kind: its model, memory, form.
    words = _split_words(name)
    words_of = {kind: _split_words(kind) for kind in known}
    if words:
        exact = [kind for kind in known if words_of[kind] == words]
        fitting = [kind for kind in known if words <= _collect_traits(kind, kinds.get(kind))]
        # `a100 80gb` leaves the form open, `3090` is no 3090 Ti.
        has_memory = re.search(r"\d+\s*(g|gb|gib)\b", name.lower()) is not None
        candidates = fitting if has_memory else exact or fitting
        if candidates:
            return tuple(candidates) if len(candidates) <= MAX_CANDIDATES else ()
    # A name that states more than the kind does: an H200 NVL is an h200.
    if words and not words & OTHER_MODELS:
        less = [kind for kind in known if words_of[kind] < words]
        most = max((len(words_of[kind]) for kind in less), default=0)
        if less:
            return tuple(kind for kind in less if len(words_of[kind]) == most)
    begun = [kind for kind in known if _squash_name(kind).startswith(typed)]
    if begun and len(typed) >= MIN_PART:
        return tuple(begun) if len(begun) <= MAX_CANDIDATES else ()
    # One letter is another product: a B100 is no h100.
    if len(re.findall(r"[a-z]", name.lower())) < MIN_LETTERS:
        return ()
    likely = suggest(name, known, ())
    if not likely and typed.startswith("cpu"):
        return tuple(kind for kind in known if kind.startswith("cpu"))
    return likely


def _squash_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _strip_makers(name: str) -> tuple[str, ...]:
    """Return the words of a driver's name without makers, in their order."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return tuple(word for word in words if word not in MAKERS)


def _split_words(name: str) -> frozenset[str]:
    """Return the words of a name that identify the device: `rtx3090ti` is 3090 and ti,
    `A100-SXM4-80GB` a100, sxm and 80."""
    words = []
    for word in re.findall(r"[a-z0-9.]+", name.lower()):
        word = re.sub(r"^(geforce|rtx|gtx)(?=\d)", "", word)
        word = re.sub(r"^(\d+)(g|gb|gib)$", r"\1", word)
        form = FORM_FACTORS.fullmatch(word)
        word = form[1] if form else word
        # `3090ti`, `4080super`.
        model = re.fullmatch(r"(\d{4})(ti|super)", word)
        words += list(model.groups()) if model else [word]
    return frozenset(word for word in words if word and word not in MAKERS)


def _collect_traits(kind: str, entry: catalog.CatalogDevice | None) -> frozenset[str]:
    """Collect all words that are true of a kind: of its name, its drivers' names, its memory."""
    traits = set(_split_words(kind))
    if entry is not None:
        traits.update(*map(_split_words, entry.match), *map(_split_words, entry.labels))
        if entry.memory:
            traits |= _split_words(entry.memory)
        if entry.interconnect is not None:
            traits |= FORM_OF.get(entry.interconnect.kind, set())
    return frozenset(traits)


def _can_have(memory: int, divided: Slice) -> bool:
    """Return whether a GPU of this memory has slices of this kind."""
    for eighths in MEMORY_EIGHTHS.get(divided.cores, ()):
        part = memory * eighths / 8
        if abs(part - divided.memory) <= SLICE_TOLERANCE * part:
            return True
    return False
