"""Build an index, or update it: what is new or changed is embedded, and what is gone removed.

    documents -> chunks -> words, vectors -> passages, BM25, stores in a new folder -> manifest
    renamed over the old one

Words come first: an index without an earlier one answers by them while vectors are made. Weights,
means and maps stay those of the fit while the text changes; `refit` fits new ones. Embeddings are
cached next to the index until it is complete, so that an interrupted build resumes.

A store in a folder begins as a copy of the old index's, which its readers keep open. At a server
one table serves both: new vectors are added before the new index replaces the old one, deleted
chunks' vectors are removed after, and a search skips ids that its index does not have.

Nothing here imports PyTorch.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.corpus.distinct_texts import Copies
from farspan.corpus.documents import write_array
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import content_hash, load, save
from farspan.domain.units import counted
from farspan.launch.folder_lock import lock_file
from farspan.launch.trust import require_server, seal_server
from farspan.retrieval import passages, stores
from farspan.retrieval.bm25 import BM25Index, Numbered
from farspan.retrieval.choose import Bodies, LexicalChoice, choose_words, usual_words
from farspan.retrieval.chunk import Chunk, chunk_document, titled_text
from farspan.retrieval.evaluate import Evaluation, SideName, SideVectors, evaluate
from farspan.retrieval.evaluation_text import mine_evaluation
from farspan.retrieval.filters import field_value
from farspan.retrieval.index import (
    COVARIANCE,
    INDEX_MANIFEST,
    LEXICAL,
    PASSAGES,
    SEAL,
    Fit,
    Index,
    IndexManifest,
    NoModels,
    Recipe,
    SetName,
    Table,
    VectorSet,
    passages_of,
)
from farspan.retrieval.index_task import FittedVoice, Task, VoiceModel
from farspan.retrieval.passages import (
    Damaged,
    IndexedDocument,
    Passages,
    corpus_hash,
    indexed_document,
    text_hash,
)
from farspan.retrieval.stores import FIELD, Ids, Payload, Store
from farspan.retrieval.words import Words, choose_languages, detect_languages

#: Metadata columns that searches can filter by, and what payloads hold in addition.
_MAX_FIELDS = 64
_ADD_BATCH_SIZE = 1024
#: Vectors that a covariance is measured over.
MAX_COVARIANCE_ROWS = 20_000
#: Records the tables that a build found or made at servers: in the end all but the new index's are
#: dropped.
_TABLES_FILE = "tables.json"


class ServerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table or collection of an index at a server."""

    store: str
    table: Table
    dim: int


class Listed(NamedTuple):
    """The documents of an index, the language of each, and their hash."""

    documents: list[IndexedDocument]
    languages: list[str]
    corpus: str


@dataclass(frozen=True)
class Chunked:
    """The documents of an index, the language of each, their chunks, and the hash (N) of each
    chunk's embedded text."""

    documents: list[IndexedDocument]
    languages: list[str]
    chunks: list[Chunk]
    texts: npt.NDArray[np.int64]
    #: Documents that the old index does not have.
    new: int


@dataclass(frozen=True)
class Fitted:
    """The voices of an index, how it makes words, and the chunks (N) that this was fitted to."""

    lexical: LexicalChoice
    voices: Mapping[SetName, FittedVoice]
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
            languages = detect_languages([document.text for document in task.documents])
            listed = Listed(documents, languages, corpus)
            if before is None and (task.voices or task.recipe.evaluate):
                before = _build_words(task, building, listed)
            manifest = _write_index(task, building, listed, before)
            save(manifest, path / INDEX_MANIFEST)
            _remove_others(path, {INDEX_MANIFEST, manifest.files}, building)
        _drop_old_vectors(path, building, manifest, task.write_line)
        shutil.rmtree(building, ignore_errors=True)
    return manifest


def _build_words(task: Task, building: Path, listed: Listed) -> IndexManifest:
    """Complete an index of words alone, made in the usual way: it answers while queries are tuned
    on and vectors are made."""
    recipe = msgspec.structs.replace(task.recipe, evaluate=False)
    alone = replace(task, voices=(), origin=None, encoder=None, recipe=recipe)
    manifest = _write_index(alone, building, listed, None)
    save(manifest, task.path / INDEX_MANIFEST)
    next_step = "vectors follow" if task.voices else "how well they find is measured now"
    task.write_line(f"searches by words answer already; {next_step}")
    return manifest


