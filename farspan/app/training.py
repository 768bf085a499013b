"""The main job, step by step: text, plan, run folder, training, report."""

from __future__ import annotations

import errno
import secrets
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from farspan.app import clusters
from farspan.app.base_model import describe_base, keep_base
from farspan.app.configs import refuse_edited, refuse_other
from farspan.app.copy_places import refuse_unusable_places, shared_disk
from farspan.app.corpora import bring_corpus
from farspan.app.jobs import register_job, remove_unbegun, wait_for_orphans
from farspan.app.microbatches import enlarge_where_unsure
from farspan.app.notify import notifying
from farspan.app.plans import (
    Planned,
    add_forecast,
    best_plan,
    planned_devices,
    write_planned,
)
from farspan.app.preflight_checks import refuse_existing, require_torch, unused_path
from farspan.app.reporting import Report, write_report
from farspan.app.resolving import resolve_run
from farspan.app.tracking import tracking_run
from farspan.app.updates import Ended, Note, Progress, ignore_update, note_reporter
from farspan.corpus.hub_models import find_model_folder
from farspan.domain.config import RunConfig
from farspan.domain.escapes import shell_word
from farspan.domain.problems import Refusal
from farspan.domain.run import ID_BYTES, RunFolder, RunRecord
from farspan.domain.run_events import STOP_REASONS, Started, read_events
from farspan.domain.struct_files import load, to_json, write_atomically
from farspan.domain.units import counted, format_bytes
from farspan.launch.slurm_allocation import SLURM, require_allocation
from farspan.models._weight_files import hash_weights
from farspan.report.run_endings import step_of


def plan_run(
    path: Path, config: RunConfig, progress: Progress = ignore_update, *, table: bool = False
) -> RunFolder:
    """Plan what `config` asks for, report the predictions, and make its run directory at `path`.

    With `table` the techniques are compared on this cluster first.
    """
    if clusters.find_launcher(config.parallel) == SLURM:
        require_allocation("run.yaml", "farspan slurm run.yaml")
    refuse_unusable_places(config.checkpoint)
    resolved = resolve_run(config, progress, trial=True)
    planned = best_plan(resolved, config.parallel, progress, table=table)
    if config.on_fault != "stop":
        planned = enlarge_where_unsure(planned, progress)
    return make_run(path, config, planned, progress)


def make_run(
    path: Path, config: RunConfig, planned: Planned, progress: Progress = ignore_update
) -> RunFolder:
    """Report a plan's predictions, and make its run directory at `path`."""
    from farspan.launch.host_claims import describe_holder

    resolved = planned.resolved
    if config.model.path is None:
        planned = add_forecast(planned)
    progress(planned)
    # Refuse a plan that a device cannot hold.
    plan = planned.plan
    devices = planned_devices(plan, resolved.cluster)
    memories = planned.estimate.memory
    for at, device, memory in zip(plan.devices, devices, memories, strict=True):
        usable = device.memory
        if memory.total > usable:
            raise Refusal(
                "out-of-memory",
                what="the plan needs more memory than a device has",
                where=f"{at.host}, device {at.index}",
                fact=f"predicted {format_bytes(memory.total)}, there is {format_bytes(usable)}",
                remedy="set train.recompute: true, or a smaller size, in run.yaml",
            )
    refuse_unusable_places(config.checkpoint, site=resolved.cluster)
    if location := shared_disk(config.checkpoint, path):
        progress(Note(f"{location} is on the run's own disk: a lost disk loses both"))
    # Again: it may have been made while this run was planned.
    refuse_existing(path, f"--run {shell_word(unused_path(path))}")
    run = RunFolder(path)
    initial = base = None
    initial_weights = ""
    if config.model.path:
        initial = str(find_model_folder(config.model.path, weights=True).resolve())
        base = describe_base(config, Path(initial))
        if plan.model.lora:
            initial_weights = hash_weights(Path(initial))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    launcher = clusters.find_launcher(config.parallel)
    identity = secrets.token_hex(ID_BYTES)
    home = describe_holder(path)
    record = RunRecord(
        corpus=str(resolved.corpus_folder.resolve()),
        command=tuple(sys.argv),
        created=created,
        id=identity,
        home=home,
        warnings=resolved.warnings,
        initial=initial,
        initial_weights=initial_weights,
        launcher=launcher,
        asked=config,
        forecast=planned.forecast,
    )
    try:
        run.make()
        write_atomically(run.corpus, to_json(resolved.corpus))
        write_atomically(run.tokenizer, (resolved.corpus_folder / "tokenizer.json").read_bytes())
        if initial is not None and base is not None:
            keep_base(run, Path(initial), base)
        write_planned(run, planned, config, record)
    except BaseException:
        # Half a run would be in the way of the same command.
        remove_unbegun(run)
        raise
    return run


