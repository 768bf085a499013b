"""An index: one folder with the manifest, and the chunks, their vectors in a store, BM25 and what was fitted.

index.json       manifest: what it was made from, how, how well it searches, and the folder of its files
FOLDER/chunks.jsonl     one Chunk a line, whose number from 0 is its id in the store
FOLDER/fitted.safetensors, FOLDER/store/, FOLDER/bm25/

A new index gets a folder of its own, and takes the old one's place as the manifest is renamed over the old one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import msgspec
import numpy as np

from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.codec import content_hash, load, save
from farspan.domain.corpus import Document
from farspan.domain.problems import Refusal
from farspan.domain.units import counted
from farspan.launch.lock import locked
from farspan.retrieval import stores
from farspan.retrieval.chunk import Chunk, chunk_documents
from farspan.retrieval.embed import Embedder, FitSettings, steps_to_fit
from farspan.retrieval.evaluate import Evaluation, ModelVectors, Queries, body_of, choose_queries, evaluate
from farspan.retrieval.lexical import Lexical
from farspan.retrieval.rank import query_form
from farspan.retrieval.work import IndexWork
from farspan.runtime.model.decoder import Decoder, initialise

_MANIFEST, _CHUNKS, _FITTED, _STORE, _LEXICAL = "index.json", "chunks.jsonl", "fitted.safetensors", "store", "bm25"
_ADD_AT_ONCE = 1024
#: Titles at most that the maps are fitted to.
_TITLES = 16_384


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an index is of: the hash of the model's weights and of the corpus."""

    model: str
    corpus: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an index is made. `seed` is the untrained model's, the choice of queries' and the bootstrap's."""

    #: At most so many tokens a chunk, and no more than the model reads after the end of text that comes first.
    chunk_tokens: int = 128
    fit: FitSettings = FitSettings()
    store: str = "auto"
    seed: int = 0
    #: Whether it is measured how well the index searches.
    evaluate: bool = True
    #: Raised whenever the same fields come to give another index.
    version: int = 3


class IndexManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`evaluation` is None where it was left out, and where no document has a body of a few words to be found by."""

    origin: Origin
    recipe: Recipe
    documents: int
    chunks: int
    dim: int
    evaluation: Evaluation | None
    #: The folder of the files, beside the manifest; or they lie beside it themselves.
    files: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16}|\.)$")] = "."


def build(
    path: Path, model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], *,
    train: int, origin: Origin, recipe: Recipe, say: Callable[[str], None], work: IndexWork | None = None,
) -> IndexManifest:  # fmt: skip
    """Make the index at `path`, the first `train` documents being the training split; `say` gets lines for people.

    Does nothing where an index of the same origin and recipe is there, evaluated or not to be. `work` is told how far
    it is. What is embedded is kept beside `path` until the index is whole, so that a build that was stopped, however
    that happened, goes on where it was; until then the old index stays. Refuses a corpus without text, and to be the
    second at work on this index (run-busy).
    """
    recipe = msgspec.structs.replace(recipe, store=stores.resolve(recipe.store))
    building, work = path.with_name(f"{path.name}.building"), work or IndexWork()
    if (manifest := _current(path, origin, recipe)) and not building.exists():
        say(f"index {path} is up to date")
        return manifest
    with _alone(building, path):
        manifest = _current(path, origin, recipe)
        kept = building / content_hash(origin)
        _sweep(building, {"lock", kept.name})
        _sweep(path, {_MANIFEST, read_manifest(path, "").files if (path / _MANIFEST).exists() else ""})
        if manifest is None:
            kept.mkdir(exist_ok=True)
            work.folder = kept
            manifest = _write(building, model, tokenizer, documents, train, origin, recipe, say, work)
            (building / manifest.files).rename(path / manifest.files)
            save(manifest, path / _MANIFEST)
            _sweep(path, {_MANIFEST, manifest.files})
        shutil.rmtree(building, ignore_errors=True)
    return manifest


def _current(path: Path, origin: Origin, recipe: Recipe) -> IndexManifest | None:
    """The manifest at `path` if its index is the one to be made: an evaluated one also where that is not asked for."""
    if not (path / _MANIFEST).exists():
        return None
    manifest = load(path / _MANIFEST, IndexManifest)
    enough = (recipe, msgspec.structs.replace(recipe, evaluate=True))
    return manifest if manifest.origin == origin and manifest.recipe in enough else None


def _alone(building: Path, path: Path) -> IO[bytes]:
    """The lock of the folder of a building; refuses where another process has it. Who has it removes the folder."""
    while True:
        building.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            lock = locked(building / "lock", "this index is being made already", path)
            if os.path.samestat(os.fstat(lock.fileno()), (building / "lock").stat()):
                return lock


def _sweep(folder: Path, kept: set[str]) -> None:
    """Remove what killed processes have left. Files of an index that has no folder for them are its own (".")."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir() if "." not in kept else ():
        if entry.name not in kept:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _write(
    building: Path, model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document],
    train: int, origin: Origin, recipe: Recipe, say: Callable[[str], None], work: IndexWork,
) -> IndexManifest:  # fmt: skip
    size = max(min(recipe.chunk_tokens, model.spec.context - 1), 8)
    # Bodies come first. Heads hold titles: what is fitted to chunks must not know them, or the evaluation would.
    chunks = sorted(chunk_documents(documents, tokenizer, size), key=lambda chunk: chunk.head)
    bodies = [chunk for chunk in chunks if not chunk.head]
    if not chunks:
        raise Refusal(
            "no-documents", what="there is nothing to index", where=building.parent,
            fact=f"{counted(len(documents), 'document')}, none with text",
            remedy="name a source with text: farspan init FOLDER",
        )  # fmt: skip
    texts = [body_of(document) for document in documents]
    queries = choose_queries(documents, texts, train, recipe.seed)
    titles, owners = title_pairs(documents[:train], bodies, queries)
    fitted = [chunk.indexed for chunk in bodies or chunks]
    heads = [chunk.indexed for chunk in chunks[len(fitted) :]]
    questions = [query.text for query in (*queries.reported, *queries.tuning)] if recipe.evaluate else []
    models = 2 if recipe.evaluate and queries.reported else 1
    work.expect("embedding", models * _chars(fitted, titles, questions) + _chars(heads))
    work.expect("fitting", models * steps_to_fit(len(titles), recipe.fit))
    work.expect("storing", len(chunks))
    say(f"embedding {counted(len(chunks), 'chunk')} of {counted(len(documents), 'document')}")
    embedder, vectors_ND = Embedder.fit(model, tokenizer, fitted, titles, owners, recipe.fit, work)
    evaluation = None
    if models == 2:
        say(f"embedding the same with an untrained model, to compare over {counted(len(queries.reported), 'title')}")
        blank = untrained(model, recipe.seed)
        sides = {
            "model": _side(embedder, vectors_ND, queries),
            "untrained": _side(*Embedder.fit(blank, tokenizer, fitted, titles, owners, recipe.fit, work), queries),
        }
        evaluation = evaluate(texts, np.array([c.document for c in bodies]), queries, sides, recipe.seed)
    vectors_ND = np.concatenate([vectors_ND, embedder.passages(heads)])
    files = building / content_hash(origin, recipe)
    _fill(stores.load(recipe.store).create(files / _STORE, vectors_ND.shape[1]), chunks, vectors_ND, work)
    Lexical.build(f"{document.title}\n{document.text}" for document in documents).save(files / _LEXICAL)
    (files / _CHUNKS).write_bytes(msgspec.json.Encoder().encode_lines(chunks))
    embedder.save(files / _FITTED)
    return IndexManifest(
        origin=origin, recipe=recipe, documents=len(documents), chunks=len(chunks), dim=vectors_ND.shape[1],
        evaluation=evaluation, files=files.name,
    )  # fmt: skip


def _chars(*texts: Sequence[str]) -> int:
    return sum(len(text) for part in texts for text in part)


