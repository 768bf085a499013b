"""Random small clusters, models and trainings for tests of techniques: seeded, unlike in all that
farspan knows."""

from __future__ import annotations

import random

from farspan import models
from farspan.domain.cluster import Cluster, DataSheet, Device, Host, Link, Site
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.train import TrainSpec
from farspan.techniques import Task

GB = 10**9


def _kind(
    name: str, memory: int, fp16: float, fp32: float, bandwidth: float, watts: float, usd: float
) -> Device:
    sheet = DataSheet(
        flops={"fp16": fp16, "fp32": fp32},
        dtypes=("fp16", "fp32"),
        bandwidth=bandwidth,
        watts=watts,
    )
    return Device(kind=name, backend="cuda", memory=memory, sheet=sheet, usd_per_hour=usd)


KINDS = {
    "fast": _kind("fast", 24 * GB, 160e12, 20e12, 900e9, 200, usd=0.5),
    "slow": _kind("slow", 12 * GB, 60e12, 8e12, 300e9, 70, usd=0.2),
    "tiny": _kind("tiny", 3 * GB, 20e12, 3e12, 200e9, 50, usd=0.1),
}


def cluster(
    *sites: tuple[tuple[str, ...], ...], rtt_s: float = 0.05, bandwidth: float | None = 1e9 / 8
) -> Cluster:
    """Sites of hosts of device kinds: `cluster((("fast", "fast"),), (("slow",),))`; all sites
    linked alike."""
    made = tuple(
        Site(
            name=f"s{i}",
            hosts=tuple(
                Host(name=f"s{i}h{j}", devices=tuple(KINDS[kind] for kind in host))
                for j, host in enumerate(site)
            ),
        )
        for i, site in enumerate(sites)
    )
    links = tuple(
        Link(a=a.name, b=b.name, rtt_s=rtt_s, bandwidth=bandwidth)
        for i, a in enumerate(made)
        for b in made[i + 1 :]
    )
    return Cluster(sites=made, links=links)


def random_cluster(random_: random.Random, most: int = 6) -> Cluster:
    """Up to three sites of up to two hosts of up to two runs of devices, `most` devices in all."""
    left = most
    sites = []
    for i in range(random_.randint(1, 3)):
        hosts = []
        for j in range(random_.randint(1, 2)):
            count = min(left, random_.randint(1, 3))
            left -= count
            if count:
                kinds = (
                    [random_.choice(list(KINDS))] * count
                    if random_.random() < 0.6
                    else random_.choices(list(KINDS), k=count)
                )
                hosts.append(Host(name=f"s{i}h{j}", devices=tuple(KINDS[kind] for kind in kinds)))
        if hosts:
            sites.append(Site(name=f"s{i}", hosts=tuple(hosts)))
    links = tuple(
        Link(
            a=a.name,
            b=b.name,
            rtt_s=random_.choice((1e-3, 0.02, 0.1)),
            bandwidth=random_.choice((1e9, 1e10)) / 8,
        )
        for i, a in enumerate(sites)
        for b in sites[i + 1 :]
    )
    return Cluster(sites=tuple(sites), links=links)


def random_model(random_: random.Random, layers: int | None = None) -> ModelSpec:
    family = random_.choice(("gpt2", "llama"))
    return models.family(family).shape(
        d_model=random_.choice((128, 512, 1024)),
        layers=layers or random_.randint(1, 6),
        context=256,
        vocab_size=random_.choice((1024, 32768)),
        tied=random_.random() < 0.5,
    )


def task(
    model: ModelSpec,
    where: Cluster,
    *,
    batch: int = 16,
    seq_len: int = 256,
    precision: str = "fp16",
) -> Task:
    train = TrainSpec(steps=100, batch=batch, seq_len=seq_len, precision=precision)
    return Task(model, models.graph(model), where, train, load_engine("farspan"))
