"""What every store does alike: it checks vectors and payloads, and knows its own folder or table
from another's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from farspan.domain.codec import load, save
from farspan.domain.escapes import shell_line
from farspan.domain.problems import Refusal, command
from farspan.retrieval.stores import FIELD, About, Payload, Spot, Vectors

#: Under which key a server keeps what a table or collection of farspan's is about.
MARK = "farspan"
_ABOUT = "about.json"


def rows_to_add(
    ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload], dim: int
) -> tuple[list[int], Vectors, list[dict[str, str | int]]]:
    """What is to be written of N rows: every id once, with the last of its vectors and payloads.

    Refuses (store-mismatch) vectors of another length than `dim`, a NaN or infinity, and an id
    below 0.
    """
    last = {int(number): row for row, number in enumerate(ids)}
    if not last:
        return [], np.zeros((0, dim), np.float32), []
    vectors_ND = np.asarray(vectors_ND, np.float32)
    if not len(ids) == len(vectors_ND) == len(payloads):
        raise ValueError(f"{len(ids)} ids, {len(vectors_ND)} vectors and {len(payloads)} payloads")
    check_vectors(vectors_ND, dim)
    if min(last) < 0 or max(last) >= 2**63:
        raise _mismatch(
            "an id is not from 0 to below 2**63", f"ids from {min(last)} to {max(last)}"
        )
    check_keys({key for payload in payloads for key in payload})
    kept = [*last.values()]
    return [*last], np.ascontiguousarray(vectors_ND[kept]), [dict(payloads[row]) for row in kept]


def check_vectors(vectors_ND: Vectors, dim: int) -> None:
    """Refuses (store-mismatch) vectors of another length than `dim`, and a NaN or infinity in
    one."""
    if (length := vectors_ND.shape[-1]) != dim:
        raise _mismatch(
            "vectors are of another length than the store's", f"store: {dim}, vectors: {length}"
        )
    if not np.isfinite(vectors_ND).all():
        raise _mismatch("a vector holds a NaN or an infinity", "nothing was written or searched")


def check_keys(keys: set[str]) -> None:
    """Refuses (out-of-range) a key of a payload that some store would read as more than a name."""
    for key in sorted(keys):
        if not FIELD.fullmatch(key):
            raise Refusal(
                "out-of-range",
                what=f"{key!r} cannot be a field of a chunk",
                where="the vector store",
                fact="a field is a word of letters, digits and underscores",
                remedy="name another field",
            )


def _mismatch(what: str, fact: str) -> Refusal:
    remedy = command("embed")
    return Refusal("store-mismatch", what=what, where="the vector store", fact=fact, remedy=remedy)


def new_folder(spot: Spot, about: About) -> Path:
    """The folder of a new embedded store, made, with a file that says what it is about.

    Refuses (store-foreign) a folder that holds something, and (out-of-range) a location.
    """
    _no_location(spot)
    if spot.folder.exists() and any(spot.folder.iterdir()):
        raise foreign(
            spot.folder,
            "the folder for a new store is not empty",
            f"it holds {_listed(spot.folder)}",
        )
    spot.folder.mkdir(parents=True, exist_ok=True)
    save(about, spot.folder / _ABOUT)
    return spot.folder


def own_folder(spot: Spot, data: str) -> About:
    """What the embedded store is about that `new_folder` made; `data` is what the store itself has
    in the folder.

    Refuses (no-index) a missing or empty folder, (store-foreign) what another made, and
    (out-of-range) a location.
    """
    _no_location(spot)
    if not spot.folder.exists() or not any(spot.folder.iterdir()):
        raise missing(spot.folder, "the folder is missing or empty")
    if not (spot.folder / data).exists() or not (spot.folder / _ABOUT).exists():
        raise foreign(
            spot.folder, "the folder is of another store", f"it holds {_listed(spot.folder)}"
        )
    return load(spot.folder / _ABOUT, About)


def _no_location(spot: Spot) -> None:
    if spot.location:
        raise Refusal(
            "out-of-range",
            what="this store lies in the run's folder and takes no location",
            where="run.yaml, key index.store",
            fact=f"location: {spot.location}",
            remedy="leave out what follows the store's name",
            key="index.store",
        )


def _listed(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")


def marked(about: About) -> str:
    """What a server keeps to a table or collection, so that `claimed` knows it again."""
    return msgspec.json.encode(about).decode()


def claimed(mark: object, where: object, wanted: About | None = None) -> About:
    """The About that `marked` wrote. Refuses (store-foreign) where it is none, and where it is not
    the one `wanted`."""
    try:
        found = msgspec.json.decode(mark if isinstance(mark, str) else "", type=About)
    except msgspec.DecodeError:
        raise foreign(
            where, "farspan did not make what has this name", "it bears no mark of farspan's"
        ) from None
    if wanted is not None and found != wanted:
        there, here = (
            f"model {a.model}, tokenizer {a.tokenizer}, fit {a.fit}, dim {a.dim}"
            for a in (found, wanted)
        )
        raise foreign(
            where, "what has this name holds other vectors", f"there: {there}; here: {here}"
        )
    return found


def foreign(where: object, what: str, fact: str) -> Refusal:
    """A folder, table or collection that is not this index's: it is left as it is."""
    remedy = "name another database or server in run.yaml, key index.store"
    if isinstance(where, Path):
        remedy = shell_line("mv", where, Path(f"{where}.other"))
    return Refusal(
        "store-foreign", what=what, where=where, fact=fact, remedy=remedy, key="index.store"
    )


def missing(where: object, fact: str) -> Refusal:
    """No store where one is to be opened."""
    return Refusal(
        "no-index",
        what="there is no such vector store",
        where=where,
        fact=fact,
        remedy=command("embed"),
    )


def unreachable(where: object, error: object, remedy: str) -> Refusal:
    """A server that does not answer, does not let us in, or does not do what is asked. `remedy`:
    how to look at it."""
    fact = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    return Refusal(
        "store-unreachable",
        what="the vector store's server does not do what is asked",
        where=where,
        fact=fact,
        remedy=remedy,
        key="index.store",
    )
