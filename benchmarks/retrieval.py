"""How well titles find their documents: BM25, a trained and an untrained model, each with and without fitted maps.

    python benchmarks/retrieval.py [RUN]            # writes results/retrieval.json
    python benchmarks/retrieval.py [RUN] --choose   # writes results/retrieval_maps.json

RUN is a run directory on any corpus; without one, `farspan demo` makes runs/retrieval first. Every row is measured by
`farspan.retrieval.evaluate`, as `farspan search --eval` is, over the reported titles. Plain pooling is what `farspan
embed` does for a corpus without titles: the same features, centred, whitened, and projected at random.

`--choose` compares sizes of a vector and passes over the pairs for the maps of the trained model, on titles of training
documents that neither the maps are fitted to nor the evaluation reports. Of the candidates whose nDCG@10 is not below
the best one's (the 95 % interval of the paired difference reaches 0), the smallest vector wins, then the fewest passes:
the defaults of `farspan.retrieval.embed.Fit`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from farspan.corpus.documents import read_documents
from farspan.domain.codec import load
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import parameters
from farspan.domain.run import RunFolder, RunRecord
from farspan.retrieval.chunk import chunk_documents
from farspan.retrieval.embed import Embedder, apply_maps, fit_maps, inverse_frequency
from farspan.retrieval.evaluate import TUNING, ModelVectors, body_of, choose_queries, evaluate, measure, table
from farspan.retrieval.fitting import title_pairs, untrained
from farspan.retrieval.index import FitSettings, Recipe
from farspan.retrieval.metrics import bootstrap, ranks
from farspan.retrieval.rank import by_document
from farspan.runtime import inference
from farspan.runtime.model.decoder import Decoder

RESULTS = Path(__file__).parent / "results"
SEED = 0
#: Titles that the candidates of `--choose` are compared on, as far as a corpus has them.
CHOOSING = 2000
SIZES, EPOCHS = (128, 256, 512), (7, 14, 28, 56, 112)
PAIRS = (
    ("model", "untrained"),
    ("model, plain", "untrained, plain"),
    ("model", "model, plain"),
    ("fused", "bm25"),
)


class Task:
    """The run's documents and their chunks, the titles that are asked, and those that the maps are fitted to."""

    def __init__(self, run: RunFolder, most_tuning: int) -> None:
        self.trained = inference.load(run)
        documents = list(read_documents(Path(load(run.record, RunRecord).corpus)))
        train = load(run.corpus, CorpusManifest).train.documents
        self.bodies = [body_of(document) for document in documents]
        self.queries = choose_queries(documents, self.bodies, train, SEED, most_tuning)
        size = min(Recipe().chunk_tokens, self.trained.model.spec.context - 1)
        chunks = [chunk for chunk in chunk_documents(documents, self.trained.tokenizer, size) if not chunk.head]
        self.passages, self.owners = [chunk.text for chunk in chunks], np.array([chunk.document for chunk in chunks])
        self.titles, self.first_passages = title_pairs(documents[:train], chunks, self.queries)


class Features:
    """What a model makes of the texts of a task, before any map."""

    def __init__(self, model: Decoder, task: Task) -> None:
        tokenizer = task.trained.tokenizer
        weights = inverse_frequency(tokenizer.encode_batch(task.passages), model.spec.vocab_size)
        pool = Embedder(model, tokenizer, {"weights": weights}).pool
        self.width = model.spec.d_model
        self.passages, self.titles = pool(task.passages), pool(task.titles)
        self.reported = pool([query.text for query in task.queries.reported])
        self.tuning = pool([query.text for query in task.queries.tuning])

    def side(self, first_passages: Sequence[int], fit: FitSettings) -> ModelVectors:
        """Vectors under maps that are fitted to as many titles as there are numbers of passages."""
        maps = fit_maps(self.passages, self.titles[: len(first_passages)], first_passages, self.width, fit)
        asked = (apply_maps(maps, features, "query") for features in (self.reported, self.tuning))
        return ModelVectors(apply_maps(maps, self.passages, "passage"), *asked)


def report(task: Task) -> dict[str, Any]:
    """Every system over the reported titles."""
    sides = {}
    for name, model in (("model", task.trained.model), ("untrained", untrained(task.trained.model, SEED))):
        features = Features(model, task)
        sides[name] = features.side(task.first_passages, FitSettings())
        sides[f"{name}, plain"] = features.side([], FitSettings())
    evaluation = evaluate(task.bodies, task.owners, task.queries, sides, SEED, PAIRS)
    print(table(evaluation))
    return {"fit": FitSettings(), "evaluation": evaluation}


def choose(task: Task) -> dict[str, Any]:
    """Every candidate over the tuning titles, against the best."""
    features = Features(task.trained.model, task)
    measured, seconds = {}, {}
    for fit in (FitSettings(size=size, epochs=epochs) for size in SIZES for epochs in EPOCHS):
        start = time.process_time()
        side = features.side(task.first_passages, fit)
        seconds[fit] = time.process_time() - start
        found = [
            ranks(by_document(task.owners, similarities, len(task.bodies)), query.relevant)
            for similarities, query in zip(side.tuning @ side.chunks.T, task.queries.tuning, strict=True)
        ]
        measured[fit] = measure(found)
        print(f"{fit}: nDCG@10 {measured[fit]['ndcg_at_10'].mean():.4f}", flush=True)
    best = max(measured, key=lambda fit: measured[fit]["ndcg_at_10"].mean())
    rows = [
        {
            "size": fit.size, "epochs": fit.epochs, "fit_cpu_s": seconds[fit],
            **{metric: values.mean() for metric, values in found.items()},
            "ndcg_minus_best": bootstrap(found["ndcg_at_10"] - measured[best]["ndcg_at_10"], seed=SEED),
        }
        for fit, found in measured.items()
    ]  # fmt: skip
    chosen = next(row for row in rows if row["ndcg_minus_best"][1] >= 0)
    for row in rows:
        low, high = row["ndcg_minus_best"]
        print(
            f"{row['size']:4} numbers {row['epochs']:3} passes  hit@10 {row['hit_at_10']:.3f}  nDCG@10"
            f" {row['ndcg_at_10']:.3f}, {low:+.3f} to {high:+.3f} of the best's{'  <- chosen' if row is chosen else ''}"
        )
    return {"chosen": {key: chosen[key] for key in ("size", "epochs")}, "rows": rows}


def demo_run() -> Path:
    """The run of the demo that this benchmark made, or makes now."""
    path = Path("runs/retrieval")
    if not path.exists():
        subprocess.run([sys.executable, "-m", "farspan", "demo", "--run", str(path)], check=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--choose", action="store_true", help="compare candidates for the maps, on tuning titles only")
    given = parser.parse_args()
    start = time.perf_counter()
    task = Task(RunFolder.existing(given.run or demo_run()), CHOOSING if given.choose else TUNING)
    found = choose(task) if given.choose else report(task)
    header = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "platform": platform.platform(),
        "torch": str(torch.__version__), "numpy": np.__version__, "seed": SEED, "weights": task.trained.weights,
        "parameters": parameters(task.trained.model.spec), "documents": len(task.bodies),
        "passages": len(task.passages), "fitted_titles": len(task.titles),
        "reported_titles": len(task.queries.reported), "tuning_titles": len(task.queries.tuning),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
    name = "retrieval_maps.json" if given.choose else "retrieval.json"
    content = msgspec.json.encode({**header, **found}, enc_hook=float)
    (RESULTS / name).write_text(json.dumps(json.loads(content), indent=1) + "\n")


if __name__ == "__main__":
    main()
