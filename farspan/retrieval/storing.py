"""Vectors of an index in its store: filled, followed and cleared.

A store in the index's own folder is copied before it is changed: who reads the old index has the
old one. At a server one table serves both: what is new is added before the new index takes the old
one's place, what is gone is deleted after, and a search passes over ids that its index does not
know.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from farspan.domain.codec import content_hash, load, save
from farspan.domain.problems import Refusal
from farspan.retrieval import stores
from farspan.retrieval.index import STORE, IndexManifest, field, passages_of
from farspan.retrieval.passages import Passages
from farspan.retrieval.stores import Ids, Payload, Spot, Store, StoreModule
from farspan.retrieval.stores._common import foreign
from farspan.retrieval.work import IndexWork

#: What is left at a server by the index that was there before.
LEFT = "left.json"
_ADD_AT_ONCE = 1024
#: A store that shares fewer of its vectors with the new one is not worth copying.
_SHARED_LEAST = 0.5


class Left(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table or collection at a server that no index needs any more."""

    store: str
    table: str


def table(path: Path, store: str, fit: str) -> str:
    """What the vectors of the index at `path` are called at a server; empty for a store in the
    index's folder."""
    name, location = stores.resolve(store)
    shared = stores.load(name).shared(location)
    return f"farspan_{content_hash(str(path.resolve()), store, fit)}" if shared else ""


def fill(
    path: Path,
    building: Path,
    manifest: IndexManifest,
    before: IndexManifest | None,
    work: IndexWork,
) -> None:
    """Bring the store of the index that is being made at `building` to its passages, which are
    written."""
    passages = passages_of(path, building, manifest)
    work.start("storing")
    with closing(_store(path, building, manifest, before, passages)) as store:
        there, ids_N = store.ids(), passages.rows_N["id"]
        new = np.flatnonzero(~np.isin(ids_N, there))
        work.did(len(ids_N) - len(new), kept=True)
        for rows in (
            new[start : start + _ADD_AT_ONCE] for start in range(0, len(new), _ADD_AT_ONCE)
        ):
            payloads = [_payload(passages, int(row), manifest) for row in rows]
            store.add(ids_N[rows].tolist(), np.asarray(passages.vectors_NE[rows]), payloads)
            work.did(len(rows))
        if not _is_shared(manifest):
            store.delete(there[~np.isin(there, ids_N)].tolist())
        store.finish()


def _payload(passages: Passages, row: int, manifest: IndexManifest) -> Payload:
    """What a search can be narrowed by; at a server, where others may read it, also the text."""
    document = passages.documents[int(passages.rows_N["document"][row])]
    payload = {
        name: value for name in manifest.fields if (value := field(document, name)) is not None
    }
    return payload | {"text": passages.chunk(row).text} if _is_shared(manifest) else payload


def _store(
    path: Path,
    building: Path,
    manifest: IndexManifest,
    before: IndexManifest | None,
    passages: Passages,
) -> Store:
    module, spot = stores.load(manifest.store[0]), manifest.spot(building)
    if _is_shared(manifest):
        try:
            return module.open_store(spot)
        except Refusal as refusal:
            if refusal.problem.code != "no-index":
                raise
    elif before is not None and (before.store, before.about) == (manifest.store, manifest.about):
        old = path / before.files / STORE
        kept = np.isin(passages.rows_N["id"], _ids(path, before)).mean()
        if old.is_dir() and kept >= _SHARED_LEAST:
            shutil.copytree(old, spot.folder)
            return _open_copy(module, spot, old)
    return module.create(spot, manifest.about)


def _open_copy(module: StoreModule, spot: Spot, old: Path) -> Store:
    """The store at `spot`, which is a copy of the one at `old`."""
    try:
        return module.open_store(spot)
    except Refusal as refusal:
        problem = refusal.problem
        if problem.code != "store-foreign":
            raise
        # Without this the fix would move the copy away, and the next one would be refused again.
        raise foreign(old, problem.what, problem.fact) from None


def _ids(path: Path, manifest: IndexManifest) -> Ids:
    """Ids (N) of the chunks of the index at `path`."""
    ids_N: Ids = passages_of(path, path, manifest).rows_N["id"]
    return ids_N


def _is_shared(manifest: IndexManifest) -> bool:
    return bool(manifest.table)


def leave(building: Path, before: IndexManifest, manifest: IndexManifest) -> None:
    """Note what the old index has at a server, before the new one takes its place."""
    if before.table and (before.recipe.store, before.table) != (
        manifest.recipe.store,
        manifest.table,
    ):
        save(Left(store=before.recipe.store, table=before.table), building / LEFT)


def clear(building: Path, manifest: IndexManifest, path: Path, say: Callable[[str], None]) -> None:
    """Remove from servers what the index that took another's place does not need. Not to reach one
    is no failure of the index: what stays there is said."""
    left = load(building / LEFT, Left) if (building / LEFT).exists() else None
    try:
        if manifest.table:
            with closing(stores.load(manifest.store[0]).open_store(manifest.spot(path))) as store:
                there = store.ids()
                store.delete(there[~np.isin(there, _ids(path, manifest))].tolist())
        if left is not None and left.table != manifest.table:
            name, location = stores.resolve(left.store)
            stores.load(name).drop(Spot(folder=building, location=location, name=left.table))
    except Refusal as refusal:
        what = left.table if left else manifest.table
        say(f"what the old index had in {what} is still there: {refusal.problem.what}")
