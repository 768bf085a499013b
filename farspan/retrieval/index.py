"""An index that is open: one folder with the manifest, and the folder of the files that it names.

    index.json                   what it was made from, how, how well it searches, and FOLDER
    FOLDER/passages/             documents and their chunks (farspan.retrieval.passages)
    FOLDER/fitted.safetensors    what was fitted to the corpus
    FOLDER/store/NAME/           a set of vectors, unless it lies at a server
    FOLDER/bm25/

A new index gets a folder of its own, and takes the old one's place as the manifest is renamed over
the old one. Nothing here imports PyTorch: words alone are searched without a model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.corpus import Place
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import ContentHash, load
from farspan.domain.suggest import advise
from farspan.retrieval import stores
from farspan.retrieval.bm25 import BM25Index
from farspan.retrieval.evaluate import Evaluation
from farspan.retrieval.passages import Damaged, IndexedDocument, Passages
from farspan.retrieval.stores import Store, StoreLocation, StoreModule, Vectors

INDEX_MANIFEST = "index.json"
PASSAGES = "passages"
LEXICAL = "bm25"
FITTED = "fitted.safetensors"
STORE_FOLDER = "store"
SEAL = "seal"
#: The set of vectors that the run's own model makes, under the index's fit.
OWN_VECTORS = "own"
#: A new fit is due when so many of the chunks, or of those that the fit was made to, are not of
#: both.
DRIFT = 0.2


class FitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How vectors are fitted (`tuning.py`): size of a vector, pairs of a step, steps and passes
    over the pairs at most, seed. Chosen on tuning queries alone
    (docs/decisions/0008-embeddings.md)."""

    size: int = 512
    batch: int = 512
    steps: int = 300
    epochs: int = 14
    seed: int = 0


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model whose vectors an index holds: hashes of its weights and of its tokenizer."""

    model: str
    tokenizer: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an index is made. `seed` is the untrained model's, the choice of queries' and the
    bootstrap's."""

    #: At most so many tokens a chunk, and no more than the model reads after the end of text that
    #: comes first.
    chunk_tokens: int = 128
    fit: FitSettings = FitSettings()
    #: `NAME` or `NAME:LOCATION`, as in run.yaml.
    store: str = "auto"
    seed: int = 0
    #: Whether it is measured how well the index searches.
    evaluate: bool = True
    #: Raised whenever the same fields come to give another index.
    version: int = 8


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vectors were fitted to, and the evaluation was made over: documents, and their chunks.
    `k1` and `b` are what BM25 was found best with."""

    id: str
    documents: int
    chunks: int
    k1: float
    b: float


#: What a table or collection of an index is called at a server; empty for a store in a folder.
Table = Annotated[str, msgspec.Meta(pattern=r"^(farspan_[0-9a-f]{16})?\Z")]


class IndexFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What made vectors: hashes of the model's weights, of its tokenizer and of the maps that were
    fitted; numbers a vector. Vectors have length 1, so that the inner product is the cosine."""

    model: str
    tokenizer: str
    fit: str
    dim: int
    metric: Literal["cosine"] = "cosine"


class VectorSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vector of every passage by one encoder, in a store: `NAME` or `NAME:LOCATION`, as in
    run.yaml."""

    encoder: str
    dim: Annotated[int, msgspec.Meta(ge=1)]
    store: str
    table: Table

    def place(self, folder: Path) -> StoreLocation:
        """Where the vectors lie: in `folder`, or at a server."""
        return StoreLocation(
            folder=folder,
            location=stores.resolve(self.store)[1],
            name=self.table or stores.EMBEDDED_TABLE,
            dim=self.dim,
        )

    @property
    def module(self) -> StoreModule:
        return stores.load(stores.resolve(self.store)[0])


class IndexManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`evaluation` is None where it was left out, and where no document has a body of a few words
    to be found by."""

    origin: Origin
    recipe: Recipe
    #: Hash of the documents, and the fingerprint of the source that they were read from; empty
    #: where it was not there.
    corpus: str
    source: str
    documents: int
    chunks: int
    #: Documents that are near copies of others, which the fit was not made to; and other places of
    #: documents, where exact copies stand.
    near_copies: int = 0
    exact_copies: int = 0
    #: Sets of vectors by their names; and the numbers of a vector, the metric and the table of the
    #: run's own.
    sets: dict[Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]+\Z")], VectorSet]
    dim: int
    metric: Literal["cosine"] = "cosine"
    table: Table
    fit: Fit
    #: Chunks of today that the fit was made to.
    fitted_chunks: int
    #: What a search can be narrowed by.
    fields: tuple[str, ...]
    evaluation: Evaluation | None
    #: The folder of the files, beside the manifest.
    files: ContentHash

    def __post_init__(self) -> None:
        if OWN_VECTORS not in self.sets:
            raise ValueError(f"there is no set of vectors {OWN_VECTORS!r}")

    @property
    def fit_is_due(self) -> bool:
        """Whether much of the text is not what the fit was made to."""
        return self.fitted_chunks < (1 - DRIFT) * max(self.chunks, self.fit.chunks)

    @property
    def about(self) -> IndexFingerprint:
        return IndexFingerprint(
            model=self.origin.model, tokenizer=self.origin.tokenizer, fit=self.fit.id, dim=self.dim
        )

    @property
    def servers(self) -> str:
        """The stores that lie at servers; empty where none does."""
        stores = {vectors.store for vectors in self.sets.values() if vectors.table}
        return " ".join(sorted(stores))

    def place(self, path: Path, name: str = OWN_VECTORS) -> StoreLocation:
        """Where a set of vectors of the index at `path` lies."""
        return self.sets[name].place(path / self.files / STORE_FOLDER / name)


