"""The main job, step by step: corpus, plan, training, report. Commands string these together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farspan.cli import clusters
from farspan.cli.console import Console
from farspan.cli.runs import as_yaml
from farspan.domain.cluster import Cluster
from farspan.domain.codec import load, load_yaml, missing_path, save, to_json, write_atomically
from farspan.domain.config import ParallelConfig, RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.probe import ProbeResult
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.results import Estimate, Finished, Measurement
from farspan.domain.run import RunFolder, RunRecord, cache_folder
from farspan.domain.train import TrainSpec
from farspan.domain.units import format_bytes

if TYPE_CHECKING:
    from farspan.launch.probe import Probe
    from farspan.planning.rank import Candidate
    from farspan.report.compared import Compared

#: Seconds of trial steps in each precision.
PROBE_S = 3.0


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """run.yaml made concrete on a cluster whose devices keep the pace of a trial, or of the estimator."""

    model: ModelSpec
    train: TrainSpec
    cluster: Cluster
    corpus: CorpusManifest
    corpus_folder: Path
    warnings: tuple[str, ...]
    origin: dict[str, str]


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and all that it was made from."""

    plan: Plan
    estimate: Estimate
    resolved: Resolved


def prepare(config: RunConfig, console: Console) -> tuple[Path, CorpusManifest]:
    """Tokenizer and token files of the run's text, made or found."""
    from farspan.corpus.prepare import prepare as prepare_corpus
    from farspan.planning.quantities import check

    check(config)
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    folder, manifest = prepare_corpus(
        config.data_config, config.tokenizer_config, cache_folder() / "corpora", workers=workers, say=console.say
    )
    for skipped in manifest.skipped:
        console.say(f"skipped {skipped}")
    return folder, manifest


def resolve(config: RunConfig, console: Console, *, trial: bool) -> Resolved:
    """Prepare the text, find the cluster, and settle model and training; with `trial` on the first device's real speed.

    Without a trial nothing of the cluster is touched: its figures and the estimator stand for it.
    """
    from farspan.domain.engine import engine as find_engine
    from farspan.planning import pace
    from farspan.planning.resolve import resolve as resolve_config
    from farspan.retrieval.stores import resolve as resolve_store

    resolve_store(config.index.store)
    allowed(config.parallel)
    engine, given = find_engine("farspan"), given_cluster(config, reach=trial)
    notes = check_gpus(config) if given is None else ()
    folder, manifest = prepare(config, console)
    if trial or given is None:
        with _prober(config, given) as (probe, cluster):
            found = resolve_config(config, manifest, cluster, **_trials(config, probe, cluster, console))
    else:
        cluster = given
        asked = pace.common_precisions(cluster) if config.train.precision == "auto" else (config.train.precision,)
        found = resolve_config(
            config, manifest, cluster, matmul_flops=lambda: pace.product_flops(cluster, engine, asked),
            measure=lambda model, train: pace.predicted(model, train, cluster, engine, asked),
        )  # fmt: skip
    if trial or given is None:
        cluster = pace.calibrated(cluster, found.model, found.train, engine, found.probe)
    return Resolved(
        model=found.model, train=found.train, cluster=cluster, corpus=manifest, corpus_folder=folder,
        warnings=(*notes, *found.warnings), origin=found.origin,
    )  # fmt: skip


@contextmanager
def _prober(config: RunConfig, given: Cluster | None) -> Iterator[tuple[Probe, Cluster]]:
    """A probe process on the first host, and the cluster: the given one, or what the process finds here."""
    from farspan.launch.probe import Probe

    require_torch()
    with Probe(given.machines[0], threads=given.devices[0].threads, device=0) if given else Probe() as probe:
        workers = config.parallel.workers
        yield probe, given or probe.describe(config.parallel.device, None if workers == "auto" else workers)


def check_gpus(config: RunConfig) -> tuple[str, ...]:
    """A note on each GPU of this machine that is left out of the devices that run.yaml asks for; refuses where PyTorch
    can use none, before any work is done."""
    from farspan.launch import probe

    require_torch()
    return probe.check_gpus(config.parallel.device)


def _trials(config: RunConfig, probe: Probe, cluster: Cluster, console: Console) -> dict[str, Any]:
    """The two measurements that resolving asks for, made on the cluster's first device."""
    from farspan.domain.engine import engine
    from farspan.planning import pace

    device = first_device(cluster)
    precisions = cluster.devices[0].dtypes if config.train.precision == "auto" else (config.train.precision,)

    def matmul_flops() -> float:
        return len(cluster.devices) / pace.crowding(cluster) * max(probe.matmul_flops(device, precisions).values())

    def measure(model: ModelSpec, train: TrainSpec) -> ProbeResult:
        tried = pace.fitting(model, train, cluster, engine("farspan"))
        if isinstance(tried, Problem) and len(cluster.devices) == 1:
            raise Refusal.of(tried)
        if isinstance(tried, Problem):  # A model that one device cannot hold may still be divided over several.
            console.say(f"the model is not tried on one {cluster.devices[0].kind}, which cannot hold it: predicted")
            return pace.predicted(model, train, cluster, engine("farspan"), precisions)
        console.say(f"trying the model on {cluster.devices[0].kind}: {', '.join(precisions)}")
        return probe.measure(device, model, tried, precisions=precisions, seconds=PROBE_S)

    return {"matmul_flops": matmul_flops, "measure": measure}


