"""A model that fits nowhere: what is short, where, by how much, and the nearest things that fit.

What is short is told of the technique that lacks least: its plan were every device just enough
larger, in proportion. Or, where plans that were predicted to fit ran out of memory, what fits by
their word.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.model import ModelSpec, parameters
from farspan.domain.trial import Trial
from farspan.planning.candidate import Candidate
from farspan.planning.fit import (
    QUICK,
    Ground,
    Limit,
    Room,
    Rung,
    climb,
    holds_too_little,
    model_ladder,
    nearest_miss,
)
from farspan.planning.parts import whole
from farspan.planning.rank import candidate
from farspan.planning.select import SelectionTask, held
from farspan.techniques import Task

#: Shorter sequences than this are not proposed.
SHORTEST = 128
#: Techniques that search for longer are asked what they lack on up to so many devices.
MOST_SEARCHED = 16
#: How many times each host's devices and hosts are multiplied when more devices are proposed, and
#: how many devices that may make at most.
TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
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


def misfit(ground: Ground, model: ModelSpec) -> Misfit | None:
    """Why a model fits no part of the cluster; None where it does fit, or where memory is not what
    is lacking."""
    rung = Rung(parameters(model), model, ground.train_for(model, ground.cluster), ground.cluster)
    names = [
        name
        for name in ground.allowed
        if name in QUICK or len(ground.cluster.devices) <= MOST_SEARCHED
    ]
    misses = {name: nearest_miss(ground, rung, name, whole(ground.cluster)) for name in names}
    lacking = {name: miss for name, miss in misses.items() if miss is not None}
    if not lacking:
        return None
    name = min(lacking, key=lambda name: lacking[name].device.used / lacking[name].device.usable)
    device, host = lacking[name]
    host = host if host is not None and host.spare < 0 else None
    if device.spare >= 0 and host is None:
        return None
    fit = climb(ground, model_ladder(ground, model.family, model.vocab_size, model.context))
    smaller = fit.best if fit is not None and fit.best.amount < parameters(model) else None
    times = _times(ground, model)
    return Misfit(
        technique=name,
        lacks=device if device.spare < 0 or host is None else host,
        smaller=smaller,
        host=host,
        seq_len=_shorter(ground, model),
        devices=None if times is None else times * len(ground.cluster.devices),
        times=times,
    )


def largest_tried(
    cluster: Cluster, asked: SelectionTask, tried: Sequence[tuple[Candidate, Trial]]
) -> Limit | None:
    """The largest model of the family that fits by what plans showed that ran out of memory though
    they were predicted to fit (`held`); None where none that is smaller does."""
    out = [candidate for candidate, trial in tried if trial.status == "oom"]
    less = held(cluster, asked.engine, out)
    model = asked.model
    ground = Ground(less, asked.engine, lambda model, cluster: asked.train, asked.allow)
    fit = climb(ground, model_ladder(ground, model.family, model.vocab_size, model.context))
    return None if fit is None or fit.best.amount >= parameters(model) else fit.best


def _fits(ground: Ground, model: ModelSpec, cluster: Cluster, seq_len: int | None = None) -> bool:
    """Whether any technique fits the model on the whole of a cluster."""
    train = ground.train_for(model, cluster)
    if seq_len is not None:
        train = replace(train, seq_len=seq_len)
    if holds_too_little(Rung(0, model, train, cluster), ground.engine, whole(cluster)):
        return False
    task = Task(model, models.graph(model), cluster, train, ground.engine)
    answers = (candidate(task, whole(cluster), name) for name in ground.allowed)
    return any(isinstance(answer, Candidate) and answer.eligible for answer in answers)


def _shorter(ground: Ground, model: ModelSpec) -> int | None:
    seq_len = ground.train_for(model, ground.cluster).seq_len
    while (seq_len := seq_len // 2) >= SHORTEST:
        if _fits(ground, model, ground.cluster, seq_len):
            return seq_len
    return None


def _times(ground: Ground, model: ModelSpec) -> int | None:
    """How many times every host must stand there; tried with the techniques that plan at once."""
    allowed = tuple(name for name in QUICK if name in ground.allowed)
    if not allowed:
        return None
    for times in TIMES:
        if times * len(ground.cluster.devices) > MOST_DEVICES:
            return None
        cluster = multiplied(ground.cluster, times)
        if _fits(Ground(cluster, ground.engine, ground.train_for, allowed), model, cluster):
            return times
    return None


def multiplied(cluster: Cluster, times: int) -> Cluster:
    """Every host several times, in its site."""
    sites = tuple(
        replace(
            site,
            hosts=tuple(
                host if i == 0 else replace(host, name=f"{host.name}-{i + 1}")
                for host in site.hosts
                for i in range(times)
            ),
        )
        for site in cluster.sites
    )
    return replace(cluster, sites=sites)