class QueryEmbedder(Protocol):
    """What makes vectors of queries: `farspan.retrieval.embed.Embedder`."""

    def queries(self, texts: list[str]) -> Vectors: ...


class Index:
    """An index that is open; what of it a search does not need is not read. Close it after use.

    `embedder` is called with the file of the fit, once a query is to be embedded.
    """

    def __init__(
        self,
        path: Path,
        manifest: IndexManifest,
        embedder: Callable[[Path, Origin], QueryEmbedder],
        remedy: str,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._embedder = embedder
        self._remedy = remedy
        self._files = path / manifest.files
        self.passages = passages_of(path, manifest)
        self._closing = ExitStack()

    @classmethod
    def open(
        cls,
        path: Path,
        embedder: Callable[[Path, Origin], QueryEmbedder],
        *,
        remedy: str,
        vectors: bool = True,
    ) -> Self:
        """Open the index at `path`; refuse (no-index) a missing and a damaged one. `remedy` would
        make it.

        Without `vectors` the store stays closed: it may lie at a server, and words alone do not
        need it.
        """
        while True:
            manifest = read_manifest(path, remedy)
            try:
                index = cls(path, manifest, embedder, remedy)
                # All that a search may need is opened now: a new index may take this one's files
                # away.
                for part in ("lexical", "documents", *(("stores",) if vectors else ())):
                    getattr(index, part)
                # Old files are removed after the manifest has changed: a store that was opened
                # in between may have a part of its vectors.
                if read_manifest(path, remedy) == manifest:
                    return index
                index.close()
            except Exception:
                # A new index may have taken this one's files away meanwhile.
                if read_manifest(path, remedy) == manifest:
                    raise

    @cached_property
    def documents(self) -> list[IndexedDocument]:
        return self.passages.documents

    @cached_property
    def lexical(self) -> BM25Index:
        try:
            lexical = BM25Index.load(self._files / LEXICAL)
        except Exception as error:  # What damaged files lead to is not said.
            raise Damaged(self.path, f"{LEXICAL}: {error}") from None
        if lexical.count != self.manifest.documents:
            raise Damaged(self.path, f"{LEXICAL} is of {lexical.count} documents")
        return lexical

    @cached_property
    def named(self) -> dict[str, list[int]]:
        """Documents by their titles in lower case."""
        named: dict[str, list[int]] = {}
        for number, document in enumerate(self.documents):
            titles = {document.title.lower()}
            titles.update(place.title.lower() for place in document.places)
            for title in titles:
                named.setdefault(title, []).append(number)
        return named

    @cached_property
    def embedder(self) -> QueryEmbedder:
        """Return the embedder. Refuse (no-index) where the run has another model than the index."""
        return self._embedder(self._files / FITTED, self.manifest.origin)

    @cached_property
    def stores(self) -> dict[str, Store]:
        """The store of each set of vectors."""
        opened = {}
        for name, vectors in self.manifest.sets.items():
            opened[name] = vectors.module.open(self.manifest.place(self.path, name))
            self._closing.callback(opened[name].close)
        return opened

    @property
    def store(self) -> Store:
        """The store of the vectors that searches ask."""
        return self.stores[OWN_VECTORS]

    def vectors(self, rows: npt.NDArray[np.integer[Any]]) -> Vectors:
        """Return the vectors (N, E) of passages."""
        return self.store.vectors(self.passages.rows_N["id"][rows].tolist())

    def masked(self, where: dict[str, str]) -> np.ndarray:
        """Which documents (N) have these values in these fields, in one of their places; refuses
        an unknown field."""
        for name in where:
            if name not in self.manifest.fields:
                raise unknown_field(name, self.manifest.fields)

        def has_values(document: IndexedDocument | Place) -> bool:
            return all(field(document, name) == value for name, value in where.items())

        equal = [any(map(has_values, document.everywhere)) for document in self.documents]
        return np.array(equal, bool)

    def close(self) -> None:
        self._closing.close()


def field(document: IndexedDocument | Place, name: str) -> str | None:
    """Return a document's value in a field; a column of the source that is called like one of
    farspan's own gives way."""
    own = {"title": document.title, "origin": document.origin}
    return own.get(name, document.metadata.get(name))


def unknown_field(name: str, fields: tuple[str, ...]) -> Refusal:
    return Refusal(
        "usage",
        what=f"there is no field {name!r} to filter by",
        where="the filter of a search",
        fact=f"fields: {', '.join(fields)}",
        remedy=advise(name, fields, verb="filter by", synonyms=()),
    )


def passages_of(path: Path, manifest: IndexManifest) -> Passages:
    """Open the passages of the index at `path`. Raises Damaged."""
    folder = path / manifest.files / PASSAGES
    return Passages(path, folder, manifest.documents, manifest.chunks)


def read_manifest(path: Path, remedy: str) -> IndexManifest:
    """Read the manifest of the index at `path`; refuse where there is none, and one of an earlier
    version. `remedy` would make it."""
    if not (path / INDEX_MANIFEST).exists():
        raise Refusal(
            "no-index",
            what="there is no index to search",
            where=path,
            fact=f"{INDEX_MANIFEST} is missing",
            remedy=remedy,
        )
    try:
        return load(path / INDEX_MANIFEST, IndexManifest)
    except Refusal as refusal:
        raise Refusal(
            "no-index",
            what="the index is damaged, or of another version of farspan",
            where=path / INDEX_MANIFEST,
            fact=refusal.problem.fact,
            remedy=remedy,
        ) from None
