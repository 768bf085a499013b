"""Make an index, or bring it up to its text: chunks that are new or changed are embedded, what is
gone is removed.

    documents -> chunks -> vectors -> passages, BM25, stores in a new folder -> manifest renamed
    over the old one

Weights, means and maps stay those of the fit while the text changes; `refit` makes new ones
(`retrieval/fitting.py`). What is embedded is kept beside the index until that is whole, so that a
build that was stopped goes on where it was.

A store in a folder begins as a copy of the old index's, whose readers have the old one. At a server
one table serves both: what is new is added before the new index takes the old one's place, what is
gone is deleted after, and a search passes over ids that its index does not know.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from farspan.corpus.copies import Copies
from farspan.domain.codec import content_hash, load, save
from farspan.domain.problems import Refusal
from farspan.domain.units import counted
from farspan.launch.lock import locked
from farspan.launch.trust import require_server, seal_server
from farspan.retrieval import passages, stores
from farspan.retrieval.chunk import Chunk, chunk_document
from farspan.retrieval.embed import Embedder
from farspan.retrieval.evaluate import Evaluation
from farspan.retrieval.fitting import Task, fit_corpus
from farspan.retrieval.index import (
    FITTED,
    LEXICAL,
    MANIFEST,
    OWN,
    PASSAGES,
    SEAL,
    Fit,
    Index,
    IndexManifest,
    Origin,
    Recipe,
    Table,
    VectorSet,
    field,
    passages_of,
)
from farspan.retrieval.lexical import K1, B, Lexical
from farspan.retrieval.passages import (
    IndexedDocument,
    Passages,
    corpus_hash,
    indexed_document,
    text_hash,
)
from farspan.retrieval.pooling import bf16_is_fast
from farspan.retrieval.stores import FIELD, Ids, Payload, Store, Vectors

#: Columns that searches can be narrowed by, at most, and what payloads hold beside them.
_FIELDS = 64
_NOT_COLUMNS = {"title", "origin", "text"}
_ADD_AT_ONCE = 1024
#: Where it is noted which tables a build found or made at servers: in the end all but the new
#: index's are dropped.
_TABLES = "tables.json"


class ServerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table or collection of an index at a server."""

    store: str
    table: Table


@dataclass(frozen=True)
class Chunked:
    """What the index is of: documents, their chunks, and the hash (N) of what is embedded of each
    chunk."""

    documents: list[IndexedDocument]
    chunks: list[Chunk]
    texts: npt.NDArray[np.int64]
    #: Documents that the old index does not have.
    new: int


@dataclass(frozen=True)
class Embedded:
    """What embeds, which chunks (N) the fit knows, and what gives the vectors of chunks by their
    rows."""

    embedder: Embedder
    vectors: Callable[[Ids], Vectors]
    dim: int
    fitted: npt.NDArray[np.bool_]
    fit: Fit
    evaluation: Evaluation | None


def build(task: Task) -> IndexManifest:
    """Make the index, or bring it up to the documents; nothing to do where it is.

    An index with an evaluation serves also where none is asked for. Until the new one is whole the
    old one stays. Refuses a corpus without text, and to be the second at work on this index
    (run-busy).
    """
    task = _resolved(task)
    path = task.path
    building = task.path.with_name(f"{task.path.name}.building")
    places = task.known_copies().places
    documents = [
        indexed_document(document, places.get(number, ()))
        for number, document in enumerate(task.documents)
    ]
    corpus = corpus_hash(documents)
    if (manifest := _current(task, corpus)) and not building.exists():
        if manifest.source != task.source:
            # Files were touched, and say what they said before.
            manifest = msgspec.structs.replace(manifest, source=task.source)
            save(manifest, path / MANIFEST)
        _seal(path, manifest)
        task.say(f"index {path} is up to date")
        return manifest
    with _alone(building, path):
        manifest = _current(task, corpus)
        before = _manifest(path)
        kept = building / _features_name(task)
        _sweep(building, {"lock", kept.name, _TABLES}, building)
        _sweep(path, {MANIFEST, before.files if before else ""}, building)
        if manifest is None:
            kept.mkdir(exist_ok=True)
            task.work.folder = kept
            manifest = _write(task, building, documents, corpus, before)
            save(manifest, path / MANIFEST)
            _sweep(path, {MANIFEST, manifest.files}, building)
        _clear_servers(path, building, manifest, task.say)
        shutil.rmtree(building, ignore_errors=True)
    return manifest


