"""From text to an index and back: the documents of today indexed, and searched.

An index is a run's (`RUN/index`), or has a folder of its own (`farspan index`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from farspan.app.encoders import ReadyEncoder, choose_encoder, find_known_encoder
from farspan.app.index_folders import IndexHome
from farspan.app.updates import Ended, Note, Progress, ignore_update, note_reporter
from farspan.domain.config import DataConfig, IndexConfig, IndexFolderConfig, RunConfig
from farspan.domain.corpus import CorpusManifest, copies_line
from farspan.domain.escapes import shell_word
from farspan.domain.index_folder import IndexFolder
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord, make_cache_folder
from farspan.domain.struct_files import load, load_yaml
from farspan.domain.units import counted

if TYPE_CHECKING:
    from farspan.corpus.distinct_texts import Text
    from farspan.retrieval.hybrid_ranking import System
    from farspan.retrieval.index import (
        EncoderIdentity,
        Index,
        IndexManifest,
        Origin,
        QueryEmbedder,
    )
    from farspan.retrieval.own_voice import OwnModel
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


def index_config(home: IndexHome) -> IndexConfig:
    """Return how an index is asked for: a run's run.yaml, or index.yaml."""
    if isinstance(home, IndexFolder):
        return load_yaml(home.config, IndexFolderConfig).index
    return load_yaml(home.config, RunConfig).index


def data_config(home: IndexHome) -> DataConfig:
    """Return where the text of an index comes from."""
    if isinstance(home, IndexFolder):
        return load_yaml(home.config, IndexFolderConfig).data_config
    return load_yaml(home.config, RunConfig).data_config


def rebuild(home: IndexHome, *options: object) -> str:
    """Return the command that brings an index up to its text."""
    return command("index" if isinstance(home, IndexFolder) else "embed", home.path, *options)


def update_index(
    home: IndexHome,
    progress: Progress = ignore_update,
    *,
    evaluate: bool = True,
    store: str | None = None,
    encoder: str | None = None,
    device: Device = "auto",
    processes: int = 1,
    tune: bool = False,
    queries: Path | None = None,
    qrels: Path | None = None,
) -> Indexed:
    """Bring an index to the documents that its text holds today: what is new or changed is
    embedded, what is gone removed. With `tune` vectors are fitted, and ways to search chosen, again
    over the text of today, also by `queries` with their `qrels` (the configuration's unless given).

    `store` and `encoder` take the place of the configuration's. On a CPU `processes` of them embed
    for the run's model. Raises Refusal, also (device-missing) for a device that is not there.
    """
    from farspan.planning.quantities import fit_s
    from farspan.retrieval.build import build
    from farspan.retrieval.index import Recipe
    from farspan.retrieval.index_task import Task, VoiceModel
    from farspan.retrieval.index_work import IndexWork

    asked = index_config(home)
    _check_store(store or asked.store)
    report = note_reporter(progress)
    work = IndexWork(time.monotonic, progress)
    with ExitStack() as stack:
        stack.callback(progress, Ended())
        voices: list[VoiceModel] = []
        origin = None
        if isinstance(home, RunFolder):
            own = _own_model(home, device, processes, report, stack)
            voices.append(own)
            origin = own.origin
        text = _read_documents(home, report)
        documents = text.documents
        copies = text.copies
        own_queries = _read_own_queries(asked, queries, qrels, text) if tune else []
        note = copies_line(len(documents), copies.near, copies.exact)
        if note:
            report(note)
        before = _read_index_manifest(home)
        known = before.encoder if before else None
        texts = [document.text for document in documents]
        ready = choose_encoder(encoder or asked.encoder, known, texts, report)
        if ready.model is not None:
            voices.insert(0, ready.model)
        recipe = Recipe(
            chunk_tokens=_passage_tokens(ready, before),
            store=store or asked.store,
            evaluate=evaluate,
        )
        limit_s = fit_s(asked)
        models = HomeModels(home, progress)
        train = text.train
        fingerprint = text.fingerprint
        identity = ready.identity
        task = Task(
            path=home.index,
            documents=documents,
            train=train,
            copies=copies,
            voices=voices,
            origin=origin,
            encoder=identity,
            no_encoder=ready.why_none,
            recipe=recipe,
            write_line=report,
            work=work,
            source=fingerprint,
            refit=tune,
            own=own_queries,
            fit_s=limit_s,
            models=models,
        )
        manifest = build(task)
    if work.kept:
        report(f"embedded {counted(work.embedded, 'text')}; {work.kept:,} had been embedded before")
    if manifest.fit_is_due:
        report(
            "much of the text is not what the index was fitted to; a new fit is due: "
            f"{command('tune', home.path)}"
        )
    earlier = None if before is None else (before.fit, before.evaluation)
    fitted = earlier != (manifest.fit, manifest.evaluation)
    return Indexed(manifest=manifest, fitted=fitted, embedded=work.embedded, kept=work.kept)