def _cache_name(task: Task) -> str:
    """Return the folder for embeddings of these models, computed as this process does."""
    return content_hash([voice.cache_key for voice in task.voices])


def _resolve_store(task: Task) -> Task:
    """Return the task with its store's whole name: the meaning of `auto` may change."""
    name, location = stores.resolve(task.recipe.store)
    spec = f"{name}:{location}" if location else name
    recipe = msgspec.structs.replace(task.recipe, store=spec)
    return replace(task, recipe=recipe)


def _fit_id(task: Task, corpus: str) -> str:
    recipe = msgspec.structs.replace(task.recipe, store="", evaluate=True)
    return content_hash(_identities(task), recipe, corpus, list(task.own), task.fit_s)


def _identities(task: Task) -> list[str]:
    return [voice.identity for voice in task.voices]


def _load_manifest(path: Path) -> IndexManifest | None:
    """Return the manifest at `path`; None also where it has another version, or is damaged."""
    with suppress(Refusal):
        return load(path / INDEX_MANIFEST, IndexManifest)
    return None


def _load_current(task: Task, corpus: str) -> IndexManifest | None:
    """Return the manifest at the path if its index is the requested one, or has an evaluation
    more."""
    manifest = _load_manifest(task.path)
    if manifest is None or not _has_voices(manifest, task) or manifest.corpus != corpus:
        return None
    evaluated = msgspec.structs.replace(task.recipe, evaluate=True)
    if manifest.recipe not in (task.recipe, evaluated):
        return None
    fitted = not task.refit or manifest.fit.id == _fit_id(task, corpus)
    return manifest if fitted else None


def _has_voices(manifest: IndexManifest, task: Task) -> bool:
    """Return whether an index has the vectors of these models, and no others."""
    encoder = manifest.encoder and manifest.encoder.id
    return manifest.origin == task.origin and encoder == (task.encoder and task.encoder.id)


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
    listed: Listed,
    before: IndexManifest | None,
) -> IndexManifest:
    """Write the files of the index into a folder of their own, and fill its store."""
    with ExitStack() as stack:
        old = _open_reusable(task, before)
        if old is not None:
            stack.callback(old.close)
        chunked = _chunk_documents(task, listed, old)
        if not chunked.chunks:
            raise Refusal(
                "no-documents",
                what="there is nothing to index",
                where=task.path.parent,
                fact=f"{counted(len(listed.documents), 'document')}, none with text",
                remedy="name a source with text: farspan init FOLDER",
            )

        task.work.add_expected("storing", len(chunked.chunks))
        recipe = task.recipe
        is_extended = old is not None and _is_extended(task, old)
        if old is not None and is_extended:
            fitted = _extend(task, chunked, old)
            recipe = msgspec.structs.replace(recipe, evaluate=old.manifest.recipe.evaluate)
        else:
            fitted = _fit(task, chunked, listed.corpus, old)

        manifest = _manifest_of(task, chunked, fitted, recipe, listed.corpus)
        _write_files(task, chunked, fitted, manifest, old)
        _record_tables(building, task.path, before, manifest)
        for voice in task.voices:
            vectors = fitted.voices[voice.name]
            _fill_store(task, manifest, voice.name, vectors, old)
            path = task.path / manifest.files / f"{COVARIANCE}-{voice.name}.npy"
            write_array(path, measure_covariance(vectors, len(chunked.chunks)))
    return manifest


def _is_extended(task: Task, old: Index) -> bool:
    """Return whether the fit and the choices of the old index stay."""
    before = old.manifest
    recipe = task.recipe
    lacks_evaluation = recipe.evaluate and not before.recipe.evaluate
    if task.refit or lacks_evaluation or not _has_voices(before, task):
        return False
    same = msgspec.structs.replace(before.recipe, store=recipe.store, evaluate=recipe.evaluate)
    return same == recipe


