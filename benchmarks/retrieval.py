"""What makes plain mean-pooled embeddings of a small model find documents by title, and how to fuse them with BM25.

This is the comparison before the maps that `retrieval.embed` fits; `farspan search --eval` has the figures with them.

    python benchmarks/retrieval.py RUN [--documents 5000]

Token weights (uniform, inverse document frequency, surprisal under the model, both), the block whose states are
averaged, and whitening, each for the run's model and for an untrained one of the same shape: hit rate@10 of the queries
of `farspan search --eval`. Candidates are a seeded sample of documents beside those that are asked for. Then weighted
fusion against reciprocal rank fusion, on the tuning queries and on the reported ones, and seconds for each step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from farspan.corpus.documents import read_documents
from farspan.domain.codec import load
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import parameters
from farspan.domain.run import RunFolder, RunRecord
from farspan.retrieval.chunk import Chunking, chunk_documents
from farspan.retrieval.evaluate import WEIGHTS, Query, body_of, choose_queries
from farspan.retrieval.lexical import Lexical
from farspan.retrieval.metrics import bootstrap, hit, ndcg, ranks
from farspan.retrieval.rank import by_document, fuse, query_form
from farspan.runtime import inference
from farspan.runtime.model import Decoder, initialise

RESULTS = Path(__file__).parent / "results"
ROWS = 64
#: Logits made at a time, so that they stay in the CPU's cache.
LOGITS = 2**22


def surprisal(model: Decoder, tokens_BS: torch.Tensor, inside_BS: torch.Tensor) -> torch.Tensor:
    """-log p in nats (M) of the tokens after each row's first, where `inside_BS` (one position shorter) is true."""
    device = tokens_BS.device
    with torch.autocast(device.type, torch.bfloat16, enabled=True):
        states_MD = model.hidden(tokens_BS[:, :-1])[inside_BS]
        parts = []
        rows = max(LOGITS // model.head_VD.shape[0], 1)
        for x_ND, targets_N in zip(states_MD.split(rows), tokens_BS[:, 1:][inside_BS].split(rows), strict=True):
            logits_NV = torch.nn.functional.linear(x_ND, model.head_VD).float()
            parts.append(torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none"))
    return torch.cat(parts)


class States:
    """States after so many blocks, and the surprisal of each token, text after text in one long array."""

    def __init__(self, model: Decoder, ids: list[list[int]], end: int, layers: list[int | None]) -> None:
        self.lengths = [len(text) for text in ids]
        self.tokens = torch.tensor([token for text in ids for token in text])
        self.surprisal = torch.zeros(len(self.tokens))
        self.states = {layer: torch.zeros(len(self.tokens), model.spec.d_model) for layer in layers}
        for places, tokens, inside in batches(ids, end):
            self.surprisal[places] = surprisal(model, tokens, inside)
            with torch.autocast("cpu", torch.bfloat16):
                streams = list(model.streams(tokens))
                for layer in layers:
                    state = model.norm(streams[-1]) if layer is None else streams[layer]
                    self.states[layer][places] = state[:, 1:][inside].float()

    def pooled(self, layer: int | None, weights: torch.Tensor) -> torch.Tensor:
        owner = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        sums = torch.zeros(len(self.lengths), self.states[layer].shape[1])
        sums.index_add_(0, owner, self.states[layer] * weights[:, None])
        totals = torch.zeros(len(self.lengths)).index_add_(0, owner, weights)
        return sums / totals.clamp(min=1e-9)[:, None]


def batches(ids: list[list[int]], end: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(positions in the long array, tokens with an end of text before each row, mask), shortest texts first."""
    starts = np.cumsum([0, *map(len, ids)])
    order = sorted((row for row in range(len(ids)) if ids[row]), key=lambda row: len(ids[row]))
    for first in range(0, len(order), ROWS):
        rows = order[first : first + ROWS]
        longest = len(ids[rows[-1]])
        tokens = torch.tensor([[end, *ids[row], *[end] * (longest - len(ids[row]))] for row in rows])
        inside = torch.arange(longest) < torch.tensor([[len(ids[row])] for row in rows])
        places = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        yield torch.from_numpy(places), tokens, inside


def treated(passages: torch.Tensor, asked: torch.Tensor, titles: torch.Tensor, whiten: float) -> np.ndarray:
    """Cosines (queries, passages) after centring and whitening."""
    centred, asked = passages - passages.mean(0), asked - titles.mean(0)
    variances, directions = torch.linalg.eigh((centred.T @ centred / len(centred)).double())
    whitening = (directions * variances.clamp(min=float(variances[-1]) * 1e-6) ** (-whiten / 2)).float()
    unit = torch.nn.functional.normalize
    return (unit(asked @ whitening, dim=1) @ unit(centred @ whitening, dim=1).T).numpy()


def hits(scores_of: Callable[[int], np.ndarray], queries: list[Query]) -> np.ndarray:
    return np.array([hit(ranks(scores_of(row), query.relevant), 10) for row, query in enumerate(queries)])


class Setting:
    """The documents, queries and texts that everything is measured on."""

    def __init__(self, run: RunFolder, count: int) -> None:
        self.trained = inference.load(run)
        documents = list(read_documents(Path(load(run.record, RunRecord).corpus)))
        train = load(run.corpus, CorpusManifest).train.documents
        texts = [body_of(document) for document in documents]
        queries = choose_queries(documents, texts, train, seed=0)
        asked = {n for query in queries.reported + queries.tuning for n in query.relevant}
        others = [n for n in np.random.default_rng(0).permutation(len(documents)) if int(n) not in asked]
        kept = sorted(asked | {int(n) for n in others[: max(count - len(asked), 0)]})
        place = {n: i for i, n in enumerate(kept)}
        self.documents = [documents[n] for n in kept]
        self.bodies = [texts[n] for n in kept]
        self.reported, self.tuning = (
            [Query(query.text, tuple(place[n] for n in query.relevant)) for query in some]
            for some in (queries.reported, queries.tuning)
        )
        chunks = chunk_documents(self.documents, self.trained.tokenizer, Chunking(per_document=2))
        self.chunks = [chunk for chunk in chunks if not chunk.head]
        self.owners = [chunk.document for chunk in self.chunks]
        self.titles = [query_form(document.title) for document in documents[:train][:: train // 1000 + 1]]


def treatments(setting: Setting) -> tuple[list[dict[str, Any]], np.ndarray]:
    """A row a treatment; and the cosines of the treatment that the product uses, over tuning, then reported queries."""
    trained, tokenizer = setting.trained.model, setting.trained.tokenizer
    untrained = Decoder(trained.spec).eval()
    initialise(untrained, 0)
    layers: list[int | None] = [0, 1, trained.spec.layers // 2, None]
    groups = [
        [chunk.text for chunk in setting.chunks],
        [q.text for q in setting.tuning + setting.reported],
        setting.titles,
    ]
    ids = [tokenizer.encode_batch(texts) for texts in groups]
    counts = np.bincount(np.concatenate([np.unique(text) for text in ids[0]]), minlength=trained.spec.vocab_size)
    idf = torch.from_numpy(np.log(len(ids[0]) / np.clip(counts, 1, None))).float()
    weights: dict[str, Callable[[States], torch.Tensor]] = {
        "uniform": lambda states: torch.ones(len(states.tokens)),
        "idf": lambda states: idf[states.tokens],
        "surprisal": lambda states: states.surprisal,
        "surprisal^2": lambda states: states.surprisal**2,
        "surprisal * idf": lambda states: states.surprisal * idf[states.tokens],
    }
    models = {"trained": trained, "untrained": untrained}
    with torch.inference_mode():
        states = {n: [States(m, text, tokenizer.end_of_text, layers) for text in ids] for n, m in models.items()}
        variants = [(0, name, whiten) for name in weights for whiten in (0.0, 0.5, 0.75, 1.0)]
        variants += [(layer, name, 0.75) for layer in layers[1:] for name in ("uniform", "surprisal^2")]
        rows, chosen = [], None
        for layer, name, whiten in variants:
            found = {}
            for model, parts in states.items():
                cosines = treated(*(part.pooled(layer, weights[name](part)) for part in parts), whiten)
                reported = cosines[len(setting.tuning) :]
                found[model] = hits(
                    lambda row, c=reported: by_document(setting.owners, c[row], len(setting.bodies)), setting.reported
                )
                if (model, layer, name, whiten) == ("trained", 0, "surprisal^2", 0.75):
                    chosen = cosines
            low, high = bootstrap(found["trained"] - found["untrained"], seed=0)
            rows.append({
                "states": "output" if layer is None else f"after {layer} blocks", "weights": name, "whiten": whiten,
                "trained": found["trained"].mean(), "untrained": found["untrained"].mean(), "interval": [low, high],
            })  # fmt: skip
    assert chosen is not None
    return rows, chosen


def fusions(setting: Setting, cosines: np.ndarray) -> list[dict[str, Any]]:
    """nDCG@10 of each fusion over the tuning and the reported queries."""
    lexical, N = Lexical.build(setting.bodies), len(setting.bodies)

    def reciprocal(bm25: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """1 / (60 + rank), summed over both (Cormack et al. 2009); nothing for what a system did not find."""
        return sum((scores > 0) / (60 + 1 + np.argsort(np.argsort(-scores))) for scores in (bm25, vectors))

    ways: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"bm25": lambda bm25, vectors: bm25}
    ways |= {f"bm25 + {w:g} cosine": lambda bm25, vectors, w=w: fuse(bm25, vectors, w) for w in WEIGHTS}
    ways["reciprocal ranks"] = reciprocal
    gains: dict[str, list[float]] = {way: [] for way in ways}
    for row, query in enumerate(setting.tuning + setting.reported):
        bm25, vectors = lexical.scores(query.text), by_document(setting.owners, cosines[row], N)
        for way, scores in ways.items():
            gains[way].append(ndcg(ranks(scores(bm25, vectors), query.relevant), 10))
    T = len(setting.tuning)
    return [{"fusion": w, "tuning": np.mean(g[:T]), "reported": np.mean(g[T:])} for w, g in gains.items()]


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        cells = (
            f"{v:.3f}" if isinstance(v, float) else str([round(x, 3) for x in v]) if isinstance(v, list) else v
            for v in row.values()
        )
        print("  ".join(f"{cell!s:18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--documents", type=int, default=5000, help="candidates (default: 5000)")
    given = parser.parse_args()
    start = time.perf_counter()
    setting = Setting(RunFolder.existing(given.run), given.documents)
    rows, cosines = treatments(setting)
    print(f"hit rate@10 of {len(setting.reported)} titles among {len(setting.bodies)} documents: trained, untrained,")
    print("and the 95 % interval of their difference")
    show(rows)
    fused = fusions(setting, cosines)
    print("\nnDCG@10 of fusions on tuning and reported queries")
    show(fused)
    header = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "cpus": os.cpu_count(),
        "platform": platform.platform(), "torch": torch.__version__, "weights": setting.trained.weights,
        "parameters": parameters(setting.trained.model.spec), "queries": len(setting.reported),
        "tuning_queries": len(setting.tuning), "documents": len(setting.bodies), "chunks": len(setting.chunks),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    content = json.dumps({**header, "treatments": rows, "fusions": fused}, indent=2, default=float)
    (RESULTS / "retrieval.json").write_text(content + "\n")


if __name__ == "__main__":
    main()
