"""An index: one folder with the chunks, their vectors in a store, BM25, what was fitted, and the manifest.

index.json       manifest: what it was made from, how, and how well it searches
chunks.jsonl     one Chunk a line, whose number from 0 is its id in the store
fitted.safetensors, store/, bm25/
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from farspan.corpus.tokenizer import Tokenizer
from farspan.domain.codec import load, save
from farspan.domain.corpus import Document
from farspan.domain.problems import Refusal
from farspan.retrieval import stores
from farspan.retrieval.chunk import Chunk, chunk_documents
from farspan.retrieval.embed import Embedder, Fit
from farspan.retrieval.evaluate import Evaluation, Queries, Side, body_of, choose_queries, evaluate
from farspan.retrieval.lexical import Lexical
from farspan.retrieval.rank import query_form
from farspan.runtime.model import Decoder, initialise

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
    fit: Fit = Fit()
    store: str = "auto"
    seed: int = 0
    #: Raised whenever the same fields come to give another index.
    version: int = 3


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`evaluation` is None where no document of the corpus has a body of a few words to be found by."""

    origin: Origin
    recipe: Recipe
    documents: int
    chunks: int
    dim: int
    evaluation: Evaluation | None


def build(
    path: Path, model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document], *,
    train: int, origin: Origin, recipe: Recipe, say: Callable[[str], None],
) -> Manifest:  # fmt: skip
    """Make the index at `path`, the first `train` documents being the training split; `say` gets progress lines.

    Does nothing where an index of the same origin and recipe is there. A new one is written beside it and then takes
    its place. Refuses a corpus without text.
    """
    recipe = msgspec.structs.replace(recipe, store=stores.resolve(recipe.store))
    if (path / _MANIFEST).exists():
        manifest = load(path / _MANIFEST, Manifest)
        if (manifest.origin, manifest.recipe) == (origin, recipe):
            say(f"index {path} is up to date")
            return manifest
    work = path.with_name(f"{path.name}.building")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    manifest = _write(work, model, tokenizer, documents, train, origin, recipe, say)
    shutil.rmtree(path, ignore_errors=True)
    work.rename(path)
    return manifest


def _write(
    work: Path, model: Decoder, tokenizer: Tokenizer, documents: Sequence[Document],
    train: int, origin: Origin, recipe: Recipe, say: Callable[[str], None],
) -> Manifest:  # fmt: skip
    size = max(min(recipe.chunk_tokens, model.spec.context - 1), 8)
    # Bodies come first. Heads hold titles: what is fitted to chunks must not know them, or the evaluation would.
    chunks = sorted(chunk_documents(documents, tokenizer, size), key=lambda chunk: chunk.head)
    bodies = [chunk for chunk in chunks if not chunk.head]
    if not chunks:
        raise Refusal(
            "no-documents", what="there is nothing to index", where=work.parent,
            fact=f"{len(documents)} documents, none with text", remedy="name a source with text: farspan init FOLDER",
        )  # fmt: skip
    say(f"embedding {len(chunks):,} chunks of {len(documents):,} documents")
    texts = [body_of(document) for document in documents]
    queries = choose_queries(documents, texts, train, recipe.seed)
    titles, owners = title_pairs(documents[:train], bodies, queries)
    fitted = [chunk.indexed for chunk in bodies or chunks]
    embedder, vectors_ND = Embedder.fit(model, tokenizer, fitted, titles, owners, recipe.fit)
    evaluation = None
    if queries.reported:
        say(f"embedding the same with an untrained model, to compare over {len(queries.reported)} queries")
        blank = untrained(model, recipe.seed)
        sides = {
            "model": _side(embedder, vectors_ND, queries),
            "untrained": _side(*Embedder.fit(blank, tokenizer, fitted, titles, owners, recipe.fit), queries),
        }
        evaluation = evaluate(texts, np.array([c.document for c in bodies]), queries, sides, recipe.seed)
    vectors_ND = np.concatenate([vectors_ND, embedder.passages([c.indexed for c in chunks[len(fitted) :]])])
    _fill(stores.load(recipe.store).create(work / _STORE, vectors_ND.shape[1]), chunks, vectors_ND)
    Lexical.build(f"{document.title}\n{document.text}" for document in documents).save(work / _LEXICAL)
    (work / _CHUNKS).write_bytes(msgspec.json.Encoder().encode_lines(chunks))
    embedder.save(work / _FITTED)
    manifest = Manifest(
        origin=origin, recipe=recipe, documents=len(documents), chunks=len(chunks), dim=vectors_ND.shape[1],
        evaluation=evaluation,
    )  # fmt: skip
    save(manifest, work / _MANIFEST)
    return manifest


def title_pairs(
    documents: Sequence[Document], bodies: Sequence[Chunk], queries: Queries
) -> tuple[list[str], list[int]]:
    """Titles as they would be asked, and the number of the first body chunk of each: what the maps are fitted to.

    Evenly over the documents, without those that the evaluation asks for.
    """
    asked = {number for query in (*queries.reported, *queries.tuning) for number in query.relevant}
    first = {chunk.document: row for row, chunk in reversed([*enumerate(bodies)])}
    usable = [n for n, d in enumerate(documents) if n in first and n not in asked and query_form(d.title)]
    chosen = usable[:: len(usable) // _TITLES + 1]
    return [query_form(documents[n].title) for n in chosen], [first[n] for n in chosen]


def untrained(model: Decoder, seed: int) -> Decoder:
    """A model of the same shape, on the same device, with the weights that training begins from."""
    blank = Decoder(model.spec).eval().to(model.tok.weight.device)
    initialise(blank, seed)
    return blank


def _side(embedder: Embedder, bodies_ND: stores.Vectors, queries: Queries) -> Side:
    reported, tuning = ([query.text for query in some] for some in (queries.reported, queries.tuning))
    return Side(bodies_ND, embedder.queries(reported), embedder.queries(tuning))


def _fill(store: stores.Store, chunks: Sequence[Chunk], vectors_ND: stores.Vectors) -> None:
    for start in range(0, len(chunks), _ADD_AT_ONCE):
        some = chunks[start : start + _ADD_AT_ONCE]
        payloads: list[stores.Payload] = [{"document": c.document, "title": c.title, "origin": c.origin} for c in some]
        store.add(range(start, start + len(some)), vectors_ND[start : start + len(some)], payloads)
    store.finish()
    store.close()


@dataclass
class Index:
    """An index that is open. Close it after use."""

    manifest: Manifest
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
        chunks: dict[int, list[Chunk]] = {}
        lines = msgspec.json.Decoder(Chunk).decode_lines((path / _CHUNKS).read_bytes())
        for chunk in sorted(lines, key=lambda chunk: chunk.start):
            chunks.setdefault(chunk.document, []).append(chunk)
        named: dict[str, list[int]] = {}
        for number, parts in chunks.items():
            named.setdefault(parts[0].title.lower(), []).append(number)
        return cls(
            manifest, chunks, named, Lexical.load(path / _LEXICAL), Embedder.load(model, tokenizer, path / _FITTED),
            stores.load(manifest.recipe.store).open_store(path / _STORE),
        )  # fmt: skip

    def close(self) -> None:
        self.store.close()


def read_manifest(path: Path, command: str) -> Manifest:
    """The manifest of the index at `path`; refuses where there is none. `command` would make it."""
    if not (path / _MANIFEST).exists():
        raise Refusal(
            "no-index", what="there is no index to search", where=path, fact=f"{_MANIFEST} is missing", remedy=command
        )  # fmt: skip
    return load(path / _MANIFEST, Manifest)