def _features_name(task: Task) -> str:
    """The folder for what a model has embedded, in the way of this process."""
    device = task.model.tok.weight.device
    return content_hash(task.origin, str(torch.__version__), device.type, bf16_is_fast(device))


def _resolved(task: Task) -> Task:
    """The task with its store's whole name: `auto` may come to mean another."""
    name, location = stores.resolve(task.recipe.store)
    spec = f"{name}:{location}" if location else name
    return replace(task, recipe=msgspec.structs.replace(task.recipe, store=spec))


def _fit_id(task: Task, corpus: str) -> str:
    recipe = msgspec.structs.replace(task.recipe, store="", evaluate=True)
    return content_hash(task.origin, recipe, corpus, list(task.own), task.fit_s)


def _manifest(path: Path) -> IndexManifest | None:
    """The manifest at `path`; None also where it is of another version, or damaged."""
    with suppress(Refusal):
        return load(path / MANIFEST, IndexManifest)
    return None


def _current(task: Task, corpus: str) -> IndexManifest | None:
    """The manifest at the path if its index is the one to be made, or that one with an
    evaluation."""
    manifest = _manifest(task.path)
    if manifest is None or manifest.origin != task.origin or manifest.corpus != corpus:
        return None
    enough = (task.recipe, msgspec.structs.replace(task.recipe, evaluate=True))
    fitted = not task.refit or manifest.fit.id == _fit_id(task, corpus)
    return manifest if manifest.recipe in enough and fitted else None


def _alone(building: Path, path: Path) -> IO[bytes]:
    """The lock of the folder of a building; refuses where another process has it. Who has it
    removes the folder."""
    while True:
        building.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            lock = locked(building / "lock", "this index is being made already", path)
            if os.path.samestat(os.fstat(lock.fileno()), (building / "lock").stat()):
                return lock


