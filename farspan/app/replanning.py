"""Going on with a run on other machines, or by another technique: a new plan for what is left of it.

The model, the text and the training stay what they were, so that the checkpoint fits; a synchronous run keeps its
losses. What the old plan was lies in `plans/` of the run's folder.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from farspan.app import clusters
from farspan.app.configs import as_yaml
from farspan.app.plans import Planned, best_plan
from farspan.app.resolving import Resolved
from farspan.app.updates import Note, Progress, silent
from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import load_cluster_json, save_cluster_json
from farspan.domain.codec import load, load_yaml, save, write_atomically
from farspan.domain.config import ParallelConfig, RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal, command
from farspan.domain.results import load_estimate
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.units import counted, format_bytes, format_seconds, format_usd, short_time
from farspan.semantics.identity import lasting, training_key

#: What `--cluster` calls this machine as it is.
HERE = "here"


def replan(
    run: RunFolder, progress: Progress = silent, *, cluster: str | None = None, technique: str | None = None,
    step: int = 0,
) -> Planned:  # fmt: skip
    """Plan what is left of a run after `step` for another cluster (None: the same; `here`: this machine), by a
    technique or the best. Says what changes, and makes the new plan the run's. Raises Refusal where nothing fits."""
    old, record, config = run.load_plan(), load(run.record, RunRecord), load_yaml(run.config, RunConfig)
    parallel = _parallel(config.parallel, old, cluster, technique)
    there = _cluster(msgspec.structs.replace(config, parallel=parallel), run, cluster)
    resolved = Resolved(
        model=old.model, train=old.train, cluster=there, corpus=load(run.corpus, CorpusManifest),
        corpus_folder=record.corpus_folder, warnings=(), origin={},
    )  # fmt: skip
    planned = best_plan(resolved, parallel, progress)
    if training_key(planned.plan) != training_key(old):
        raise Refusal(
            "plan-mismatch", what="the new plan is of another training", where=run.plan,
            fact="its checkpoints could not be used", remedy=command("resume", run.path),
        )  # fmt: skip
    progress(Note(_change(run, old, planned, step)))
    asked = config if cluster is None else msgspec.structs.replace(config, parallel=parallel)
    _adopt(run, old, planned, asked, record)
    return planned


def _parallel(given: ParallelConfig, old: Plan, cluster: str | None, technique: str | None) -> ParallelConfig:
    """What is asked for now. A run of synchronous steps stays one, unless run.yaml allows others by name."""
    from farspan import techniques

    name = given.cluster if cluster is None else None if cluster == HERE else cluster
    allow = given.allow
    if old.sync is None and not allow:
        allow = tuple(other for other in techniques.names() if other not in techniques.INEXACT)
    workers = given.workers if cluster is None else "auto"
    return msgspec.structs.replace(given, cluster=name, technique=technique or "auto", allow=allow, workers=workers)


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


def _adopt(run: RunFolder, old: Plan, planned: Planned, config: RunConfig, record: RunRecord) -> None:
    """Make the new plan the run's: plan.json comes last, by which all else is read."""
    from farspan.launch.trust import seal

    run.plans.mkdir(exist_ok=True)
    save(old, run.plans / f"{old.hash}.json")
    cluster = planned.resolved.cluster
    save_cluster_json(cluster, run.cluster)
    write_atomically(run.config, as_yaml(config))
    launcher = clusters.launcher(config.parallel)
    save(msgspec.structs.replace(record, launcher=launcher, asked=config), run.record)
    seal(run)
    save(planned.estimate, run.estimate)
    save(lasting(planned.plan, cluster), run.plan)


def newest_step(run: RunFolder) -> int:
    """The step of the newest checkpoint by its name; 0 without one."""
    steps = [int(path.name.removeprefix("step-")) for path in Path(run.checkpoints).glob("step-????????")]
    return max(steps, default=0)