def allowed(asked: ParallelConfig) -> tuple[str, ...]:
    """The techniques that run.yaml lets one compare; none is all. Refuses names that are none."""
    from farspan import techniques

    names = asked.allow if asked.technique == "auto" else (asked.technique,)
    for name in names:
        techniques.technique(name)
    return names


def plan(resolved: Resolved, asked: ParallelConfig, console: Console, *, table: bool = False) -> Planned:
    """The best plan of the techniques that run.yaml allows, on all devices or on some; of one that it names, on all.

    With `table` says how they compare. Raises Refusal where none fits.
    """
    from farspan.cli import selecting
    from farspan.cli.planning import paragraph

    named, several = asked.technique != "auto", len(resolved.cluster.devices) > 1
    question = selecting.question_of(resolved, asked)
    selection = selecting.choose(resolved, asked, console, paying=True) if several and not named else None
    ranking = question.rank(resolved.cluster) if selection is None else selection.ranking
    if table:
        from farspan.cli.planning import say_ranking

        say_ranking(ranking, console)
        console.say()
    here = [] if ranking.chosen is None else [ranking.candidates[ranking.chosen]]
    # What is named is run, also where something speaks against it.
    here += [one for one in ranking.candidates if named and one.plan is not None]
    if not here:
        raise selecting.nothing_runs(ranking, () if selection is None else selection.tried, question)
    best = here[0]
    assert best.plan is not None and best.estimate is not None
    if selection is not None:
        console.say(paragraph(selecting.why(selection)))
    learned = msgspec.structs.replace(resolved, cluster=ranking.cluster)
    return Planned(plan=best.plan, estimate=best.estimate, resolved=learned)


def unchosen(candidate: Candidate) -> Problem:
    """Why a plan that fits is not run."""
    return Problem(
        code="cannot-plan", what=f"{candidate.technique} is not chosen", where=candidate.where,
        fact=candidate.unchosen or "nothing says what it would take",
        remedy="set parallel.technique: data",
    )  # fmt: skip


def given_cluster(config: RunConfig, *, reach: bool) -> Cluster | None:
    """The cluster that the run asks for, with as many of its devices as `workers` says; None is this machine. With
    `reach`, refuses one whose first host cannot be reached."""
    from farspan.launch.hosts import Agent
    from farspan.launch.launchers import split

    split(config.parallel.launcher)
    if config.parallel.cluster is None:
        return None
    cluster, workers = clusters.find(config.parallel.cluster), config.parallel.workers
    if reach:
        with Agent(cluster.machines[0]):  # Or a refusal that says why it cannot be reached.
            pass
    if workers == "auto":
        return cluster
    if workers > len(cluster.devices):
        raise Refusal(
            "device-missing", what=f"the cluster has no {workers} devices", where="run.yaml, key parallel.workers",
            fact=f"it has {len(cluster.devices)}", remedy=f"set parallel.workers: {len(cluster.devices)}",
        )  # fmt: skip
    return cluster.first(workers)


