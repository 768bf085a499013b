"""By what a plan and a cluster are known again: hashes without what differs from one day to the
next."""

from __future__ import annotations

from typing import Any

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.cluster_json import as_json
from farspan.domain.plan import Plan
from farspan.domain.struct_files import content_hash


def plan_key(plan: Plan) -> str:
    """Return the key of a plan's seconds a step on a cluster: its hash without the run's length,
    schedule, inputs, and what the cluster calls its devices."""
    train, devices = (
        plan.train,
        tuple(msgspec.structs.replace(at, kind=msgspec.UNSET) for at in plan.devices),
    )
    return content_hash(
        plan.model,
        plan.replicas,
        plan.sync,
        devices,
        plan.engine,
        train.batch,
        train.seq_len,
        train.precision,
        train.attention,
        train.recompute,
        # What `auto` chose is the devices'.
        train.compile is True,
        train.wan_bits,
    )


def training_key(plan: Plan) -> str:
    """Return the key that two plans must share so that one resumes from the other's checkpoint:
    model, text, and all that decides the loss of synchronous steps. How the work is divided, and
    how often is saved and validated, may differ."""
    return content_hash(*_training(plan).values())


def unlike_training(plan: Plan, other: Plan) -> list[str]:
    """Return the keys of run.yaml by which the training of two plans differs."""
    mine, theirs = _training(plan), _training(other)
    return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


def _training(plan: Plan) -> dict[str, Any]:
    train = plan.train
    # An earlier version's checkpoints know no regularization.
    more = (
        {"train.dropout, train.mask or train.reshuffle": train.regularization}
        if train.regularization
        else {}
    )
    return {
        "model": plan.model,
        "data": plan.inputs.corpus,
        "train.steps": train.steps,
        "train.batch": train.batch,
        "model.context": train.seq_len,
        "train.precision": train.precision,
        "train.optimizer": train.optimizer,
        "train.schedule": train.schedule,
        "train.seed": train.seed,
        **more,
    }


def cluster_hash(cluster: Cluster) -> str:
    """Return the key of a cluster's measurements: the hash of all its figures, the catalogue's too,
    without what a trial measured on one day and the processes of a lab."""

    def lasting_host(host: Host) -> Host:
        devices = tuple(own.but(pace=1.0, framework=None, enter=None) for own in host.devices)
        return msgspec.structs.replace(host, devices=devices, enter=None)

    links = tuple(msgspec.structs.replace(link, pace=1.0) for link in cluster.links)
    return content_hash(
        as_json(msgspec.structs.replace(cluster.with_hosts(lasting_host), links=links))
    )


def identity(cluster: Cluster) -> str:
    """Return the cluster's identity for a plan: its sites, hosts and devices. How fast these are,
    and the links between them, is measured and learned again, and the plan priced by it."""
    devices = [
        (site.name, host.name, device.kind, device.backend, device.slot.threads)
        for site in cluster.sites
        for host in site.hosts
        for device in host.devices
    ]
    return content_hash(devices)


def lasting(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan as it is known again on the same cluster on another day."""
    inputs = msgspec.structs.replace(plan.inputs, cluster=identity(cluster))
    return msgspec.structs.replace(plan, inputs=inputs)