def _passage_tokens(ready: ReadyEncoder, before: IndexManifest | None) -> int:
    """Return the word pieces of a passage: more where an encoder reads it."""
    from farspan.retrieval.index import ENCODER_PASSAGE_TOKENS, PASSAGE_TOKENS

    if ready.identity is None:
        return PASSAGE_TOKENS
    if not ready.max_tokens and before is not None:
        # The encoder is not on this machine: what it has embedded stays.
        return before.recipe.chunk_tokens
    return max(PASSAGE_TOKENS, min(ENCODER_PASSAGE_TOKENS, ready.max_tokens))


def _check_store(store: str) -> None:
    """Refuse a store that is not known, or whose library is missing, before anything is read."""
    from farspan.retrieval.stores import load as load_store
    from farspan.retrieval.stores import resolve

    load_store(resolve(store)[0])


def _own_model(
    run: RunFolder, device: Device, processes: int, report: Callable[[str], None], stack: ExitStack
) -> OwnModel:
    """Load a run's model as a voice of its index."""
    from farspan.launch.trust import require_own_links
    from farspan.retrieval.own_voice import OwnModel
    from farspan.retrieval.pooling import Processes
    from farspan.runtime.inference import load as load_model
    from farspan.runtime.inference import on_device

    require_own_links(run)
    trained = on_device(load_model(run), device, report)
    pool = None
    if processes > 1 and trained.model.tok.weight.device.type == "cpu":
        pool = stack.enter_context(Processes(processes))
    return OwnModel(
        model=trained.model,
        tokenizer=trained.tokenizer,
        origin=model_origin(run, trained),
        processes=pool,
    )


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


def _read_index_manifest(home: IndexHome) -> IndexManifest | None:
    """Return the manifest of an index; None where there is none that can be read."""
    from farspan.retrieval.index import read_manifest

    with suppress(Refusal):
        return read_manifest(home.index, "")
    return None


def _read_documents(home: IndexHome, report: Callable[[str], None]) -> Text:
    """Read the documents of today; those that the run was trained on if its text is not there."""
    if isinstance(home, RunFolder):
        return _read_run_documents(home, report)
    from farspan.corpus.prepare import read_source
    from farspan.corpus.processes import usable_cores

    return read_source(
        data_config(home), make_cache_folder("corpora"), workers=usable_cores(), write_line=report
    )


def _read_run_documents(run: RunFolder, report: Callable[[str], None]) -> Text:
    from farspan.corpus.distinct_texts import read_distinct
    from farspan.corpus.find_prepared import find_corpus
    from farspan.corpus.prepare import read_text
    from farspan.corpus.processes import usable_cores

    config = load_yaml(run.config, RunConfig)
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
            f"{config.data_config.line} is not there: indexing the documents that the run was "
            "trained on"
        )
    return read_distinct(prepared, manifest, "")


def write_vectors(home: IndexHome, path: Path) -> Path:
    """Write ids, vectors, texts and fields of an index to a .parquet, .jsonl or .npy file, and next
    to it the commands that load it elsewhere: the path of these. Refuses (no-index) where there is
    no index or it has no vectors, and like `farspan.retrieval.vector_file.write_vectors`."""
    from farspan.retrieval import vector_file

    with open_index(home) as index:
        name = vector_file.written_set(index)
        vector_file.write_vectors(path, vector_file.rows(index, name), index.manifest.about(name))
    return path.with_name(f"{path.name}.load.md")


