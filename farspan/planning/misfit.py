"""A model that fits nowhere: what is short, where, by how much, and the nearest things that fit.

What is short is that of the technique that lacks least: its plan were every device just enough
larger, in proportion. Or, where plans that were predicted to fit ran out of memory, what fits by
what they showed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.trial import Trial
from farspan.planning.candidate import Candidate
from farspan.planning.cluster_parts import whole_cluster
from farspan.planning.fit import (
    QUICK,
    Ground,
    Limit,
    Miss,
    Room,
    Rung,
    find_hardest_rung,
    holds_too_little,
    model_ladder,
    nearest_miss,
)
from farspan.planning.rank_plans import price_technique
from farspan.planning.select_by_trials import SelectionTask, limit_memory_by_ooms
from farspan.techniques import Task

#: Shorter sequences than this are not proposed.
SHORTEST = 128
#: Techniques that search for longer are asked what they lack on up to so many devices.
MOST_SEARCHED = 16
#: How many times each host's devices and hosts are multiplied when more devices are proposed, and
#: how many devices that may make at most.
MULTIPLES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
MOST_DEVICES = 512


class Misfit(msgspec.Struct, frozen=True, kw_only=True):
    """What a model lacks on a cluster, and what would fit. None where nothing of that sort was
    found."""

    technique: str
    #: The device, and the host if there too is too little.
    lacks: Room
    host: Room | None
    #: The largest model of the same family that fits.
    smaller: Limit | None
    #: The longest sequence, halved again and again, with which the model fits.
    seq_len: int | None
    #: Devices when every host stands there several times, and how many times.
    devices: int | None
    times: int | None


def explain_misfit(ground: Ground, model: ModelSpec) -> Misfit | None:
    """Explain why a model fits no part of the cluster; None where it does fit, or where memory is
    not what is lacking."""
    cluster = ground.cluster
    devices = len(cluster.devices)
    rung = Rung(count_parameters(model), model, ground.train_for(model, cluster), cluster)

    # The technique that lacks least.
    misses: dict[str, Miss] = {}
    for name in ground.allowed:
        if name in QUICK or devices <= MOST_SEARCHED:
            miss = nearest_miss(ground, rung, name, whole_cluster(cluster))
            if miss is not None:
                misses[name] = miss
    if not misses:
        return None
    name = min(misses, key=lambda name: misses[name].device.fill())
    device, host = misses[name]
    if host is not None and host.spare >= 0:
        host = None
    if device.spare >= 0 and host is None:
        return None

    # What fits instead.
    fit = find_hardest_rung(
        ground, model_ladder(ground, model.family, model.vocab_size, model.context)
    )
    smaller = fit.best if fit is not None and fit.best.amount < count_parameters(model) else None
    times = _enough_hosts(ground, model)
    return Misfit(
        technique=name,
        lacks=device if device.spare < 0 or host is None else host,
        smaller=smaller,
        host=host,
        seq_len=_shorter_seq_len(ground, model),
        devices=None if times is None else times * devices,
        times=times,
    )


def largest_tried(
    cluster: Cluster, asked: SelectionTask, tried: Sequence[tuple[Candidate, Trial]]
) -> Limit | None:
    """Return the largest model of the family that fits by what plans showed that ran out of memory
    though they were predicted to fit (`held`); None where none that is smaller does."""
    out = [candidate for candidate, trial in tried if trial.status == "oom"]
    less = limit_memory_by_ooms(cluster, asked.engine, out)
    model = asked.model
    ground = Ground(less, asked.engine, lambda model, cluster: asked.train, asked.allow)
    fit = find_hardest_rung(
        ground, model_ladder(ground, model.family, model.vocab_size, model.context)
    )
    return None if fit is None or fit.best.amount >= count_parameters(model) else fit.best


def _fits(ground: Ground, model: ModelSpec, cluster: Cluster, seq_len: int | None = None) -> bool:
    """Return whether any technique fits the model on the whole of a cluster."""
    train = ground.train_for(model, cluster)
    if seq_len is not None:
        train = replace(train, seq_len=seq_len)
    if holds_too_little(Rung(0, model, train, cluster), ground.engine, whole_cluster(cluster)):
        return False
    task = Task(model, models.graph(model), cluster, train, ground.engine)
    answers = (price_technique(task, whole_cluster(cluster), name) for name in ground.allowed)
    return any(isinstance(answer, Candidate) and answer.eligible for answer in answers)


def _shorter_seq_len(ground: Ground, model: ModelSpec) -> int | None:
    seq_len = ground.train_for(model, ground.cluster).seq_len
    while (seq_len := seq_len // 2) >= SHORTEST:
        if _fits(ground, model, ground.cluster, seq_len):
            return seq_len
    return None


def _enough_hosts(ground: Ground, model: ModelSpec) -> int | None:
    """Return how many times every host must stand there; tried with the techniques that plan at
    once."""
    allowed = tuple(name for name in ground.allowed if name in QUICK)
    if not allowed:
        return None
    for times in MULTIPLES:
        if times * len(ground.cluster.devices) > MOST_DEVICES:
            return None
        cluster = multiply_hosts(ground.cluster, times)
        if _fits(Ground(cluster, ground.engine, ground.train_for, allowed), model, cluster):
            return times
    return None


def multiply_hosts(cluster: Cluster, times: int) -> Cluster:
    """Repeat every host in its site."""
    sites = []
    for site in cluster.sites:
        hosts = []
        for host in site.hosts:
            hosts.append(host)
            hosts += [replace(host, name=f"{host.name}-{i}") for i in range(2, times + 1)]
        sites.append(replace(site, hosts=tuple(hosts)))
    return replace(cluster, sites=tuple(sites))
