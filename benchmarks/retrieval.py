"""How well searches find documents: words, a ready encoder, a table in its place, a run's own
vectors, and what `farspan index` chooses of these.

    python -m benchmarks.retrieval [NAME ...] [--root ROOT] [--no-runs]
                                                    # writes results/retrieval.json

NAME is `built-in`, or a corpus of questions that people asked (questions.py; ROOT is where its
packages are unpacked). Each is indexed as `farspan index` does, below runs/retrieval. What that
index chose is measured on its own reported queries (titles, questions made of titles, openings),
and by `farspan.retrieval.search` on the judged questions, which the index has not seen.

Own vectors come from the demo's run, and a run of four minutes on Perl's documentation. The
untrained model has the same shape, the weights that training begins from, and the same fit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks import questions
from benchmarks.questions import QuestionCorpus
from farspan.app.index_folders import make_index_folder
from farspan.app.indexing import model_origin, open_index, update_index
from farspan.app.updates import Note
from farspan.corpus.prepare import read_source
from farspan.corpus.processes import usable_cores
from farspan.domain.config import DataConfig, IndexConfig
from farspan.domain.index_folder import IndexFolder
from farspan.domain.run import RunFolder, make_cache_folder
from farspan.planning.quantities import fit_s
from farspan.report.tables import table_lines
from farspan.retrieval import choose
from farspan.retrieval.bm25 import BM25Index, Numbered
from farspan.retrieval.build import build
from farspan.retrieval.embed import Embedder
from farspan.retrieval.evaluate import METRICS, describe_mix, format_lexical, measure_rankings
from farspan.retrieval.hybrid_ranking import System
from farspan.retrieval.index import EncoderIdentity, Index, NoModels, Origin, QueryEmbedder, Recipe
from farspan.retrieval.index_task import Task
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.metrics import Floats, Ints, bootstrap_interval
from farspan.retrieval.own_voice import OwnModel
from farspan.retrieval.search import search
from farspan.retrieval.words import WordRules, Words
from farspan.runtime import inference
from farspan.runtime.inference import Trained
from farspan.runtime.model.decoder import Decoder, initialize_model

RESULTS = Path(__file__).parent / "results" / "retrieval.json"
WORK = Path("runs/retrieval")
BUILT_IN = "built-in"
SEED = 0
#: Documents that a search returns here: nDCG@10 and MRR@10 look no deeper.
DEPTH = 10
#: bm25s as it comes, for what stems, stop words and tuning are worth.
PLAIN_K1 = 1.5
PLAIN_B = 0.75
#: Corpora whose questions set ENCODER_SHARES and Recipe.chunk_tokens; `python` had no part in that.
FITTED_ON = ("perl", "r", "debian")
COMPARED = (
    ("words", "plain words"),
    ("encoder", "words"),
    ("default", "words"),
    ("default", "encoder"),
    ("table", "words"),
    ("own", "words"),
    ("own", "untrained"),
    ("own and words", "words"),
)
METRIC = "ndcg_at_10"


class Judged(NamedTuple):
    """A system's ranks of the documents that answer each question."""

    system: str
    ranks: list[Ints]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="corpora; all by default")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where packages are unpacked")
    parser.add_argument("--no-runs", action="store_true", help="leave own vectors out")
    given = parser.parse_args()
    names = given.names or [BUILT_IN, *questions.installed_corpora(given.root)]
    for name in questions.CORPORA:
        if not given.names and name not in names:
            print(f"{name} is left out: its packages are not below {given.root}", flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "commit": commit,
        "recipes": count_recipes(),
        "corpora": [measure_corpus(name, given.root, not given.no_runs) for name in names],
    }
    for corpus in found["corpora"]:
        print("\n".join(format_corpus(corpus)), flush=True)
    print(f"recipes tried on each corpus's tuning queries: {found['recipes']}")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def count_recipes() -> dict[str, int]:
    """Return how many recipes an index tries on its tuning queries."""
    words = len(choose.WORD_RULES) * (len(choose.K1S) + len(choose.BS)) + 1
    return {"words": words, "weights of a voice": choose.WEIGHT_STEPS + 1}


def measure_corpus(name: str, root: Path, with_run: bool) -> dict[str, Any]:
    """Index one corpus and measure every system on its queries and questions."""
    corpus = None
    source = "pydocs"
    if name != BUILT_IN:
        corpus = questions.load_corpus(name, root)
        questions.write(corpus, WORK / name)
        source = str(WORK / name / "documents")
    began = time.perf_counter()
    home = make_index_folder(source, WORK / name / "index", encoder="minilm")
    indexed = update_index(home, print_note)
    manifest = indexed.manifest
    assert manifest.evaluation is not None
    measured: dict[str, Any] = {
        "name": name,
        "fitted_on": name in FITTED_ON,
        "documents": manifest.documents,
        "passages": manifest.chunks,
        "words": format_lexical(manifest.lexical),
        "mix": describe_mix(manifest.evaluation.choice.mix),
        "seconds": time.perf_counter() - began,
        "evaluation": msgspec.to_builtins(manifest.evaluation),
    }
    judged: list[Judged] = []
    if corpus is not None:
        judged = judge_index(home, corpus)
    if with_run and name in RUNS:
        own, evaluations = judge_own(name, source, corpus)
        judged += own
        measured["own"] = evaluations
    if corpus is not None:
        measured["questions"] = summarize_judged(judged)
        measured["questions"]["number"] = len(corpus.questions)
    return measured


