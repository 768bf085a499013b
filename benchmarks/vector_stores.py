"""Vector stores on a run's own embeddings: what each costs to install and import, its speed,
recall, and safety.

    python benchmarks/vector_stores.py [RUN/index] [--vectors 100000]      # by default
    runs/demo/index

The index's vectors are repeated with noise up to the number asked for; queries are noisy vectors of
the index. Stores that are not installed are left out and named. A store that has a durable write
path is killed (SIGKILL) in mid-ingest and reopened: `survived` says whether everything it had
acknowledged was there.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
K, BATCH, GROUPS = 10, 1000, 100


class Qdrant:
    """farspan's own store file, as `embed` uses it."""

    distribution, module, durable = "qdrant-edge-py", "qdrant_edge", False

    def __init__(self, path: Path, dim: int, create: bool = True) -> None:
        from farspan.retrieval.stores import StoreLocation, qdrant

        place = StoreLocation(folder=path, dim=dim)
        self.store = qdrant.create(place) if create else qdrant.open(place)

    def add(self, ids: range, vectors: np.ndarray) -> None:
        self.store.add(ids, vectors, [{"group": i % GROUPS} for i in ids])

    def finish(self) -> None:
        self.store.finish()

    def search(self, query: np.ndarray) -> list[int]:
        return self.store.search(query, K).ids.tolist()

    def filtered(self, query: np.ndarray, group: int) -> list[int]:
        return self.store.search(query, K, {"group": group}).ids.tolist()

    def count(self) -> int:
        return len(self.store.ids())


class QdrantInt8(Qdrant):
    """The same as it is beyond EXACT_BYTES, at any size."""

    def __init__(self, path: Path, dim: int, create: bool = True) -> None:
        from farspan.retrieval.stores import qdrant

        qdrant.EXACT_BYTES, whole = 1_000_000, qdrant.EXACT_BYTES
        super().__init__(path, dim, create)
        qdrant.EXACT_BYTES = whole


class NumpyExact:
    """All inner products, from a memory-mapped file."""

    distribution, module, durable = "numpy", "numpy", False

    def __init__(self, path: Path, dim: int) -> None:
        path.mkdir()
        self.path, self.parts = path / "vectors.npy", list[np.ndarray]()

    def add(self, ids: range, vectors: np.ndarray) -> None:
        self.parts.append(vectors)

    def finish(self) -> None:
        np.save(self.path, np.concatenate(self.parts))
        self.vectors = np.load(self.path, mmap_mode="r")
        self.groups = np.arange(len(self.vectors)) % GROUPS

    def search(self, query: np.ndarray) -> list[int]:
        return best(self.vectors @ query)

    def filtered(self, query: np.ndarray, group: int) -> list[int]:
        rows = np.flatnonzero(self.groups == group)
        return [int(rows[i]) for i in best(self.vectors[rows] @ query)]


class Faiss:
    distribution, module, durable = "faiss-cpu", "faiss", False

    def __init__(self, path: Path, dim: int) -> None:
        import faiss

        path.mkdir()
        self.path, self.index = (
            path / "index.faiss",
            faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT),
        )

    def add(self, ids: range, vectors: np.ndarray) -> None:
        self.index.add(vectors)

    def finish(self) -> None:
        import faiss

        faiss.write_index(self.index, str(self.path))
        self.index.hnsw.efSearch = 128

    def search(self, query: np.ndarray) -> list[int]:
        return self.index.search(query[None], K)[1][0].tolist()


class Usearch:
    distribution, module, durable = "usearch", "usearch", False

    def __init__(self, path: Path, dim: int) -> None:
        from usearch.index import Index

        path.mkdir()
        self.path, self.index = path / "index.usearch", Index(ndim=dim, metric="ip", dtype="f32")

    def add(self, ids: range, vectors: np.ndarray) -> None:
        self.index.add(np.array(ids), vectors)

    def finish(self) -> None:
        self.index.save(str(self.path))

    def search(self, query: np.ndarray) -> list[int]:
        return self.index.search(query, K).keys.tolist()


