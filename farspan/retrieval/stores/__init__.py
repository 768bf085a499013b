"""Vector stores, one file each: vectors with payloads, and the nearest to a query.

A module has `create(path, dim)` and `open_store(path)`, both returning a Store.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.problems import Refusal, nearest

#: What `index.store: auto` means; docs/decisions/0001-vector-database.md says why.
DEFAULT = "qdrant"

Vectors = npt.NDArray[np.float32]
Payload = Mapping[str, str | int]


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A stored vector near a query: its id, the inner product with the query, and what was stored with it."""

    id: int
    score: float
    payload: dict[str, str | int]


class Store(Protocol):
    """Unit vectors of one length with payloads, found by inner product."""

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        """Add N vectors. When this returns they survive a killed process; an id that is there already is replaced."""

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> list[Hit]:
        """The k best by inner product, best first, of those whose payload equals `where` on each of its keys."""

    def count(self) -> int:
        """Number of vectors."""

    def finish(self) -> None:
        """Build whatever makes search fast; the store is complete on disk when this returns."""

    def close(self) -> None:
        """Release files; the store cannot be used after."""


class StoreModule(Protocol):
    """What a store's file offers."""

    @staticmethod
    def create(path: Path, dim: int) -> Store: ...

    @staticmethod
    def open_store(path: Path) -> Store: ...


def names() -> list[str]:
    """Every store, without importing any."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def resolve(name: str) -> str:
    """The store that a user means; refuses an unknown one."""
    chosen = DEFAULT if name == "auto" else name
    if chosen not in names():
        match = nearest(name, names()) or DEFAULT
        raise Refusal(
            "out-of-range", what=f"there is no vector store {name!r}", where="run.yaml, key index.store",
            fact=f"stores: {', '.join(names())}", remedy=f"set index.store: {match}", key="index.store",
        )  # fmt: skip
    return chosen


def load(name: str) -> StoreModule:
    return cast(StoreModule, importlib.import_module(f"{__name__}.{resolve(name)}"))
