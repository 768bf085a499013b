"""Build an index, or update it: embed chunks that are new or changed, and remove deleted ones.

    documents -> chunks -> vectors -> passages, BM25, stores in a new folder -> manifest renamed
    over the old one

Weights, means and maps stay those of the fit while the text changes; `refit` fits new ones
(`retrieval/embedder_fit.py`). Embeddings are cached next to the index until it is complete, so
that an interrupted build resumes.

A store in a folder begins as a copy of the old index's, which its readers keep open. At a server
one table serves both: new vectors are added before the new index replaces the old one, deleted
chunks' vectors are removed after, and a search skips ids that its index does not have.
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

from farspan.corpus.distinct_texts import Copies
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import content_hash, load, save
from farspan.domain.units import counted
from farspan.launch.folder_lock import lock_file
from farspan.launch.trust import require_server, seal_server
from farspan.retrieval import passages, stores
from farspan.retrieval.bm25 import K1, B, BM25Index
from farspan.retrieval.chunk import Chunk, chunk_document
from farspan.retrieval.embed import Embedder
from farspan.retrieval.embedder_fit import Task, fit_corpus
from farspan.retrieval.evaluate import Evaluation
from farspan.retrieval.index import (
    FITTED,
    INDEX_MANIFEST,
    LEXICAL,
    OWN_VECTORS,
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
from farspan.retrieval.passages import (
    IndexedDocument,
    Passages,
    corpus_hash,
    indexed_document,
    text_hash,
)
from farspan.retrieval.pooling import bf16_is_fast
from farspan.retrieval.stores import FIELD, Ids, Payload, Store, Vectors

#: Metadata columns that searches can filter by, and what payloads hold in addition.
_MAX_FIELDS = 64
_PAYLOAD_FIELDS = {"title", "origin", "text"}
_ADD_BATCH_SIZE = 1024
_MIN_CHUNK_TOKENS = 8
#: Records the tables that a build found or made at servers: in the end all but the new index's are
#: dropped.
_TABLES_FILE = "tables.json"


class ServerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table or collection of an index at a server."""

    store: str
    table: Table


@dataclass(frozen=True)
class Chunked:
    """The documents of an index, their chunks, and the hash (N) of each chunk's embedded text."""

    documents: list[IndexedDocument]
    chunks: list[Chunk]
    texts: npt.NDArray[np.int64]
    #: Documents that the old index does not have.
    new: int


@dataclass(frozen=True)
class Embedded:
    """The embedder, the chunks (N) it was fitted to, and a function from rows to vectors."""

    embedder: Embedder
    vectors: Callable[[Ids], Vectors]
    dim: int
    fitted: npt.NDArray[np.bool_]
    fit: Fit
    evaluation: Evaluation | None


def build(task: Task) -> IndexManifest:
    """Build the index, or update it to the documents; do nothing where it is up to date.

    An index with an evaluation also serves where none is asked for. The old index stays until the
    new one is complete. Raises Refusal for a corpus without text, and while another process builds
    this index (run-busy).
    """
    task = _resolve_store(task)
    path = task.path
    building = path.with_name(f"{path.name}.building")
    places = task.known_copies().places
    documents = [
        indexed_document(document, places.get(number, ()))
        for number, document in enumerate(task.documents)
    ]
    corpus = corpus_hash(documents)
    manifest = _load_current(task, corpus)
    if manifest and not building.exists():
        if manifest.source != task.source:
            # Files were touched, and their content is the same.
            manifest = msgspec.structs.replace(manifest, source=task.source)
            save(manifest, path / INDEX_MANIFEST)
        _seal_servers(path, manifest)
        task.write_line(f"index {path} is up to date")
        return manifest

    with _lock_building(building, path):
        # Another process may have completed it while this one waited for the lock.
        manifest = _load_current(task, corpus)
        before = _load_manifest(path)
        cache = building / _cache_name(task)
        _remove_others(building, {"lock", cache.name, _TABLES_FILE}, building)
        _remove_others(path, {INDEX_MANIFEST, before.files if before else ""}, building)
        if manifest is None:
            cache.mkdir(exist_ok=True)
            task.work.folder = cache
            manifest = _write_index(task, building, documents, corpus, before)
            save(manifest, path / INDEX_MANIFEST)
            _remove_others(path, {INDEX_MANIFEST, manifest.files}, building)
        _drop_old_vectors(path, building, manifest, task.write_line)
        shutil.rmtree(building, ignore_errors=True)
    return manifest