def _manifest_of(
    task: Task, chunked: Chunked, fitted: Fitted, recipe: Recipe, corpus: str
) -> IndexManifest:
    _, location = stores.resolve(recipe.store)
    sets: dict[SetName, VectorSet] = {}
    for voice in task.voices:
        table = ""
        if location:
            made_by = _vectors_id(voice, fitted.fit)
            place = content_hash(str(task.path.resolve()), recipe.store, made_by)
            table = f"farspan_{place}"
        dim = fitted.voices[voice.name].dim
        sets[voice.name] = VectorSet(dim=dim, store=recipe.store, table=table)
    copies = task.known_copies()
    num_documents = len(chunked.documents)
    num_chunks = len(chunked.chunks)
    fitted_chunks = int(fitted.fitted.sum())
    fields = _filter_fields(chunked.documents)
    files = content_hash(_identities(task), recipe, corpus, fitted.fit)
    evaluation = fitted.evaluation
    manifest = IndexManifest(
        recipe=recipe,
        corpus=corpus,
        source=task.source,
        documents=num_documents,
        chunks=num_chunks,
        lexical=fitted.lexical,
        sets=sets,
        origin=task.origin,
        encoder=task.encoder,
        fit=fitted.fit,
        fitted_chunks=fitted_chunks,
        fields=fields,
        evaluation=evaluation,
        files=files,
    )
    return msgspec.structs.replace(
        manifest,
        near_copies=copies.near,
        exact_copies=copies.exact,
        no_encoder=task.no_encoder,
    )


def _vectors_id(voice: VoiceModel, fit: Fit) -> str:
    """Return the hash that vectors of a voice depend on: a ready encoder's on no fit."""
    return fit.id if voice.name == "own" else voice.identity


def _write_files(
    task: Task,
    chunked: Chunked,
    fitted: Fitted,
    manifest: IndexManifest,
    old: Index | None,
) -> None:
    """Write all but the stores."""
    files = task.path / manifest.files
    # Only a manifest that somebody changed has named this folder before.
    shutil.rmtree(files, ignore_errors=True)
    folder = files / PASSAGES
    folder.mkdir(parents=True)
    documents = chunked.documents
    passages.write(folder, documents, chunked.chunks, chunked.texts, fitted.fitted)

    lexical = _known_bm25(old, manifest) or _build_bm25(task, chunked, fitted.lexical)
    lexical.save(files / LEXICAL)
    for voice in fitted.voices.values():
        voice.save(files)
    _seal_servers(task.path, manifest)


def _known_bm25(old: Index | None, manifest: IndexManifest) -> BM25Index | None:
    """Return the old index's BM25 where it is of the same text and made in the same way."""
    if old is None:
        return None
    before = old.manifest
    if (before.corpus, before.lexical) != (manifest.corpus, manifest.lexical):
        return None
    with suppress(Damaged):
        return old.lexical
    return None


def _build_bm25(task: Task, chunked: Chunked, choice: LexicalChoice) -> BM25Index:
    """Build BM25 of documents; it also finds a document by its titles, and by those of its copies,
    where its text does not begin with them."""
    words = Words(choice.rules)
    texts = []
    for document, text in zip(chunked.documents, task.documents, strict=True):
        titles = dict.fromkeys([document.title, *(place.title for place in document.places)])
        texts.append(titled_text(text.text, titles))
    numbered = Numbered(map(words.of_text, texts, chunked.languages))
    return BM25Index.build(numbered, choice.k1, choice.b)


def _open_reusable(task: Task, before: IndexManifest | None) -> Index | None:
    """Open the old index if its passages are cut alike, and its vectors are complete."""
    recipe = task.recipe
    if before is None:
        return None
    cut = (before.recipe.version, before.recipe.chunk_tokens)
    if cut != (recipe.version, recipe.chunk_tokens):
        return None
    another_store = before.recipe.store != recipe.store
    if another_store and not _owns_vectors(task.path, before):
        return None
    try:
        # The lock keeps others from replacing it, and its BM25 is not needed.
        old = Index(task.path, before, task.models or NoModels(), "")
        # Reading all of it finds damage while everything can still be embedded again.
        count = len(old.documents) and sum(1 for _ in old.passages)
        ids_N = old.passages.rows_N["id"]
        if count and all(np.isin(ids_N, store.ids()).all() for store in old.stores.values()):
            return old
        old.close()
    except Refusal as refusal:
        code = refusal.problem.code
        is_unreachable = another_store and code == "store-unreachable"
        if code != "no-index" and not is_unreachable:
            raise
    return None


def measure_covariance(voice: FittedVoice, count: int) -> npt.NDArray[np.float32]:
    """Return the covariance (E, E) of the vectors of `count` chunks, from a sample of many."""
    step = count // MAX_COVARIANCE_ROWS + 1
    sample_SE = voice.vectors(np.arange(0, count, step)).astype(np.float64)
    centred_SE = sample_SE - sample_SE.mean(axis=0)
    return (centred_SE.T @ centred_SE / len(sample_SE)).astype(np.float32)


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