class SqliteVec:
    distribution, module, durable = "sqlite-vec", "sqlite_vec", True

    def __init__(self, path: Path, dim: int, create: bool = True) -> None:
        import sqlite_vec

        path.mkdir(exist_ok=True)
        self.db = sqlite3.connect(path / "vectors.db")
        if not hasattr(self.db, "enable_load_extension"):
            raise NotImplementedError("this Python's sqlite3 was built without loadable extensions")
        self.db.enable_load_extension(True)
        sqlite_vec.load(self.db)
        if create:
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute(
                "CREATE VIRTUAL TABLE v USING vec0"
                f"(id INTEGER PRIMARY KEY, e FLOAT[{dim}] distance_metric=cosine, g INT)"
            )

    def add(self, ids: range, vectors: np.ndarray) -> None:
        rows = ((i, vector.tobytes(), i % GROUPS) for i, vector in zip(ids, vectors, strict=True))
        with self.db:
            self.db.executemany("INSERT INTO v(id, e, g) VALUES (?, ?, ?)", rows)

    def finish(self) -> None:
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def search(self, query: np.ndarray) -> list[int]:
        found = self.db.execute("SELECT id FROM v WHERE e MATCH ? AND k = ?", (query.tobytes(), K))
        return [row[0] for row in found]

    def filtered(self, query: np.ndarray, group: int) -> list[int]:
        found = self.db.execute(
            "SELECT id FROM v WHERE e MATCH ? AND k = ? AND g = ?", (query.tobytes(), K, group)
        )
        return [row[0] for row in found]

    def count(self) -> int:
        return int(self.db.execute("SELECT count(*) FROM v").fetchone()[0])


class Zvec:
    distribution, module, durable = "zvec", "zvec", True

    def __init__(self, path: Path, dim: int, create: bool = True) -> None:
        import zvec

        if create:
            schema = zvec.CollectionSchema(
                name="vectors",
                fields=[
                    zvec.FieldSchema("g", zvec.DataType.INT64, index_param=zvec.InvertIndexParam())
                ],
                vectors=zvec.VectorSchema(
                    "e",
                    zvec.DataType.VECTOR_FP32,
                    dim,
                    index_param=zvec.HnswIndexParam(metric_type=zvec.MetricType.IP),
                ),
            )
            self.collection = zvec.create_and_open(str(path), schema)
        else:
            self.collection = zvec.open(str(path))

    def add(self, ids: range, vectors: np.ndarray) -> None:
        import zvec

        rows = zip(ids, vectors.tolist(), strict=True)
        docs = [
            zvec.Doc(id=str(i), vectors={"e": vector}, fields={"g": i % GROUPS})
            for i, vector in rows
        ]
        if not all(status.ok() for status in self.collection.insert(docs)):
            raise OSError("zvec did not take every document")

    def finish(self) -> None:
        self.collection.optimize()
        self.collection.flush()

    def _query(self, query: np.ndarray, filter: str | None) -> list[int]:
        import zvec

        found = self.collection.query(zvec.Query("e", vector=query.tolist()), topk=K, filter=filter)
        return [int(doc.id) for doc in found]

    def search(self, query: np.ndarray) -> list[int]:
        return self._query(query, None)

    def filtered(self, query: np.ndarray, group: int) -> list[int]:
        return self._query(query, f"g = {group}")

    def count(self) -> int:
        return int(self.collection.stats.doc_count)


STORES = {
    "numpy exact": NumpyExact,
    "qdrant-edge (farspan)": Qdrant,
    "qdrant-edge, 8 bits": QdrantInt8,
    "faiss HNSW32": Faiss,
    "usearch": Usearch,
    "sqlite-vec": SqliteVec,
    "zvec": Zvec,
}


def best(similarities: np.ndarray) -> list[int]:
    top = np.argpartition(-similarities, K)[:K]
    return [int(i) for i in top[np.argsort(-similarities[top])]]