def _cache_name(task: Task) -> str:
    """Return the folder for embeddings of this model, computed as this process does."""
    device = task.model.tok.weight.device
    version = str(torch.__version__)
    return content_hash(task.origin, version, device.type, bf16_is_fast(device))


def _resolve_store(task: Task) -> Task:
    """Return the task with its store's whole name: the meaning of `auto` may change."""
    name, location = stores.resolve(task.recipe.store)
    spec = f"{name}:{location}" if location else name
    recipe = msgspec.structs.replace(task.recipe, store=spec)
    return replace(task, recipe=recipe)


def _fit_id(task: Task, corpus: str) -> str:
    recipe = msgspec.structs.replace(task.recipe, store="", evaluate=True)
    return content_hash(task.origin, recipe, corpus, list(task.own), task.fit_s)


def _load_manifest(path: Path) -> IndexManifest | None:
    """Return the manifest at `path`; None also where it has another version, or is damaged."""
    with suppress(Refusal):
        return load(path / INDEX_MANIFEST, IndexManifest)
    return None


def _load_current(task: Task, corpus: str) -> IndexManifest | None:
    """Return the manifest at the path if its index is the requested one, or has an evaluation
    more."""
    manifest = _load_manifest(task.path)
    if manifest is None or manifest.origin != task.origin or manifest.corpus != corpus:
        return None
    evaluated = msgspec.structs.replace(task.recipe, evaluate=True)
    if manifest.recipe not in (task.recipe, evaluated):
        return None
    fitted = not task.refit or manifest.fit.id == _fit_id(task, corpus)
    return manifest if fitted else None


def _lock_building(building: Path, path: Path) -> IO[bytes]:
    """Lock the folder of a build; its holder removes the folder.

    Raises Refusal where another process has the lock.
    """
    while True:
        building.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            lock = lock_file(building / "lock", "this index is being made already", path)
            # The folder may have been removed, and made again, before the lock was taken.
            current = (building / "lock").stat()
            if os.path.samestat(os.fstat(lock.fileno()), current):
                return lock


