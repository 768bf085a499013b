"""Qdrant Edge: Qdrant's engine inside the process. Write-ahead log, payloads, filters; HNSW for many vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import qdrant_edge as qdrant

from farspan.retrieval.stores import Hit, Payload, Vectors

#: Up to so many bytes of vectors every one is compared: exact, nothing to build, and still a few milliseconds a search.
EXACT_BYTES = 128_000_000


class QdrantStore:
    def __init__(self, shard: qdrant.EdgeShard) -> None:
        self._shard = shard

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        rows = zip(ids, vectors_ND.tolist(), payloads, strict=True)
        points = [qdrant.Point(number, vector, dict(payload)) for number, vector, payload in rows]
        if points:
            self._shard.update(qdrant.UpdateOperation.upsert_points(points))

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> list[Hit]:
        equal = (where or {}).items()
        request = qdrant.QueryRequest(
            limit=k, query=qdrant.Query.Nearest(vector_D.tolist()), with_payload=True,
            filter=qdrant.Filter(must=[qdrant.FieldCondition(key, match=qdrant.MatchValue(v)) for key, v in equal]),
        )  # fmt: skip
        hits = self._shard.query(request)
        return [Hit(id=int(hit.id), score=hit.score, payload=hit.payload or {}) for hit in hits]

    def count(self) -> int:
        return self._shard.count(qdrant.CountRequest(exact=True))

    def finish(self) -> None:
        self._shard.optimize()
        self._shard.flush()

    def close(self) -> None:
        self._shard.close()


def create(path: Path, dim: int) -> QdrantStore:
    """A new store in a folder that does not exist yet."""
    path.mkdir(parents=True)
    config = qdrant.EdgeConfig(
        vectors=qdrant.EdgeVectorParams(dim, qdrant.Distance.Dot),
        optimizers=qdrant.EdgeOptimizersConfig(indexing_threshold=EXACT_BYTES // 1000, default_segment_number=1),
    )
    return QdrantStore(qdrant.EdgeShard.create(str(path), config))


def open_store(path: Path) -> QdrantStore:
    """The store that is in a folder, with everything that was acknowledged before a crash."""
    return QdrantStore(qdrant.EdgeShard.load(str(path)))
