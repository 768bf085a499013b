"""What every store does alike: it checks vectors and fields, and refuses what is another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal, command
from farspan.retrieval.stores import FIELD, Ids, Payload, StoreLocation, Vectors

#: Under which key a server keeps that a table or collection is farspan's.
MARK = "farspan"


def rows_to_add(
    ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload], dim: int
) -> tuple[list[int], Vectors, list[dict[str, str | int]]]:
    """Return ids, vectors and payloads as a store writes them.

    Refuses (store-mismatch) vectors of another length than `dim`, a NaN or infinity, and an id
    below 0.
    """
    numbers, vectors_ND = [int(number) for number in ids], np.asarray(vectors_ND, np.float32)
    if numbers:
        check_vectors(vectors_ND, dim)
        if min(numbers) < 0:
            raise _mismatch("an id is below 0", f"ids from {min(numbers)}")
    check_keys({key for payload in payloads for key in payload})
    return numbers, np.ascontiguousarray(vectors_ND), [dict(payload) for payload in payloads]


def checked_filter(vector_D: Vectors, where: Payload | None, dim: int) -> dict[str, str | int]:
    """Return the fields and values of a filter. Refuses a query's vector like `check_vectors`, and
    (out-of-range) a field."""
    check_vectors(vector_D, dim)
    check_keys({*(where or {})})
    return dict(where or {})


def check_vectors(vectors_ND: Vectors, dim: int) -> None:
    """Refuse (store-mismatch) vectors of another length than `dim`, and a NaN or infinity in
    one."""
    if (length := vectors_ND.shape[-1]) != dim:
        raise _mismatch(
            "vectors are of another length than the store's", f"store: {dim}, vectors: {length}"
        )
    if not np.isfinite(vectors_ND).all():
        raise _mismatch("a vector holds a NaN or an infinity", "nothing was written or searched")


def check_keys(keys: set[str]) -> None:
    """Refuse (out-of-range) a key of a payload that some store would read as more than a name."""
    for key in sorted(keys):
        if not FIELD.fullmatch(key):
            raise Refusal(
                "out-of-range",
                what=f"{key!r} cannot be a field of a chunk",
                where="the vector store",
                fact="a field is a word of letters, digits and underscores",
                remedy="name another field",
            )


def in_order(ids: Sequence[int], found: Mapping[Any, Any], dim: int) -> Vectors:
    """Return the vectors (N, D) that were found of ids; zeros for the rest."""
    vectors_ND = np.zeros((len(ids), dim), np.float32)
    for row, number in enumerate(ids):
        if number in found:
            vectors_ND[row] = found[number]
    return vectors_ND


def sorted_ids(ids: Sequence[int]) -> Ids:
    return np.sort(np.array(ids, np.int64))


def _mismatch(what: str, fact: str) -> Refusal:
    remedy = command("embed")
    return Refusal("store-mismatch", what=what, where="the vector store", fact=fact, remedy=remedy)


def refuse_location(place: StoreLocation) -> None:
    """Refuse (out-of-range) a location of a store that lies in a folder."""
    if place.location:
        raise Refusal(
            "out-of-range",
            what="this store lies in the run's folder and takes no location",
            where="run.yaml, key index.store",
            fact=f"location: {place.location}",
            remedy="leave out what follows the store's name",
            key="index.store",
        )


def bad_location(what: str, fact: str, remedy: str) -> Refusal:
    """A location or a vector's length that a store cannot have; `remedy` is what to set instead."""
    return Refusal(
        "out-of-range",
        what=what,
        where="run.yaml, key index.store",
        fact=fact,
        remedy=f"set index.store: {remedy}",
        key="index.store",
    )


def refuse_foreign(mark: object, where: str | Path) -> None:
    """Refuse (store-foreign) a table or collection that does not bear the mark of farspan's."""
    if mark != MARK:
        raise foreign(
            where, "farspan did not make what has this name", "it bears no mark of farspan's"
        )


def foreign(where: str | Path, what: str, fact: str) -> Refusal:
    """A folder, table or collection that is not this index's: it is left as it is."""
    remedy = "name another database or server in run.yaml, key index.store"
    if isinstance(where, Path):
        remedy = shell_line("mv", where, Path(f"{where}.other"))
    return Refusal(
        "store-foreign", what=what, where=where, fact=fact, remedy=remedy, key="index.store"
    )


def missing(where: str | Path, fact: str) -> Refusal:
    """No store where one is to be opened."""
    return Refusal(
        "no-index",
        what="there is no such vector store",
        where=where,
        fact=fact,
        remedy=command("embed"),
    )


def unreachable(where: str, error: Exception, remedy: str) -> Refusal:
    """A server that does not answer, does not let us in, or does not do what is asked. `remedy`:
    how to look at it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Refusal(
        "store-unreachable",
        what="the vector store's server does not do what is asked",
        where=where,
        fact=lines[0] if lines else type(error).__name__,
        remedy=remedy,
        key="index.store",
    )
