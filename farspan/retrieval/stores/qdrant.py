"""Qdrant Edge: Qdrant's engine inside the process. Payloads, filters, exact or quantized search.

It has no write-ahead log: that would let one process alone open it, and several may search an index
at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import qdrant_edge as qdrant

from farspan.retrieval.stores import StoreLocation, Vectors
from farspan.retrieval.stores._common import CheckedStore, Fields, missing, refuse_location

#: Up to so many bytes of vectors every one is compared as it is: exact, and quick to open. Above,
#: every one is compared in 8 bits a number, and the best of those again as they are.
EXACT_BYTES = 128_000_000
#: How many times as many as are asked for are compared again (benchmarks/results/search.json:
#: recall@10 1.0).
_OVERSAMPLING = 3.0
_SHARD = "shard"


class QdrantStore(CheckedStore):
    def __init__(self, shard: qdrant.EdgeShard, place: StoreLocation) -> None:
        super().__init__(place)
        self._shard = shard

    def write(self, ids: list[int], vectors_ND: Vectors, payloads: list[Fields]) -> None:
        rows = zip(ids, vectors_ND.tolist(), payloads, strict=True)
        points = [qdrant.Point(number, vector, payload) for number, vector, payload in rows]
        self._shard.update(qdrant.UpdateOperation.upsert_points(points))

    def remove(self, ids: list[int]) -> None:
        self._shard.update(qdrant.UpdateOperation.delete_points([*ids]))

    def nearest(self, vector_D: Vectors, k: int, where: Fields) -> tuple[list[Any], list[float]]:
        rescore = qdrant.QuantizationSearchParams(rescore=True, oversampling=_OVERSAMPLING)
        conditions: list[Any] = []
        for key, value in where.items():
            match = qdrant.MatchValue(value)
            conditions.append(qdrant.FieldCondition(key, match=match))
        request = qdrant.QueryRequest(
            limit=k,
            query=qdrant.Query.Nearest(vector_D.tolist()),
            with_payload=False,
            params=qdrant.SearchParams(quantization=rescore),
            filter=qdrant.Filter(must=conditions),
        )
        hits = self._shard.query(request)
        return [hit.id for hit in hits], [hit.score for hit in hits]

    def read(self, ids: list[int]) -> Iterator[tuple[Any, Any]]:
        for record in self._shard.retrieve([*ids], with_payload=False, with_vector=True):
            yield record.id, record.vector

    def numbers(self) -> list[Any]:
        every: list[Any] = []
        offset = None
        while True:
            request = qdrant.ScrollRequest(limit=10_000, offset=offset)
            records, offset = self._shard.scroll(request)
            every += [record.id for record in records]
            if offset is None:
                return every

    def finish(self) -> None:
        self._shard.optimize()
        self._shard.flush()

    def close(self) -> None:
        self._shard.close()


def create(place: StoreLocation) -> QdrantStore:
    """Create a store in a folder that does not exist yet."""
    refuse_location(place, "qdrant")
    (place.folder / _SHARD).mkdir(parents=True)
    quantization = qdrant.ScalarQuantizationConfig(
        qdrant.ScalarType.Int8, memory=qdrant.Memory.Cached
    )
    # m=0: no graph. For 28,000 vectors it took 13.6 s to build and saved 1.3 ms (decision 1).
    no_graph = qdrant.HnswIndexConfig(m=0, ef_construct=4, full_scan_threshold=EXACT_BYTES)
    vectors = qdrant.EdgeVectorParams(
        place.dim,
        qdrant.Distance.Dot,
        quantization_config=quantization,
        hnsw_config=no_graph,
    )
    optimizers = qdrant.EdgeOptimizersConfig(
        indexing_threshold=EXACT_BYTES // 1000, default_segment_number=1
    )
    config = qdrant.EdgeConfig(vectors=vectors, optimizers=optimizers, wal_enabled=False)
    shard = qdrant.EdgeShard.create(str(place.folder / _SHARD), config)
    return QdrantStore(shard, place)


def open(place: StoreLocation) -> QdrantStore:
    """Open the store in a folder."""
    refuse_location(place, "qdrant")
    if not (place.folder / _SHARD).exists():
        raise missing(place.folder, f"{_SHARD} is missing")
    return QdrantStore(qdrant.EdgeShard.load(str(place.folder / _SHARD)), place)


def drop(place: StoreLocation) -> None:
    """Its folder is all that there is of it."""