def _sweep(folder: Path, kept: set[str], building: Path) -> None:
    """Remove what killed processes have left, and the files of an index of before: these are first
    moved away whole, as who is just opening them may write to them."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in [*folder.iterdir()]:
        if entry.name not in kept:
            gone = entry.rename(building / f"gone-{entry.name}")
            shutil.rmtree(gone, ignore_errors=True) if gone.is_dir() else gone.unlink()


def _write(
    task: Task,
    building: Path,
    documents: list[IndexedDocument],
    corpus: str,
    before: IndexManifest | None,
) -> IndexManifest:
    """Write the files of the index into a folder of their own, and fill its store."""
    with ExitStack() as stack:
        old = _usable(task, before)
        if old is not None:
            stack.callback(old.close)
        chunked = _chunked(task, documents, old)
        if not chunked.chunks:
            raise Refusal(
                "no-documents",
                what="there is nothing to index",
                where=task.path.parent,
                fact=f"{counted(len(documents), 'document')}, none with text",
                remedy="name a source with text: farspan init FOLDER",
            )
        task.work.expect("storing", len(chunked.chunks))
        if old is None or task.refit or (task.recipe.evaluate and not old.manifest.recipe.evaluate):
            old = None
            recipe = task.recipe
            embedded = _fitted(task, chunked, corpus)
        else:
            embedded = _followed(task, chunked, old)
            recipe = msgspec.structs.replace(task.recipe, evaluate=old.manifest.recipe.evaluate)
        manifest = _manifest_of(task, chunked, embedded, recipe, corpus)
        _write_files(task, chunked, embedded, manifest)
        _note_tables(building, task.path, before, manifest)
        _fill(task, manifest, embedded, old)
    return manifest


def _manifest_of(
    task: Task, chunked: Chunked, embedded: Embedded, recipe: Recipe, corpus: str
) -> IndexManifest:
    at_server = bool(stores.resolve(recipe.store)[1])
    place = content_hash(str(task.path.resolve()), recipe.store, embedded.fit.id)
    own = VectorSet(
        encoder=OWN,
        dim=embedded.dim,
        store=recipe.store,
        table=f"farspan_{place}" if at_server else "",
    )
    return IndexManifest(
        origin=task.origin,
        recipe=recipe,
        corpus=corpus,
        source=task.source,
        documents=len(chunked.documents),
        near_copies=task.known_copies().near,
        exact_copies=task.known_copies().exact,
        chunks=len(chunked.chunks),
        sets={OWN: own},
        dim=own.dim,
        table=own.table,
        fit=embedded.fit,
        fitted_chunks=int(embedded.fitted.sum()),
        fields=_fields(chunked.documents),
        evaluation=embedded.evaluation,
        files=content_hash(task.origin, recipe, corpus, embedded.fit),
    )


def _write_files(task: Task, chunked: Chunked, embedded: Embedded, manifest: IndexManifest) -> None:
    """Write all but the stores."""
    files = task.path / manifest.files
    # Only a manifest that somebody changed has named this folder before.
    shutil.rmtree(files, ignore_errors=True)
    (files / PASSAGES).mkdir(parents=True)
    passages.write(
        files / PASSAGES, chunked.documents, chunked.chunks, chunked.texts, embedded.fitted
    )
    texts = (
        "\n".join([*_titles(document), text.text])
        for document, text in zip(chunked.documents, task.documents, strict=True)
    )
    Lexical.build(texts, embedded.fit.k1, embedded.fit.b).save(files / LEXICAL)
    embedded.embedder.save(files / FITTED)
    _seal(task.path, manifest)


def _usable(task: Task, before: IndexManifest | None) -> Index | None:
    """The index that is there, opened, if its vectors are of this model and recipe and whole."""
    if before is None or before.origin != task.origin:
        return None
    same = msgspec.structs.replace(
        before.recipe, store=task.recipe.store, evaluate=task.recipe.evaluate
    )
    another_store = before.recipe.store != task.recipe.store
    if same != task.recipe or (another_store and not _is_own(task.path, before)):
        return None

    def embedder(fitted: Path, of: Origin) -> Embedder:
        return Embedder.load(task.model, task.tokenizer, fitted, task.work, task.processes)

    try:
        # Nobody else replaces it meanwhile, and its words are not asked for.
        old = Index(task.path, before, embedder, "")
        # Who reads all of it now finds what is damaged while everything can still be made again.
        count = len(old.documents) and sum(1 for _ in old.passages)
        if count and np.isin(old.passages.rows_N["id"], old.store.ids()).all():
            return old
        old.close()
    except Refusal as refusal:
        gone = another_store and refusal.problem.code == "store-unreachable"
        if refusal.problem.code != "no-index" and not gone:
            raise
    return None


def _seal(path: Path, manifest: IndexManifest) -> None:
    """Mark that this user puts vectors at the servers of an index."""
    if manifest.servers:
        seal_server(path / manifest.files / SEAL, manifest.servers)


def _is_own(path: Path, manifest: IndexManifest) -> bool:
    """Whether this user has put the vectors of the index at `path` where they lie."""
    if manifest.servers:
        try:
            require_server(path / manifest.files / SEAL, manifest.servers, "")
        except Refusal:
            return False
    return True


def _chunked(task: Task, documents: list[IndexedDocument], old: Index | None) -> Chunked:
    """The chunks of every document; those of documents that the old index has are read from it."""
    # Of a document that a source gives twice the first one's chunks have the ids that their content
    # gives them.
    numbered = list(enumerate(old.documents)) if old else []
    known = {document.key: number for number, document in reversed(numbered)}
    size = max(min(task.recipe.chunk_tokens, task.model.spec.context - 1), 8)
    chunks: list[Chunk] = []
    for number, (document, text) in enumerate(zip(documents, task.documents, strict=True)):
        if old is not None and document.key in known:
            rows = old.passages.of_document(known[document.key])
            chunks += [
                msgspec.structs.replace(old.passages.chunk(row), document=number) for row in rows
            ]
        else:
            chunks += chunk_document(text, number, task.tokenizer, size)
    texts_N = np.array([text_hash(chunk.indexed) for chunk in chunks], np.int64)
    new = sum(document.key not in known for document in documents)
    return Chunked(documents, _distinct(chunks), texts_N, new)


def _distinct(chunks: list[Chunk]) -> list[Chunk]:
    """Chunks with an id each: a document that a source gives twice would give its chunks' twice."""
    seen: set[int] = set()
    distinct = []
    for chunk in chunks:
        number = chunk.id
        while number in seen:
            number = (number + 1) % 2**63
        seen.add(number)
        distinct.append(chunk if number == chunk.id else msgspec.structs.replace(chunk, id=number))
    return distinct


