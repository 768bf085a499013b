"""An index that is open: one folder with the manifest, and the folder of the files that it names.

    index.json                   what it was made from, how, how well it searches, and FOLDER
    FOLDER/passages/             documents and their chunks (farspan.retrieval.passages)
    FOLDER/bm25/
    FOLDER/store/NAME/           a set of vectors, unless it lies at a server
    FOLDER/fitted.safetensors    what was fitted to the corpus for the run's own vectors
    FOLDER/queries.safetensors   the table that makes vectors of queries without the encoder
    FOLDER/covariance-NAME.npy   of a set of vectors: how far a query's cosines spread

A new index gets a folder of its own, and takes the old one's place as the manifest is renamed over
the old one. Nothing here imports PyTorch: words alone are searched without a model.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from farspan.domain.problems import Refusal
from farspan.domain.struct_files import ContentHash, load
from farspan.retrieval import stores
from farspan.retrieval.bm25 import BM25Index
from farspan.retrieval.choose import LexicalChoice
from farspan.retrieval.evaluate import Evaluation
from farspan.retrieval.filters import Bindings, Filters, Where
from farspan.retrieval.passages import Damaged, IndexedDocument, Passages
from farspan.retrieval.stores import Store, StoreLocation, StoreModule, Vectors
from farspan.retrieval.words import Words

if TYPE_CHECKING:
    from farspan.retrieval.encoders.query_table import QueryTable

INDEX_MANIFEST = "index.json"
PASSAGES = "passages"
LEXICAL = "bm25"
FITTED = "fitted.safetensors"
STORE_FOLDER = "store"
SEAL = "seal"
QUERY_TABLE = "queries.safetensors"
COVARIANCE = "covariance"
#: The set of vectors that the run's own model makes, under the index's fit; and a ready encoder's.
SetName = Literal["own", "encoder"]
OWN_VECTORS: Literal["own"] = "own"
ENCODER_VECTORS: Literal["encoder"] = "encoder"
#: A new fit is due when so many of the chunks, or of those that the fit was made to, are not of
#: both.
DRIFT = 0.2


#: Word pieces of a passage; and where a ready encoder embeds it: on three corpora 256 found .008 to
#: .037 more of nDCG@10 than 128 (docs/decisions/0030-voices.md).
PASSAGE_TOKENS = 128
ENCODER_PASSAGE_TOKENS = 256


class FitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How vectors are fitted (`contrastive_fit.py`): size of a vector, pairs of a step, steps and
    passes over the pairs at most, seed. Chosen on tuning queries alone
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

    #: At most so many word pieces a chunk, as `chunk.py` estimates them.
    chunk_tokens: int = PASSAGE_TOKENS
    fit: FitSettings = FitSettings()
    #: `NAME` or `NAME:LOCATION`, as in run.yaml.
    store: str = "auto"
    seed: int = 0
    #: Whether it is measured how well the index searches.
    evaluate: bool = True
    #: Raised whenever the same fields come to give another index.
    version: int = 10


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The documents, and their chunks, that vectors were fitted to and the evaluation was made
    over."""

    id: str
    documents: int
    chunks: int


class EncoderIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ready encoder, known by the hash of its files."""

    id: ContentHash
    name: str
    #: The folder that it was found in; another with the same files will do.
    folder: str


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
    """A vector of every passage by one model, in a store: `NAME` or `NAME:LOCATION`, as in
    run.yaml."""

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
    lexical: LexicalChoice
    #: Sets of vectors by their names: the run's own, and a ready encoder's.
    sets: dict[SetName, VectorSet]
    #: The model of the run's own vectors, and the ready encoder; None without such vectors.
    origin: Origin | None = None
    encoder: EncoderIdentity | None = None
    #: Why there are no vectors of a ready encoder; empty where there are, or none were asked for.
    no_encoder: str = ""
    metric: Literal["cosine"] = "cosine"
    fit: Fit
    #: Chunks of today that the fit was made to.
    fitted_chunks: int
    #: What a search can be narrowed by.
    fields: tuple[str, ...]
    evaluation: Evaluation | None
    #: The folder of the files, beside the manifest.
    files: ContentHash

    def __post_init__(self) -> None:
        if (self.origin is None) == (OWN_VECTORS in self.sets):
            raise ValueError(f"{OWN_VECTORS!r} vectors and their model come together")
        if (self.encoder is None) == (ENCODER_VECTORS in self.sets):
            raise ValueError(f"{ENCODER_VECTORS!r} vectors and their model come together")

    @property
    def fit_is_due(self) -> bool:
        """Whether much of the text is not what the fit was made to."""
        return self.fitted_chunks < (1 - DRIFT) * max(self.chunks, self.fit.chunks)

    @property
    def best_set(self) -> SetName | None:
        """The set with the best vectors for likeness of passages; None without any."""
        best_first: tuple[SetName, ...] = ("encoder", "own")
        return next((name for name in best_first if name in self.sets), None)

    def about(self, name: SetName) -> IndexFingerprint:
        """Return the fingerprint of the vectors of a set."""
        dim = self.sets[name].dim
        if name == ENCODER_VECTORS:
            assert self.encoder is not None
            return IndexFingerprint(model=self.encoder.id, tokenizer="", fit="", dim=dim)
        assert self.origin is not None
        return IndexFingerprint(
            model=self.origin.model, tokenizer=self.origin.tokenizer, fit=self.fit.id, dim=dim
        )

    @property
    def servers(self) -> str:
        """The stores that lie at servers; empty where none does."""
        stores = {vectors.store for vectors in self.sets.values() if vectors.table}
        return " ".join(sorted(stores))

    def place(self, path: Path, name: SetName) -> StoreLocation:
        """Where a set of vectors of the index at `path` lies."""
        return self.sets[name].place(path / self.files / STORE_FOLDER / name)


class QueryEmbedder(Protocol):
    """What makes vectors of queries: `Embedder` of `embed.py`, a ready encoder, or a table."""

    def queries(self, texts: list[str]) -> Vectors: ...


class QueryModels(Protocol):
    """Finds the models that make vectors of queries, once a query is to be embedded."""

    def own(self, fitted: Path, origin: Origin) -> QueryEmbedder:
        """Return the run's own embedder. Refuse (no-index) where the run has another model."""

    def encoder(self, identity: EncoderIdentity) -> QueryEmbedder | None:
        """Return the ready encoder; None where it is not on this machine."""