def judge_index(home: IndexFolder, corpus: QuestionCorpus) -> list[Judged]:
    """Return what an index's systems find of a corpus's questions."""
    judged = []
    with open_index(home) as index:
        judged.append(Judged("plain words", rank_by_plain_words(index, corpus)))
        systems: dict[str, System | None] = {
            "words": "bm25",
            "encoder": "encoder",
            "default": None,
        }
        for name, system in systems.items():
            judged.append(Judged(name, rank_by_search(index, corpus, system)))
    # Without the encoder a table makes the queries' vectors.
    with closing(Index.open(home.index, NoModels(), remedy="")) as index:
        judged.append(Judged("table", rank_by_search(index, corpus, None)))
    return judged


def rank_by_search(index: Index, corpus: QuestionCorpus, system: System | None) -> list[Ints]:
    """Return the ranks of each question's answers in a search; none beyond DEPTH."""
    answers = find_answers(index, corpus)
    ranks = []
    for query, relevant in zip(corpus.questions, answers, strict=True):
        results = search(index, query.text, DEPTH, system).results
        places = [rank for rank, result in enumerate(results, 1) if result.origin in relevant]
        ranks.append(pad_ranks(places, len(query.relevant)))
    return ranks


def find_answers(index: Index, corpus: QuestionCorpus) -> list[set[str]]:
    """Return the origins that answer each question, as the index names documents."""
    by_name = {Path(document.origin).name: document.origin for document in index.documents}
    for document in index.documents:
        for place in document.places:
            by_name[Path(place.origin).name] = document.origin
    answers = []
    for query in corpus.questions:
        names = [questions.file_name(corpus.documents[row]) for row in query.relevant]
        answers.append({by_name[name] for name in names})
    return answers


def pad_ranks(places: Sequence[int], relevant: int) -> Ints:
    """Return ranks of all relevant documents: of those that were not found, beyond any depth."""
    missing = [10**6] * (relevant - len(places))
    return np.array([*places, *missing], np.int64)


def rank_by_plain_words(index: Index, corpus: QuestionCorpus) -> list[Ints]:
    """Return the ranks of answers by BM25 as it comes: no stems, every word, nothing tuned."""
    languages = index.manifest.lexical.rules.languages
    words = Words(WordRules(stems=False, stop_words=False, languages=languages))
    texts = [f"{document.title}\n{document.text}" for document in corpus.documents]
    numbered = Numbered(words.of_text(text, "en") for text in texts)
    lexical = BM25Index.build(numbered, PLAIN_K1, PLAIN_B)
    ranks = []
    for query in corpus.questions:
        scores_N = lexical.bm25_scores(words.of_query(query.text))
        order = np.argsort(-scores_N, kind="stable")[:DEPTH].tolist()
        places = [rank for rank, row in enumerate(order, 1) if row in query.relevant]
        ranks.append(pad_ranks(places, len(query.relevant)))
    return ranks


def demo_run() -> RunFolder:
    """Return the run of the demo that this benchmark made, or makes now."""
    path = WORK / BUILT_IN / "run"
    if not path.exists():
        subprocess.run([sys.executable, "-m", "farspan", "demo", "--run", str(path)], check=True)
    return RunFolder.existing(path)


def perl_run() -> RunFolder:
    """Return the run on Perl's documentation that this benchmark made, or makes now."""
    path = WORK / "perl" / "run"
    if not path.exists():
        text = WORK / "perl" / "documents"
        config = path.with_suffix(".yaml")
        config.write_text(f"data: {text}\nsize: tiny\nbudget: {{time: 4m}}\n")
        subprocess.run(
            [sys.executable, "-m", "farspan", "train", str(config), "--run", str(path)], check=True
        )
    return RunFolder.existing(path)


RUNS = {BUILT_IN: demo_run, "perl": perl_run}


class OwnQueries:
    """Makes vectors of queries by one model, for an index of its own vectors."""

    def __init__(self, model: OwnModel) -> None:
        self._model = model

    def own(self, fitted: Path, origin: Origin) -> QueryEmbedder:
        return Embedder.load(self._model.model, self._model.tokenizer, fitted)

    def encoder(self, identity: EncoderIdentity) -> QueryEmbedder | None:
        return None


def judge_own(
    name: str, source: str, corpus: QuestionCorpus | None
) -> tuple[list[Judged], dict[str, Any]]:
    """Return what a run's own vectors find, trained and untrained, and their evaluations."""
    run = RUNS[name]()
    trained = inference.load(run)
    origin = model_origin(run, trained)
    blank = Origin(model=f"{origin.model}-untrained", tokenizer=origin.tokenizer)
    models = {
        "own": as_voice(trained, trained.model, origin),
        "untrained": as_voice(trained, untrained(trained.model), blank),
    }
    judged: list[Judged] = []
    evaluations: dict[str, Any] = {}
    for system, model in models.items():
        path = WORK / name / system / "index"
        evaluations[system] = build_own(path, source, model)
        if corpus is None:
            continue
        with closing(Index.open(path, OwnQueries(model), remedy="")) as index:
            judged.append(Judged(system, rank_by_search(index, corpus, "model")))
            if system == "own":
                judged.append(Judged("own and words", rank_by_search(index, corpus, None)))
    return judged, evaluations