def _chunk_documents(task: Task, listed: Listed, old: Index | None) -> Chunked:
    """Chunk every document; the chunks of documents that the old index has are read from it."""
    known: dict[str, int] = {}
    if old is not None:
        # Of a document that a source gives twice the first one's chunks have the ids that their
        # content gives them.
        for number, document in enumerate(old.documents):
            known.setdefault(document.key, number)
    documents = listed.documents
    chunks: list[Chunk] = []
    for number, (document, text) in enumerate(zip(documents, task.documents, strict=True)):
        if old is not None and document.key in known:
            for row in old.passages.of_document(known[document.key]):
                chunk = old.passages.chunk(row)
                chunks.append(msgspec.structs.replace(chunk, document=number))
        else:
            chunks += chunk_document(text, number, task.recipe.chunk_tokens)
    texts_N = np.array([text_hash(chunk.indexed) for chunk in chunks], np.int64)
    new = sum(document.key not in known for document in documents)
    return Chunked(documents, listed.languages, _make_ids_unique(chunks), texts_N, new)


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


def _fit(task: Task, chunked: Chunked, corpus: str, old: Index | None) -> Fitted:
    """Choose how text becomes words, fit each voice, and choose the weights of voices."""
    recipe = task.recipe
    chunks = chunked.chunks
    num_documents = len(chunked.documents)
    lexical = _known_lexical(task, old, corpus)
    if old is None or old.manifest.corpus != corpus:
        num_passages = counted(len(chunks), "passage")
        task.write_line(f"indexing {counted(num_documents, 'document')} in {num_passages}")
    fit = Fit(id=_fit_id(task, corpus), documents=num_documents, chunks=len(chunks))
    every_chunk = np.ones(len(chunks), bool)
    languages = choose_languages(chunked.languages)
    if not recipe.evaluate and not task.voices:
        return Fitted(lexical or usual_words(languages), {}, every_chunk, fit, None)
    text = mine_evaluation(
        task.documents,
        chunks,
        train=task.train,
        copies=task.known_copies(),
        own=task.own,
        seed=recipe.seed,
    )
    bodies = Bodies(text.bodies, chunked.languages)
    if lexical is None:
        tuning = text.queries.tuning if recipe.evaluate else []
        lexical = choose_words(bodies, tuning, languages, recipe.seed)
    voices: dict[SetName, FittedVoice] = {}
    sides: dict[SideName, SideVectors] = {}
    for voice in task.voices:
        fitted = voice.fit(task, text, chunks, old)
        voices[voice.name] = fitted
        sides |= fitted.sides
    evaluation = None
    if recipe.evaluate and text.queries.reported:
        owners = text.owners(chunks)
        evaluation = evaluate(bodies, owners, text.queries, lexical, sides, recipe.seed)
        near = task.known_copies().near
        evaluation = msgspec.structs.replace(evaluation, near_copies=near)
    return Fitted(lexical, voices, every_chunk, fit, evaluation)


def _known_lexical(task: Task, old: Index | None, corpus: str) -> LexicalChoice | None:
    """Return how an index of the same text makes words; None where that is to be chosen."""
    if old is None or task.refit or old.manifest.corpus != corpus:
        return None
    is_chosen = old.manifest.recipe.evaluate or not task.recipe.evaluate
    return old.manifest.lexical if is_chosen else None


def _extend(task: Task, chunked: Chunked, old: Index) -> Fitted:
    """Embed new and changed chunks under the old fit; the vectors of the others are the old
    index's."""
    manifest = old.manifest
    old_rows = old.passages.rows_N
    # The row (N) of each chunk's text in the old index, or -1.
    row_of_text = {text: row for row, text in enumerate(old_rows["text"].tolist())}
    rows_N = np.array([row_of_text.get(text, -1) for text in chunked.texts.tolist()])
    num_new = int((rows_N < 0).sum())
    num_kept = len(chunked.documents) - chunked.new
    removed = manifest.documents - num_kept
    task.write_line(
        f"{counted(chunked.new, 'document')} new or changed, {removed:,} gone: "
        f"{counted(num_new, 'new passage')}"
    )
    voices = {voice.name: voice.extend(task, chunked.chunks, old) for voice in task.voices}
    fitted_N = old_rows["fitted"][rows_N] & (rows_N >= 0)
    fitted_N |= _near_fitted(task.known_copies(), chunked.chunks, fitted_N)
    return Fitted(manifest.lexical, voices, fitted_N, manifest.fit, manifest.evaluation)


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
    """Return the fields that searches can filter by: the columns that most documents have."""
    columns: Counter[str] = Counter()
    for document in documents:
        for place in document.everywhere:
            columns.update(place.metadata)
    common = [name for name, _ in columns.most_common(_MAX_FIELDS)]
    return ("title", "origin", *[name for name in common if name not in ("title", "origin")])


