"""Vector stores, one file each: vectors with payloads, and the nearest to a query.

A module has `create`, `open` and `drop`, each of a place. `index.store` of run.yaml names it as
`NAME` or `NAME:LOCATION`: with a location vectors lie at a server. Listing the stores imports none
of them.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.install import extra_of, install_command
from farspan.domain.problems import Refusal
from farspan.domain.suggest import advise, known_names

#: What `index.store: auto` means; docs/decisions/0001-vector-database.md says why.
DEFAULT = "qdrant"

#: The table or collection of a store that has a folder to itself.
EMBEDDED_TABLE = "farspan"

#: What a key of a payload looks like: a word that no store reads as more than a name.
FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Vectors = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float32]
#: Numbers of chunks: from 0 to below 2**63.
Ids = npt.NDArray[np.int64]
Payload = Mapping[str, str | int]


class Hits(NamedTuple):
    """Ids of the vectors nearest to a query (H), best first, and their inner products with it."""

    ids: Ids
    scores: Scores


class StoreLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where unit vectors of `dim` numbers lie: in `folder`, which is the store's alone, or beyond
    it at `location`, such as the URL of a server, in a table or collection called `name`."""

    folder: Path
    location: str = ""
    name: str = EMBEDDED_TABLE
    dim: int


class Store(Protocol):
    """Unit vectors of one length with payloads, found by inner product.

    Refuses (store-mismatch) vectors of another length or with a NaN, (out-of-range) a field of a
    payload that is not a word of letters, digits and underscores, (store-unreachable) where a
    server went away.
    """

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        """Add N vectors, of ids that are not there yet."""

    def delete(self, ids: Sequence[int]) -> None:
        """Remove vectors, each id once; one that is not there is passed over."""

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> Hits:
        """Return the k best by inner product, best first, of those whose payload equals `where` on
        each of its keys."""

    def vectors(self, ids: Sequence[int]) -> Vectors:
        """Return the vectors (N, D) of ids, as they were added; zeros for an id that is not
        there."""

    def ids(self) -> Ids:
        """Every id, in ascending order."""

    def finish(self) -> None:
        """Build whatever makes search fast; the store is complete on disk when this returns."""

    def close(self) -> None:
        """Release files and connections; the store cannot be used after."""


class StoreModule(Protocol):
    """What a store's file offers. A folder is one index's, which fills it and never changes it
    after; at a server the tables of one index stay, and are changed while others read them."""

    @staticmethod
    def create(place: StoreLocation) -> Store:
        """Create a store; at a server use the table that is there, if it is farspan's. Refuse
        (store-foreign) a table or collection that is somebody else's, (store-unreachable) a server
        that does not answer or lets nobody in, (out-of-range) a location that it cannot read and
        more numbers a vector than it can hold."""

    @staticmethod
    def open(place: StoreLocation) -> Store:
        """Open the store that `create` made. Refuse like `create`, and (no-index) where there is
        none."""

    @staticmethod
    def drop(place: StoreLocation) -> None:
        """Remove the table or collection from a server, if it is farspan's."""


def store_names() -> list[str]:
    """Every store, without importing any."""
    return sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )


def resolve(spec: str, option: str = "") -> tuple[str, str]:
    """Return the store that a user means and its location, by run.yaml or by an option; refuse an
    unknown store, and a location with a password in it: a run's files are shared and copied."""
    name, _, location = (DEFAULT if spec == "auto" else spec).partition(":")
    if name not in store_names():
        raise Refusal(
            "out-of-range",
            what=f"there is no vector store {name!r}",
            where=option or "run.yaml, key index.store",
            fact=known_names(name, store_names(), "stores"),
            remedy=advise(name, store_names(), verb="set index.store:", option=option),
            key=None if option else "index.store",
        )
    user, at, _ = location.partition("://")[2].rpartition("@")
    if (at and ":" in user) or "password=" in location:
        raise Refusal(
            "out-of-range",
            what="the store's location has a password in it",
            where="run.yaml, key index.store",
            fact="run.yaml and the index are read by others, and copied with the run",
            remedy="leave it out, and give it in the environment: export PGPASSWORD=...",
            key="index.store",
        )
    return name, location


def load(name: str) -> StoreModule:
    """Import the module of a store; refuse (extra-missing) where its library is not installed."""
    try:
        return cast(StoreModule, importlib.import_module(f"{__name__}.{name}"))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("farspan"):
            raise
        raise Refusal(
            "extra-missing",
            what=f"the store {name} needs a library that is not installed",
            where=f"index.store: {name}",
            fact=f"there is no module {error.name}",
            remedy=install_command(extra_of(error.name)),
            key="index.store",
        ) from None
