"""Continuing a run on other machines, or by another technique: a new plan for the remaining steps.

The model, the text and the training stay what they were, so that the checkpoint fits; a synchronous
run keeps its losses. What the old plan was lies in `plans/` of the run's folder.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from farspan.app import clusters
from farspan.app.checkpoints import copy_checkpoints, unmirrored_steps
from farspan.app.clusters import whole_cluster_of_run
from farspan.app.jobs import read_status
from farspan.app.plans import Planned, best_plan, device_places, write_planned
from farspan.app.resolving import Resolved
from farspan.app.updates import Note, Progress, ignore_update
from farspan.corpus.find_prepared import find_corpus
from farspan.domain.cluster import THIS_MACHINE, Cluster
from farspan.domain.cluster_json import load_cluster_json, save_cluster_json
from farspan.domain.config import ParallelConfig, RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.cost import Estimate
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load, load_yaml, save
from farspan.domain.units import counted, format_bytes, format_seconds, format_usd, short_time
from farspan.planning.device_modes import settle_asked


def replan_run(
    run: RunFolder,
    progress: Progress = ignore_update,
    *,
    cluster: str | None = None,
    technique: str | None = None,
) -> Planned:
    """Plan the rest of a run for another cluster (None: the same; `here`: this machine), by a
    technique or the best. Reports what changes, and makes the new plan the run's. Raises Refusal
    where nothing fits, and where the run is being trained."""
    from farspan.launch.folder_lock import lock_run
    from farspan.launch.probe_client import Probe

    with lock_run(run):
        try:
            copy_checkpoints(run, clusters.cluster_of_run(run))
        except Refusal as refusal:
            progress(Note(f"{refusal.problem.what}: {refusal.problem.fact}"))
        config = load_yaml(run.config, RunConfig)
        parallel = replace(config.parallel, technique=technique or "auto")
        if cluster is not None:
            # Another cluster is used whole.
            name = None if cluster == THIS_MACHINE else cluster
            parallel = replace(parallel, cluster=name, workers="auto")
        asked = replace(config, parallel=parallel)
        if cluster is None and not clusters.is_external(parallel.cluster or ""):
            target = load_cluster_json(run.cluster)
        elif (given := clusters.given_cluster(asked, reach=True)) is not None:
            target = given
        else:
            with Probe() as probe:
                target = probe.describe_devices(parallel.device, None)
        resolved = resolve_rest(run, target)
        planned = best_plan(resolved, _keep_synchronous(parallel, run.load_plan()), progress)
        adopt_plan(run, planned, progress, asked)
    return planned


def plan_without(
    run: RunFolder, hosts: Collection[str], devices: Collection[tuple[str, int]] = ()
) -> Planned:
    """Plan the rest of a run without some hosts of its whole cluster, and some devices as (host,
    index), by predictions alone: nothing is tried while machines wait. Raises Refusal where nothing
    fits."""
    whole = whole_cluster_of_run(run)
    config = load_yaml(run.config, RunConfig)
    places = []
    for place, (host, index) in enumerate(device_places(whole)):
        if host not in hosts and (host, index) not in devices:
            places.append(place)
    if not places:
        lost = ", ".join(sorted({*hosts, *(host for host, _ in devices)}))
        raise Refusal(
            "cannot-plan",
            what="no device of the run is there",
            where=run.cluster,
            fact=f"{lost} cannot be worked with",
            remedy=run.resume_command(),
        )
    parallel = replace(config.parallel, technique="auto", workers="auto")
    if len(places) == len(whole.devices):
        # All are back: as the run was asked for.
        parallel = config.parallel
    resolved = resolve_rest(run, whole.only(places))
    planned = best_plan(resolved, _keep_synchronous(parallel, run.load_plan()), trials=False)
    return _number_devices(planned, whole, places)


def _number_devices(planned: Planned, whole: Cluster, places: Sequence[int]) -> Planned:
    """Give the devices of a plan for some places of a cluster their numbers on their hosts: a host
    that has lost its first device has a second one."""
    by_host: dict[str, list[int]] = {}
    every = device_places(whole)
    for place in places:
        host, index = every[place]
        by_host.setdefault(host, []).append(index)
    devices = []
    for device in planned.plan.devices:
        devices.append(replace(device, index=by_host[device.host][device.index]))
    of_hosts = [place for place, (host, _) in enumerate(every) if host in by_host]
    return replace(
        planned,
        plan=replace(planned.plan, devices=tuple(devices)),
        resolved=replace(planned.resolved, cluster=whole.only(of_hosts)),
    )


def adopt_plan(
    run: RunFolder,
    planned: Planned,
    progress: Progress = ignore_update,
    asked: RunConfig | None = None,
) -> None:
    """Report what a plan for the rest of a run changes, and make it the run's; `asked` is its new
    run.yaml, if any. Without one the plan is of a part of the run's cluster, which is kept whole:
    hosts come back."""
    old = run.load_plan()
    record = load(run.record, RunRecord)
    config = asked or load_yaml(run.config, RunConfig)
    progress(Note(_describe_change(run, old, planned)))
    lost = unmirrored_steps(run)
    if lost > 0:
        progress(
            Note(
                f"the newest checkpoint here is of step {max(0, run.newest_checkpoint())}: "
                f"{counted(lost, 'step')} after it were saved on {old.devices[0].host} alone and "
                "are made again"
            )
        )
    run.plans.mkdir(exist_ok=True)
    save(old, run.plans / f"{old.hash}.json")
    whole = whole_cluster_of_run(run)
    if asked is None and planned.resolved.cluster != whole:
        save_cluster_json(whole, run.whole_cluster)
    else:
        run.whole_cluster.unlink(missing_ok=True)
    if asked is not None:
        launcher = clusters.find_launcher(asked.parallel)
        record = replace(record, launcher=launcher, asked=asked)
    write_planned(run, planned, config, record)


def resolve_rest(run: RunFolder, cluster: Cluster) -> Resolved:
    """Return a run's own model, training and text on a cluster."""
    plan = run.load_plan()
    record = load(run.record, RunRecord)
    corpus = load(run.corpus, CorpusManifest)
    asked = load_yaml(run.config, RunConfig).train
    return Resolved(
        model=plan.model,
        train=settle_asked(plan.train, cluster, compiled=asked.compile, graph=asked.graph),
        cluster=cluster,
        corpus=corpus,
        corpus_folder=find_corpus(record.corpus_folder, corpus.hash) or record.corpus_folder,
        warnings=(),
        origin={},
    )


