"""A plan for a run, and a plan as a file: chosen, or read and checked against what is there."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from farspan.app import choose_plan
from farspan.app.clusters import given_cluster
from farspan.app.configs import as_yaml
from farspan.app.preflight_checks import check_gpus, require_torch
from farspan.app.resolving import Resolved, prepare_run_corpus, start_probe
from farspan.app.updates import Chosen, Note, Progress, Ranked, ignore_update
from farspan.domain.cluster import Cluster, Device
from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.config import ParallelConfig, RunConfig
from farspan.domain.corpus import SPLITS, CorpusManifest
from farspan.domain.cost import Estimate
from farspan.domain.forecast import Forecast
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.plan import Plan, find_flaw
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import (
    content_hash,
    convert,
    parse_json,
    read_bytes,
    save,
    write_atomically,
)
from farspan.estimate.loss_forecast import forecast
from farspan.planning.select_by_trials import Selection
from farspan.planning.selection_outcome import nothing_runs
from farspan.semantics.identity import identity, lasting

#: The version of plans that this farspan writes and reads.
VERSION = {field.name: field.default for field in msgspec.structs.fields(Plan)}["version"]


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and all that it was made from."""

    plan: Plan
    estimate: Estimate
    resolved: Resolved
    forecast: Forecast | None = None

    def __str__(self) -> str:
        from farspan.report.text import plan_line

        return plan_line(self.plan, self.estimate, self.resolved.corpus, self.forecast)


def best_plan(
    resolved: Resolved,
    parallel: ParallelConfig,
    progress: Progress = ignore_update,
    *,
    table: bool = False,
    trials: bool = True,
) -> Planned:
    """Return the best plan of the techniques that run.yaml allows, on all devices or on some; of
    one that it names, on all.

    With `table` reports how they compare; without `trials` uses predictions alone. Raises Refusal
    where none fits.
    """
    named = parallel.technique != "auto"
    question = choose_plan.selection_task_of(resolved, parallel)
    selection = None
    if trials and not named and len(resolved.cluster.devices) > 1:
        selection = choose_plan.choose_plan(resolved, parallel, progress, paying=True)
    ranking = question.rank(resolved.cluster) if selection is None else selection.ranking
    if table:
        progress(Ranked(ranking))
    if ranking.chosen is not None:
        best = ranking.candidates[ranking.chosen]
    elif named and ranking.candidates:
        # What is named is run, also where something speaks against it.
        best = ranking.candidates[0]
    else:
        raise nothing_runs(ranking, () if selection is None else selection.tried, question)
    if selection is not None:
        progress(Chosen(selection))
    learned = replace(resolved, cluster=ranking.cluster)
    return Planned(plan=best.plan, estimate=best.estimate, resolved=learned)


def add_forecast(planned: Planned) -> Planned:
    """Add the loss that the run is predicted to reach from random weights, where the fit knows its
    kind: text is counted, a few seconds."""
    train = planned.plan.train
    if train.optimizer.muon is msgspec.UNSET or train.schedule.kind == "constant":
        return planned
    if train.shares:
        return planned
    from farspan.corpus.counting import measure_counts
    from farspan.corpus.token_files import TokenFile, VerifiedArray

    resolved = planned.resolved
    estimate = planned.estimate
    tokens = estimate.steps_done * train.tokens_per_step * estimate.token_efficiency
    corpus = resolved.corpus
    split_tokens = []
    for split in SPLITS:
        values = TokenFile.open(resolved.corpus_folder, split, corpus).tokens
        # A small part of every block is counted: training verifies them.
        split_tokens.append(values.unverified if isinstance(values, VerifiedArray) else values)
    train_tokens, val_tokens = split_tokens
    predicted = forecast(
        measure_counts(train_tokens, val_tokens, corpus.vocab_size, tokens),
        parameters=count_parameters(resolved.model),
        unique_tokens=corpus.train.tokens,
        tokens=tokens,
        steps=estimate.steps_done,
        bigram_nats=corpus.bigram_nats,
    )
    return replace(planned, forecast=predicted)


def write_plan(plan: Plan, cluster: Cluster, path: Path) -> None:
    """Write a plan to a file."""
    save(lasting(plan, cluster), path)


def write_planned(run: RunFolder, planned: Planned, config: RunConfig, record: RunRecord) -> None:
    """Write a run's plan, its estimate, cluster and record, and its run.yaml. plan.json comes
    last: it makes the folder a run."""
    from farspan.launch.trust import seal_run

    cluster = planned.resolved.cluster
    write_atomically(run.config, as_yaml(config))
    save(planned.estimate, run.estimate)
    save_cluster_json(cluster, run.cluster)
    save(record, run.record)
    seal_run(run)
    write_plan(planned.plan, cluster, run.plan)


def read_plan(path: Path) -> Plan:
    """Read the plan in a file; refuses what is none, and plans of another version."""
    return convert_plan(parse_json(read_bytes(path), object, path), path)


def convert_plan(document: object, where: Path) -> Plan:
    """Return the plan in a parsed file; refuses what is none, and plans of another version."""
    remedy = command("plan", "run.yaml", "-o", where)
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(document, dict) or "replicas" not in document:
        raise Refusal(
            "file-unreadable",
            what="this file holds no plan",
            where=where,
            fact="it has no key 'replicas'",
            remedy=remedy,
        )
    if version != VERSION:
        raise Refusal(
            "version-mismatch",
            what="the plan was written by another version of farspan",
            where=where,
            fact=f"it is of version {version}, this farspan reads version {VERSION}",
            remedy=remedy,
        )
    plan = convert(document, Plan, str(where))
    flaw = find_flaw(plan)
    if flaw:
        raise Refusal(
            "plan-mismatch",
            what="the plan does not hold together",
            where=where,
            fact=flaw,
            remedy=remedy,
        )
    return plan


