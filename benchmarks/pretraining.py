"""What pretraining adds to search: models that read a corpus for two minutes and for an hour,
beside one that read nothing, by questions that people asked.

    python -m benchmarks.pretraining [NAME ...] [--root ROOT]     # writes results/pretraining.json

NAME is a corpus of questions.py, `perl` and `debian` by default; ROOT is where its packages are
unpacked. Each model serves in two ways. Its own vectors are fitted to the corpus as `farspan embed`
does, and are a voice. And its states of a query are mapped onto the encoder's space, by ridge
regression on short texts that the encoder embedded: it then stands in for the encoder at queries,
as the table of tokens does that an index keeps.

Shapes: Q queries, C passages, N documents, T short texts, E size of an encoder's vector, F
features.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import questions
from benchmarks.questions import QuestionCorpus
from benchmarks.retrieval import (
    SEED,
    as_voice,
    build_own,
    find_answers,
    print_note,
    untrained,
)
from farspan.app.index_folders import make_index_folder
from farspan.app.indexing import model_origin, open_index, update_index
from farspan.domain.run import RunFolder
from farspan.report.history import open_run
from farspan.report.tables import table_lines
from farspan.retrieval.choose import ENCODER_SHARE, MAX_OWN_SHARE
from farspan.retrieval.embed import Embedder
from farspan.retrieval.encoders.distillation import ENGLISH_QUESTIONS, make_queries
from farspan.retrieval.encoders.encoder import Encoder, scale_to_unit
from farspan.retrieval.encoders.finding import NotFound, find_encoder
from farspan.retrieval.evaluate import cosine_rows
from farspan.retrieval.hybrid_ranking import (
    Mix,
    Voice,
    VoiceScores,
    best_by_document,
    fuse_scores,
    query_form,
    score_words,
)
from farspan.retrieval.index import (
    ENCODER_VECTORS,
    FITTED,
    OWN_VECTORS,
    Index,
    NoModels,
    Origin,
    read_manifest,
)
from farspan.retrieval.metrics import Floats, bootstrap_interval, ndcg, relevant_ranks
from farspan.retrieval.own_voice import OwnModel
from farspan.retrieval.stores import Vectors
from farspan.runtime import inference

RESULTS = Path(__file__).parent / "results" / "pretraining.json"
WORK = Path("runs/pretraining")
CORPORA = ("perl", "debian")
TIMES = ("2m", "1h")
#: Short texts that states are mapped by, and the ridge in equations.
SHORT_TEXTS = 20_000
RIDGE = 30.0
#: The share of own vectors beside an encoder and words. Nothing is chosen on the questions.
THIRD_SHARE = 0.2


class Model(NamedTuple):
    """A model of a study: its name, the tokens that it read, and its validation loss."""

    name: str
    voice: OwnModel
    tokens: int
    loss: float | None


class Judge:
    """An index of words and an encoder, with questions that are judged."""

    def __init__(self, index: Index, corpus: QuestionCorpus, encoder: Encoder) -> None:
        self.texts = [query.text for query in corpus.questions]
        rows_of = {document.origin: row for row, document in enumerate(index.documents)}
        answers = find_answers(index, corpus)
        self._relevant = [sorted(rows_of[origin] for origin in found) for found in answers]
        self._count = len(index.documents)
        self._owners_C = np.asarray(index.passages.rows_N["document"], np.int64)
        self._vectors_CE = index.vectors(np.arange(index.manifest.chunks), ENCODER_VECTORS)
        asked = [index.words.of_query(text) for text in self.texts]
        self._words = [score_words(index.lexical.bm25_scores(words)) for words in asked]
        self.encoder = self.near(encoder.many_queries(self.texts))
        assert index.query_table is not None
        self.table_vectors = index.query_table.queries(self.texts)

    def near(self, vectors_QE: Vectors) -> list[VoiceScores]:
        """Return the scores of documents near each query's vector in the encoder's space."""
        return self.score(self._owners_C, self._vectors_CE, vectors_QE)

    def score(
        self, owners_C: np.ndarray, vectors_CE: Vectors, vectors_QE: Vectors
    ) -> list[VoiceScores]:
        """Return the scores of documents near each query's vector."""
        cosines_of = cosine_rows(vectors_CE, vectors_QE)
        scores = []
        for row in range(len(vectors_QE)):
            cosines_C = cosines_of(row)
            best_N = best_by_document(owners_C, cosines_C, self._count)
            scores.append(VoiceScores(best_N, float(cosines_C.std())))
        return scores

    def measure(self, mix: Mix, voices: Mapping[Voice, Sequence[VoiceScores]]) -> Floats:
        """Return nDCG@10 of each question under a mix of words and these voices."""
        measured = []
        for row, relevant in enumerate(self._relevant):
            scored: dict[Voice, VoiceScores] = {"bm25": self._words[row]}
            for name, scores in voices.items():
                scored[name] = scores[row]
            ranks = relevant_ranks(fuse_scores(scored, mix), relevant)
            measured.append(ndcg(ranks, 10))
        return np.array(measured)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="corpora of questions.py")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where packages are unpacked")
    given = parser.parse_args()
    corpora = [study_corpus(name, given.root) for name in given.names or CORPORA]
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": str(torch.__version__),
        "seed": SEED,
        "shares": {"encoder": ENCODER_SHARE, "own": MAX_OWN_SHARE, "third": THIRD_SHARE},
        "corpora": corpora,
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for corpus in corpora:
        print("\n".join(format_study(corpus)), flush=True)


