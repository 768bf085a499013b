"""Qdrant Edge: Qdrant's engine inside the process. Payloads, filters, exact or quantized search.

It has no write-ahead log: that would let one process alone open it, and several may search an index
at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import qdrant_edge as qdrant

from farspan.retrieval.stores import About, Hit, Ids, Payload, Spot, Vectors
from farspan.retrieval.stores._common import (
    check_keys,
    check_vectors,
    new_folder,
    own_folder,
    rows_to_add,
)

#: Up to so many bytes of vectors every one is compared as it is: exact, and quick to open. Above,
#: every one is compared in 8 bits a number, and the best of those again as they are.
EXACT_BYTES = 128_000_000
#: How many times as many as are asked for are compared again (benchmarks/results/search.json:
#: recall@10 1.0).
_OVERSAMPLING = 3.0
_SHARD = "shard"


class QdrantStore:
    def __init__(self, shard: qdrant.EdgeShard, about: About) -> None:
        self._shard, self._about = shard, about

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        numbers, vectors_ND, kept = rows_to_add(ids, vectors_ND, payloads, self._about.dim)
        rows = zip(numbers, vectors_ND.tolist(), kept, strict=True)
        points = [qdrant.Point(number, vector, payload) for number, vector, payload in rows]
        if points:
            self._shard.update(qdrant.UpdateOperation.upsert_points(points))
            self._shard.flush()

    def delete(self, ids: Sequence[int]) -> None:
        if len(ids):
            self._shard.update(
                qdrant.UpdateOperation.delete_points([int(number) for number in ids])
            )
            self._shard.flush()

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> list[Hit]:
        check_vectors(vector_D, self._about.dim)
        equal = dict(where or {})
        check_keys({*equal})
        again = qdrant.QuantizationSearchParams(rescore=True, oversampling=_OVERSAMPLING)
        request = qdrant.QueryRequest(
            limit=k,
            query=qdrant.Query.Nearest(vector_D.tolist()),
            with_payload=True,
            params=qdrant.SearchParams(quantization=again),
            filter=qdrant.Filter(
                must=[
                    qdrant.FieldCondition(key, match=qdrant.MatchValue(value))
                    for key, value in equal.items()
                ]
            ),
        )
        hits = self._shard.query(request)
        return [Hit(id=int(hit.id), score=hit.score, payload=hit.payload or {}) for hit in hits]

    def ids(self) -> Ids:
        every: list[int] = []
        offset = None
        while True:
            records, offset = self._shard.scroll(qdrant.ScrollRequest(limit=10_000, offset=offset))
            every += [int(record.id) for record in records]
            if offset is None:
                return np.sort(np.array(every, np.int64))

    def count(self) -> int:
        return self._shard.count(qdrant.CountRequest(exact=True))

    def describe(self) -> About:
        return self._about

    def finish(self) -> None:
        self._shard.optimize()
        self._shard.flush()

    def close(self) -> None:
        self._shard.close()


def shared(location: str) -> bool:
    """It lies in the index's own folder."""
    return False


def create(spot: Spot, about: About) -> QdrantStore:
    """A new store in a folder that does not exist yet, or is empty."""
    folder = new_folder(spot, about)
    (folder / _SHARD).mkdir()
    config = qdrant.EdgeConfig(
        # m=0: no graph. For 28,000 vectors it took 13.6 s to build and saved 1.3 ms (decision 1).
        vectors=qdrant.EdgeVectorParams(
            about.dim,
            qdrant.Distance.Dot,
            quantization_config=qdrant.ScalarQuantizationConfig(
                qdrant.ScalarType.Int8, memory=qdrant.Memory.Cached
            ),
            hnsw_config=qdrant.HnswIndexConfig(
                m=0, ef_construct=4, full_scan_threshold=EXACT_BYTES
            ),
        ),
        optimizers=qdrant.EdgeOptimizersConfig(
            indexing_threshold=EXACT_BYTES // 1000, default_segment_number=1
        ),
        wal_enabled=False,
    )
    return QdrantStore(qdrant.EdgeShard.create(str(folder / _SHARD), config), about)


def open_store(spot: Spot) -> QdrantStore:
    """The store that is in a folder, with everything that was acknowledged before a crash."""
    about = own_folder(spot, _SHARD)
    return QdrantStore(qdrant.EdgeShard.load(str(spot.folder / _SHARD)), about)


def drop(spot: Spot) -> None:
    """Its folder is all that there is of it."""
