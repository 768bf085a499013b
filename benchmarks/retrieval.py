"""How well titles, questions and openings find documents: BM25, and vectors of a trained and of an
untrained model.

    python -m benchmarks.retrieval [RUN ...]       # writes results/retrieval.json

RUN is a run directory on any corpus; without one, `farspan demo` makes runs/retrieval first, and a
training of four minutes on Perl's documentation (perl_documentation.py) makes runs/retrieval-perl.
Every row is measured as `farspan embed` measures: on queries that nothing was fitted to or chosen
on. Models are fitted to the corpus in one way, and shown before that too. The untrained one has the
same shape and the weights that training begins from.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks import perl_documentation
from farspan.corpus.documents import read_documents
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import count_parameters
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load, load_yaml
from farspan.retrieval.chunk import chunk_document
from farspan.retrieval.embed import Embedder
from farspan.retrieval.embedder_fit import sides_of
from farspan.retrieval.evaluate import evaluate, format_evaluation
from farspan.retrieval.index import FitSettings, Recipe
from farspan.retrieval.pairs import mine_pairs
from farspan.retrieval.queries import body_of, choose_queries, passage_of, question_lines
from farspan.runtime import inference
from farspan.runtime.model.decoder import Decoder, initialize_model

RESULTS = Path(__file__).parent / "results" / "retrieval.json"
SEED = 0
COMPARED = (
    ("model", "bm25"),
    ("model", "untuned"),
    ("model", "untrained"),
    ("untrained", "bm25"),
    ("fused", "bm25"),
)


def untrained(model: Decoder, seed: int) -> Decoder:
    """Return a model of the same shape, on the same device, with the weights that training begins
    from."""
    blank = Decoder(model.spec).eval().to(model.tok.weight.device)
    initialize_model(blank, seed)
    return blank


def measured(path: Path) -> dict[str, Any]:
    """One run's corpus, under every system."""
    run = RunFolder.existing(path)
    start = time.perf_counter()
    trained = inference.load(run)
    documents = list(read_documents(Path(json.loads(run.record.read_text())["corpus"])))
    train = load(run.corpus, CorpusManifest).train.documents
    bodies = [body_of(document) for document in documents]
    fit = FitSettings()
    queries = choose_queries(documents, bodies, train, SEED)
    size = min(Recipe().chunk_tokens, trained.model.spec.context - 1)
    chunks = [
        chunk
        for number, document in enumerate(documents)
        for chunk in chunk_document(document, number, trained.tokenizer, size)
        if not chunk.head
    ]
    questions = [question_lines(document) for document in documents]
    passages = [passage_of(chunk, questions[chunk.document]) for chunk in chunks]
    pairs = mine_pairs(documents[:train], chunks, passages, queries.relevant)
    sides = {}
    seconds = {}
    for name, model in (("model", trained.model), ("untrained", untrained(trained.model, SEED))):
        began = time.perf_counter()
        unfitted = Embedder.unfitted(model, trained.tokenizer, passages)
        texts = unfitted.read(passages)
        asked = unfitted.read(pairs.asked)
        read = time.perf_counter()
        fitted = {name: unfitted.fitted(texts, asked, pairs, fit)}
        seconds[name] = {"read": read - began, "fit": time.perf_counter() - read}
        if name == "model":
            fitted["untuned"] = unfitted.fitted(
                texts, asked, pairs, msgspec.structs.replace(fit, steps=0)
            )
        sides |= sides_of(fitted, texts, queries)
    owners = np.array([chunk.document for chunk in chunks])
    evaluation = evaluate(bodies, owners, queries, sides, SEED, COMPARED)
    print(f"{path}\n{format_evaluation(evaluation)}\n", flush=True)
    return {
        "run": path.name,
        "text": Path(load_yaml(run.config, RunConfig).data_config.source).name,
        "weights": trained.weights,
        "parameters": count_parameters(trained.model.spec),
        "documents": len(documents),
        "passages": len(passages),
        "pairs": len(pairs.texts),
        "seconds": seconds,
        "seconds_in_all": time.perf_counter() - start,
        "fit": fit,
        "evaluation": evaluation,
    }


def demo_run() -> Path:
    """Return the run of the demo that this benchmark made, or makes now."""
    path = Path("runs/retrieval")
    if not path.exists():
        subprocess.run([sys.executable, "-m", "farspan", "demo", "--run", str(path)], check=True)
    return path


def perl_run() -> Path:
    """Return the run on Perl's documentation that this benchmark made, or makes now."""
    path = Path("runs/retrieval-perl")
    text = Path("runs/perldoc")
    if not path.exists():
        if not perl_documentation.write(text):
            sys.exit(f"no documentation below {perl_documentation.ROOT}: install Debian's perl-doc")
        config = path.with_suffix(".yaml")
        config.write_text(f"data: {text}\nsize: tiny\nbudget: {{time: 4m}}\n")
        subprocess.run(
            [sys.executable, "-m", "farspan", "train", str(config), "--run", str(path)], check=True
        )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "commit": commit,
        "runs": [measured(path) for path in parser.parse_args().runs or [demo_run(), perl_run()]],
    }
    RESULTS.write_text(
        json.dumps(json.loads(msgspec.json.encode(found, enc_hook=float)), indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