def _remove_others(folder: Path, kept: set[str], building: Path) -> None:
    """Remove all of `folder` but `kept`: what killed processes left, and an old index's files.

    Entries are moved away whole first, since a process that is opening one may write to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for entry in [*folder.iterdir()]:
        if entry.name not in kept:
            moved = entry.rename(building / f"gone-{entry.name}")
            shutil.rmtree(moved, ignore_errors=True) if moved.is_dir() else moved.unlink()


def _write_index(
    task: Task,
    building: Path,
    documents: list[IndexedDocument],
    corpus: str,
    before: IndexManifest | None,
) -> IndexManifest:
    """Write the files of the index into a folder of their own, and fill its store."""
    with ExitStack() as stack:
        old = _open_reusable(task, before)
        if old is not None:
            stack.callback(old.close)
        chunked = _chunk_documents(task, documents, old)
        if not chunked.chunks:
            raise Refusal(
                "no-documents",
                what="there is nothing to index",
                where=task.path.parent,
                fact=f"{counted(len(documents), 'document')}, none with text",
                remedy="name a source with text: farspan init FOLDER",
            )

        task.work.add_expected("storing", len(chunked.chunks))
        recipe = task.recipe
        if old is not None:
            lacks_evaluation = recipe.evaluate and not old.manifest.recipe.evaluate
            if task.refit or lacks_evaluation:
                old = None
        if old is None:
            embedded = _fit_and_embed(task, chunked, corpus)
        else:
            embedded = _embed_new(task, chunked, old)
            recipe = msgspec.structs.replace(recipe, evaluate=old.manifest.recipe.evaluate)

        manifest = _manifest_of(task, chunked, embedded, recipe, corpus)
        _write_files(task, chunked, embedded, manifest)
        _record_tables(building, task.path, before, manifest)
        _fill_store(task, manifest, embedded, old)
    return manifest


def _manifest_of(
    task: Task, chunked: Chunked, embedded: Embedded, recipe: Recipe, corpus: str
) -> IndexManifest:
    _, location = stores.resolve(recipe.store)
    table = ""
    if location:
        place = content_hash(str(task.path.resolve()), recipe.store, embedded.fit.id)
        table = f"farspan_{place}"
    dim = embedded.dim
    fit = embedded.fit
    sets = {OWN_VECTORS: VectorSet(encoder=OWN_VECTORS, dim=dim, store=recipe.store, table=table)}
    origin = task.origin
    evaluation = embedded.evaluation
    fitted_chunks = int(embedded.fitted.sum())
    fields = _filter_fields(chunked.documents)
    files = content_hash(origin, recipe, corpus, fit)
    manifest = IndexManifest(
        origin=origin,
        recipe=recipe,
        corpus=corpus,
        source=task.source,
        documents=len(chunked.documents),
        chunks=len(chunked.chunks),
        sets=sets,
        dim=dim,
        table=table,
        fit=fit,
        evaluation=evaluation,
        fitted_chunks=fitted_chunks,
        fields=fields,
        files=files,
    )
    near = task.known_copies().near
    exact = task.known_copies().exact
    return msgspec.structs.replace(manifest, near_copies=near, exact_copies=exact)


def _write_files(task: Task, chunked: Chunked, embedded: Embedded, manifest: IndexManifest) -> None:
    """Write all but the stores."""
    files = task.path / manifest.files
    # Only a manifest that somebody changed has named this folder before.
    shutil.rmtree(files, ignore_errors=True)
    folder = files / PASSAGES
    folder.mkdir(parents=True)
    documents = chunked.documents
    passages.write(folder, documents, chunked.chunks, chunked.texts, embedded.fitted)

    # BM25 also finds a document by its titles, and by those of its copies.
    texts = []
    for document, text in zip(documents, task.documents, strict=True):
        titles = [document.title, *(place.title for place in document.places)]
        texts.append("\n".join([*dict.fromkeys(titles), text.text]))
    lexical = BM25Index.build(texts, embedded.fit.k1, embedded.fit.b)
    lexical.save(files / LEXICAL)
    embedded.embedder.save(files / FITTED)
    _seal_servers(task.path, manifest)


def _open_reusable(task: Task, before: IndexManifest | None) -> Index | None:
    """Open the old index if its vectors are complete, and of this model and recipe."""
    recipe = task.recipe
    if before is None or before.origin != task.origin:
        return None
    same = msgspec.structs.replace(before.recipe, store=recipe.store, evaluate=recipe.evaluate)
    if same != recipe:
        return None
    another_store = before.recipe.store != recipe.store
    if another_store and not _owns_vectors(task.path, before):
        return None

    def embedder(fitted: Path, of: Origin) -> Embedder:
        return Embedder.load(task.model, task.tokenizer, fitted, task.work, task.processes)

    try:
        # The lock keeps others from replacing it, and its BM25 is not needed.
        old = Index(task.path, before, embedder, "")
        # Reading all of it finds damage while everything can still be embedded again.
        count = len(old.documents) and sum(1 for _ in old.passages)
        if count:
            stored = np.isin(old.passages.rows_N["id"], old.store.ids())
            if stored.all():
                return old
        old.close()
    except Refusal as refusal:
        code = refusal.problem.code
        is_unreachable = another_store and code == "store-unreachable"
        if code != "no-index" and not is_unreachable:
            raise
    return None


def _seal_servers(path: Path, manifest: IndexManifest) -> None:
    """Record that this user stores vectors at the servers of an index."""
    if manifest.servers:
        seal_server(path / manifest.files / SEAL, manifest.servers)


def _owns_vectors(path: Path, manifest: IndexManifest) -> bool:
    """Return whether this user stored the vectors of the index at `path`."""
    if manifest.servers:
        try:
            require_server(path / manifest.files / SEAL, manifest.servers, "")
        except Refusal:
            return False
    return True


def _chunk_documents(task: Task, documents: list[IndexedDocument], old: Index | None) -> Chunked:
    """Chunk every document; the chunks of documents that the old index has are read from it."""
    known: dict[str, int] = {}
    if old is not None:
        # Of a document that a source gives twice the first one's chunks have the ids that their
        # content gives them.
        for number, document in enumerate(old.documents):
            known.setdefault(document.key, number)
    size = min(task.recipe.chunk_tokens, task.model.spec.context - 1)
    size = max(size, _MIN_CHUNK_TOKENS)

    chunks: list[Chunk] = []
    for number, (document, text) in enumerate(zip(documents, task.documents, strict=True)):
        if old is not None and document.key in known:
            for row in old.passages.of_document(known[document.key]):
                chunk = old.passages.chunk(row)
                chunks.append(msgspec.structs.replace(chunk, document=number))
        else:
            chunks += chunk_document(text, number, task.tokenizer, size)
    texts_N = np.array([text_hash(chunk.indexed) for chunk in chunks], np.int64)
    new = sum(document.key not in known for document in documents)
    return Chunked(documents, _make_ids_unique(chunks), texts_N, new)


def _make_ids_unique(chunks: list[Chunk]) -> list[Chunk]:
    """Give each chunk an id of its own: a document that a source has twice repeats its chunks'."""
    seen: set[int] = set()
    unique = []
    for chunk in chunks:
        number = chunk.id
        while number in seen:
            number = (number + 1) % 2**63
        seen.add(number)
        if number != chunk.id:
            chunk = msgspec.structs.replace(chunk, id=number)
        unique.append(chunk)
    return unique