def resume_run(
    run: RunFolder,
    progress: Progress = ignore_update,
    *,
    trust: bool = False,
    cluster: str | None = None,
    technique: str | None = None,
    until_done: bool = False,
    without: tuple[str, ...] = (),
) -> Report:
    """Continue a run that was stopped, or report one that is finished. With `trust` its cluster's
    commands are run, and its links followed, also where it was not made here; without, such a run
    is refused. For another cluster or technique the remaining steps are planned again. Workers of
    a killed job are waited for, and with `until_done` hosts that are away. The sites in `without`
    are given up."""
    from farspan.app.replanning import replan_run
    from farspan.app.restoring import fetch_missing_checkpoints
    from farspan.launch import trust as trusting
    from farspan.report.history import is_complete

    refuse_edited(run)
    if cluster is None and load(run.record, RunRecord).launcher == SLURM and not is_complete(run):
        require_allocation(run.path, run.resume_command())
    if trust:
        trusting.seal_run(run)
    if is_complete(run):
        progress(Note("this run is finished: nothing is left to train"))
        return write_report(run.path, page=False)
    if not trust:
        trusting.require_trusted(run)
    with notifying(_notify_command(run), run.path, progress) as report:
        wait_for_orphans(run, note_reporter(report))
        fetch_missing_checkpoints(run, report)
        bring_corpus(run, report)
        if cluster is not None or technique is not None:
            replan_run(run, report, cluster=cluster, technique=technique)
        return train_run(run, report, until_done=until_done, without=without)


def _notify_command(run: RunFolder) -> str | None:
    asked = load(run.record, RunRecord).asked
    return None if asked is None else asked.notify


def train_until_done(
    path: Path,
    config: RunConfig,
    config_path: Path,
    progress: Progress = ignore_update,
    *,
    without: tuple[str, ...] = (),
) -> Report:
    """Train a run to its end: begin it, or resume it where it lies at `path`. The same call resumes
    it after whatever has ended the process before, also from a copy, on any machine. Raises Refusal
    (run-exists) where another run.yaml's run lies there."""
    from farspan.app.restoring import restore_run
    from farspan.app.slurm_site_jobs import wait_for_sites
    from farspan.app.take_claims import wait_for_holder

    run = RunFolder(path)
    if run.plan.exists():
        refuse_other(run, config, config_path)
        return resume_run(run, progress, until_done=True, without=without)
    # A start that was killed while the run was made.
    if run.corpus.exists():
        remove_unbegun(run)
    if restore_run(path, config, progress) is not None:
        wait_for_holder(run, progress)
        return resume_run(run, progress, until_done=True, without=without)
    with notifying(config.notify, path, progress) as report:
        wait_for_sites(config, report)
        run = plan_run(path, config, report)
        return _train_begun(run, report, until_done=True, without=without)


def train_run(
    run: RunFolder,
    progress: Progress = ignore_update,
    *,
    until_done: bool = False,
    without: tuple[str, ...] = (),
) -> Report:
    """Train the run's plan from its newest checkpoint, reporting events; then write its report.

    On the main thread Ctrl-C and SIGTERM save first and then raise Refusal (interrupted). No worker
    is left behind, however it ends.
    """
    from farspan.app.supervisor import Supervisor

    require_torch()
    plan = run.load_plan()
    record = load(run.record, RunRecord)
    ended = None
    hosts = dict.fromkeys(device.host for device in plan.devices)
    if record.launcher != "local" or len(hosts) > 1:
        workers = f"{counted(len(plan.devices), 'worker')} on {', '.join(hosts)}"
        progress(Note(f"starting {workers} through {record.launcher}"))
    try:
        with register_job(run) as job, tracking_run(run, progress) as trackers:
            supervisor = Supervisor(
                run, progress, trackers.take, until_done=until_done, without=without
            )
            try:
                ended = supervisor.train_run()
            finally:
                job.has_started_workers = supervisor.has_started_workers
    except BaseException:
        progress(Ended())
        # What ended the run is raised, not what keeps its report from being written.
        with suppress(Exception):
            if run.events.exists():
                write_report(run.path)
        raise
    progress(Ended())
    report = write_report(run.path)
    if ended is not None and ended.reason in STOP_REASONS:
        raise Refusal(
            "interrupted",
            what=f"stopped as asked; step {step_of(ended.step, plan.train)} is saved",
            where=run.path,
            fact="nothing of it is lost",
            remedy=_remedy_after_stop(run, record.launcher),
        )
    return report


def _remedy_after_stop(run: RunFolder, launcher: str) -> str:
    """Return the command that resumes a run which was asked to stop. A Slurm job does not know why
    it was asked: after its limit it goes back into the queue, after a scancel it does not."""
    remedy = run.resume_command()
    if launcher == SLURM:
        return f"{remedy}   # unless its job goes back into the queue by itself"
    return remedy


def train_new(run: RunFolder, progress: Progress = ignore_update) -> Report:
    """Train a run that was just made (`train`). Where the disk is full before its workers have
    started, its folder is removed: the same command then works when there is space."""
    with notifying(_notify_command(run), run.path, progress) as report:
        return _train_begun(run, report)


def _train_begun(
    run: RunFolder, progress: Progress, *, until_done: bool = False, without: tuple[str, ...] = ()
) -> Report:
    try:
        return train_run(run, progress, until_done=until_done, without=without)
    except (Refusal, OSError) as error:
        if isinstance(error, Refusal):
            disk_is_full = error.problem.code == "disk-full"
        else:
            disk_is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not disk_is_full or _has_begun(run):
            raise
        remove_unbegun(run)
        if not isinstance(error, Refusal):
            raise
        remedy = "free some space there, and give the same command again"
        raise Refusal.of(replace(error.problem, remedy=remedy)) from None


def _has_begun(run: RunFolder) -> bool:
    """Return whether workers of a run have started, or saved anything; True also where its events
    are damaged."""
    if any(run.checkpoints.glob("step-*")):
        return True
    if not run.events.exists():
        return False
    try:
        events = list(read_events(run.events))
    except Refusal:
        return True
    return any(isinstance(event, Started) for event in events)
