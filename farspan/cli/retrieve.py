"""From a run to its index and back: what embed, search and demo share."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from farspan.cli.console import Console
from farspan.cli.index_progress import IndexProgress
from farspan.corpus.documents import read_documents
from farspan.domain.codec import load, load_yaml
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.problems import command
from farspan.domain.run import RunFolder, RunRecord
from farspan.retrieval.index import Index, Manifest, Origin, Recipe, build
from farspan.retrieval.search import Answer
from farspan.retrieval.work import Work
from farspan.runtime.inference import Trained
from farspan.runtime.inference import load as load_model


def _origin(run: RunFolder, trained: Trained) -> Origin:
    return Origin(model=trained.weights, corpus=load(run.corpus, CorpusManifest).hash)


def make_index(run: RunFolder, console: Console, *, evaluate: bool = True) -> tuple[Manifest, Work]:
    """Embed every document of the run's corpus into the run's index; nothing to do where that is up to date."""
    import rich.console

    trained = load_model(run)
    documents = list(read_documents(Path(load(run.record, RunRecord).corpus)))
    recipe = Recipe(store=load_yaml(run.config, RunConfig).index.store, evaluate=evaluate)
    with IndexProgress(rich.console.Console(stderr=console.json), time.monotonic) as progress:
        manifest = build(
            run.index, trained.model, trained.tokenizer, documents,
            train=load(run.corpus, CorpusManifest).train.documents, origin=_origin(run, trained),
            recipe=recipe, say=console.say, work=progress.work,
        )  # fmt: skip
    if progress.work.kept:
        console.say(f"embedded {progress.work.embedded:,} texts; {progress.work.kept:,} were embedded before")
    return manifest, progress.work


def opened(run: RunFolder) -> closing[Index]:
    """The run's index, ready to be searched."""
    trained = load_model(run)
    return closing(Index.open(
        run.index, trained.model, trained.tokenizer, origin=_origin(run, trained), command=command("embed", run.path),
    ))  # fmt: skip


def say_answer(answer: Answer, console: Console) -> None:
    """Results for a person: rank, score, title, where it is from, and the beginning of its text."""
    console.say(f"searched with {answer.system}: {answer.why}")
    for rank, result in enumerate(answer.results, 1):
        console.say(f"{rank:3}. {result.score:6.3f}  {result.title}  [{result.origin}]")
        console.say(f"             {result.text[:150]}")
    if not answer.results:
        console.say("nothing found")
