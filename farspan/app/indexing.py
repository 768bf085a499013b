"""From a run to its index and back: the documents of today embedded, and searched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from farspan.app.updates import Ended, Note, Progress, ignore_update, note_reporter
from farspan.domain.config import IndexConfig, RunConfig
from farspan.domain.corpus import CorpusManifest, copies_line
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord, make_cache_folder
from farspan.domain.struct_files import load, load_yaml
from farspan.domain.units import counted

if TYPE_CHECKING:
    from farspan.corpus.distinct_texts import Text
    from farspan.retrieval.hybrid_ranking import System
    from farspan.retrieval.index import Index, IndexManifest, Origin, QueryEmbedder
    from farspan.retrieval.queries import Query
    from farspan.retrieval.search import Answer
    from farspan.runtime.inference import Trained

Device = Literal["auto", "cpu", "cuda", "mps"]
#: A longer query is no question; words of a megabyte would take seconds to look up.
MAX_QUERY_CHARS = 10_000


@dataclass(frozen=True, kw_only=True)
class Indexed:
    """An index as its manifest describes it, whether it was fitted and evaluated now, and how many
    texts were embedded for it now and before."""

    manifest: IndexManifest
    fitted: bool
    embedded: int
    kept: int


def update_index(
    run: RunFolder,
    progress: Progress = ignore_update,
    *,
    evaluate: bool = True,
    store: str | None = None,
    device: Device = "auto",
    processes: int = 1,
    tune: bool = False,
    queries: Path | None = None,
    qrels: Path | None = None,
) -> Indexed:
    """Bring the run's index to the documents that its text holds today: what is new or changed is
    embedded, what is gone removed. With `tune` vectors are fitted and judged again over the text of
    today, also by `queries` with their `qrels` (run.yaml's unless given).

    `store` takes the place of run.yaml's `index.store`. On a CPU `processes` of them embed. Raises
    Refusal, also (device-missing) for a device that is not there.
    """
    from farspan.launch.trust import require_own_links
    from farspan.planning.quantities import fit_s
    from farspan.retrieval.build import build
    from farspan.retrieval.embedder_fit import Task
    from farspan.retrieval.index import Recipe
    from farspan.retrieval.index_work import IndexWork
    from farspan.retrieval.pooling import Processes
    from farspan.retrieval.stores import load as load_store
    from farspan.retrieval.stores import resolve
    from farspan.runtime.inference import load as load_model
    from farspan.runtime.inference import on_device

    require_own_links(run)
    config = load_yaml(run.config, RunConfig)
    recipe = Recipe(store=store or config.index.store, evaluate=evaluate)
    load_store(resolve(recipe.store)[0])
    report = note_reporter(progress)
    trained = on_device(load_model(run), device, report)
    model = trained.model
    work = IndexWork(time.monotonic, progress)
    text = _read_documents(run, config, report)
    documents = text.documents
    copies = text.copies
    own = _read_own_queries(config.index, queries, qrels, text) if tune else []
    note = copies_line(len(documents), copies.near, copies.exact)
    if note:
        report(note)
    before = _read_index_manifest(run)
    with ExitStack() as stack:
        stack.callback(progress, Ended())
        pool = None
        if processes > 1 and model.tok.weight.device.type == "cpu":
            pool = stack.enter_context(Processes(processes))
        identity = model_origin(run, trained)
        limit_s = fit_s(config)
        task = Task(
            path=run.index,
            model=model,
            tokenizer=trained.tokenizer,
            documents=documents,
            train=text.train,
            copies=copies,
            origin=identity,
            recipe=recipe,
            write_line=report,
            work=work,
            source=text.fingerprint,
            refit=tune,
            own=own,
            fit_s=limit_s,
            processes=pool,
        )
        manifest = build(task)
    if work.kept:
        report(f"embedded {counted(work.embedded, 'text')}; {work.kept:,} had been embedded before")
    if manifest.fit_is_due:
        report(
            "much of the text is not what the index was fitted to; a new fit is due: "
            f"{command('tune', run.path)}"
        )
    earlier = None if before is None else (before.fit, before.evaluation)
    fitted = earlier != (manifest.fit, manifest.evaluation)
    return Indexed(manifest=manifest, fitted=fitted, embedded=work.embedded, kept=work.kept)


def _read_own_queries(
    config: IndexConfig, queries: Path | None, qrels: Path | None, text: Text
) -> list[Query]:
    """Read a person's queries: none where no file is named. Raises Refusal (usage) for one file
    without the other."""
    from farspan.retrieval.relevance_judgements import read_judged

    asked = queries or (Path(config.queries).expanduser() if config.queries else None)
    answers = qrels or (Path(config.qrels).expanduser() if config.qrels else None)
    if not asked and not answers:
        return []
    if not asked or not answers:
        raise Refusal(
            "usage",
            what="queries and what answers them come together",
            where=asked or answers,
            fact=f"there are no {'qrels' if asked else 'queries'}",
            remedy="farspan tune --queries queries.jsonl --qrels qrels.tsv",
        )
    return read_judged(asked, answers, text.documents, text.copies)


def _read_index_manifest(run: RunFolder) -> IndexManifest | None:
    """Return the manifest of the run's index; None where there is none that can be read."""
    from farspan.retrieval.index import read_manifest

    with suppress(Refusal):
        return read_manifest(run.index, "")
    return None


def _read_documents(run: RunFolder, config: RunConfig, report: Callable[[str], None]) -> Text:
    """Read the documents of today; those that the run was trained on if its text is not there."""
    from farspan.corpus.distinct_texts import read_distinct
    from farspan.corpus.find_prepared import find_corpus
    from farspan.corpus.prepare import read_text
    from farspan.corpus.processes import usable_cores

    manifest = load(run.corpus, CorpusManifest)
    try:
        return read_text(
            config.data_config,
            config.tokenizer_config,
            manifest.hash,
            make_cache_folder("corpora"),
            workers=usable_cores(),
            write_line=report,
        )
    except Refusal as refusal:
        prepared = find_corpus(load(run.record, RunRecord).corpus_folder, manifest.hash)
        if refusal.problem.code != "path-missing" or prepared is None:
            raise
        report(
            f"{config.data_config.source} is not there: indexing the documents that the run was "
            "trained on"
        )
    return read_distinct(prepared, manifest, "")


def write_vectors(run: RunFolder, path: Path) -> Path:
    """Write ids, vectors, texts and fields of the run's index to a .parquet, .jsonl or .npy file,
    and next to it the commands that load it elsewhere: the path of these. Refuses (no-index) where
    there is no index, and like `farspan.retrieval.vector_file.write_vectors`."""
    from farspan.retrieval import vector_file

    with open_index(run) as index:
        vector_file.write_vectors(path, vector_file.rows(index), index.manifest.about)
    return path.with_name(f"{path.name}.load.md")


def open_index(
    run: RunFolder,
    progress: Progress = ignore_update,
    *,
    vectors: bool = True,
    trained: Trained | None = None,
) -> closing[Index]:
    """Open the run's index for searches; without `vectors` by words alone. `trained`: the run's
    model, where it is loaded already."""
    from farspan.launch.trust import require_own_links, require_server
    from farspan.retrieval.index import SEAL, Index, read_manifest

    # Some stores write when they are opened.
    require_own_links(run)

    def embedder(fitted: Path, of: Origin) -> QueryEmbedder:
        from farspan.retrieval.embed import Embedder
        from farspan.runtime.inference import load as load_model
        from farspan.runtime.inference import on_gpu

        model = trained or on_gpu(load_model(run), note_reporter(progress))
        refuse_other_model(run, of, model_origin(run, model))
        return Embedder.load(model.model, model.tokenizer, fitted)

    remedy = command("embed", run.path)
    manifest = read_manifest(run.index, remedy)
    if manifest.servers and vectors:
        require_server(
            run.index / manifest.files / SEAL,
            manifest.servers,
            f"look whether it is yours, then: {remedy} --store {shell_word(manifest.recipe.store)}",
        )
    return closing(Index.open(run.index, embedder, remedy=remedy, vectors=vectors))


def refuse_other_model(run: RunFolder, index: Origin, today: Origin) -> None:
    """Raise Refusal (no-index) for an index of another model or tokenizer than the run has
    today."""
    for what in ("model", "tokenizer"):
        have = getattr(index, what)
        want = getattr(today, what)
        if have != want:
            raise Refusal(
                "no-index",
                what=f"the index is of another {what} than the run",
                where=run.index,
                fact=f"index: {have}, run: {want}",
                remedy=command("embed", run.path),
            )


def search_run(
    run: RunFolder,
    query: str,
    k: int = 5,
    system: System | None = None,
    where: Mapping[str, str] | None = None,
    progress: Progress = ignore_update,
) -> Answer:
    """Find the `k` documents that answer a query best, by the `system` that was measured to be
    best unless another is named, among those with the values of `where` in its fields. A running
    server of the run is asked first.

    Raises Refusal (usage) for an empty or endless query and an unknown field, and (no-index) where
    there is no index.
    """
    refuse_query(query)
    from farspan.retrieval.serve import client

    manifest = _read_index_manifest(run)
    if manifest is not None and is_stale(run, manifest):
        update = command("embed", run.path)
        progress(Note(f"the text has changed since it was indexed; to follow it: {update}"))
    answer = client.ask(run.path, query, k, system, where or {})
    if answer:
        return answer
    from farspan.retrieval.search import search as search_index

    while True:
        with open_index(run, progress, vectors=system != "bm25") as index:
            try:
                return search_index(index, query, k, system, where)
            except Refusal:
                # A new index may have taken the files of this one away before the model was loaded.
                if _read_index_manifest(run) in (None, index.manifest):
                    raise


def is_stale(run: RunFolder, manifest: IndexManifest) -> bool:
    """Return whether the files of the run's text are others than were indexed; False of text that
    is no folder."""
    from farspan.corpus.sources import folder

    source = load_yaml(run.config, RunConfig).data_config.source
    if not manifest.source or not Path(source).expanduser().exists():
        return False
    with suppress(Refusal, OSError):
        return folder.open_source(source).fingerprint() != manifest.source
    return True


def refuse_query(query: str) -> None:
    """Raise Refusal (usage) for a query that is empty, or longer than a passage could answer."""
    if not query.strip():
        raise Refusal(
            "usage",
            what="there is nothing to search for",
            where="farspan search",
            fact="the query is empty",
            remedy='farspan search "read a file line by line"',
        )
    if len(query) > MAX_QUERY_CHARS:
        raise Refusal(
            "usage",
            what="the query is too long",
            where="farspan search",
            fact=f"it has {len(query):,} characters; at most {MAX_QUERY_CHARS:,} are searched for",
            remedy="search for the sentence that matters",
        )


def model_origin(run: RunFolder, trained: Trained) -> Origin:
    """Return the hashes that identify the run's model and tokenizer."""
    import hashlib

    from farspan.retrieval.index import Origin

    digest = hashlib.sha256(run.tokenizer.read_bytes()).hexdigest()
    return Origin(model=trained.weights, tokenizer=digest[:16])