def title_pairs(
    documents: Sequence[Document], bodies: Sequence[Chunk], queries: Queries
) -> tuple[list[str], list[int]]:
    """Titles as they would be asked, and the number of the first body chunk of each: what the maps are fitted to.

    Evenly over the documents, without those that the evaluation asks for.
    """
    relevant = {number for query in (*queries.reported, *queries.tuning) for number in query.relevant}
    first = {chunk.document: row for row, chunk in reversed([*enumerate(bodies)])}
    usable = [n for n, d in enumerate(documents) if n in first and n not in relevant and query_form(d.title)]
    chosen = usable[:: len(usable) // _TITLES + 1]
    return [query_form(documents[n].title) for n in chosen], [first[n] for n in chosen]


def untrained(model: Decoder, seed: int) -> Decoder:
    """A model of the same shape, on the same device, with the weights that training begins from."""
    blank = Decoder(model.spec).eval().to(model.tok.weight.device)
    initialise(blank, seed)
    return blank


def _side(embedder: Embedder, bodies_ND: stores.Vectors, queries: Queries) -> ModelVectors:
    reported, tuning = ([query.text for query in some] for some in (queries.reported, queries.tuning))
    return ModelVectors(bodies_ND, embedder.queries(reported), embedder.queries(tuning))


def _fill(store: stores.Store, chunks: Sequence[Chunk], vectors_ND: stores.Vectors, work: IndexWork) -> None:
    work.start("storing")
    for start in range(0, len(chunks), _ADD_AT_ONCE):
        some = chunks[start : start + _ADD_AT_ONCE]
        payloads: list[stores.Payload] = [{"document": c.document, "title": c.title, "origin": c.origin} for c in some]
        store.add(range(start, start + len(some)), vectors_ND[start : start + len(some)], payloads)
        work.did(len(some))
    store.finish()
    store.close()


@dataclass
class Index:
    """An index that is open. Close it after use."""

    manifest: IndexManifest
    #: Chunks of each document that has any, from its beginning on.
    chunks: dict[int, list[Chunk]]
    #: Documents by their titles in small letters.
    named: dict[str, list[int]]
    lexical: Lexical
    embedder: Embedder
    store: stores.Store

    @classmethod
    def open(cls, path: Path, model: Decoder, tokenizer: Tokenizer, *, origin: Origin, command: str) -> Index:
        """The index at `path`; refuses a missing one and one of another model or corpus. `command` would make it."""
        manifest = read_manifest(path, command)
        for what in ("model", "corpus"):
            have, want = getattr(manifest.origin, what), getattr(origin, what)
            if have != want:
                raise Refusal(
                    "no-index", what=f"the index is of another {what} than the run", where=path,
                    fact=f"index: {have}, run: {want}", remedy=command,
                )  # fmt: skip
        try:
            return cls._load(path / manifest.files, manifest, model, tokenizer)
        except Exception:
            # A new index may have taken its place meanwhile.
            if read_manifest(path, command) == manifest:
                raise
        return cls.open(path, model, tokenizer, origin=origin, command=command)

    @classmethod
    def _load(cls, files: Path, manifest: IndexManifest, model: Decoder, tokenizer: Tokenizer) -> Index:
        chunks: dict[int, list[Chunk]] = {}
        lines = msgspec.json.Decoder(Chunk).decode_lines((files / _CHUNKS).read_bytes())
        for chunk in sorted(lines, key=lambda chunk: chunk.start):
            chunks.setdefault(chunk.document, []).append(chunk)
        named: dict[str, list[int]] = {}
        for number, parts in chunks.items():
            named.setdefault(parts[0].title.lower(), []).append(number)
        return cls(
            manifest, chunks, named, Lexical.load(files / _LEXICAL), Embedder.load(model, tokenizer, files / _FITTED),
            stores.load(manifest.recipe.store).open_store(files / _STORE),
        )  # fmt: skip

    def close(self) -> None:
        self.store.close()


def read_manifest(path: Path, command: str) -> IndexManifest:
    """The manifest of the index at `path`; refuses where there is none. `command` would make it."""
    if not (path / _MANIFEST).exists():
        raise Refusal(
            "no-index", what="there is no index to search", where=path, fact=f"{_MANIFEST} is missing", remedy=command
        )
    return load(path / _MANIFEST, IndexManifest)
