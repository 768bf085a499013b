"""An index made, or brought up to its text: chunks that are new or changed are embedded, what is
gone is removed.

    documents -> chunks -> vectors -> passages, BM25, store in a new folder -> manifest renamed over
    the old one

Weights, means and maps stay those of the fit while the text changes; `refit` makes new ones
(`retrieval/fitting.py`). What is embedded is kept beside the index until that is whole, so that a
build that was stopped goes on where it was.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.corpus.copies import Copies
from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.codec import content_hash, load, save
from farspan.domain.corpus import Document
from farspan.domain.problems import Refusal
from farspan.domain.units import counted
from farspan.launch.lock import locked
from farspan.retrieval import passages, stores, storing
from farspan.retrieval.chunk import Chunk, chunk_document
from farspan.retrieval.embed import Embedder
from farspan.retrieval.evaluate import Evaluation
from farspan.retrieval.fitting import fit_corpus
from farspan.retrieval.index import (
    FITTED,
    LEXICAL,
    MANIFEST,
    PASSAGES,
    Fit,
    IndexManifest,
    Origin,
    Recipe,
    passages_of,
)
from farspan.retrieval.lexical import K1, B, Lexical
from farspan.retrieval.passages import (
    Damaged,
    IndexedDocument,
    Passages,
    corpus_hash,
    indexed_document,
    text_hash,
)
from farspan.retrieval.pooling import Processes
from farspan.retrieval.queries import Query
from farspan.retrieval.stores import FIELD, Vectors
from farspan.retrieval.work import IndexWork
from farspan.runtime.model.decoder import Decoder

#: Columns that searches can be narrowed by, at most, and what payloads hold beside them.
_FIELDS, _OWN = 64, {"title", "origin", "text"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """An index to be made at `path`, and of what. The first `train` documents are the training
    split; `say` gets lines for people, and `work` is told how far it is."""

    path: Path
    model: Decoder
    tokenizer: Tokenizer
    documents: Sequence[Document]
    train: int
    origin: Origin
    recipe: Recipe
    say: Callable[[str], None]
    work: IndexWork
    #: Which of the documents are copies, and where exact copies stand; none without it.
    copies: Copies | None = None
    #: Fingerprint of where the documents were read from.
    source: str = ""
    #: Fit to the documents of today, whatever the old index was fitted to.
    refit: bool = False
    #: A person's queries, which a fit is judged by too, and the seconds that it takes at most.
    own: Sequence[Query] = ()
    fit_s: float = math.inf
    processes: Processes | None = None

    def known_copies(self) -> Copies:
        return self.copies or Copies.none(len(self.documents))


@dataclass(frozen=True)
class Old:
    """The index that is there, of the same model and recipe."""

    manifest: IndexManifest
    files: Path
    passages: Passages


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
    """Vectors (N, E) of the chunks, what embeds, and of which chunks (N) the fit knows."""

    embedder: Embedder
    vectors: Vectors
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
    path, building = task.path, task.path.with_name(f"{task.path.name}.building")
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
        task.say(f"index {path} is up to date")
        return manifest
    with _alone(building, path):
        manifest, before = _current(task, corpus), _manifest(path)
        kept = building / content_hash(task.origin)
        _sweep(building, {"lock", kept.name, storing.LEFT})
        _sweep(path, {MANIFEST, before.files if before else ""}, building)
        if manifest is None:
            kept.mkdir(exist_ok=True)
            task.work.folder = kept
            manifest = _write(task, building, documents, corpus, before)
            if (
                path / manifest.files
            ).exists():  # A manifest that somebody changed may have named it.
                (path / manifest.files).rename(building / f"gone-{manifest.files}")
            (building / manifest.files).rename(path / manifest.files)
            if before is not None:
                storing.leave(building, before, manifest)
            save(manifest, path / MANIFEST)
            _sweep(path, {MANIFEST, manifest.files}, building)
        storing.clear(building, manifest, path, task.say)
        shutil.rmtree(building, ignore_errors=True)
    return manifest


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


def _sweep(folder: Path, kept: set[str], by_way_of: Path | None = None) -> None:
    """Remove what killed processes have left, and the files of an index of before: these are first
    moved away whole, as who is just opening them may write to them."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.name not in kept:
            gone = entry if by_way_of is None else entry.rename(by_way_of / f"gone-{entry.name}")
            shutil.rmtree(gone, ignore_errors=True) if gone.is_dir() else gone.unlink()