def spread(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` unit vectors near the given ones."""
    generator = np.random.default_rng(seed)
    rows = vectors[generator.integers(0, len(vectors), count)]
    noisy = rows + generator.normal(scale=0.3 / np.sqrt(rows.shape[1]), size=rows.shape)
    return (noisy / np.linalg.norm(noisy, axis=1, keepdims=True)).astype(np.float32)


def import_s(module: str) -> float:
    """Best of three of importing in a fresh process, less a process that imports nothing."""

    def once(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    return max(
        min(once(f"import {module}") for _ in range(3)) - min(once("") for _ in range(3)), 0.0
    )


def installed_mb(distribution: str) -> float:
    files = importlib.metadata.files(distribution) or []
    return (
        sum(
            Path(str(file.locate())).stat().st_size
            for file in files
            if Path(str(file.locate())).exists()
        )
        / 1e6
    )


def timed_ms(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(
    kind: type[Any], vectors: np.ndarray, queries: np.ndarray, folder: Path
) -> dict[str, Any]:
    store = kind(folder / "store", vectors.shape[1])
    start = time.perf_counter()
    for first in range(0, len(vectors), BATCH):
        store.add(range(first, min(first + BATCH, len(vectors))), vectors[first : first + BATCH])
    ingest_s = time.perf_counter() - start
    store.finish()
    build_s = time.perf_counter() - start - ingest_s
    store.search(queries[0])
    times = sorted(timed_ms(functools.partial(store.search, query)) for query in queries)
    found = [len({*store.search(query)} & {*best(vectors @ query)}) / K for query in queries[:100]]
    row = {
        "import_s": import_s(kind.module),
        "installed_mb": installed_mb(kind.distribution),
        "ingest_s": ingest_s,
        "build_s": build_s,
        "p50_ms": statistics.median(times),
        "p95_ms": times[int(0.95 * len(times))],
        "recall_at_10": statistics.mean(found),
        "disk_mb": sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file()) / 1e6,
    }
    if hasattr(store, "filtered"):
        calls = [
            functools.partial(store.filtered, query, i % GROUPS)
            for i, query in enumerate(queries[:100])
        ]
        row["filter_ms"] = statistics.median(timed_ms(call) for call in calls)
    return row


def survived(name: str, vectors: Path, folder: Path) -> bool:
    """Kill a writer after its 20th acknowledged batch, reopen, and look for everything
    acknowledged."""
    command = [sys.executable, __file__, "--writer", name, str(vectors), str(folder / "store")]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(20):
        writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged = [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    writer.wait()
    have = np.load(vectors, mmap_mode="r")
    count = acknowledged[-1] if acknowledged else 20 * 100
    store = STORES[name](folder / "store", have.shape[1], create=False)
    return store.count() >= count and all(
        store.search(np.array(have[i]))[0] == i for i in range(0, count, 97)
    )


def write_until_killed(name: str, vectors: Path, folder: Path) -> None:
    have = np.load(vectors, mmap_mode="r")
    store = STORES[name](folder, have.shape[1])
    for first in range(0, len(have), 100):
        store.add(range(first, first + 100), np.array(have[first : first + 100]))
        print(first + 100, flush=True)
    time.sleep(60)


def own_vectors(index: Path) -> np.ndarray:
    """The vectors of an index."""
    from farspan.retrieval.index import read_manifest

    manifest = read_manifest(index, "farspan embed")
    store = manifest.sets["own"].module.open(manifest.place(index))
    return store.vectors(store.ids().tolist())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", type=Path, nargs="?", default=Path("runs/demo/index"))
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--writer", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.writer:
        write_until_killed(given.writer[0], Path(given.writer[1]), Path(given.writer[2]))
        return
    own = own_vectors(given.index)
    vectors, queries = spread(own, given.vectors, seed=0), spread(own, 200, seed=1)
    header = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "vectors": len(vectors),
        "dim": vectors.shape[1],
        "own_vectors": len(own),
    }
    rows = []
    for name, kind in STORES.items():
        if importlib.util.find_spec(kind.module) is None:
            print(f"{name}: not installed ({kind.distribution}), left out")
            continue
        row = {"store": name, "version": importlib.metadata.version(kind.distribution)}
        with tempfile.TemporaryDirectory() as folder:
            try:
                row |= measure(kind, vectors, queries, Path(folder))
            except NotImplementedError as error:
                row["cannot_run_here"] = str(error)
        if kind.durable and "cannot_run_here" not in row:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "vectors.npy"
                np.save(file, vectors[:10_000])
                row["survived"] = survived(name, file, Path(folder))
        cells = (
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
        )
        print("  ".join(cells), flush=True)
        rows.append(row)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "vector_stores.json").write_text(
        json.dumps({**header, "rows": rows}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