class HomeModels:
    """Finds the models that embed queries for an index: the run's, and a ready encoder.

    `trained`: the run's model, where it is loaded already.
    """

    def __init__(
        self, home: IndexHome, progress: Progress = ignore_update, trained: Trained | None = None
    ) -> None:
        self._home = home
        self._progress = progress
        self._trained = trained

    def own(self, fitted: Path, origin: Origin) -> QueryEmbedder:
        from farspan.retrieval.embed import Embedder
        from farspan.runtime.inference import load as load_model
        from farspan.runtime.inference import on_gpu

        run = self._home
        assert isinstance(run, RunFolder)
        model = self._trained or on_gpu(load_model(run), note_reporter(self._progress))
        refuse_other_model(run, origin, model_origin(run, model))
        return Embedder.load(model.model, model.tokenizer, fitted)

    def encoder(self, identity: EncoderIdentity) -> QueryEmbedder | None:
        return find_known_encoder(identity)


def open_index(
    home: IndexHome,
    progress: Progress = ignore_update,
    *,
    vectors: bool = True,
    trained: Trained | None = None,
) -> closing[Index]:
    """Open an index for searches; without `vectors` by words alone. `trained`: the run's model,
    where it is loaded already."""
    from farspan.launch.trust import require_own_links, require_server
    from farspan.retrieval.index import SEAL, Index, read_manifest

    if isinstance(home, RunFolder):
        # Some stores write when they are opened.
        require_own_links(home)
    remedy = rebuild(home)
    manifest = read_manifest(home.index, remedy)
    if manifest.servers and vectors:
        require_server(
            home.index / manifest.files / SEAL,
            manifest.servers,
            f"look whether it is yours, then: {remedy} --store {shell_word(manifest.recipe.store)}",
        )
    models = HomeModels(home, progress, trained)
    return closing(Index.open(home.index, models, remedy=remedy, vectors=vectors))


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


def search_home(
    home: IndexHome,
    query: str,
    k: int = 5,
    system: System | None = None,
    where: Mapping[str, Any] | Sequence[str] | None = None,
    progress: Progress = ignore_update,
) -> Answer:
    """Find the `k` documents that answer a query best, by the `system` that was measured to be
    best unless another is named, among those that `where` leaves: JSON values by field, or texts
    such as `year>=2020` (`farspan.retrieval.filters`). A running server of the index is asked
    first.

    Raises Refusal (usage, out-of-range) for an empty or endless query and a condition that cannot
    be read or compared, and (no-index) where there is no index.
    """
    refuse_query(query)
    from farspan.retrieval.filters import Filters

    filters = Filters.parse(where)
    from farspan.retrieval.serve import client

    manifest = _read_index_manifest(home)
    if manifest is not None and is_stale(home, manifest):
        update = rebuild(home)
        progress(Note(f"the text has changed since it was indexed; to follow it: {update}"))
    answer = client.ask(home.path, query, k, system, where or {})
    if answer:
        return answer
    from farspan.retrieval.search import search as search_index

    while True:
        with open_index(home, progress, vectors=system != "bm25") as index:
            try:
                return search_index(index, query, k, system, filters)
            except Refusal:
                # A new index may have taken the files of this one away before the model was loaded.
                if _read_index_manifest(home) in (None, index.manifest):
                    raise


def is_stale(home: IndexHome, manifest: IndexManifest) -> bool:
    """Return whether the files of an index's text are others than were indexed; False of text that
    is no folder."""
    from farspan.corpus.mixture import open_sources

    data = data_config(home).without_replay()
    places = [Path(part.source).expanduser() for part in data.parts]
    if not manifest.source or not all(place.exists() for place in places):
        return False
    with suppress(Refusal, OSError):
        return open_sources(data).fingerprint() != manifest.source
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