def as_voice(trained: Trained, model: Decoder, origin: Origin) -> OwnModel:
    return OwnModel(model=model, tokenizer=trained.tokenizer, origin=origin)


def untrained(model: Decoder) -> Decoder:
    """Return a model of the same shape, on the same device, with the weights that training begins
    from."""
    blank = Decoder(model.spec).eval().to(model.tok.weight.device)
    initialize_model(blank, SEED)
    return blank


def build_own(path: Path, source: str, model: OwnModel) -> Any:
    """Build an index of a model's own vectors, and return its evaluation."""
    text = read_source(
        DataConfig(source=source),
        make_cache_folder("corpora"),
        workers=usable_cores(),
        write_line=print,
    )
    task = Task(
        path=path,
        documents=text.documents,
        train=text.train,
        copies=text.copies,
        voices=(model,),
        origin=model.origin,
        recipe=Recipe(),
        write_line=print,
        work=IndexWork(time.monotonic, lambda update: None),
        fit_s=fit_s(IndexConfig()),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return msgspec.to_builtins(build(task).evaluation)


def summarize_judged(judged: Iterable[Judged]) -> dict[str, Any]:
    """Return each system's means over the questions, and differences with their intervals."""
    values: dict[str, Floats] = {}
    systems: dict[str, dict[str, float]] = {}
    for system, ranks in judged:
        measured = measure_rankings(ranks)
        values[system] = measured[METRIC]
        shown = [metric for metric in METRICS if metric != "recall_at_100"]
        systems[system] = {metric: float(measured[metric].mean()) for metric in shown}
    differences = []
    for a, b in COMPARED:
        if a in values and b in values:
            difference_Q = values[a] - values[b]
            interval = bootstrap_interval(difference_Q, seed=SEED)
            mean = float(difference_Q.mean())
            differences.append({"a": a, "b": b, "mean": mean, "interval": interval})
    intervals = {name: bootstrap_interval(found, seed=SEED) for name, found in values.items()}
    return {"systems": systems, "intervals": intervals, "differences": differences}


def format_corpus(measured: Mapping[str, Any]) -> list[str]:
    """Return the lines of one corpus: the judged questions, then each kind of mined query."""
    lines = [
        f"{measured['name']}: {measured['documents']:,} documents, {measured['passages']:,} "
        f"passages, indexed in {measured['seconds']:.0f} s",
        f"chosen: {measured['words']}; {measured['mix']}",
    ]
    judged = measured.get("questions")
    if judged:
        fitted = ", which the encoder's weight was fitted on" if measured["fitted_on"] else ""
        rows = []
        for system, means in judged["systems"].items():
            low, high = judged["intervals"][system]
            value = f"{means[METRIC]:.3f} [{low:.3f}, {high:.3f}]"
            rows.append((system, value, f"{means['mrr_at_10']:.3f}", f"{means['hit_at_10']:.3f}"))
        title = f"{judged['number']} questions of people{fitted}"
        lines += table_lines((title, "nDCG@10", "MRR@10", "hit@10"), rows, right=(1, 2, 3))
        lines += format_differences(judged["differences"])
    evaluations = [measured["evaluation"], *measured.get("own", {}).values()]
    for kind in measured["evaluation"]["kinds"]:
        lines += format_kind(kind, evaluations)
    return [*lines, ""]


def format_kind(kind: str, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of one kind of mined query, over the evaluations that measured it."""
    rows = []
    differences = []
    number = 0
    for place, evaluation in enumerate(evaluations):
        found = evaluation["kinds"].get(kind)
        if found is None:
            continue
        number = found["reported"]
        origin = ("", " (own)", " (untrained)")[place]
        for system, means in found["systems"].items():
            value = f"{means[METRIC]:.3f}"
            rows.append((system + origin, value, f"{means['mrr_at_10']:.3f}"))
        for difference in found["differences"]:
            named = difference | {"a": difference["a"] + origin, "b": difference["b"] + origin}
            differences.append(named)
    heads = (f"{number} {kind} queries", "nDCG@10", "MRR@10")
    return [*table_lines(heads, rows, right=(1, 2)), *format_differences(differences)]


def format_differences(differences: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each difference, with its interval."""
    lines = []
    for difference in differences:
        low, high = difference["interval"]
        lines.append(
            f"{difference['a']} - {difference['b']}: {difference['mean']:+.3f} "
            f"(95 % interval {low:+.3f} to {high:+.3f})"
        )
    return lines


def print_note(update: object) -> None:
    """Print what indexing says; its progress is not shown."""
    if isinstance(update, Note):
        print(update.text, flush=True)


if __name__ == "__main__":
    main()
