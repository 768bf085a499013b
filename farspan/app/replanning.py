"""Going on with a run on other machines, or by another technique: a new plan for what is left of it.

The model, the text and the training stay what they were, so that the checkpoint fits; a synchronous run keeps its
losses. What the old plan was lies in `plans/` of the run's folder.
"""

from __future__ import annotations

import msgspec

from farspan.app import clusters
from farspan.app.jobs import status
from farspan.app.plans import Planned, best_plan, write_planned
from farspan.app.resolving import Resolved
from farspan.app.updates import Note, Progress, silent
from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.codec import load, load_yaml, save
from farspan.domain.config import ParallelConfig, RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.plan import Plan
from farspan.domain.results import load_estimate
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.units import counted, format_bytes, format_seconds, format_usd, short_time

#: What `--cluster` calls this machine as it is.
HERE = "here"


def replan(
    run: RunFolder, progress: Progress = silent, *, cluster: str | None = None, technique: str | None = None
) -> Planned:
    """Plan what is left of a run for another cluster (None: the same; `here`: this machine), by a technique or the
    best. Says what changes, and makes the new plan the run's. Raises Refusal where nothing fits, and where the run is
    being trained."""
    from farspan.launch.lock import locked

    with locked(run.lock, "this run is being trained already", run.path):
        old, record, config = run.load_plan(), load(run.record, RunRecord), load_yaml(run.config, RunConfig)
        parallel = _parallel(config.parallel, cluster, technique)
        asked = msgspec.structs.replace(config, parallel=parallel)
        resolved = Resolved(
            model=old.model, train=old.train, cluster=_cluster(asked, run, cluster),
            corpus=load(run.corpus, CorpusManifest), corpus_folder=record.corpus_folder, warnings=(), origin={},
        )  # fmt: skip
        planned = best_plan(resolved, _exact(parallel, old), progress)
        progress(Note(_change(run, old, planned, status(run).saved_step or 0)))
        run.plans.mkdir(exist_ok=True)
        save(old, run.plans / f"{old.hash}.json")
        launcher = clusters.launcher(parallel)
        write_planned(run, planned, asked, msgspec.structs.replace(record, launcher=launcher, asked=asked))
    return planned


def _parallel(given: ParallelConfig, cluster: str | None, technique: str | None) -> ParallelConfig:
    """What run.yaml says from now on: another cluster is used whole."""
    if cluster is None:
        return msgspec.structs.replace(given, technique=technique or "auto")
    name = None if cluster == HERE else cluster
    return msgspec.structs.replace(given, cluster=name, technique=technique or "auto", workers="auto")


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


def _change(run: RunFolder, old: Plan, planned: Planned, step: int) -> str:
    """What the new plan changes, in time, money and memory."""
    now, left = planned.estimate, old.train.steps - step
    facts = [f"{short_time(now.step_s)} a step", f"{format_seconds(left * now.step_s)} in all"]
    if now.usd is not None:
        facts.append(format_usd(now.usd * left / old.train.steps))
    facts.append(f"{format_bytes(now.memory_bytes)} on the fullest device")
    text = f"{counted(left, 'step')} to go by {_called(planned.plan)}: {', '.join(facts)}"
    if not run.estimate.exists():
        return text
    before = load_estimate(run.estimate)
    return (
        f"{text} (before, by {_called(old)}: {short_time(before.step_s)} a step, {format_bytes(before.memory_bytes)})"
    )


def _called(plan: Plan) -> str:
    return f"{plan.technique} on {counted(len(plan.devices), 'device')}"