def check_cluster(plan: Plan, cluster: Cluster, path: Path, remedy: str) -> None:
    """Refuse a plan that was made for another cluster, or that names devices that do not exist."""
    actual = identity(cluster)
    if plan.inputs.cluster != actual:
        hosts = ", ".join(dict.fromkeys(device.host for device in plan.devices))
        fact = f"it is for cluster {plan.inputs.cluster} (hosts {hosts}), this is cluster {actual}"
        raise Refusal(
            "plan-mismatch",
            what="the plan is for another cluster",
            where=path,
            fact=fact,
            remedy=remedy,
        )
    check_devices(plan, cluster, path, remedy)


def device_places(cluster: Cluster) -> list[tuple[str, int]]:
    """Return the host of each of the cluster's devices, and its index there."""
    places = []
    for host in cluster.hosts:
        for index in range(len(host.devices)):
            places.append((host.name, index))
    return places


def planned_devices(plan: Plan, cluster: Cluster) -> list[Device]:
    """Return the cluster's device of each rank."""
    devices = {host.name: host.devices for host in cluster.hosts}
    return [devices[at.host][at.index] for at in plan.devices]


def check_devices(plan: Plan, cluster: Cluster, path: object, remedy: str) -> None:
    """Refuse a plan that names devices which the cluster lacks."""
    existing = set(device_places(cluster))
    lacking = []
    for at in plan.devices:
        if (at.host, at.index) not in existing:
            lacking.append(f"{at.host}, device {at.index}")
    if lacking:
        raise Refusal(
            "plan-mismatch",
            what="the plan names devices that do not exist",
            where=path,
            fact="; ".join(lacking),
            remedy=remedy,
        )


def read_planned(
    source: Path | Selection,
    config: RunConfig,
    config_path: Path,
    progress: Progress = ignore_update,
) -> Planned:
    """Return the plan of a file or a selection with run.yaml's text and cluster; refuses where the
    two do not fit together."""
    from farspan import models
    from farspan.domain.engine import load_engine
    from farspan.estimate.estimate_plan import estimate

    if isinstance(source, Path):
        path = source
        remedy = command("plan", config_path, "-o", path)
        plan = read_plan(path)
    else:
        path = Path("the selection")
        remedy = command("plan", config_path, "-o", "plan.json")
        ranking = source.ranking
        if ranking.chosen is None:
            raise Refusal(
                "cannot-plan",
                what="the selection chose no plan",
                where="plan",
                fact="no plan that was priced can run",
                remedy="look at its ranking: print(selection.ranking.listed)",
            )
        plan = lasting(ranking.candidates[ranking.chosen].plan, ranking.cluster)
    if not plan.inputs.corpus:
        raise Refusal(
            "plan-mismatch",
            what="the plan was made from flags, without text",
            where=path,
            fact="it has no hash of a corpus, so nothing says what to train on",
            remedy=remedy,
        )
    cluster, gpu_notes = _find_cluster(config)
    check_cluster(plan, cluster, path, remedy)
    folder, manifest = prepare_run_corpus(config, progress)
    if plan.inputs.corpus != manifest.hash:
        raise Refusal(
            "plan-mismatch",
            what="the plan is for another text",
            where=path,
            fact=f"it is for corpus {plan.inputs.corpus}, {config_path} gives {manifest.hash}",
            remedy=remedy,
        )
    model = _named_model(config, manifest, cluster)
    if model is not None and model != plan.model:
        planned = content_hash(plan.model)
        raise Refusal(
            "plan-mismatch",
            what="the plan is for another model",
            where=path,
            fact=f"it is for model {planned}, {config_path} names {content_hash(model)}",
            remedy=remedy,
        )
    progress(
        Note(f"as {path} says: model and training are the plan's, text and cluster {config_path}'s")
    )
    resolved = Resolved(
        model=plan.model,
        train=plan.train,
        cluster=cluster,
        corpus=manifest,
        corpus_folder=folder,
        warnings=gpu_notes,
        origin={},
    )
    graph = models.graph(plan.model)
    priced = estimate(plan, graph, cluster, load_engine(plan.engine))
    return Planned(plan=plan, estimate=priced, resolved=resolved)


def _find_cluster(config: RunConfig) -> tuple[Cluster, tuple[str, ...]]:
    """Return the run's cluster: the one that it names, or this machine with a note on each GPU
    that it does not use."""
    require_torch()
    given = given_cluster(config, reach=True)
    if given is not None:
        return given, ()
    notes = check_gpus(config)
    with start_probe(config, None) as (_, cluster):
        return cluster, notes


class _NotNamedError(Exception):
    """run.yaml leaves the model to measurements."""


def _named_model(config: RunConfig, manifest: CorpusManifest, cluster: Cluster) -> ModelSpec | None:
    """Return the model that run.yaml names; None where its size depends on the machine."""
    from farspan.planning.choose_model import choose_model

    def measure() -> float:
        raise _NotNamedError

    try:
        return choose_model(config, manifest, cluster, measure).model
    except _NotNamedError:
        return None
