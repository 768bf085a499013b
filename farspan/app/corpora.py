"""The prepared corpus of a resumed run: found where it lies today, or prepared again."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from farspan.app.resolving import prepare_run_corpus
from farspan.app.updates import Note, Progress
from farspan.corpus.find_prepared import find_corpus, missing_corpus
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, load_yaml


def bring_corpus(run: RunFolder, progress: Progress) -> None:
    """Find the corpus of a run by its hash, or prepare it again from its source, and note in
    run.json where it lies today.

    Raises Refusal (path-missing) where the source is gone or holds other text. A run whose rank 0
    works on a host with a disk of its own continues without: that host may have a copy.
    """
    from farspan.launch.folder_lock import lock_run
    from farspan.launch.trust import save_record

    record = load(run.record, RunRecord)
    digest = load(run.corpus, CorpusManifest).hash
    folder = find_corpus(record.corpus_folder, digest)
    if folder is None:
        progress(Note(f"the corpus is not in {record.corpus}: preparing it again"))
        problem: Problem | None = None
        try:
            folder, manifest = prepare_run_corpus(load_yaml(run.config, RunConfig), progress)
            if manifest.hash != digest:
                problem = _describe_change(run, record, manifest, digest)
        except Refusal as refusal:
            why = refusal.problem
            fact = f"{why.what}: {why.fact} ({why.where})"
            missing = missing_corpus(run, digest, record.corpus_folder)
            problem = replace(
                missing.problem,
                what="the corpus of this run is not there and cannot be prepared again",
                fact=fact,
            )
        if problem is not None:
            # Rank 0's host may have a copy, if it does not see the run's folder.
            first = run.load_plan().devices[0].host
            hosts = {host.name: host for host in load_cluster_json(run.cluster).hosts}
            if first not in hosts or hosts[first].folder is None:
                raise Refusal.of(problem)
            progress(Note(f"{problem.what}: {problem.fact}; rank 0's host may have a copy"))
            return
    if folder is not None and folder.resolve() != record.corpus_folder.resolve():
        moved = replace(record, corpus=str(folder.resolve()))
        with lock_run(run):
            save_record(run, moved)


def refuse_other_text(config: Path, made: CorpusManifest) -> None:
    """Refuse text that is not the run's, where `config` is the run.yaml of a run: preparing it does
    not mend the run. Raises Refusal (path-missing)."""
    run = RunFolder(config.parent)
    if not run.plan.exists():
        return
    if config.name != run.config.name:
        return
    digest = load(run.corpus, CorpusManifest).hash
    if made.hash != digest:
        raise Refusal.of(_describe_change(run, load(run.record, RunRecord), made, digest))


def _describe_change(
    run: RunFolder, record: RunRecord, made: CorpusManifest, digest: str
) -> Problem:
    return Problem(
        code="path-missing",
        what="the corpus of this run cannot be prepared again: its text has changed",
        where=record.corpus,
        fact=(
            f"{' + '.join(map(shell_word, made.places))} is prepared as corpus {made.hash} "
            f"today; the run needs {digest}"
        ),
        remedy=(
            "put the text back as it was, or train on today's: "
            f"{command('train', run.config, '--run', f'{run.path}-2')}"
        ),
    )
