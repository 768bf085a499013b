"""Runs and checkpoints brought back from the copies that `checkpoint.copy` names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from farspan.app import clusters
from farspan.app.checkpoints import flaw_of
from farspan.app.configs import describe_changes
from farspan.app.copy_places import reachable_places
from farspan.app.updates import Note, Progress, ignore_update
from farspan.corpus import find_prepared, token_files
from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.config import RunConfig
from farspan.domain.corpus import TOKEN_FILES, CorpusManifest, token_file_sizes
from farspan.domain.epoch_fence import Ledger, readable_ledger
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord, make_cache_folder
from farspan.domain.run_events import Finished, read_events
from farspan.domain.struct_files import cut_unfinished_line, load, load_yaml, save, write_atomically
from farspan.domain.units import format_bytes
from farspan.launch.checkpoint_mirror import max_checkpoint_bytes, replace_checkpoint
from farspan.launch.copied_run import (
    CHANGED_FILES,
    FIXED_FILES,
    MANIFEST,
    MAX_EVENTS_BYTES,
    MAX_RUN_FILE_BYTES,
    CopiedCheckpoint,
    CopiedRun,
    copy_name,
    list_checkpoints,
    list_other_files,
    run_slug,
)
from farspan.launch.copies import CopyError
from farspan.launch.copy_run import write_ledger
from farspan.launch.folder_lock import lock_run
from farspan.launch.trust import list_commands, plain_commands, seal_run

#: Where what is fetched lies until all of it has come.
FETCHED_FOLDER = ".fetched"


# -- a run that is not here
#   ------------------------------------------------------------------------------------------------


def restore_run(
    path: Path, config: RunConfig, progress: Progress = ignore_update
) -> RunFolder | None:
    """Make the run folder at `path`, where none is, from a copy of this run: of the same name, made
    by the same run.yaml. Return None where no place of `checkpoint.copy` has one.

    `resume_run` continues it. Of several copies the newest run is taken, and of that the copy with
    the newest whole checkpoint. Raises Refusal (copy-unusable) where a place cannot be looked at,
    or a copy cannot be used.
    """
    if not config.checkpoint.copies:
        return None
    cluster = clusters.given_cluster(config, reach=False)
    matching, unseen = _find_matching(path, config, cluster, progress)
    if not matching:
        if unseen:
            raise Refusal(
                "copy-unusable",
                what="this run may have a copy, and not all places can be looked at",
                where=path,
                fact="; ".join(unseen),
                remedy=f"begin it again: {command('train', 'run.yaml', '--run', path)}",
            )
        return None
    newest = max(_created(record) for _, record in matching)
    copies = [copy for copy, record in matching if _created(record) == newest]
    causes = []
    for copy in copies:
        try:
            run = _rebuild_folder(path, copy, config, cluster, progress)
        except (CopyError, OSError) as error:
            causes.append(f"{copy.place.name}, {copy.folder}: {error}")
            continue
        progress(Note(f"{path} is restored from {copy.place.name}, {copy.folder}"))
        return run
    raise Refusal(
        "copy-unusable",
        what="the copy of this run cannot be used",
        where=path,
        fact="; ".join(causes),
        remedy=f"begin it again: {command('train', 'run.yaml', '--run', path)}",
    )


def _created(record: RunRecord) -> datetime:
    return datetime.fromisoformat(record.created)


def _find_matching(
    path: Path, config: RunConfig, cluster: Cluster | None, progress: Progress
) -> tuple[list[tuple[CopiedRun, RunRecord]], list[str]]:
    """Find the copies of a run of this name and run.yaml, with their records; and why places could
    not be looked at."""
    matching = []
    unseen = []
    slug = run_slug(path.absolute().name)
    for place in reachable_places(config.checkpoint, cluster):
        try:
            for folder in place.list_folders():
                if folder.rpartition("-")[0] != slug:
                    continue
                copy = CopiedRun(place, folder)
                record = copy.read_record()
                if record is None or copy.folder != f"{slug}-{record.identity}":
                    continue
                others = _other_values(record, config)
                if others:
                    progress(Note(f"{place.name}, {folder} is of another run.yaml: {others}"))
                else:
                    matching.append((copy, record))
        except CopyError as error:
            unseen.append(f"{place.name}: {error}")
    return matching, unseen


def _other_values(record: RunRecord, config: RunConfig) -> str:
    """Describe what a run was asked for otherwise than by this run.yaml; empty for the same."""
    if record.asked is None:
        return "it was made by an earlier version"
    # Where and how it is parallelized may have been changed since.
    return "; ".join(describe_changes(replace(record.asked, parallel=config.parallel), config))


def _rebuild_folder(
    path: Path, copy: CopiedRun, config: RunConfig, cluster: Cluster | None, progress: Progress
) -> RunFolder:
    """Make a run's folder from its copy, aside until it is whole. Raises CopyError and OSError."""
    aside = path.absolute().with_name(f".{path.name}.restoring")
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    run = RunFolder(aside)
    run.make()
    try:
        files = copy.list_files()
        _fetch_run_files(run, copy, files)
        try:
            plan = run.load_plan()
            load_cluster_json(run.cluster)
            load(run.corpus, CorpusManifest)
            load_yaml(run.config, RunConfig)
            record = load(run.record, RunRecord)
            if run.events.exists():
                cut_unfinished_line(run.events)
                list(read_events(run.events))
        except Refusal as refusal:
            problem = refusal.problem
            raise CopyError(f"{problem.where}: {problem.fact}") from None
        if record.initial is not None:
            record = replace(record, initial=str(path.absolute() / "initial"))
        save(record, run.record)
        fetch_corpus(run, [(copy, files)], progress)
        fetched = _fetch_newest(run, plan, [(copy, files)], -1, progress)
        if not fetched and any(each.step >= 0 for each in list_checkpoints(files)):
            raise CopyError("none of its checkpoints is whole")
        _drop_later_ends(run)
        # Hosts may have seen later starts than the copy has.
        write_atomically(run.restored, b"")
        os.rename(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    run = RunFolder(path)
    # What the user's own run.yaml and cluster file start may be started; all else needs a look.
    hosts = () if cluster is None else cluster.hosts
    launcher = clusters.find_launcher(config.parallel)
    copies = config.checkpoint.copies
    own = plain_commands(hosts, launcher, config.notify, copies, config.slurm.sites)
    if set(own).issuperset(list_commands(run)):
        seal_run(run)
    return run


def _drop_later_ends(run: RunFolder) -> None:
    """Take ends after the newest checkpoint out of a run's events, which are copied at another
    moment: the run is to be continued from there."""
    if not run.events.exists():
        return
    newest = run.newest_checkpoint()
    kept = []
    for event in read_events(run.events):
        if not isinstance(event, Finished) or event.step <= newest:
            kept.append(msgspec.json.encode(event) + b"\n")
    write_atomically(run.events, b"".join(kept))


def _fetch_run_files(run: RunFolder, copy: CopiedRun, files: dict[str, int]) -> None:
    others = [name for name in list_other_files(files) if not name.startswith("corpus/")]
    for name in (*FIXED_FILES, *CHANGED_FILES, *others):
        if name not in files:
            continue
        most = MAX_RUN_FILE_BYTES
        if name == run.events.name:
            most = MAX_EVENTS_BYTES
        elif name.endswith(".safetensors"):
            most = files[name]
        if files[name] > most:
            raise CopyError(f"{name} has more than {format_bytes(most)}")
        target = run.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy.fetch_file(name, target, files[name])


# -- a run that is here
#   ------------------------------------------------------------------------------------------------


def fetch_missing_checkpoints(run: RunFolder, progress: Progress = ignore_update) -> None:
    """Fetch the newest whole checkpoint that a copy of the run has and the run's folder lacks, its
    text where that is not here, and the newest ledger of its starts. Places that cannot be looked
    at are reported. Raises Refusal (run-busy) where the run is trained."""
    config = load_yaml(run.config, RunConfig)
    if not config.checkpoint.copies:
        return
    with lock_run(run):
        copies = _list_copies(run, config, progress)
        if not copies:
            return
        _adopt_ledger(run, [copy for copy, _ in copies], progress)
        fetch_corpus(run, copies, progress)
        newest = run.newest_checkpoint()
        if newest >= 0 and any(list_checkpoints(files) for _, files in copies):
            newest = _newest_whole(run, progress)
        _fetch_newest(run, run.load_plan(), copies, newest, progress)


def _list_copies(
    run: RunFolder, config: RunConfig, progress: Progress
) -> list[tuple[CopiedRun, dict[str, int]]]:
    """List the copies of a run that can be reached, each with its files."""
    copies = []
    try:
        for place in reachable_places(config.checkpoint, clusters.cluster_of_run(run)):
            copy = CopiedRun(place, copy_name(run))
            try:
                record = copy.read_record()
                if record is not None:
                    copies.append((copy, copy.list_files()))
            except CopyError as error:
                progress(Note(f"no look at the copy at {place.name}: {error}"))
    except Refusal as refusal:
        progress(Note(f"{refusal.problem.what}: {refusal.problem.fact}"))
    return copies


def _newest_whole(run: RunFolder, progress: Progress) -> int:
    """Return the step of the newest whole checkpoint in the run's folder, -1 without one. Damaged
    ones are reported."""
    steps = []
    for path in run.checkpoints.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal():
            steps.append(int(number))
    for step in sorted(steps, reverse=True):
        path = run.checkpoints / f"step-{step:08d}"
        flaw = flaw_of(path)
        if not flaw:
            return step
        progress(Note(f"{path} is damaged: {flaw}"))
    return -1


def _fetch_newest(
    run: RunFolder,
    plan: Plan,
    copies: Sequence[tuple[CopiedRun, dict[str, int]]],
    newest: int,
    progress: Progress,
) -> bool:
    """Fetch the newest whole checkpoint after step `newest`, and best weights where the run has
    none; return whether there was one. Damaged copies are reported, and those before them used."""
    candidates = []
    for copy, files in copies:
        candidates += [(copy, each) for each in list_checkpoints(files)]
    steps = [(copy, each) for copy, each in candidates if each.step > newest]
    fetched = False
    for copy, checkpoint in sorted(steps, key=lambda pair: pair[1].step, reverse=True):
        if _fetch_checkpoint(run, plan, copy, checkpoint, progress):
            fetched = True
            break
    if not (run.best / MANIFEST).is_file():
        for copy, checkpoint in candidates:
            if checkpoint.step < 0 and _fetch_checkpoint(run, plan, copy, checkpoint, progress):
                break
    return fetched


def _fetch_checkpoint(
    run: RunFolder, plan: Plan, copy: CopiedRun, checkpoint: CopiedCheckpoint, progress: Progress
) -> bool:
    """Fetch one checkpoint, verify it, and rename it into place; return whether it was whole."""
    arriving = run.path / FETCHED_FOLDER
    shutil.rmtree(arriving, ignore_errors=True)
    name = f"{checkpoint.folder} at {copy.place.name}"
    try:
        if sum(checkpoint.files.values()) > max_checkpoint_bytes(plan):
            raise CopyError("it is larger than any checkpoint of this plan")
        epoch = copy.read_epoch(checkpoint)
        if checkpoint.step >= 0 and not readable_ledger(run.epochs).counts(epoch, checkpoint.step):
            raise CopyError(f"start {epoch} of the run wrote it after another had begun")
        copy.fetch_checkpoint(checkpoint, arriving / checkpoint.name)
        if flaw := flaw_of(arriving / checkpoint.name):
            raise CopyError(f"it is damaged: {flaw}")
        run.checkpoints.mkdir(exist_ok=True)
        replace_checkpoint(arriving / checkpoint.name, run.checkpoints / checkpoint.name)
    except CopyError as error:
        progress(Note(f"{name} is not used: {error}"))
        return False
    finally:
        shutil.rmtree(arriving, ignore_errors=True)
    progress(Note(f"{checkpoint.name} is fetched from {copy.place.name}, {copy.folder}"))
    return True


def fetch_corpus(
    run: RunFolder, copies: Sequence[tuple[CopiedRun, dict[str, int]]], progress: Progress
) -> None:
    """Fetch the run's token files into the cache where they are not here and a copy has them, every
    block verified."""
    manifest = load(run.corpus, CorpusManifest)
    recorded = load(run.record, RunRecord).corpus_folder
    if find_prepared.find_corpus(recorded, manifest.hash) is not None:
        return
    sizes = dict(zip(TOKEN_FILES, token_file_sizes(manifest), strict=True))
    for copy, files in copies:
        if any(files.get(f"corpus/{name}") != size for name, size in sizes.items()):
            continue
        corpora = make_cache_folder(find_prepared.CORPORA)
        folder = corpora / find_prepared.sent_name(manifest.hash)
        aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        try:
            aside.mkdir()
            for name, size in sizes.items():
                copy.fetch_file(f"corpus/{name}", aside / name, size)
            token_files.verify_corpus(aside, manifest)
            write_atomically(aside / "corpus.json", run.corpus.read_bytes())
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(aside, folder)
        except CopyError as error:
            progress(Note(f"no text from {copy.place.name}: {error}"))
            continue
        except Refusal as refusal:
            progress(Note(f"no text from {copy.place.name}: {refusal.problem.fact}"))
            continue
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        progress(Note(f"the text is fetched from {copy.place.name}, {copy.folder}"))
        return


# -- the ledger of a run's starts
#   ------------------------------------------------------------------------------------------------


def _adopt_ledger(run: RunFolder, copies: Sequence[CopiedRun], progress: Progress) -> None:
    """Take the newest ledger of the copies where the run's own is older, damaged or gone."""
    ledger = _newest_ledger(copies)
    if ledger is not None and ledger.epoch > readable_ledger(run.epochs).epoch:
        save(ledger, run.epochs)
        progress(
            Note(f"{run.epochs.name} is that of a copy: the run has had {ledger.epoch} starts")
        )


def _newest_ledger(copies: Sequence[CopiedRun]) -> Ledger | None:
    newest = None
    for copy in copies:
        with suppress(CopyError):  # A damaged one: what it holds back another may have.
            ledger = copy.read_ledger()
            if ledger is not None and (newest is None or ledger.epoch > newest.epoch):
                newest = ledger
    return newest


def read_copied_ledger(run: RunFolder) -> Ledger | None:
    """Return the newest ledger of epochs among the copies of a run that can be reached; None where
    there is none."""
    config = load_yaml(run.config, RunConfig)
    return _newest_ledger([copy for copy, _ in _list_copies(run, config, ignore_update)])


def write_copied_ledger(run: RunFolder) -> None:
    """Write the run's ledger of epochs to each of its copies that can be reached. Raises Refusal
    (superseded) where a copy is of a later start."""
    config = load_yaml(run.config, RunConfig)
    for copy, _ in _list_copies(run, config, ignore_update):
        ledger = copy.read_ledger()
        epoch = readable_ledger(run.epochs).epoch
        if ledger is not None and ledger.epoch > epoch:
            raise Refusal(
                "superseded",
                what="the run goes on elsewhere",
                where=f"{copy.place.name}, {copy.folder}",
                fact=f"the copy is of start {ledger.epoch} of the run, this is start {epoch}",
                remedy=command("status", run.path),
            )
        with suppress(CopyError):
            write_ledger(run, copy)
