"""Chroma: embedded in the run's folder, or with a location such as http://localhost:8000 its own
server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import chromadb
import httpx
import numpy as np
from chromadb.config import Settings
from chromadb.errors import ChromaError, InternalError, NotFoundError

from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal
from farspan.retrieval.stores import About, Hit, Ids, Payload, Spot, Vectors
from farspan.retrieval.stores._common import (
    MARK,
    check_keys,
    check_vectors,
    claimed,
    foreign,
    marked,
    missing,
    new_folder,
    own_folder,
    rows_to_add,
    unreachable,
)

CONNECT_S, ANSWER_S = 5.0, 60.0
#: Chroma searches a graph at any size: neighbours of a vector, and candidates while it is built and
#: searched. With its own values (16, 100, 100) it found a third of the neighbours of 20,000 random
#: vectors.
GRAPH = {"space": "ip", "max_neighbors": 32, "ef_construction": 200, "ef_search": 800}
PAUSES_S = (0.05, 0.2, 1.0)
#: How a collection without an embedding function says so; Chroma builds anything else by its name.
NO_FUNCTION = (None, {"type": "legacy"}, {"type": "unknown"})
_DATA, _NOT_YET = "chroma.sqlite3", "Nothing found on disk"


class ChromaStore:
    def __init__(self, client: Any, collection: Any, about: About, where: str) -> None:
        self._client, self._collection, self._about, self._where = client, collection, about, where
        self._at_once = int(client.get_max_batch_size())

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        numbers, vectors_ND, kept = rows_to_add(ids, vectors_ND, payloads, self._about.dim)
        for start in range(0, len(numbers), self._at_once):
            some = slice(start, start + self._at_once)
            texts = [str(number) for number in numbers[some]]
            with _answers(self._where):
                fields = [
                    {**gone, **payload}
                    for gone, payload in zip(self._fields(texts), kept[some], strict=True)
                ]
                self._collection.upsert(
                    ids=texts, embeddings=vectors_ND[some], metadatas=[f or None for f in fields]
                )

    def _fields(self, texts: list[str]) -> list[dict[str, None]]:
        """The fields that these ids have, as what removes them: an upsert leaves those that it does
        not name."""
        found = self._collection.get(ids=texts, include=["metadatas"])
        rows = zip(found["ids"], found["metadatas"], strict=True)
        there = {text: dict.fromkeys(fields or {}) for text, fields in rows}
        return [there.get(text, {}) for text in texts]

    def delete(self, ids: Sequence[int]) -> None:
        texts = [*dict.fromkeys(str(int(number)) for number in ids)]
        for start in range(0, len(texts), self._at_once):
            with _answers(self._where):
                self._collection.delete(ids=texts[start : start + self._at_once])

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> list[Hit]:
        check_vectors(vector_D, self._about.dim)
        equal = dict(where or {})
        check_keys({*equal})
        terms = [{key: {"$eq": value}} for key, value in equal.items()]
        with _answers(self._where):
            found = self._query(
                query_embeddings=[vector_D],
                n_results=k,
                include=["metadatas", "distances"],
                where=terms[0] if len(terms) == 1 else {"$and": terms} if terms else None,
            )
        hits = zip(found["ids"][0], found["distances"][0], found["metadatas"][0], strict=True)
        # Its distance is 1 less the inner product.
        return [
            Hit(id=int(text), score=1 - distance, payload=dict(fields or {}))
            for text, distance, fields in hits
        ]

    def _query(self, **what: Any) -> Any:
        """Asked again where a collection gets its first vectors at this moment: a search then fails
        (1.5.9)."""
        for pause_s in PAUSES_S:
            try:
                return self._collection.query(**what)
            except InternalError as error:
                if _NOT_YET not in str(error):
                    raise
            time.sleep(pause_s)
        return self._collection.query(**what)

    def ids(self) -> Ids:
        with _answers(self._where):
            return np.sort(np.array(self._collection.get(include=[])["ids"], np.int64))

    def count(self) -> int:
        with _answers(self._where):
            return int(self._collection.count())

    def describe(self) -> About:
        return self._about

    def finish(self) -> None:
        """Nothing is left to do: Chroma builds its graph as vectors come."""

    def close(self) -> None:
        self._client.close()


@contextmanager
def _answers(where: str) -> Iterator[None]:
    """Refuses (no-index) a collection that is not there, and (store-unreachable) a server that
    fails or refuses."""
    try:
        yield
    except NotFoundError as error:
        raise missing(where, str(error)) from None
    except (ChromaError, httpx.HTTPError) as error:
        if not where.startswith("http"):
            raise
        raise unreachable(where, error, f"curl {shell_word(where)}/api/v2/heartbeat") from None


def _client(spot: Spot) -> Any:
    """Settings are ours alone, not those of a file .env that lies about; telemetry is off."""
    settings = Settings(_env_file=None, anonymized_telemetry=False)
    if not spot.location:
        return chromadb.PersistentClient(spot.folder, settings=settings)
    parts = urlsplit(spot.location)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refusal(
            "out-of-range",
            what="this is no location of a Chroma server",
            where="run.yaml, key index.store",
            fact=f"location: {spot.location}",
            remedy="set index.store: chroma:http://localhost:8000",
            key="index.store",
        )
    secure = parts.scheme == "https"
    with _answers(spot.location):
        # The client itself would wait for ever.
        httpx.get(
            f"{spot.location.rstrip('/')}/api/v2/heartbeat", timeout=CONNECT_S
        ).raise_for_status()
        client = chromadb.HttpClient(
            parts.hostname, parts.port or (443 if secure else 80), secure, settings=settings
        )
    client._server._session.timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    return client


def _find(client: Any, spot: Spot) -> Any | None:
    try:
        with _answers(spot.location):
            return client.get_collection(spot.name, embedding_function=None)
    except Refusal as refusal:
        if refusal.problem.code != "no-index":
            raise
        return None


def shared(location: str) -> bool:
    """Yes at a server, no in a folder."""
    return bool(location)


def create(spot: Spot, about: About) -> ChromaStore:
    """A new collection, in a new folder where there is no location; at a server the one that is
    there for `about`."""
    if not spot.location:
        new_folder(spot, about)
    client = _client(spot)
    collection = _find(client, spot)
    if collection is None:
        with _answers(spot.location):
            collection = client.create_collection(
                spot.name,
                embedding_function=None,
                metadata={MARK: marked(about)},
                configuration={"hnsw": GRAPH},
            )
    return _store(client, collection, spot, about)


def open_store(spot: Spot) -> ChromaStore:
    """The collection that `create` made."""
    about = None if spot.location else own_folder(spot, _DATA)
    client = _client(spot)
    collection = _find(client, spot)
    if collection is None:
        client.close()
        raise missing(spot.location or spot.folder, f"there is no collection {spot.name}")
    return _store(client, collection, spot, about)


def _store(client: Any, collection: Any, spot: Spot, wanted: About | None) -> ChromaStore:
    """The collection as a store; refuses (store-foreign) one that is not as `create` makes it."""
    where: str | Path = f"{spot.location}, collection {spot.name}" if spot.location else spot.folder
    try:
        about = claimed((collection.metadata or {}).get(MARK), where, wanted)
        _refuse_embedding_function(collection, where)
        space = collection.configuration_json["hnsw"]["space"]
        if space != GRAPH["space"]:
            raise foreign(
                where,
                "the collection has another measure of likeness",
                f"{space}, not {GRAPH['space']}",
            )
    except Refusal:
        client.close()
        raise
    return ChromaStore(client, collection, about, spot.location or str(spot.folder))


def _refuse_embedding_function(collection: Any, where: str | Path) -> None:
    """Refuse a collection that names an embedding function.

    At an add Chroma builds every function that the schema names, and with it code from the folder
    of a model. `collection.schema` and `collection.configuration` build them too: only what they
    are made from is read here.
    """
    schema = dict(collection._model.serialized_schema or {})
    # Fields of payloads may have any name, so what they are called is not looked at.
    fields = [*(schema.pop("keys", None) or {}).values()]
    for named in _embedding_functions([collection.configuration_json, schema, fields]):
        if named not in NO_FUNCTION:
            name = named.get("name") if isinstance(named, dict) else named
            raise foreign(
                where,
                "the collection names an embedding function, which Chroma would run",
                f"embedding function: {str(name)[:60]!r}",
            )


def _embedding_functions(part: Any) -> Iterator[Any]:
    """Every value of a key `embedding_function` in what was JSON."""
    if isinstance(part, dict):
        if "embedding_function" in part:
            yield part["embedding_function"]
        part = [*part.values()]
    if isinstance(part, list):
        for inner in part:
            yield from _embedding_functions(inner)


def drop(spot: Spot) -> None:
    """Remove the collection from a server, if it is farspan's; in a folder there is nothing to
    do."""
    if not spot.location:
        return
    with closing(_client(spot)) as client:
        collection = _find(client, spot)
        if collection is not None and MARK in (collection.metadata or {}):
            with _answers(spot.location):
                client.delete_collection(spot.name)