def _fill_store(
    task: Task, manifest: IndexManifest, name: SetName, voice: FittedVoice, old: Index | None
) -> None:
    """Add to the new index's store what it lacks, and delete what the index does not have."""
    listed = passages_of(task.path, manifest)
    ids_N = listed.rows_N["id"]
    task.work.start_kind("storing")
    with closing(_open_new_store(task, manifest, name, old)) as store:
        stored_ids = store.ids()
        new = np.flatnonzero(~np.isin(ids_N, stored_ids))
        task.work.add_done(len(ids_N) - len(new), kept=True)
        for start in range(0, len(new), _ADD_BATCH_SIZE):
            rows = new[start : start + _ADD_BATCH_SIZE]
            payloads = [_fields_of(listed, int(row), manifest) for row in rows]
            store.add(ids_N[rows].tolist(), voice.vectors(rows), payloads)
            task.work.add_done(len(rows))
        if not manifest.sets[name].table:
            _delete_others(store, stored_ids, ids_N)
        store.finish()


def _delete_others(store: Store, stored_ids: Ids, ids_N: Ids) -> None:
    """Delete the stored ids that are not among an index's `ids_N`."""
    others = stored_ids[~np.isin(stored_ids, ids_N)]
    store.delete(others.tolist())


def _open_new_store(task: Task, manifest: IndexManifest, name: SetName, old: Index | None) -> Store:
    made = manifest.sets[name]
    place = manifest.place(task.path, name)
    if old is not None and not made.table and _keeps_vectors(task, name, old, manifest):
        old_place = old.manifest.place(task.path, name)
        shutil.copytree(old_place.folder, place.folder)
        return made.module.open(place)
    return made.module.create(place)


def _keeps_vectors(task: Task, name: SetName, old: Index, manifest: IndexManifest) -> bool:
    """Return whether vectors of the old index's set are those of the new one."""
    before = old.manifest
    if before.sets.get(name) != manifest.sets[name]:
        return False
    if name == "own":
        return before.origin == task.origin and before.fit.id == manifest.fit.id
    return before.encoder is not None and before.encoder.id == (task.encoder and task.encoder.id)


def _fields_of(listed: Passages, row: int, manifest: IndexManifest) -> Payload:
    """Return the fields that a store can filter by; at a server, for its other readers, also the
    text. Other names than words are compared without the store (`filtered_vectors.py`)."""
    document = listed.documents[int(listed.rows_N["document"][row])]
    stored = [name for name in manifest.fields if FIELD.fullmatch(name) and name != "text"]
    values = {name: field_value(document, name) for name in stored}
    payload = {name: value for name, value in values.items() if value is not None}
    if manifest.servers:
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
        if index is None or not index.servers or not _owns_vectors(path, index):
            continue
        for vectors in index.sets.values():
            recorded = ServerTable(store=vectors.store, table=vectors.table, dim=vectors.dim)
            tables.append(recorded)
    save(tables, building / _TABLES_FILE)


def _drop_old_vectors(
    path: Path, building: Path, manifest: IndexManifest, write_line: Callable[[str], None]
) -> None:
    """Remove from servers what the new index does not need.

    A server that does not answer is reported, and does not fail the build.
    """
    used = {vectors.table: name for name, vectors in manifest.sets.items() if vectors.table}
    for recorded in _recorded_tables(building):
        vectors = VectorSet(dim=recorded.dim, store=recorded.store, table=recorded.table)
        try:
            if recorded.table not in used:
                vectors.module.drop(vectors.place(building))
                continue
            ids_N = passages_of(path, manifest).rows_N["id"]
            with closing(vectors.module.open(vectors.place(building))) as store:
                _delete_others(store, store.ids(), ids_N)
        except Refusal as refusal:
            what = refusal.problem.what
            write_line(f"what the old index had in {recorded.table} is still there: {what}")
