"""A plan as a file: written by `farspan plan -o`, checked against what is there before it is run or compared."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farspan.cli import job
from farspan.cli.console import Console
from farspan.domain.cluster import Cluster, Host
from farspan.domain.codec import content_hash, parse_json, read_bytes, save
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan, unsound
from farspan.domain.problems import Refusal, command

#: The version of plans that this farspan writes and reads.
VERSION = next(field.default for field in msgspec.structs.fields(Plan) if field.name == "version")


def cluster_hash(cluster: Cluster) -> str:
    """What measurements of a cluster are known by: without what a trial measured on one day, and without the processes
    of a lab."""

    def lasting_host(host: Host) -> Host:
        devices = tuple(msgspec.structs.replace(one, pace=1.0, framework=None, enter=None) for one in host.devices)
        return msgspec.structs.replace(host, devices=devices, enter=None)

    links = tuple(msgspec.structs.replace(link, pace=1.0) for link in cluster.links)
    return content_hash(msgspec.structs.replace(cluster.with_hosts(lasting_host), links=links))


def identity(cluster: Cluster) -> str:
    """What a plan knows its cluster by: its sites, hosts and devices. How fast these are, and the links between them,
    is measured and learned again, and the plan priced by it."""
    devices = [
        (site.name, host.name, one.kind, one.backend, one.threads)
        for site in cluster.sites
        for host in site.hosts
        for one in host.devices
    ]
    return content_hash(devices)


def lasting(plan: Plan, cluster: Cluster) -> Plan:
    """The plan as it is known again on the same cluster on another day."""
    inputs = msgspec.structs.replace(plan.inputs, cluster=identity(cluster))
    return msgspec.structs.replace(plan, inputs=inputs)


def write(plan: Plan, cluster: Cluster, path: Path) -> None:
    """Write a plan to a file."""
    save(lasting(plan, cluster), path)


def read(path: Path) -> Plan:
    """The plan in a file; refuses what is none, and plans of another version."""
    content = read_bytes(path)
    found = parse_json(content, object, path)
    version = found.get("version") if isinstance(found, dict) else None
    if not isinstance(found, dict) or "replicas" not in found:
        raise Refusal(
            "file-unreadable", what="this file holds no plan", where=path, fact="it has no key 'replicas'",
            remedy=command("plan", "run.yaml", "-o", path),
        )  # fmt: skip
    if version != VERSION:
        raise Refusal(
            "version-mismatch", what="the plan was written by another version of farspan", where=path,
            fact=f"it is of version {version}, this farspan reads version {VERSION}",
            remedy=command("plan", "run.yaml", "-o", path),
        )  # fmt: skip
    plan = parse_json(content, Plan, path)
    if wrong := unsound(plan):
        raise Refusal(
            "plan-mismatch", what="the plan does not hold together", where=path, fact=wrong,
            remedy=command("plan", "run.yaml", "-o", path),
        )  # fmt: skip
    return plan


def check_cluster(plan: Plan, cluster: Cluster, path: Path, remedy: str) -> None:
    """Refuse a plan that was made for another cluster, or that names devices which there are none of."""
    here = identity(cluster)
    if plan.inputs.cluster != here:
        devices = ", ".join(dict.fromkeys(device.host for device in plan.devices))
        raise Refusal(
            "plan-mismatch", what="the plan is for another cluster", where=path,
            fact=f"it is for cluster {plan.inputs.cluster} (hosts {devices}), this is cluster {here}", remedy=remedy,
        )  # fmt: skip
    there = {(host.name, index) for host in cluster.hosts for index in range(len(host.devices))}
    lacking = [f"{at.host}, device {at.index}" for at in plan.devices if (at.host, at.index) not in there]
    if lacking:
        raise Refusal(
            "plan-mismatch", what="the plan names devices which there are none of", where=path,
            fact="; ".join(lacking), remedy=remedy,
        )  # fmt: skip


def planned(path: Path, config: RunConfig, config_path: Path, console: Console) -> job.Planned:
    """The plan of a file with what run.yaml says of text and cluster; refuses where the two do not fit together."""
    from farspan import models
    from farspan.domain.engine import engine
    from farspan.estimate.price import estimate

    again = command("plan", config_path, "-o", path)
    plan = read(path)
    if not plan.inputs.corpus:
        raise Refusal(
            "plan-mismatch", what="the plan was made from flags, without text", where=path,
            fact="it has no hash of a corpus, so nothing says what to train on", remedy=again,
        )  # fmt: skip
    cluster, notes = _cluster(config)
    check_cluster(plan, cluster, path, again)
    folder, manifest = job.prepare(config, console)
    if plan.inputs.corpus != manifest.hash:
        raise Refusal(
            "plan-mismatch", what="the plan is for another text", where=path,
            fact=f"it is for corpus {plan.inputs.corpus}, {config_path} gives {manifest.hash}", remedy=again,
        )  # fmt: skip
    model = _named_model(config, manifest, cluster)
    if model is not None and model != plan.model:
        raise Refusal(
            "plan-mismatch", what="the plan is for another model", where=path,
            fact=f"it is for model {content_hash(plan.model)}, {config_path} names {content_hash(model)}", remedy=again,
        )  # fmt: skip
    console.say(f"as {path} says: model and training are the plan's, text and cluster {config_path}'s")
    resolved = job.Resolved(
        model=plan.model, train=plan.train, cluster=cluster, corpus=manifest, corpus_folder=folder, warnings=notes,
        origin={},
    )  # fmt: skip
    found = estimate(plan, models.graph(plan.model), cluster, engine(plan.engine))
    return job.Planned(plan=plan, estimate=found, resolved=resolved)


def _cluster(config: RunConfig) -> tuple[Cluster, tuple[str, ...]]:
    """The run's cluster: the one that it names, or this machine with a note on each GPU that is left out."""
    from farspan.launch.probe import Probe

    job.require_torch()
    given = job.given_cluster(config, reach=True)
    if given is not None:
        return given, ()
    notes, workers = job.check_gpus(config), config.parallel.workers
    with Probe() as probe:
        return probe.describe(config.parallel.device, None if workers == "auto" else workers), notes


class _NotNamedError(Exception):
    """run.yaml leaves the model to measurements."""


def _named_model(config: RunConfig, manifest: CorpusManifest, cluster: Cluster) -> ModelSpec | None:
    """The model that run.yaml names; None where it leaves its size to what the machine can do."""
    from farspan.planning.choose_model import choose_model

    def measure() -> float:
        raise _NotNamedError

    try:
        return choose_model(config, manifest, cluster, measure).model
    except _NotNamedError:
        return None
