"""From a run to its index and back: its documents embedded, and searched."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.app.updates import Ended, Note, Progress, notes, silent
from farspan.domain.codec import load, load_yaml
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.units import counted

if TYPE_CHECKING:
    from farspan.retrieval.index import Index, IndexManifest, Origin
    from farspan.retrieval.rank import System
    from farspan.retrieval.search import Answer
    from farspan.runtime.inference import Trained


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """An index as its manifest tells it, and how many texts were embedded for it now and before."""

    manifest: IndexManifest
    embedded: int
    kept: int


def embed(run: RunFolder, progress: Progress = silent, *, evaluate: bool = True) -> Indexed:
    """Embed every document of the run's corpus into the run's index; nothing to do where that is up to date."""
    from farspan.corpus.documents import read_documents
    from farspan.retrieval.index import Recipe, build
    from farspan.retrieval.work import IndexWork
    from farspan.runtime.inference import load as load_model

    trained, work = load_model(run), IndexWork(time.monotonic, progress)
    documents = list(read_documents(Path(load(run.record, RunRecord).corpus)))
    recipe = Recipe(store=load_yaml(run.config, RunConfig).index.store, evaluate=evaluate)
    try:
        manifest = build(
            run.index, trained.model, trained.tokenizer, documents,
            train=load(run.corpus, CorpusManifest).train.documents, origin=_origin(run, trained),
            recipe=recipe, say=notes(progress), work=work,
        )  # fmt: skip
    finally:
        progress(Ended())
    if work.kept:
        progress(Note(f"embedded {counted(work.embedded, 'text')}; {work.kept:,} had been embedded before"))
    return Indexed(manifest=manifest, embedded=work.embedded, kept=work.kept)


def write_vectors(run: RunFolder, path: Path) -> None:
    """Write the vectors of the run's index to a file for other databases, as `farspan.retrieval.transfer` does. Raises
    Refusal (no-index) where there is no index."""
    import hashlib

    from farspan.retrieval.index import read_manifest
    from farspan.retrieval.stores import About
    from farspan.retrieval.transfer import rows, write_vectors

    manifest = read_manifest(run.index, command("embed", run.path))
    tokenizer = hashlib.sha256(run.tokenizer.read_bytes()).hexdigest()[:16]
    about = About(model=manifest.origin.model, tokenizer=tokenizer, fit=manifest.files, dim=manifest.dim)
    write_vectors(path, rows(run.index / manifest.files), about)


def opened(run: RunFolder) -> closing[Index]:
    """The run's index, ready to be searched."""
    from farspan.retrieval.index import Index
    from farspan.runtime.inference import load as load_model

    trained = load_model(run)
    return closing(Index.open(
        run.index, trained.model, trained.tokenizer, origin=_origin(run, trained), command=command("embed", run.path),
    ))  # fmt: skip


def search(run: RunFolder, query: str, k: int = 5, system: System | None = None) -> Answer:
    """The `k` documents that answer a query best, by the `system` that was measured to find them best unless another is
    named. Raises Refusal (usage) for an empty query, and where there is no index."""
    refuse_empty(query)
    from farspan.retrieval.search import search as search_index

    with opened(run) as index:
        return search_index(index, query, k, system)


def refuse_empty(query: str) -> None:
    if not query.strip():
        raise Refusal(
            "usage", what="there is nothing to search for", where="farspan search", fact="the query is empty",
            remedy='farspan search "read a file line by line"',
        )  # fmt: skip


def _origin(run: RunFolder, trained: Trained) -> Origin:
    from farspan.retrieval.index import Origin

    return Origin(model=trained.weights, corpus=load(run.corpus, CorpusManifest).hash)
