"""Chroma: embedded in the run's folder, or with a location such as http://localhost:8000 its own
server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import chromadb
import httpx
import numpy as np
from chromadb.config import Settings
from chromadb.errors import ChromaError, NotFoundError

from farspan.domain.escapes import shell_word
from farspan.retrieval.stores import StoreLocation, Vectors
from farspan.retrieval.stores._common import (
    MARK,
    CheckedStore,
    Fields,
    bad_location,
    closed_if_refused,
    foreign,
    missing,
    refuse_foreign,
    unreachable,
)

CONNECT_S = 5.0
ANSWER_S = 60.0
#: Chroma searches a graph at any size: neighbours of a vector, and candidates while it is built and
#: searched. With its own values (16, 100, 100) it found a third of the neighbours of 20,000 random
#: vectors.
GRAPH = {"space": "ip", "max_neighbors": 32, "ef_construction": 200, "ef_search": 800}
#: How a collection without an embedding function says so; Chroma builds anything else by its name.
NO_FUNCTION = (None, {"type": "legacy"}, {"type": "unknown"})


class ChromaStore(CheckedStore):
    def __init__(self, client: Any, collection: Any, place: StoreLocation) -> None:
        super().__init__(place)
        self._client = client
        self._collection = collection
        self._where = place.location or str(place.folder)
        self.at_once = int(client.get_max_batch_size())

    def write(self, ids: list[int], vectors_ND: Vectors, payloads: list[Fields]) -> None:
        fields = [payload or None for payload in payloads]
        with _refuse_failures(self._where):
            self._collection.add(ids=_id_texts(ids), embeddings=vectors_ND, metadatas=fields)

    def remove(self, ids: list[int]) -> None:
        with _refuse_failures(self._where):
            self._collection.delete(ids=_id_texts(ids))

    def nearest(self, vector_D: Vectors, k: int, where: Fields) -> tuple[list[str], Vectors]:
        terms = [{key: {"$eq": value}} for key, value in where.items()]
        with _refuse_failures(self._where):
            answer = self._collection.query(
                query_embeddings=[vector_D],
                n_results=k,
                include=["distances"],
                where=terms[0] if len(terms) == 1 else {"$and": terms} if terms else None,
            )
        # Its distance is 1 less the inner product.
        return answer["ids"][0], 1 - np.array(answer["distances"][0], np.float32)

    def read(self, ids: list[int]) -> Iterable[tuple[Any, Any]]:
        with _refuse_failures(self._where):
            answer = self._collection.get(ids=_id_texts(ids), include=["embeddings"])
        return zip(map(int, answer["ids"]), answer["embeddings"], strict=True)

    def numbers(self) -> list[str]:
        with _refuse_failures(self._where):
            texts: list[str] = self._collection.get(include=[])["ids"]
            return texts

    def finish(self) -> None:
        """Nothing is left to do: Chroma builds its graph as vectors come."""

    def close(self) -> None:
        self._client.close()


def _id_texts(ids: list[int]) -> list[str]:
    return [str(number) for number in ids]


@contextmanager
def _refuse_failures(where: str) -> Iterator[None]:
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


@contextmanager
def _open_client(place: StoreLocation) -> Iterator[Any]:
    """Open a client, which is closed where the collection is refused. Settings are ours alone, not
    those of a file .env that lies about; telemetry is off."""
    settings = Settings(_env_file=None, anonymized_telemetry=False)
    if place.location:
        client = _server_client(place.location, settings)
    else:
        client = chromadb.PersistentClient(place.folder, settings=settings)
    with closed_if_refused(client, _refuse_failures(place.location)):
        yield client


def _server_client(location: str, settings: Settings) -> Any:
    parts = urlsplit(location)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise bad_location(
            "this is no location of a Chroma server",
            f"location: {location}",
            "chroma:http://localhost:8000",
        )
    secure = parts.scheme == "https"
    with _refuse_failures(location):
        # The client itself would wait for ever.
        httpx.get(f"{location.rstrip('/')}/api/v2/heartbeat", timeout=CONNECT_S).raise_for_status()
        client = chromadb.HttpClient(
            parts.hostname, parts.port or (443 if secure else 80), secure, settings=settings
        )
    client._server._session.timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    return client


def _find_collection(client: Any, place: StoreLocation) -> Any | None:
    """Return the collection; None where there is none. Refuse (store-foreign) one that is not
    farspan's."""
    try:
        collection = client.get_collection(place.name, embedding_function=None)
    except NotFoundError:
        return None
    where = f"{place.location}, collection {place.name}" if place.location else place.folder
    refuse_foreign((collection.metadata or {}).get(MARK), where)
    return collection


def create(place: StoreLocation) -> ChromaStore:
    """Create a collection, in a new folder where there is no location; at a server use the one that
    is there."""
    if not place.location:
        place.folder.mkdir(parents=True)
    with _open_client(place) as client:
        if _find_collection(client, place) is None:
            client.create_collection(
                place.name,
                embedding_function=None,
                metadata={MARK: MARK},
                configuration={"hnsw": GRAPH},
            )
    client.close()
    return open(place)


def open(place: StoreLocation) -> ChromaStore:
    """Open the collection that `create` made."""
    where = place.location or place.folder
    if not place.location and not (place.folder / "chroma.sqlite3").exists():
        raise missing(where, "chroma.sqlite3 is missing")
    with _open_client(place) as client:
        collection = _find_collection(client, place)
        if collection is None:
            raise missing(where, f"there is no collection {place.name}")
        _refuse_embedding_function(collection, where)
        return ChromaStore(client, collection, place)


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


def drop(place: StoreLocation) -> None:
    """Remove the collection from a server, if it is farspan's; in a folder there is nothing to
    do."""
    if place.location:
        with _open_client(place) as client:
            if _find_collection(client, place) is not None:
                client.delete_collection(place.name)
        client.close()