class NoModels:
    """Finds no model: for reading an index, and searches by words."""

    def own(self, fitted: Path, origin: Origin) -> QueryEmbedder:
        raise Refusal(
            "no-index",
            what="the index has vectors of a run's model, and no run was named",
            where=fitted,
            fact=f"model: {origin.model}",
            remedy="farspan search --system bm25",
        )

    def encoder(self, identity: EncoderIdentity) -> QueryEmbedder | None:
        return None


class Index:
    """An index that is open; what of it a search does not need is not read. Close it after use."""

    def __init__(
        self, path: Path, manifest: IndexManifest, models: QueryModels, remedy: str
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._models = models
        self._remedy = remedy
        self.files = path / manifest.files
        self.passages = passages_of(path, manifest)
        self._closing = ExitStack()

    @classmethod
    def open(
        cls,
        path: Path,
        models: QueryModels,
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
                index = cls(path, manifest, models, remedy)
                # All that a search may need is opened now: a new index may take this one's files
                # away.
                for part in (
                    "lexical",
                    "documents",
                    *(("stores", "covariances") if vectors else ()),
                ):
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
            lexical = BM25Index.load(self.files / LEXICAL)
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
    def words(self) -> Words:
        """What makes words of queries and passages, as the index made them."""
        return Words(self.manifest.lexical.rules)

    @cached_property
    def own(self) -> QueryEmbedder:
        """The run's own embedder. Refuse (no-index) where the run has another model."""
        assert self.manifest.origin is not None
        return self._models.own(self.files / FITTED, self.manifest.origin)

    @cached_property
    def encoder(self) -> QueryEmbedder | None:
        """The ready encoder; None where the index has no vectors of one, or it is not here."""
        identity = self.manifest.encoder
        return None if identity is None else self._models.encoder(identity)

    @cached_property
    def query_table(self) -> QueryTable | None:
        """What makes vectors of queries in the encoder's place; None without a table: a static
        encoder is one itself."""
        path = self.files / QUERY_TABLE
        evaluation = self.manifest.evaluation
        is_measured = evaluation is not None and evaluation.table_choice is not None
        if self.manifest.encoder is None or not (is_measured or path.exists()):
            return None
        from farspan.retrieval.encoders.query_table import QueryTable

        try:
            table = QueryTable.load(path)
        except Exception as error:  # What damaged files lead to is not said.
            raise Damaged(self.path, f"{QUERY_TABLE}: {error}") from None
        dim = self.manifest.sets[ENCODER_VECTORS].dim
        if table.dim != dim:
            raise Damaged(self.path, f"{QUERY_TABLE} has vectors of {table.dim}, not {dim}")
        return table

    @cached_property
    def covariances(self) -> dict[SetName, npt.NDArray[np.float32]]:
        """The covariance (E, E) of the vectors of each set."""
        covariances = {}
        for name, vectors in self.manifest.sets.items():
            path = self.files / f"{COVARIANCE}-{name}.npy"
            try:
                covariances[name] = np.load(path)
            except Exception as error:  # What a damaged header leads to is not said.
                raise Damaged(self.path, f"{path.name}: {error}") from None
            expected = (vectors.dim, vectors.dim)
            if covariances[name].shape != expected or not np.isfinite(covariances[name]).all():
                raise Damaged(self.path, f"{path.name} is no covariance of {vectors.dim} numbers")
        return covariances

    @cached_property
    def stores(self) -> dict[SetName, Store]:
        """The store of each set of vectors."""
        opened: dict[SetName, Store] = {}
        for name, vectors in self.manifest.sets.items():
            opened[name] = vectors.module.open(self.manifest.place(self.path, name))
            self._closing.callback(opened[name].close)
        return opened

    def vectors(self, rows: npt.NDArray[np.integer[Any]], name: SetName) -> Vectors:
        """Return the vectors (N, E) of passages in a set."""
        return self.stores[name].vectors(self.passages.rows_N["id"][rows].tolist())

    def bind(self, where: Where, among: npt.NDArray[np.bool_] | None = None) -> Bindings | None:
        """Return the documents with certain values in their fields, in one of their places, that
        are also `among` these; None without either. Raises Refusal (usage, out-of-range) for fields
        and values that are not there."""
        filters = Filters.parse(where)
        if not filters:
            return None if among is None else Bindings(mask=among, payload=None)
        filters.check_fields(self.manifest.fields)
        bindings = filters.bind(self.documents)
        return bindings if among is None else bindings.narrow(among)

    def close(self) -> None:
        self._closing.close()


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