def require_torch() -> None:
    """Refuse where training is not installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise Refusal(
            "extra-missing", what="training needs PyTorch", where=sys.executable, fact="torch is not installed there",
            remedy="pip install 'farspan[train]'",
        )  # fmt: skip


def first_device(cluster: Cluster) -> PlannedDevice:
    host, device = cluster.machines[0], cluster.devices[0]
    return PlannedDevice(host=host.name, backend=device.backend, index=0, threads=device.threads, kind=device.kind)


def start(path: Path, config: RunConfig, console: Console, *, table: bool = False) -> RunFolder:
    """Plan what `config` asks for, say what that will take, and make its run directory at `path`.

    With `table` the techniques are compared on this cluster first.
    """
    resolved = resolve(config, console, trial=True)
    planned = plan(resolved, config.parallel, console, table=table)
    return make(path, config, planned, console)


def make(path: Path, config: RunConfig, planned: Planned, console: Console) -> RunFolder:
    """Say what a plan will take, and make its run directory at `path`."""
    from farspan.cli import planfile, selecting
    from farspan.launch.trust import seal

    resolved = planned.resolved
    say_plan(planned, console)
    # Again: it may have been made while this run was planned.
    refuse_existing(path, command("train", "run.yaml", "--run", f"{path}-2"))
    run = RunFolder(path)
    run.make()
    record = RunRecord(
        corpus=str(resolved.corpus_folder.resolve()), command=tuple(sys.argv),
        created=datetime.now(UTC).isoformat(timespec="seconds"), warnings=resolved.warnings,
        initial=str(Path(config.model.path).expanduser().resolve()) if config.model.path else None,
        launcher=selecting.launcher(config.parallel), asked=config,
    )  # fmt: skip
    write_atomically(run.config, as_yaml(config))
    write_atomically(run.corpus, to_json(resolved.corpus))
    write_atomically(run.tokenizer, (resolved.corpus_folder / "tokenizer.json").read_bytes())
    save(planned.estimate, run.estimate)
    save(resolved.cluster, run.cluster)
    save(record, run.record)
    seal(run)
    save(planfile.lasting(planned.plan, resolved.cluster), run.plan)
    return run


def say_plan(planned: Planned, console: Console) -> None:
    """The plan line, and what there is to be warned about, before training; refuses what does not fit."""
    from farspan.report.text import plan_line

    console.say(plan_line(planned.plan, planned.estimate, planned.resolved.corpus))
    for warning in planned.resolved.warnings:
        console.say(f"warning: {warning}")
    hosts = {host.name: host.devices for host in planned.resolved.cluster.hosts}
    used = sorted(r for replica in planned.plan.replicas for stage in replica.stages for r in stage.mesh.ranks)
    for rank, memory in zip(used, planned.estimate.memory, strict=True):
        at = planned.plan.devices[rank]
        usable = hosts[at.host][at.index].memory
        if memory.total > usable:
            raise Refusal(
                "out-of-memory", what="the plan needs more memory than a device has",
                where=f"{at.host}, device {at.index}",
                fact=f"predicted {format_bytes(memory.total)}, there is {format_bytes(usable)}",
                remedy="set train.recompute: true, or a smaller size, in run.yaml",
            )  # fmt: skip


def refuse_existing(path: Path, remedy: str) -> None:
    """Refuse a path where anything lies: nothing is ever written over."""
    # "new/.." is this folder as soon as "new" is made, and until then it does not exist.
    there = path.resolve()
    if there.exists() and (not there.is_dir() or any(there.iterdir())):
        raise Refusal(
            "run-exists", what=f"this {'folder' if there.is_dir() else 'file'} exists already", where=path,
            fact="nothing is ever written over", remedy=remedy,
        )  # fmt: skip


def refuse_file(path: Path, remedy: str) -> None:
    """Refuse a file to be written later on that is there, or whose folder is not: what is measured would be lost."""
    refuse_existing(path, remedy)
    if not path.absolute().parent.is_dir():
        raise missing_path(path.absolute().parent)


def train(run: RunFolder, console: Console) -> Measurement | None:
    """Train the run's plan from where it stands, showing progress; then write its report and say what it took."""
    import rich.console

    from farspan.cli.progress import Progress
    from farspan.cli.reports import write_report
    from farspan.launch.launchers import launch
    from farspan.report.tensorboard import TensorBoard

    require_torch()
    plan, record, config = run.load_plan(), load(run.record, RunRecord), load_yaml(run.config, RunConfig)
    asked = config.parallel.cluster or ""
    # A lab that was made anew has other processes to enter; all else is as it was planned.
    cluster = clusters.find(asked) if asked.startswith("lab:") else load(run.cluster, Cluster)
    board, ended, reported = TensorBoard(run.tensorboard), None, None
    if record.launcher != "local" or len(cluster.hosts) > 1:
        hosts = ", ".join(dict.fromkeys(device.host for device in plan.devices))
        console.say(f"starting {len(plan.devices)} workers on {hosts} through {record.launcher}")
    try:
        with (
            launch(record.launcher, plan, run, cluster) as workers,
            passing_signals(workers.interrupt, console),
            Progress(plan, rich.console.Console(stderr=console.json), time.time) as progress,
        ):
            for event in workers:
                progress.show(event)
                board.show(event)
                ended = event if isinstance(event, Finished) else ended
    finally:
        if run.events.exists():
            reported = write_report(run.path)
    if ended is not None and ended.reason == "interrupted":
        raise Refusal(
            "interrupted", what=f"stopped as asked; step {ended.step:,} of {plan.train.steps:,} is saved",
            where=run.path, fact="nothing of it is lost", remedy=command("resume", run.path),
        )  # fmt: skip
    return say_result(run, console, None if reported is None else reported[1])


@contextmanager
def passing_signals(interrupt: Callable[[], None], console: Console) -> Iterator[None]:
    """While workers run, Ctrl-C and SIGTERM ask them to save; a second one ends them at once."""

    def handle(number: int, frame: object) -> None:
        console.say("saving; once more to stop at once")
        interrupt()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_result(run: RunFolder, console: Console, found: Compared | None = None) -> Measurement | None:
    """The summary of a run with what was `found` of its devices, and where to look next."""
    from farspan.report.compared import compare
    from farspan.report.history import open_run
    from farspan.report.measure import measure
    from farspan.report.text import summary

    done = open_run(run.path)
    console.say(summary(done, found or compare(done)))
    console.say(f"report: {run.report}")
    return measure(done)