def _write(
    task: Task,
    building: Path,
    documents: list[IndexedDocument],
    corpus: str,
    before: IndexManifest | None,
) -> IndexManifest:
    """Write the files of the index into a folder of their own in `building`."""
    old = _usable(task, before)
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
        embedded, recipe = _fitted(task, chunked, corpus), task.recipe
    else:
        embedded = _followed(task, chunked, old)
        recipe = msgspec.structs.replace(task.recipe, evaluate=old.manifest.recipe.evaluate)
    manifest = IndexManifest(
        origin=task.origin,
        recipe=recipe,
        corpus=corpus,
        source=task.source,
        documents=len(documents),
        near_copies=task.known_copies().near,
        exact_copies=task.known_copies().exact,
        chunks=len(chunked.chunks),
        dim=embedded.vectors.shape[1],
        fit=embedded.fit,
        fitted_chunks=int(embedded.fitted.sum()),
        fields=_fields(documents),
        evaluation=embedded.evaluation,
        files=content_hash(task.origin, recipe, corpus, embedded.fit),
        table=storing.table(task.path, recipe.store, embedded.fit.id),
    )
    files = building / manifest.files
    (files / PASSAGES).mkdir(parents=True)
    passages.write(
        files / PASSAGES,
        documents,
        chunked.chunks,
        embedded.vectors,
        chunked.texts,
        embedded.fitted,
    )
    texts = (
        "\n".join([*_titles(document), text.text])
        for document, text in zip(documents, task.documents, strict=True)
    )
    Lexical.build(texts, embedded.fit.k1, embedded.fit.b).save(files / LEXICAL)
    embedded.embedder.save(files / FITTED)
    storing.fill(task.path, building, manifest, before, task.work)
    return manifest


def _usable(task: Task, before: IndexManifest | None) -> Old | None:
    """The index that is there, if its vectors are of this model and recipe and whole."""
    if before is None or before.origin != task.origin:
        return None
    same = msgspec.structs.replace(
        before.recipe, store=task.recipe.store, evaluate=task.recipe.evaluate
    )
    if same != task.recipe:
        return None
    with suppress(Damaged):
        old = Old(before, task.path / before.files, passages_of(task.path, task.path, before))
        # Who reads all of it now finds what is damaged while everything can still be made again.
        return old if old.passages.documents and sum(1 for _ in old.passages) else None
    return None


def _chunked(task: Task, documents: list[IndexedDocument], old: Old | None) -> Chunked:
    """The chunks of every document; those of documents that the old index has are read from it."""
    # Of a document that a source gives twice the first one's chunks have the ids that their content
    # gives them.
    numbered = list(enumerate(old.passages.documents)) if old else []
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
    embedder, vectors_NE, evaluation = fit_corpus(
        task.model,
        task.tokenizer,
        task.documents,
        chunked.chunks,
        task.train,
        task.recipe,
        task.say,
        task.work,
        task.processes,
        task.own,
        task.fit_s,
        task.known_copies(),
    )
    fit = Fit(
        id=_fit_id(task, corpus),
        documents=len(chunked.documents),
        chunks=len(chunked.chunks),
        k1=evaluation.k1 if evaluation else K1,
        b=evaluation.b if evaluation else B,
    )
    return Embedded(embedder, vectors_NE, np.ones(len(chunked.chunks), bool), fit, evaluation)


def _followed(task: Task, chunked: Chunked, old: Old) -> Embedded:
    """What is new or changed embedded under the old fit; vectors of the rest are the old ones."""
    rows_by_text = dict(
        zip(old.passages.rows_N["text"].tolist(), range(len(old.passages.rows_N)), strict=True)
    )
    rows_N = np.array([rows_by_text.get(text, -1) for text in chunked.texts.tolist()])
    new = np.flatnonzero(rows_N < 0)
    gone = old.manifest.documents - (len(chunked.documents) - chunked.new)
    task.say(
        f"{counted(chunked.new, 'document')} new or changed, {gone:,} gone: embedding "
        f"{counted(len(new), 'chunk')}"
    )
    texts = [chunked.chunks[row].indexed for row in new]
    task.work.expect("embedding", sum(map(len, texts)))
    embedder = Embedder.load(
        task.model, task.tokenizer, old.files / FITTED, task.work, task.processes
    )
    vectors_NE = np.asarray(old.passages.vectors_NE)[rows_N]
    vectors_NE[new] = embedder.passages(texts)
    fitted_N = old.passages.rows_N["fitted"][rows_N] & (rows_N >= 0)
    fitted_N |= _near_fitted(task.known_copies(), chunked.chunks, fitted_N)
    return Embedded(embedder, vectors_NE, fitted_N, old.manifest.fit, old.manifest.evaluation)


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
        *[name for name, _ in columns.most_common(_FIELDS) if name not in _OWN],
    )