def _fit_and_embed(task: Task, chunked: Chunked, corpus: str) -> Embedded:
    """Embed every chunk, and fit the embedder to the documents of today."""
    num_chunks = len(chunked.chunks)
    num_documents = len(chunked.documents)
    task.write_line(
        f"embedding {counted(num_chunks, 'chunk')} of {counted(num_documents, 'document')}"
    )
    embedder, vectors_NE, evaluation = fit_corpus(task, chunked.chunks)
    fit = Fit(
        id=_fit_id(task, corpus),
        documents=num_documents,
        chunks=num_chunks,
        k1=evaluation.k1 if evaluation else K1,
        b=evaluation.b if evaluation else B,
    )
    fitted_N = np.ones(num_chunks, bool)
    _, dim = vectors_NE.shape
    return Embedded(embedder, vectors_NE.__getitem__, dim, fitted_N, fit, evaluation)


def _embed_new(task: Task, chunked: Chunked, old: Index) -> Embedded:
    """Embed new and changed chunks under the old fit; the vectors of the others are the old
    index's."""
    manifest = old.manifest
    chunks = chunked.chunks
    old_rows = old.passages.rows_N
    ids_N = old_rows["id"]

    # The row (N) of each chunk's text in the old index, or -1.
    row_of_text = {text: row for row, text in enumerate(old_rows["text"].tolist())}
    rows_N = np.array([row_of_text.get(text, -1) for text in chunked.texts.tolist()])
    new = np.flatnonzero(rows_N < 0)

    num_kept = len(chunked.documents) - chunked.new
    removed = manifest.documents - num_kept
    task.write_line(
        f"{counted(chunked.new, 'document')} new or changed, {removed:,} gone: embedding "
        f"{counted(len(new), 'chunk')}"
    )
    texts = [chunks[row].indexed for row in new]
    task.work.add_expected("embedding", sum(map(len, texts)))
    embedder = old.embedder
    assert isinstance(embedder, Embedder)
    new_vectors_NE = embedder.passages(texts)

    def vectors(rows: Ids) -> Vectors:
        source_rows = rows_N[rows]
        is_new = source_rows < 0
        old_ids = ids_N[source_rows[~is_new]]
        vectors_NE = np.empty((len(rows), manifest.dim), np.float32)
        vectors_NE[is_new] = new_vectors_NE[np.searchsorted(new, rows[is_new])]
        vectors_NE[~is_new] = old.store.vectors(old_ids.tolist())
        return vectors_NE

    fitted_N = old_rows["fitted"][rows_N] & (rows_N >= 0)
    fitted_N |= _near_fitted(task.known_copies(), chunks, fitted_N)
    return Embedded(embedder, vectors, manifest.dim, fitted_N, manifest.fit, manifest.evaluation)


