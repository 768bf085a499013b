"""Qdrant Edge: Qdrant's engine inside the process. Write-ahead log, payloads, filters; HNSW for many vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.retrieval.stores import Hit, Payload, Vectors

if TYPE_CHECKING:
    from qdrant_edge import EdgeShard, Filter

#: Up to so many bytes of vectors every one is compared: exact, nothing to build, and still a few milliseconds a search.
EXACT_BYTES = 128_000_000


class QdrantStore:
    def __init__(self, shard: EdgeShard) -> None:
        self._shard = shard

    def add(self, ids: Sequence[int], vectors_ND: Vectors, payloads: Sequence[Payload]) -> None:
        from qdrant_edge import Point, UpdateOperation

        rows = zip(ids, vectors_ND.tolist(), payloads, strict=True)
        points = [Point(number, vector, dict(payload)) for number, vector, payload in rows]
        if points:
            self._shard.update(UpdateOperation.upsert_points(points))

    def search(self, vector_D: Vectors, k: int, where: Payload | None = None) -> list[Hit]:
        from qdrant_edge import Query, QueryRequest

        request = QueryRequest(
            limit=k, query=Query.Nearest(vector_D.tolist()), with_payload=True, filter=_filter(where)
        )  # fmt: skip
        found = self._shard.query(request)
        return [Hit(id=int(hit.id), score=hit.score, payload=hit.payload or {}) for hit in found]

    def count(self) -> int:
        from qdrant_edge import CountRequest

        return self._shard.count(CountRequest(exact=True))

    def finish(self) -> None:
        self._shard.optimize()
        self._shard.flush()

    def close(self) -> None:
        self._shard.close()


def create(path: Path, dim: int) -> QdrantStore:
    """A new store in a folder that does not exist yet."""
    from qdrant_edge import Distance, EdgeConfig, EdgeOptimizersConfig, EdgeShard, EdgeVectorParams

    path.mkdir(parents=True)
    config = EdgeConfig(
        vectors=EdgeVectorParams(dim, Distance.Dot),
        optimizers=EdgeOptimizersConfig(indexing_threshold=EXACT_BYTES // 1000, default_segment_number=1),
    )
    return QdrantStore(EdgeShard.create(str(path), config))


def open_store(path: Path) -> QdrantStore:
    """The store that is in a folder, with everything that was acknowledged before a crash."""
    from qdrant_edge import EdgeShard

    return QdrantStore(EdgeShard.load(str(path)))


def _filter(where: Payload | None) -> Filter | None:
    from qdrant_edge import FieldCondition, Filter, MatchValue

    if not where:
        return None
    return Filter(must=[FieldCondition(key, match=MatchValue(value)) for key, value in where.items()])
