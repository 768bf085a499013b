"""An index: one folder with the chunks, their vectors in a store, BM25, what was fitted, and the manifest.

index.json       manifest: what it was made from, how, and how well it searches
chunks.jsonl     one Chunk a line, in id order
fitted.safetensors, store/, bm25/
"""

from __future__ import annotations

import functools
import shutil
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from farspan.domain.codec import load, save
from farspan.domain.corpus import Document
from farspan.domain.problems import Refusal
from farspan.retrieval import stores
from farspan.retrieval.chunk import Chunk, Chunking, chunk_documents
from farspan.retrieval.embed import Embedder, Pooling, Tokens
from farspan.retrieval.evaluate import Evaluation, Queries, Side, body_of, choose_queries, evaluate
from farspan.retrieval.lexical import Lexical
from farspan.retrieval.rank import query_form
from farspan.runtime.model import Decoder, initialise

_MANIFEST, _CHUNKS, _FITTED = "index.json", "chunks.jsonl", "fitted.safetensors"
_ADD_AT_ONCE = 1024
#: Titles at most that the mean of queries is fitted to.
_TITLES = 16_384


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an index is of: the hash of the model's weights and of the corpus."""

    model: str
    corpus: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an index is made. `seed` is the untrained model's, the choice of queries' and the bootstrap's."""

    chunking: Chunking = Chunking()
    pooling: Pooling = Pooling()
    store: str = "auto"
    seed: int = 0
    version: int = 2


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`evaluation` is None where no document of the corpus has a body of a few words to be found by."""

    origin: Origin
    recipe: Recipe
    documents: int
    chunks: int
    dim: int
    evaluation: Evaluation | None


def build(
    path: Path, model: Decoder, tokenizer: Tokens, documents: Sequence[Document], *,
    train: int, origin: Origin, recipe: Recipe, say: Callable[[str], None],
) -> Manifest:  # fmt: skip
    """Make the index at `path`, the first `train` documents being the training split; `say` gets progress lines.

    Does nothing where an index of the same origin and recipe is there. A new one is written beside and renamed into
    place. Refuses a corpus without text.
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
    old = path.with_name(f"{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    work.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    return manifest


def _write(
    work: Path, model: Decoder, tokenizer: Tokens, documents: Sequence[Document],
    train: int, origin: Origin, recipe: Recipe, say: Callable[[str], None],
) -> Manifest:  # fmt: skip
    chunks = list(chunk_documents(documents, tokenizer, _fitting(recipe.chunking, model.spec.context)))
    if not chunks:
        raise Refusal(
            "no-documents", what="there is nothing to index", where=work.parent,
            fact=f"{len(documents)} documents, none with text", remedy="name a source with text: farspan init FOLDER",
        )  # fmt: skip
    say(f"embedding {len(chunks):,} chunks of {len(documents):,} documents")
    # Heads hold titles: what vectors are fitted to must not know them, or the evaluation would.
    bodies, heads = [c for c in chunks if not c.head], [c for c in chunks if c.head]
    texts = [body_of(document) for document in documents]
    queries = choose_queries(documents, texts, train, recipe.seed)
    titles, owners = _pairs(documents[:train] or documents, bodies, queries)
    fit = functools.partial(
        Embedder.fit, tokenizer=tokenizer, texts=[chunk.indexed for chunk in bodies or heads],
        titles=titles, owners=owners, pooling=recipe.pooling,
    )  # fmt: skip
    embedder, bodies_ND = fit(model)
    evaluation = None
    if queries.reported:
        say(f"embedding the same with an untrained model, to compare over {len(queries.reported)} queries")
        blank = Decoder(model.spec).eval().to(model.tok.weight.device)
        initialise(blank, recipe.seed)
        sides = (_side(embedder, bodies_ND, queries), _side(*fit(blank), queries))
        owners = [chunk.document for chunk in bodies]
        evaluation = evaluate(texts, owners, queries, *sides, recipe.seed, recipe.chunking.per_document)
    store = stores.load(recipe.store).create(work / "store", bodies_ND.shape[1])
    _add(store, bodies or heads, bodies_ND)
    if bodies:
        _add(store, heads, embedder.passages([c.indexed for c in heads]))
    store.finish()
    store.close()
    Lexical.build(f"{document.title}\n{document.text}" for document in documents).save(work / "bm25")
    (work / _CHUNKS).write_bytes(b"".join(msgspec.json.encode(chunk) + b"\n" for chunk in chunks))
    embedder.save(work / _FITTED)
    manifest = Manifest(
        origin=origin, recipe=recipe, documents=len(documents), chunks=len(chunks), dim=bodies_ND.shape[1],
        evaluation=evaluation,
    )  # fmt: skip
    save(manifest, work / _MANIFEST)
    return manifest


def _fitting(chunking: Chunking, context: int) -> Chunking:
    """Chunks no longer than the model reads after the end-of-text token that comes first."""
    size = min(chunking.size, context - 1)
    return msgspec.structs.replace(chunking, size=size, overlap=min(chunking.overlap, size // 2))


def _add(store: stores.Store, chunks: Sequence[Chunk], vectors_ND: stores.Vectors) -> None:
    for start in range(0, len(chunks), _ADD_AT_ONCE):
        some = chunks[start : start + _ADD_AT_ONCE]
        payloads: list[stores.Payload] = [{"document": c.document, "title": c.title, "origin": c.origin} for c in some]
        store.add([c.id for c in some], vectors_ND[start : start + len(some)], payloads)


def _pairs(
    documents: Sequence[Document], bodies: Sequence[Chunk], queries: Queries
) -> tuple[list[str], list[int]]:  # fmt: skip
    """Titles as they would be asked, and the number of the first body chunk of each: what the maps are fitted to.

    Evenly over the documents, without those that the evaluation asks for.
    """
    asked = {number for query in (*queries.reported, *queries.tuning) for number in query.relevant}
    first: dict[int, int] = {}
    for row, chunk in enumerate(bodies):
        first.setdefault(chunk.document, row)
    usable = [n for n, document in enumerate(documents) if n in first and n not in asked and query_form(document.title)]
    chosen = usable[:: len(usable) // _TITLES + 1]
    return [query_form(documents[n].title) for n in chosen], [first[n] for n in chosen]


def _side(embedder: Embedder, bodies_ND: stores.Vectors, queries: Queries) -> Side:
    reported, tuning = ([query.text for query in some] for some in (queries.reported, queries.tuning))
    return Side(bodies_ND, embedder.queries(reported), embedder.queries(tuning))


class Index:
    """An index that is open: its manifest, chunks in id order, store, BM25 and embedder. Close it after use."""

    def __init__(self, path: Path, manifest: Manifest, model: Decoder, tokenizer: Tokens) -> None:
        self.manifest = manifest
        decoder = msgspec.json.Decoder(Chunk)
        self.chunks = [decoder.decode(line) for line in (path / _CHUNKS).read_bytes().splitlines()]
        self._first_chunk = [
            bisect_left(self.chunks, n, key=lambda c: c.document) for n in range(manifest.documents + 1)
        ]
        self.named: dict[str, list[int]] = {}
        for chunk in self.chunks:
            if chunk.ordinal == 0:
                self.named.setdefault(chunk.title.lower(), []).append(chunk.document)
        self.lexical = Lexical.load(path / "bm25", manifest.documents)
        self.embedder = Embedder.load(model, tokenizer, manifest.recipe.pooling, path / _FITTED)
        self.store = stores.load(manifest.recipe.store).open_store(path / "store")

    @classmethod
    def open(cls, path: Path, model: Decoder, tokenizer: Tokens, *, origin: Origin, command: str) -> Index:
        """The index at `path`; refuses a missing one and one of another model or corpus. `command` would make it."""
        manifest = read_manifest(path, command)
        for what in ("model", "corpus"):
            have, want = getattr(manifest.origin, what), getattr(origin, what)
            if have != want:
                raise Refusal(
                    "no-index", what=f"the index is of another {what} than the run", where=path,
                    fact=f"index: {have}, run: {want}", remedy=command,
                )  # fmt: skip
        return cls(path, manifest, model, tokenizer)

    def chunks_of(self, document: int) -> list[Chunk]:
        return self.chunks[self._first_chunk[document] : self._first_chunk[document + 1]]

    def close(self) -> None:
        self.store.close()


def read_manifest(path: Path, command: str) -> Manifest:
    """The manifest of the index at `path`; refuses where there is none. `command` would make it."""
    if not (path / _MANIFEST).exists():
        raise Refusal(
            "no-index", what="there is no index to search", where=path, fact=f"{_MANIFEST} is missing", remedy=command
        )  # fmt: skip
    return load(path / _MANIFEST, Manifest)