def _near_fitted(
    copies: Copies, chunks: Sequence[Chunk], fitted_N: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return which chunks (N) are near copies of text that the embedder was fitted to."""
    owners_N = np.array([chunk.document for chunk in chunks])
    clusters = np.asarray(copies.clusters)
    is_fitted = np.zeros(len(clusters), bool)
    is_fitted[owners_N[fitted_N]] = True
    is_copy_N: npt.NDArray[np.bool_] = owners_N >= copies.kept
    return is_copy_N & is_fitted[clusters[owners_N]]


def _filter_fields(documents: Sequence[IndexedDocument]) -> tuple[str, ...]:
    """Return the fields that searches can filter by: columns whose names every store accepts."""
    columns: Counter[str] = Counter()
    for document in documents:
        for place in document.everywhere:
            columns.update(filter(FIELD.fullmatch, place.metadata))
    common = [name for name, _ in columns.most_common(_MAX_FIELDS)]
    return ("title", "origin", *[name for name in common if name not in _PAYLOAD_FIELDS])


def _fill_store(task: Task, manifest: IndexManifest, embedded: Embedded, old: Index | None) -> None:
    """Add to the new index's store what it lacks, and delete what the index does not have."""
    listed = passages_of(task.path, manifest)
    ids_N = listed.rows_N["id"]
    task.work.start_kind("storing")
    with closing(_open_new_store(task.path, manifest, old)) as store:
        stored_ids = store.ids()
        new = np.flatnonzero(~np.isin(ids_N, stored_ids))
        task.work.add_done(len(ids_N) - len(new), kept=True)
        for start in range(0, len(new), _ADD_BATCH_SIZE):
            rows = new[start : start + _ADD_BATCH_SIZE]
            payloads = [_fields_of(listed, int(row), manifest) for row in rows]
            store.add(ids_N[rows].tolist(), embedded.vectors(rows), payloads)
            task.work.add_done(len(rows))
        if not manifest.table:
            _delete_others(store, stored_ids, ids_N)
        store.finish()


def _delete_others(store: Store, stored_ids: Ids, ids_N: Ids) -> None:
    """Delete the stored ids that are not among an index's `ids_N`."""
    others = stored_ids[~np.isin(stored_ids, ids_N)]
    store.delete(others.tolist())


def _open_new_store(path: Path, manifest: IndexManifest, old: Index | None) -> Store:
    own = manifest.sets[OWN_VECTORS]
    place = manifest.place(path)
    if old is not None and not own.table and old.manifest.sets[OWN_VECTORS] == own:
        old_place = old.manifest.place(path)
        shutil.copytree(old_place.folder, place.folder)
        return own.module.open(place)
    return own.module.create(place)


def _fields_of(listed: Passages, row: int, manifest: IndexManifest) -> Payload:
    """Return the fields that searches filter by; at a server, for its other readers, also the
    text."""
    document = listed.documents[int(listed.rows_N["document"][row])]
    values = {name: field(document, name) for name in manifest.fields}
    payload = {name: value for name, value in values.items() if value is not None}
    if manifest.table:
        payload["text"] = listed.chunk(row).text
    return payload


def _recorded_tables(building: Path) -> list[ServerTable]:
    file = building / _TABLES_FILE
    return load(file, list[ServerTable]) if file.exists() else []


def _record_tables(
    building: Path, path: Path, before: IndexManifest | None, manifest: IndexManifest
) -> None:
    """Record the old and the new index's tables at servers, before any is created there."""
    tables = _recorded_tables(building)
    for index in (before, manifest):
        if index is None or not index.table or not _owns_vectors(path, index):
            continue
        for vectors in index.sets.values():
            tables.append(ServerTable(store=vectors.store, table=vectors.table))
    save(tables, building / _TABLES_FILE)


def _drop_old_vectors(
    path: Path, building: Path, manifest: IndexManifest, write_line: Callable[[str], None]
) -> None:
    """Remove from servers what the new index does not need.

    A server that does not answer is reported, and does not fail the build.
    """
    used = manifest.sets[OWN_VECTORS]
    for recorded in _recorded_tables(building):
        try:
            if recorded.table != used.table:
                old = msgspec.structs.replace(used, store=recorded.store, table=recorded.table)
                old.module.drop(old.place(building))
                continue
            ids_N = passages_of(path, manifest).rows_N["id"]
            with closing(used.module.open(used.place(building))) as store:
                _delete_others(store, store.ids(), ids_N)
        except Refusal as refusal:
            what = refusal.problem.what
            write_line(f"what the old index had in {recorded.table} is still there: {what}")
