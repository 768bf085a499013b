"""An index that is open: one folder with the manifest, and the folder of the files that it names.

index.json               what it was made from, how, how well it searches, and FOLDER
FOLDER/passages/         documents, chunks and their vectors (farspan.retrieval.passages)
FOLDER/fitted.safetensors    what was fitted to the corpus
FOLDER/store/, FOLDER/bm25/

A new index gets a folder of its own, and takes the old one's place as the manifest is renamed over
the old one. Nothing here imports PyTorch: words alone are searched without a model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Protocol, Self

import msgspec
import numpy as np

from farspan.domain.codec import ContentHash, load
from farspan.domain.corpus import Place
from farspan.domain.problems import Refusal
from farspan.domain.suggest import advise
from farspan.retrieval import stores
from farspan.retrieval.evaluate import Evaluation
from farspan.retrieval.lexical import Lexical
from farspan.retrieval.passages import Damaged, IndexedDocument, Passages
from farspan.retrieval.stores import About, Spot, Store, Vectors

MANIFEST, PASSAGES, FITTED, STORE, LEXICAL = (
    "index.json",
    "passages",
    "fitted.safetensors",
    "store",
    "bm25",
)
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
    version: int = 7


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vectors were fitted to, and the evaluation was made over: documents, and their chunks.
    `k1` and `b` are what BM25 was found best with."""

    id: str
    documents: int
    chunks: int
    k1: float
    b: float


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
    dim: Annotated[int, msgspec.Meta(ge=1)]
    fit: Fit
    #: Chunks of today that the fit was made to.
    fitted_chunks: int
    #: What a search can be narrowed by.
    fields: tuple[str, ...]
    evaluation: Evaluation | None
    #: The folder of the files, beside the manifest, and the table or collection where the store
    #: lies at a server.
    files: ContentHash
    table: Annotated[str, msgspec.Meta(pattern=r"^(farspan_[0-9a-f]{16})?\Z")]
    metric: Literal["cosine"] = "cosine"

    @property
    def fit_is_due(self) -> bool:
        """Whether much of the text is not what the fit was made to."""
        return self.fitted_chunks < (1 - DRIFT) * max(self.chunks, self.fit.chunks)

    @property
    def about(self) -> About:
        return About(
            model=self.origin.model, tokenizer=self.origin.tokenizer, fit=self.fit.id, dim=self.dim
        )

    def spot(self, path: Path) -> Spot:
        """Where the store of the index at `path` lies."""
        return Spot(
            folder=path / self.files / STORE,
            location=self.store[1],
            name=self.table or stores.EMBEDDED_TABLE,
        )

    @property
    def store(self) -> tuple[str, str]:
        """The name of the store and its location."""
        return stores.resolve(self.recipe.store)


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
        self.path, self.manifest, self._embedder, self._remedy = path, manifest, embedder, remedy
        self._files = path / manifest.files
        self._opened: Store | None = None
        self.passages = passages_of(path, path, manifest)

    @classmethod
    def open(
        cls,
        path: Path,
        embedder: Callable[[Path, Origin], QueryEmbedder],
        *,
        remedy: str,
        vectors: bool = True,
    ) -> Self:
        """The index at `path`; refuses (no-index) a missing and a damaged one. `remedy` would make
        it.

        Without `vectors` the store stays closed: it may lie at a server, and words alone do not
        need it.
        """
        while True:
            manifest = read_manifest(path, remedy)
            try:
                index = cls(path, manifest, embedder, remedy)
                # All that a search may need is opened now: a new index may take this one's files
                # away.
                index._read(vectors)
                return index
            except Exception:
                # A new index may have taken this one's files away meanwhile.
                if read_manifest(path, remedy) == manifest:
                    raise

    def _read(self, vectors: bool) -> None:
        for name in ("lexical", "documents", *(("store",) if vectors else ())):
            getattr(self, name)

    @cached_property
    def documents(self) -> list[IndexedDocument]:
        return self.passages.documents

    @cached_property
    def lexical(self) -> Lexical:
        try:
            lexical = Lexical.load(self._files / LEXICAL)
        except Exception as error:  # What damaged files lead to is not said.
            raise Damaged(self.path, f"{LEXICAL}: {error}") from None
        if lexical.count != self.manifest.documents:
            raise Damaged(self.path, f"{LEXICAL} is of {lexical.count} documents")
        return lexical

    @cached_property
    def named(self) -> dict[str, list[int]]:
        """Documents by their titles in small letters."""
        named: dict[str, list[int]] = {}
        for number, document in enumerate(self.documents):
            titles = {document.title.lower(), *(one.title.lower() for one in document.places)}
            for title in titles:
                named.setdefault(title, []).append(number)
        return named

    @cached_property
    def embedder(self) -> QueryEmbedder:
        """Refuses (no-index) where the run has another model by now than the index is of."""
        return self._embedder(self._files / FITTED, self.manifest.origin)

    @cached_property
    def store(self) -> Store:
        """Refuses (store-mismatch) vectors of another model, tokenizer, fit or size."""
        self._opened = stores.load(self.manifest.store[0]).open_store(self.manifest.spot(self.path))
        about, wanted = self._opened.describe(), self.manifest.about
        if about != wanted:
            raise Refusal(
                "store-mismatch",
                what="the store holds the vectors of another index",
                where=self.path,
                fact=f"it was made for {about}, the index for {wanted}",
                remedy=self._remedy,
            )
        return self._opened

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
        if self._opened is not None:
            self._opened.close()


def field(document: IndexedDocument | Place, name: str) -> str | None:
    """What a document has in a field; a column of the source that is called like one of farspan's
    own gives way."""
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


def passages_of(index: Path, folder: Path, manifest: IndexManifest) -> Passages:
    """The passages of the index at `index`, whose files are in `folder`. Raises Damaged."""
    return Passages(
        index, folder / manifest.files / PASSAGES, manifest.documents, manifest.chunks, manifest.dim
    )


def read_manifest(path: Path, remedy: str) -> IndexManifest:
    """The manifest of the index at `path`; refuses where there is none, and one of an earlier
    version. `remedy` would make it."""
    if not (path / MANIFEST).exists():
        raise Refusal(
            "no-index",
            what="there is no index to search",
            where=path,
            fact=f"{MANIFEST} is missing",
            remedy=remedy,
        )
    try:
        return load(path / MANIFEST, IndexManifest)
    except Refusal as refusal:
        raise Refusal(
            "no-index",
            what="the index is damaged, or of another version of farspan",
            where=path / MANIFEST,
            fact=refusal.problem.fact,
            remedy=remedy,
        ) from None