def _keep_synchronous(given: ParallelConfig, old: Plan) -> ParallelConfig:
    """Allow a synchronous run exact techniques alone, unless run.yaml allows some by name."""
    from farspan import techniques

    if old.sync is not None or given.allow:
        return given
    exact = tuple(filter(techniques.exact, techniques.technique_names()))
    return replace(given, allow=exact)


def _describe_change(run: RunFolder, old: Plan, planned: Planned) -> str:
    """Describe the changes of the new plan, in time, money and memory, from the newest
    checkpoint."""
    now = planned.estimate
    before = None
    if run.estimate.exists():
        before = load(run.estimate, Estimate)
    done = max(0, run.newest_checkpoint())
    remaining = max(0, read_status(run).steps - done)
    duration = format_seconds(remaining * now.step_s)
    facts = [_describe_plan(planned.plan, now), f"{duration} in all"]
    if now.usd is not None:
        facts.append(format_usd(now.usd * remaining / old.train.steps))
    if before is not None:
        facts.append(f"before: {_describe_plan(old, before)}")
    return f"{counted(remaining, 'step')} to go by {'; '.join(facts)}"


def _describe_plan(plan: Plan, estimate: Estimate) -> str:
    devices = counted(len(plan.devices), "device")
    memory = f"{format_bytes(estimate.memory_bytes)} on the fullest device"
    return f"{plan.technique} on {devices}, {short_time(estimate.step_s)} a step, {memory}"