def study_corpus(name: str, root: Path) -> dict[str, Any]:
    """Measure every model's worth for the questions of one corpus."""
    corpus = questions.load_corpus(name, root)
    questions.write(corpus, WORK / name)
    source = str(WORK / name / "documents")
    home = make_index_folder(source, WORK / name / "index", encoder="minilm")
    update_index(home, print_note)
    encoder = find_encoder("minilm")
    if isinstance(encoder, NotFound):
        raise SystemExit(encoder.remedy)
    values: dict[str, Floats] = {}
    models = train_models(name, source)
    with open_index(home) as index:
        judge = Judge(index, corpus, encoder)
        words_and_encoder = Mix(bm25=1 - ENCODER_SHARE, encoder=ENCODER_SHARE)
        values["words"] = judge.measure(Mix(), {})
        values["encoder"] = judge.measure(Mix(bm25=0.0, encoder=1.0), {"encoder": judge.encoder})
        values["encoder, words"] = judge.measure(words_and_encoder, {"encoder": judge.encoder})
        table = judge.near(judge.table_vectors)
        values["table, words"] = judge.measure(words_and_encoder, {"encoder": table})
        short = short_texts(index, encoder)
        for model in models:
            values |= measure_model(model, judge, short, WORK / name, source)
    return {
        "name": name,
        "questions": len(corpus.questions),
        "models": {model.name: {"tokens": model.tokens, "loss": model.loss} for model in models},
        "systems": {system: summarize(found) for system, found in values.items()},
        "differences": compare_models(values, [model.name for model in models]),
    }


def train_models(name: str, source: str) -> list[Model]:
    """Return an untrained model and those that read the corpus, trained where they are not there
    yet. The untrained one has the shape of the longest trained."""
    models = []
    for time in TIMES:
        path = WORK / name / f"run-{time}"
        if not path.exists():
            config = path.with_suffix(".yaml")
            config.write_text(f"data: {source}\nbudget: {{time: {time}}}\n")
            command = [sys.executable, "-m", "farspan", "train", str(config), "--run", str(path)]
            subprocess.run(command, check=True)
        run = RunFolder.existing(path)
        trained = inference.load(run)
        origin = model_origin(run, trained)
        history = open_run(path)
        tokens = history.plan.train.tokens_per_step * len(history.history.steps)
        losses = [event.loss for event in history.history.validations]
        voice = as_voice(trained, trained.model, origin)
        models.append(Model(time, voice, tokens, min(losses)))
    blank = Origin(model=f"{origin.model}-untrained", tokenizer=origin.tokenizer)
    start = as_voice(trained, untrained(trained.model), blank)
    return [Model("untrained", start, 0, None), *models]


def short_texts(index: Index, encoder: Encoder) -> tuple[list[str], Vectors]:
    """Return short texts about the corpus, and the encoder's vectors (T, E) of them as queries."""
    rows = range(index.manifest.chunks)
    passages = [index.passages.chunk(row).indexed for row in rows]
    titles = [document.title for document in index.documents]
    rng = np.random.default_rng(SEED)
    texts = make_queries(encoder, passages, titles, ENGLISH_QUESTIONS, SHORT_TEXTS, rng)
    return texts, encoder.many_queries(texts)


