"""Going on with a run on other machines, or by another technique: a new plan for what is left of
it.

The model, the text and the training stay what they were, so that the checkpoint fits; a synchronous
run keeps its losses. What the old plan was lies in `plans/` of the run's folder.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from farspan.app import clusters
from farspan.app.checkpoints import copy_checkpoints, unmirrored_steps
from farspan.app.jobs import status
from farspan.app.plans import Planned, best_plan, write_planned
from farspan.app.resolving import Resolved
from farspan.app.updates import Note, Progress, silent
from farspan.corpus.find import find_corpus
from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.codec import load, load_yaml, save
from farspan.domain.config import ParallelConfig, RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal, command
from farspan.domain.results import Estimate
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.units import counted, format_bytes, format_seconds, format_usd, short_time
from farspan.launch.clusters import HERE


def replan(
    run: RunFolder,
    progress: Progress = silent,
    *,
    cluster: str | None = None,
    technique: str | None = None,
) -> Planned:
    """Plan what is left of a run for another cluster (None: the same; `here`: this machine), by a
    technique or the best. Says what changes, and makes the new plan the run's. Raises Refusal where
    nothing fits, and where the run is being trained."""
    from farspan.launch.lock import locked

    with locked(run.lock, "this run is being trained already", run.path):
        try:
            copy_checkpoints(run, clusters.of_run(run))
        except Refusal as refusal:
            progress(Note(f"{refusal.problem.what}: {refusal.problem.fact}"))
        config = load_yaml(run.config, RunConfig)
        parallel = _parallel(config.parallel, cluster, technique)
        asked = msgspec.structs.replace(config, parallel=parallel)
        planned = best_plan(
            _left(run, _cluster(asked, run, cluster)), _exact(parallel, run.load_plan()), progress
        )
        adopt(run, planned, progress, asked)
    return planned


def planned_without(run: RunFolder, gone: Collection[str]) -> Planned:
    """A plan for what is left of a run without some hosts of its cluster, by what is predicted
    alone: nothing is tried while machines wait. Raises Refusal where nothing fits."""
    whole = load_cluster_json(run.cluster)
    config = load_yaml(run.config, RunConfig)
    hosts = [host.name for host in whole.hosts for _ in host.devices]
    places = [place for place, host in enumerate(hosts) if host not in gone]
    if not places:
        raise Refusal(
            "cannot-plan",
            what="no host of the run is there",
            where=run.cluster,
            fact=f"{', '.join(sorted(gone))} cannot be worked with",
            remedy=command("resume", run.path),
        )
    parallel = msgspec.structs.replace(config.parallel, technique="auto", workers="auto")
    left = _left(run, whole.only(places))
    return best_plan(left, _exact(parallel, run.load_plan()), trials=False)


def adopt(
    run: RunFolder, planned: Planned, progress: Progress = silent, asked: RunConfig | None = None
) -> None:
    """Say what a plan for the rest of a run changes, and make it the run's; `asked` is its new
    run.yaml, if any."""
    old = run.load_plan()
    record = load(run.record, RunRecord)
    config = asked or load_yaml(run.config, RunConfig)
    progress(Note(_change(run, old, planned)))
    if (lost := unmirrored_steps(run)) > 0:
        progress(
            Note(
                f"the newest checkpoint here is of step {max(0, run.newest_checkpoint())}: "
                f"{counted(lost, 'step')} after it were saved on {old.devices[0].host} alone and "
                "are made again"
            )
        )
    run.plans.mkdir(exist_ok=True)
    save(old, run.plans / f"{old.hash}.json")
    if asked is not None:
        record = msgspec.structs.replace(
            record, launcher=clusters.launcher(asked.parallel), asked=asked
        )
    write_planned(run, planned, config, record)


def _left(run: RunFolder, cluster: Cluster) -> Resolved:
    """What a run still has to be planned for."""
    plan = run.load_plan()
    record = load(run.record, RunRecord)
    corpus = load(run.corpus, CorpusManifest)
    return Resolved(
        model=plan.model,
        train=plan.train,
        cluster=cluster,
        corpus=corpus,
        corpus_folder=find_corpus(record.corpus_folder, corpus.hash) or record.corpus_folder,
        warnings=(),
        origin={},
    )


def _parallel(given: ParallelConfig, cluster: str | None, technique: str | None) -> ParallelConfig:
    """What run.yaml says from now on: another cluster is used whole."""
    if cluster is None:
        return msgspec.structs.replace(given, technique=technique or "auto")
    name = None if cluster == HERE else cluster
    return msgspec.structs.replace(
        given, cluster=name, technique=technique or "auto", workers="auto"
    )


def _exact(given: ParallelConfig, old: Plan) -> ParallelConfig:
    """A run of synchronous steps stays one, unless run.yaml allows others by name."""
    from farspan import techniques

    if old.sync is not None or given.allow:
        return given
    return msgspec.structs.replace(given, allow=tuple(filter(techniques.exact, techniques.names())))


def _cluster(config: RunConfig, run: RunFolder, asked: str | None) -> Cluster:
    from farspan.launch.probe import Probe

    if asked is None and not clusters.is_external(config.parallel.cluster or ""):
        return load_cluster_json(run.cluster)
    given = clusters.given_cluster(config, reach=True)
    if given is not None:
        return given
    with Probe() as probe:
        return probe.describe(config.parallel.device, None)


def _change(run: RunFolder, old: Plan, planned: Planned) -> str:
    """What the new plan changes, in time, money and memory, from the newest checkpoint here on."""
    now = planned.estimate
    before = None
    if run.estimate.exists():
        before = load(run.estimate, Estimate)
    left = max(0, status(run).steps - max(0, run.newest_checkpoint()))
    facts = [_called(planned.plan, now), f"{format_seconds(left * now.step_s)} in all"]
    if now.usd is not None:
        facts.append(format_usd(now.usd * left / old.train.steps))
    if before is not None:
        facts.append(f"before: {_called(old, before)}")
    return f"{counted(left, 'step')} to go by {'; '.join(facts)}"


def _called(plan: Plan, estimate: Estimate) -> str:
    devices = counted(len(plan.devices), "device")
    memory = f"{format_bytes(estimate.memory_bytes)} on the fullest device"
    return f"{plan.technique} on {devices}, {short_time(estimate.step_s)} a step, {memory}"