def _fitted(task: Task, chunked: Chunked, corpus: str) -> Embedded:
    """Everything embedded, and fitted to the documents of today."""
    task.say(
        f"embedding {counted(len(chunked.chunks), 'chunk')} of "
        f"{counted(len(chunked.documents), 'document')}"
    )
    embedder, vectors_NE, evaluation = fit_corpus(task, chunked.chunks)
    fit = Fit(
        id=_fit_id(task, corpus),
        documents=len(chunked.documents),
        chunks=len(chunked.chunks),
        k1=evaluation.k1 if evaluation else K1,
        b=evaluation.b if evaluation else B,
    )
    known_N = np.ones(len(chunked.chunks), bool)
    dim = vectors_NE.shape[1]
    return Embedded(embedder, vectors_NE.__getitem__, dim, known_N, fit, evaluation)


def _followed(task: Task, chunked: Chunked, old: Index) -> Embedded:
    """What is new or changed embedded under the old fit; vectors of the rest are the old ones."""
    ids_N = old.passages.rows_N["id"]
    texts_N = old.passages.rows_N["text"]
    row_of_text = dict(zip(texts_N.tolist(), range(len(texts_N)), strict=True))
    rows_N = np.array([row_of_text.get(text, -1) for text in chunked.texts.tolist()])
    new = np.flatnonzero(rows_N < 0)
    gone = old.manifest.documents - (len(chunked.documents) - chunked.new)
    task.say(
        f"{counted(chunked.new, 'document')} new or changed, {gone:,} gone: embedding "
        f"{counted(len(new), 'chunk')}"
    )
    texts = [chunked.chunks[row].indexed for row in new]
    task.work.expect("embedding", sum(map(len, texts)))
    embedder = old.embedder
    assert isinstance(embedder, Embedder)
    new_vectors_NE = embedder.passages(texts)

    def vectors(rows: Ids) -> Vectors:
        is_new = rows_N[rows] < 0
        vectors_NE = np.empty((len(rows), old.manifest.dim), np.float32)
        vectors_NE[is_new] = new_vectors_NE[np.searchsorted(new, rows[is_new])]
        vectors_NE[~is_new] = old.store.vectors(ids_N[rows_N[rows[~is_new]]].tolist())
        return vectors_NE

    fitted_N = old.passages.rows_N["fitted"][rows_N] & (rows_N >= 0)
    fitted_N |= _near_fitted(task.known_copies(), chunked.chunks, fitted_N)
    manifest = old.manifest
    return Embedded(embedder, vectors, manifest.dim, fitted_N, manifest.fit, manifest.evaluation)


