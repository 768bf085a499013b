"""A Qdrant server, at a location such as http://localhost:6333.

The client's own engine in a folder is not used: it unpickles what lies there, and a pickle from
elsewhere runs code. Tests run that engine in memory and not the server, since there was none to
be had. A key for the server comes from QDRANT_API_KEY.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from qdrant_client import QdrantClient
from qdrant_client import models as qdrant
from qdrant_client.http.exceptions import ApiException

from farspan.domain.escapes import shell_word
from farspan.retrieval.stores import StoreLocation, Vectors
from farspan.retrieval.stores._common import (
    MARK,
    CheckedStore,
    Fields,
    bad_location,
    closed_if_refused,
    missing,
    refuse_foreign,
    unreachable,
)

#: Up to so many bytes of vectors a server compares every one; beyond, it keeps so many candidates
#: while it searches.
EXACT_BYTES = 128_000_000
SEARCH_EF = 256
#: Qdrant's own limit.
MOST_NUMBERS = 65_536
#: Vectors in one request: as JSON, some megabytes.
AT_ONCE = 500
ANSWER_S = 30
FINISH_S = 3600


class QdrantServerStore(CheckedStore):
    at_once = AT_ONCE

    def __init__(self, client: QdrantClient, place: StoreLocation) -> None:
        super().__init__(place)
        self._client = client
        self._name = place.name
        self._where = place.location

    def write(self, ids: list[int], vectors_ND: Vectors, payloads: list[Fields]) -> None:
        batch = qdrant.Batch(ids=[*ids], vectors=vectors_ND.tolist(), payloads=payloads)
        with _refuse_failures(self._where):
            self._client.upsert(self._name, batch, wait=True)

    def remove(self, ids: list[int]) -> None:
        with _refuse_failures(self._where):
            self._client.delete(self._name, qdrant.PointIdsList(points=[*ids]), wait=True)

    def nearest(self, vector_D: Vectors, k: int, where: Fields) -> tuple[list[Any], list[float]]:
        must = [
            qdrant.FieldCondition(key=key, match=qdrant.MatchValue(value=value))
            for key, value in where.items()
        ]
        with _refuse_failures(self._where):
            points = self._client.query_points(
                self._name,
                query=vector_D.tolist(),
                limit=k,
                with_payload=False,
                query_filter=qdrant.Filter(must=must),
                search_params=qdrant.SearchParams(hnsw_ef=max(SEARCH_EF, k)),
            ).points
        return [point.id for point in points], [point.score for point in points]

    def read(self, ids: list[int]) -> Iterator[tuple[Any, Any]]:
        with _refuse_failures(self._where):
            records = self._client.retrieve(self._name, ids, with_payload=False, with_vectors=True)
        return ((record.id, record.vector) for record in records)

    def numbers(self) -> list[Any]:
        every: list[Any] = []
        offset = None
        while True:
            with _refuse_failures(self._where):
                records, offset = self._client.scroll(
                    self._name, limit=10_000, offset=offset, with_payload=False, with_vectors=False
                )
            every += [record.id for record in records]
            if offset is None:
                return every

    def finish(self) -> None:
        """Wait until the server has built its graph; after an hour it continues building by
        itself."""
        end = time.monotonic() + FINISH_S
        while time.monotonic() < end:
            with _refuse_failures(self._where):
                if self._client.get_collection(self._name).status != qdrant.CollectionStatus.YELLOW:
                    return
            time.sleep(0.5)

    def close(self) -> None:
        self._client.close()


@contextmanager
def _refuse_failures(where: str) -> Iterator[None]:
    """Refuses (store-unreachable) where the server does not do what is asked of it."""
    try:
        yield
    except (ApiException, httpx.HTTPError) as error:
        raise unreachable(where, error, f"curl {shell_word(where)}/healthz") from None


@contextmanager
def _open_client(place: StoreLocation) -> Iterator[QdrantClient]:
    """Open a client of the server, which is closed where the collection is refused."""
    if not place.location:
        raise bad_location(
            "qdrant_server needs the location of a Qdrant server",
            "there is none; the store qdrant keeps vectors in the run's folder",
            "qdrant",
        )
    if not place.location.startswith(("http://", "https://")):
        raise bad_location(
            "this is no location of a Qdrant server",
            f"location: {place.location}",
            "qdrant_server:http://localhost:6333",
        )
    key = os.environ.get("QDRANT_API_KEY")
    client = QdrantClient(
        url=place.location, api_key=key, timeout=ANSWER_S, check_compatibility=False
    )
    with closed_if_refused(client, _refuse_failures(place.location)):
        yield client


def _collection_exists(client: QdrantClient, place: StoreLocation) -> bool:
    """Whether there is such a collection; refuses (store-foreign) one that is not farspan's."""
    if not client.collection_exists(place.name):
        return False
    metadata = client.get_collection(place.name).config.metadata or {}
    refuse_foreign(metadata.get(MARK), f"{place.location}, collection {place.name}")
    return True


def create(place: StoreLocation) -> QdrantServerStore:
    """Create a collection, or use the one that is there."""
    if place.dim > MOST_NUMBERS:
        raise bad_location(
            "Qdrant cannot hold such long vectors",
            f"{place.dim} numbers a vector, at most {MOST_NUMBERS:,}",
            "faiss",
        )
    with _open_client(place) as client:
        if not _collection_exists(client, place):
            client.create_collection(
                place.name,
                vectors_config=qdrant.VectorParams(size=place.dim, distance=qdrant.Distance.DOT),
                optimizers_config=qdrant.OptimizersConfigDiff(
                    indexing_threshold=EXACT_BYTES // 1000
                ),
                metadata={MARK: MARK},
            )
    return QdrantServerStore(client, place)


def open(place: StoreLocation) -> QdrantServerStore:
    """Open the collection that `create` made."""
    with _open_client(place) as client:
        if not _collection_exists(client, place):
            raise missing(place.location, f"there is no collection {place.name}")
    return QdrantServerStore(client, place)


def drop(place: StoreLocation) -> None:
    """Remove the collection, if it is farspan's."""
    with _open_client(place) as client:
        if _collection_exists(client, place):
            client.delete_collection(place.name)
    client.close()