def measure_model(
    model: Model, judge: Judge, short: tuple[list[str], Vectors], folder: Path, source: str
) -> dict[str, Floats]:
    """Return nDCG@10 of each question by every system that a model takes part in."""
    path = folder / model.name / "index"
    build_own(path, source, model.voice)
    embedder = Embedder.load(model.voice.model, model.voice.tokenizer, fitted_file(path))
    with closing(Index.open(path, NoModels(), remedy="")) as index:
        owners_C = np.asarray(index.passages.rows_N["document"], np.int64)
        vectors_CE = index.vectors(np.arange(index.manifest.chunks), OWN_VECTORS)
    asked = [query_form(text) for text in judge.texts]
    own = judge.score(owners_C, vectors_CE, embedder.queries(asked))

    map_FE, mean_F = map_states(embedder, *short)
    states_QF = embedder.pool(asked).numpy() - mean_F
    mapped_QE = scale_to_unit(states_QF @ map_FE[:-1] + map_FE[-1])
    states = judge.near(mapped_QE)
    both = judge.near(scale_to_unit(mapped_QE + judge.table_vectors))

    half = Mix(bm25=1 - MAX_OWN_SHARE, model=MAX_OWN_SHARE)
    encoder_share = ENCODER_SHARE * (1 - THIRD_SHARE)
    third = Mix(bm25=1 - encoder_share - THIRD_SHARE, encoder=encoder_share, model=THIRD_SHARE)
    side = Mix(bm25=1 - ENCODER_SHARE, encoder=ENCODER_SHARE)
    return {
        f"{model.name}: own vectors": judge.measure(Mix(bm25=0.0, model=1.0), {"model": own}),
        f"{model.name}: own vectors, words": judge.measure(half, {"model": own}),
        f"{model.name}: own vectors, encoder, words": judge.measure(
            third, {"encoder": judge.encoder, "model": own}
        ),
        f"{model.name}: states for the encoder, words": judge.measure(side, {"encoder": states}),
        f"{model.name}: states and table, words": judge.measure(side, {"encoder": both}),
    }


def map_states(
    embedder: Embedder, texts: Sequence[str], vectors_TE: Vectors
) -> tuple[Floats, Floats]:
    """Return the map (F + 1, E) of a model's states to the encoder's vectors, with what is added as
    its last row, and the states' mean (F)."""
    states_TF = embedder.pool([query_form(text) for text in texts]).numpy().astype(np.float64)
    mean_F = states_TF.mean(axis=0)
    inputs_TF = np.c_[states_TF - mean_F, np.ones(len(states_TF))]
    gram_FF = inputs_TF.T @ inputs_TF
    scale = np.trace(gram_FF) / len(gram_FF) / len(inputs_TF)
    gram_FF += RIDGE * scale * np.eye(len(gram_FF))
    return np.linalg.solve(gram_FF, inputs_TF.T @ vectors_TE), mean_F


def fitted_file(path: Path) -> Path:
    """Return the file of what was fitted for an index's own vectors."""
    return path / read_manifest(path, "").files / FITTED


def summarize(values_Q: Floats) -> dict[str, Any]:
    return {"mean": float(values_Q.mean()), "interval": bootstrap_interval(values_Q, seed=SEED)}


def compare_models(values: dict[str, Floats], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return differences: of a trained model to the untrained, and to what needs no model."""
    pairs = []
    for name in names:
        for system in (key.removeprefix(f"{name}: ") for key in values if key.startswith(name)):
            a = f"{name}: {system}"
            if name != "untrained":
                pairs.append((a, f"untrained: {system}"))
        pairs.append((f"{name}: own vectors, words", "words"))
        pairs.append((f"{name}: own vectors, encoder, words", "encoder, words"))
        pairs.append((f"{name}: states and table, words", "table, words"))
    differences = []
    for a, b in pairs:
        gain_Q = values[a] - values[b]
        interval = bootstrap_interval(gain_Q, seed=SEED)
        differences.append({"a": a, "b": b, "mean": float(gain_Q.mean()), "interval": interval})
    return differences


def format_study(study: dict[str, Any]) -> list[str]:
    """Return the lines of one corpus."""
    lines = [f"{study['name']}: {study['questions']} questions"]
    for name, read in study["models"].items():
        loss = "" if read["loss"] is None else f", validation loss {read['loss']:.2f}"
        lines.append(f"{name}: {read['tokens']:,} tokens{loss}")
    rows = []
    for system, found in study["systems"].items():
        low, high = found["interval"]
        rows.append((system, f"{found['mean']:.3f} [{low:.3f}, {high:.3f}]"))
    lines += table_lines(("system", "nDCG@10"), rows, right=(1,))
    for found in study["differences"]:
        low, high = found["interval"]
        lines.append(f"{found['a']} - {found['b']}: {found['mean']:+.3f} [{low:+.3f}, {high:+.3f}]")
    return [*lines, ""]


if __name__ == "__main__":
    main()