def _near_fitted(
    copies: Copies, chunks: Sequence[Chunk], fitted_N: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Which chunks (N) are of near copies of documents that the fit was made to: it knows their
    words."""
    owners_N = np.array([chunk.document for chunk in chunks])
    known = np.zeros(len(copies.clusters), bool)
    known[owners_N[fitted_N]] = True
    is_copy_N: npt.NDArray[np.bool_] = owners_N >= copies.kept
    return is_copy_N & known[np.asarray(copies.clusters)[owners_N]]


def _titles(document: IndexedDocument) -> list[str]:
    """What a document is called, here and where its copies stand."""
    return list(dict.fromkeys([document.title, *(place.title for place in document.places)]))


def _fields(documents: Sequence[IndexedDocument]) -> tuple[str, ...]:
    """What searches can be narrowed by: columns whose names every store takes for no more than
    names."""
    columns = Counter(
        name
        for document in documents
        for where in document.everywhere
        for name in where.metadata
        if FIELD.fullmatch(name)
    )
    return (
        "title",
        "origin",
        *[name for name, _ in columns.most_common(_FIELDS) if name not in _NOT_COLUMNS],
    )


def _fill(task: Task, manifest: IndexManifest, embedded: Embedded, old: Index | None) -> None:
    """Bring the store of the new index to its passages."""
    listed = passages_of(task.path, manifest)
    ids_N = listed.rows_N["id"]
    task.work.start("storing")
    with closing(_new_store(task.path, manifest, old)) as store:
        there = store.ids()
        new = np.flatnonzero(~np.isin(ids_N, there))
        task.work.did(len(ids_N) - len(new), kept=True)
        for start in range(0, len(new), _ADD_AT_ONCE):
            rows = new[start : start + _ADD_AT_ONCE]
            payloads = [_payload(listed, int(row), manifest) for row in rows]
            store.add(ids_N[rows].tolist(), embedded.vectors(rows), payloads)
            task.work.did(len(rows))
        if not manifest.table:
            store.delete(there[~np.isin(there, ids_N)].tolist())
        store.finish()


def _new_store(path: Path, manifest: IndexManifest, old: Index | None) -> Store:
    own = manifest.sets[OWN]
    place = manifest.place(path)
    if old is not None and not own.table and old.manifest.sets[OWN] == own:
        shutil.copytree(old.manifest.place(path).folder, place.folder)
        return own.module.open(place)
    return own.module.create(place)


def _payload(listed: Passages, row: int, manifest: IndexManifest) -> Payload:
    """What a search can be narrowed by; at a server, where others may read it, also the text."""
    document = listed.documents[int(listed.rows_N["document"][row])]
    payload = {
        name: value for name in manifest.fields if (value := field(document, name)) is not None
    }
    return payload | {"text": listed.chunk(row).text} if manifest.table else payload


def _noted_tables(building: Path) -> list[ServerTable]:
    noted = building / _TABLES
    return load(noted, list[ServerTable]) if noted.exists() else []


def _note_tables(
    building: Path, path: Path, before: IndexManifest | None, manifest: IndexManifest
) -> None:
    """Note what the old index and the new one have at servers, before anything is made there."""
    noted = _noted_tables(building)
    for one in (before, manifest):
        if one is not None and one.table and _is_own(path, one):
            noted += [ServerTable(store=each.store, table=each.table) for each in one.sets.values()]
    save(noted, building / _TABLES)


def _clear_servers(
    path: Path, building: Path, manifest: IndexManifest, say: Callable[[str], None]
) -> None:
    """Remove from servers what the new index does not need. Not to reach one is no failure of the
    index: what stays there is said."""
    used = manifest.sets[OWN]
    for one in _noted_tables(building):
        try:
            if one.table != used.table:
                old = msgspec.structs.replace(used, store=one.store, table=one.table)
                old.module.drop(old.place(building))
                continue
            with closing(used.module.open(used.place(building))) as store:
                there = store.ids()
                ids_N = passages_of(path, manifest).rows_N["id"]
                store.delete(there[~np.isin(there, ids_N)].tolist())
        except Refusal as refusal:
            what = refusal.problem.what
            say(f"what the old index had in {one.table} is still there: {what}")
