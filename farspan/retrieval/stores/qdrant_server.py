"""A Qdrant server, at a location such as http://localhost:6333.

The client's own engine in a folder is not used: it unpickles what lies there, and a pickle from
elsewhere runs code. Tests run that engine in memory and not the server, of which there was none to
be had. A key for the server comes from QDRANT_API_KEY.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import numpy as np
from qdrant_client import QdrantClient
from qdrant_client import models as qdrant
from qdrant_client.http.exceptions import ApiException

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
    rows_to_add,
    unreachable,
)

#: Up to so many bytes of vectors a server compares every one; beyond, it keeps so many candidates
#: while it searches.
EXACT_BYTES, SEARCH_EF = 128_000_000, 256
#: Qdrant's own limit.
MOST_NUMBERS = 65_536
#: Vectors in one request: as JSON, some megabytes.
AT_ONCE = 500
ANSWER_S, FINISH_S = 30, 3600
_METRIC = qdrant.Distance.DOT


class QdrantServerStore:
    def __init__(self, client: QdrantClient, spot: Spot, about: About) -> None:
        self._client, self._about = client, about
        self._name, self._where = spot.name, spot.location

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        numbers, vectors_ND, kept = rows_to_add(ids, vectors_ND, payloads, self._about.dim)
        for start in range(0, len(numbers), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            batch = qdrant.Batch(
                ids=numbers[some], vectors=vectors_ND[some].tolist(), payloads=kept[some]
            )
            with _answers(self._where):
                self._client.upsert(self._name, batch, wait=True)

    def delete(self, ids: Sequence[int]) -> None:
        numbers = [int(number) for number in ids]
        if numbers:
            with _answers(self._where):
                self._client.delete(self._name, qdrant.PointIdsList(points=numbers), wait=True)

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> list[Hit]:
        check_vectors(vector_D, self._about.dim)
        equal = dict(where or {})
        check_keys({*equal})
        must = [
            qdrant.FieldCondition(key=key, match=qdrant.MatchValue(value=value))
            for key, value in equal.items()
        ]
        with _answers(self._where):
            points = self._client.query_points(
                self._name,
                query=vector_D.tolist(),
                limit=k,
                with_payload=True,
                query_filter=qdrant.Filter(must=must),
                search_params=qdrant.SearchParams(hnsw_ef=max(SEARCH_EF, k)),
            ).points
        return [
            Hit(id=int(point.id), score=point.score, payload=point.payload or {})
            for point in points
        ]

    def ids(self) -> Ids:
        every: list[int] = []
        offset = None
        while True:
            with _answers(self._where):
                records, offset = self._client.scroll(
                    self._name, limit=10_000, offset=offset, with_payload=False, with_vectors=False
                )
            every += [int(record.id) for record in records]
            if offset is None:
                return np.sort(np.array(every, np.int64))

    def count(self) -> int:
        with _answers(self._where):
            return self._client.count(self._name, exact=True).count

    def describe(self) -> About:
        return self._about

    def finish(self) -> None:
        """Wait until the server has built its graph; after an hour it goes on building by
        itself."""
        end = time.monotonic() + FINISH_S
        while time.monotonic() < end:
            with _answers(self._where):
                if self._client.get_collection(self._name).status != qdrant.CollectionStatus.YELLOW:
                    return
            time.sleep(0.5)

    def close(self) -> None:
        self._client.close()


@contextmanager
def _answers(where: str) -> Iterator[None]:
    """Refuses (store-unreachable) where the server does not do what is asked of it."""
    try:
        yield
    except (ApiException, httpx.HTTPError) as error:
        raise unreachable(where, error, f"curl {shell_word(where)}/healthz") from None


def _client(spot: Spot) -> QdrantClient:
    if not spot.location:
        raise Refusal(
            "out-of-range",
            what="qdrant_server needs the location of a Qdrant server",
            where="run.yaml, key index.store",
            fact="there is none; the store qdrant keeps vectors in the run's folder",
            remedy="set index.store: qdrant",
            key="index.store",
        )
    if not spot.location.startswith(("http://", "https://")):
        raise Refusal(
            "out-of-range",
            what="this is no location of a Qdrant server",
            where="run.yaml, key index.store",
            fact=f"location: {spot.location}",
            remedy="set index.store: qdrant_server:http://localhost:6333",
            key="index.store",
        )
    key = os.environ.get("QDRANT_API_KEY")
    return QdrantClient(url=spot.location, api_key=key, timeout=ANSWER_S, check_compatibility=False)


def _claim(client: QdrantClient, spot: Spot, wanted: About | None = None) -> About:
    """What the collection is about; refuses (store-foreign) one that is not farspan's or of other
    vectors."""
    with _answers(spot.location):
        config = client.get_collection(spot.name).config
    where = f"{spot.location}, collection {spot.name}"
    about = claimed((config.metadata or {}).get(MARK), where, wanted)
    vectors = config.params.vectors
    if not isinstance(vectors, qdrant.VectorParams) or (vectors.size, vectors.distance) != (
        about.dim,
        _METRIC,
    ):
        raise foreign(
            where,
            "the collection is not of vectors as farspan makes them",
            f"its vectors: {vectors}",
        )
    return about


def shared(location: str) -> bool:
    """Yes: it is a server."""
    return True


def create(spot: Spot, about: About) -> QdrantServerStore:
    """A new collection, or the one that is there for `about`."""
    if about.dim > MOST_NUMBERS:
        raise Refusal(
            "out-of-range",
            what="Qdrant cannot hold such long vectors",
            where="run.yaml, key index.store",
            fact=f"{about.dim} numbers a vector, at most {MOST_NUMBERS:,}",
            remedy="set index.store: faiss",
            key="index.store",
        )
    client = _client(spot)
    try:
        with _answers(spot.location):
            if not client.collection_exists(spot.name):
                client.create_collection(
                    spot.name,
                    vectors_config=qdrant.VectorParams(size=about.dim, distance=_METRIC),
                    optimizers_config=qdrant.OptimizersConfigDiff(
                        indexing_threshold=EXACT_BYTES // 1000
                    ),
                    metadata={MARK: marked(about)},
                )
        _claim(client, spot, about)
    except Refusal:
        client.close()
        raise
    return QdrantServerStore(client, spot, about)


def open_store(spot: Spot) -> QdrantServerStore:
    """The collection that `create` made."""
    client = _client(spot)
    try:
        with _answers(spot.location):
            there = client.collection_exists(spot.name)
        if not there:
            raise missing(spot.location, f"there is no collection {spot.name}")
        about = _claim(client, spot)
    except Refusal:
        client.close()
        raise
    return QdrantServerStore(client, spot, about)


def drop(spot: Spot) -> None:
    """Remove the collection, if it is farspan's."""
    client = _client(spot)
    try:
        with _answers(spot.location):
            if client.collection_exists(spot.name):
                _claim(client, spot)
                client.delete_collection(spot.name)
    except Refusal as refusal:
        if refusal.problem.code != "store-foreign":
            raise
    finally:
        client.close()
