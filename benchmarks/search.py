"""What an index costs and how fast it answers, each in processes of their own as a user starts
them.

    python benchmarks/search.py RUN [--only store,follow,cold,server,embed]

RUN is a run with an index, such as the demo's. `store`: 100,000 vectors of 384 into the default
store, and searches in it. `follow`: one changed file of 10,000, by `farspan embed`. `cold`:
`farspan search` from process start to answer, by words and by words and vectors. `server`: the same
through `farspan serve`, and 20 fused searches a second for a minute. `embed`: passages a second
against sentence-transformers on the same weights, in turn, where that is installed. Results are
printed and written to results/search.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from farspan.domain.run import source_commit
from farspan.retrieval import stores
from farspan.retrieval.stores import StoreLocation

RESULTS = Path(__file__).parent / "results" / "search.json"
FARSPAN = (sys.executable, "-m", "farspan")
VECTORS = 100_000
DIM = 384
K = 10
AT_ONCE = 1024
FILES = 10_000
QUERIES = (
    "read a file line by line",
    "cross entropy loss of a classifier",
    "wait for several threads to finish",
    "parse a date",
    "join two paths",
    "sort a list by key",
    "open a socket",
    "random numbers with a seed",
)
RATE = 20
SECONDS = 60


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {
        name: float(np.percentile(seconds, q)) * 1e3 for name, q in (("p50_ms", 50), ("p95_ms", 95))
    }


def store(run: Path) -> dict[str, Any]:
    """Vectors that point every way alike, which is the hardest for a search that is not exact."""
    rng = np.random.default_rng(0)
    vectors, queries = (rng.normal(size=(n, DIM)).astype(np.float32) for n in (VECTORS, 200))
    vectors, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (vectors, queries))
    module = stores.load(stores.DEFAULT)
    with tempfile.TemporaryDirectory() as folder:
        place = StoreLocation(folder=Path(folder) / "store", dim=DIM)
        opened = module.create(place)
        start = time.perf_counter()
        for first in range(0, VECTORS, AT_ONCE):
            ids = range(first, min(first + AT_ONCE, VECTORS))
            opened.add(
                ids,
                vectors[ids.start : ids.stop],
                [{"title": f"t{i}", "origin": f"o{i % 100}"} for i in ids],
            )
        opened.finish()
        stored_s = time.perf_counter() - start
        opened.close()
        start = time.perf_counter()
        opened = module.open(place)
        open_s = time.perf_counter() - start
        took = []
        right = []
        for query in queries:
            start = time.perf_counter()
            found = opened.search(query, K).ids.tolist()
            took.append(time.perf_counter() - start)
            right.append(len({*found} & {*np.argsort(-(vectors @ query))[:K].tolist()}) / K)
        opened.close()
    return {
        "store_s": stored_s,
        "open_s": open_s,
        "recall_at_10": statistics.mean(right),
    } | percentiles(took)


def follow(run: Path) -> dict[str, Any]:
    """Return a folder of many small files, a model of a few seconds, one file changed."""
    words = [f"w{n}" for n in range(4000)]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        rng = random.Random(0)
        text.mkdir()
        for number in range(FILES):
            lines = "\n\n".join(" ".join(rng.choices(words, k=60)) for _ in range(2))
            (text / f"{number:05}.md").write_text(f"# Note {number}\n\n{lines}\n")
        commands = (
            ("init", "text", "--time", "10s"),
            ("train", "run.yaml"),
            ("embed", "--no-eval"),
        )
        took = [timed((*FARSPAN, *words), folder) for words in commands]
        (text / "00007.md").write_text("# Note 7\n\nThis note is another one now.\n")
        changed_s = timed((*FARSPAN, "embed", "--no-eval"), folder)
        found = subprocess.run(
            (*FARSPAN, "search", "another one now", "--json"),
            cwd=folder,
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert "00007.md" in json.loads(found.stdout)["answer"]["results"][0]["origin"]
    return {"files": FILES, "first_s": took[-1], "changed_s": changed_s}


def timed(words: tuple[str, ...], folder: str) -> float:
    start = time.perf_counter()
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=900)
    return time.perf_counter() - start


def cold(run: Path) -> dict[str, Any]:
    """In turn, eight times each."""
    took: dict[str, list[float]] = {"bm25": [], "fused": []}
    for query in QUERIES:
        for system, seconds in took.items():
            seconds.append(
                timed((*FARSPAN, "search", query, "--run", str(run), "--system", system), ".")
            )
    return {f"{kind}_s": statistics.median(seconds) for kind, seconds in took.items()} | {
        f"{kind}_most_s": max(seconds) for kind, seconds in took.items()
    }


def served(run: Path, use: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return what `use` finds of a server of the run, by its address."""
    process = subprocess.Popen(
        (*FARSPAN, "serve", str(run), "--port", "8765"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not _answers("http://127.0.0.1:8765/healthz"):
            assert process.poll() is None and time.monotonic() < deadline, (
                "the server does not start"
            )
            time.sleep(0.1)
        return use("http://127.0.0.1:8765")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def server(run: Path) -> dict[str, Any]:
    return served(
        run,
        lambda url: (
            _load(url)
            | {
                "command_s": statistics.median(
                    timed((*FARSPAN, "search", query, "--run", str(run)), ".") for query in QUERIES
                )
            }
        ),
    )


def _load(url: str) -> dict[str, Any]:
    """Send requests at their times, whether or not those before have been answered."""
    took: list[float] = []
    failed: list[str] = []

    def ask(number: int) -> None:
        words = urllib.parse.urlencode(
            {"q": f"{QUERIES[number % len(QUERIES)]} {number}", "k": 10, "system": "fused"}
        )
        start = time.perf_counter()
        try:
            with urllib.request.urlopen(f"{url}/api/search?{words}", timeout=10) as answer:
                assert json.load(answer)["results"]
            took.append(time.perf_counter() - start)
        except Exception as error:
            failed.append(str(error))

    ask(0)
    took.clear()
    began = time.monotonic()
    threads = []
    for number in range(RATE * SECONDS):
        time.sleep(max(0.0, began + number / RATE - time.monotonic()))
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return {
        "requests": len(took),
        "failed": len(failed),
        "seconds": time.monotonic() - began,
    } | percentiles(took)


def embed(run: Path) -> dict[str, Any]:
    """Passages a second: farspan and sentence-transformers as they come, and both in fp32 with
    batches of 32."""
    import importlib.util

    if importlib.util.find_spec("sentence_transformers") is None:
        return {"skipped": "sentence-transformers is not installed"}
    import torch

    from farspan.domain.run import RunFolder
    from farspan.retrieval import pooling
    from farspan.retrieval.embed import Embedder
    from farspan.retrieval.index import FITTED, passages_of, read_manifest
    from farspan.runtime.inference import load

    folder = RunFolder.existing(run)
    manifest = read_manifest(folder.index, "")
    trained = load(folder)
    texts = [chunk.indexed for chunk in passages_of(folder.index, manifest)][:4096]
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            (
                *FARSPAN,
                "export",
                str(run),
                "--format",
                "sentence-transformers",
                "--out",
                f"{out}/st",
            ),
            check=True,
        )
        from sentence_transformers import SentenceTransformer

        theirs = SentenceTransformer(f"{out}/st", trust_remote_code=True, device="cpu")
        ours = Embedder.load(
            trained.model, trained.tokenizer, folder.index / manifest.files / FITTED
        )
        fast = pooling.bf16_is_fast
        seconds = {"ours": [], "ours, fp32": [], "theirs": []}
        for _ in range(3):
            for name, encode in (
                ("ours", ours.passages),
                ("theirs", lambda texts: theirs.encode(texts, batch_size=32)),
                ("ours, fp32", ours.passages),
            ):
                pooling.bf16_is_fast = (lambda device: False) if name == "ours, fp32" else fast
                start = time.perf_counter()
                encode(texts)
                seconds[name].append(time.perf_counter() - start)
        pooling.bf16_is_fast = fast
    ratios = {
        name: statistics.median(
            t / o for t, o in zip(seconds["theirs"], seconds[name], strict=True)
        )
        for name in ("ours", "ours, fp32")
    }
    return {
        "passages": len(texts),
        "threads": torch.get_num_threads(),
        "times_theirs": ratios,
        "passages_per_s": {
            name: len(texts) / statistics.median(took) for name, took in seconds.items()
        },
    }


PARTS = {"store": store, "follow": follow, "cold": cold, "server": server, "embed": embed}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    given = parser.parse_args()
    results = json.loads(RESULTS.read_bytes()) if RESULTS.exists() else {}
    for name in given.only.split(","):
        results[name] = PARTS[name](given.run) | {
            "commit": source_commit(),
            "cores": os.cpu_count(),
        }
        print(name, json.dumps(results[name]), flush=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
