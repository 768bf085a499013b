"""Rankings of small questions, for tests of what is said about them."""

from __future__ import annotations

import functools

from farspan import models
from farspan.domain.cluster import Cluster, DataSheet, Device, Host, Link, Site
from farspan.domain.engine import load_engine
from farspan.domain.train import TrainSpec
from farspan.planning.rank_plans import rank_plans
from farspan.planning.ranking import Ranking

FAST = Device(
    kind="fast",
    backend="cuda",
    memory=24 * 10**9,
    sheet=DataSheet(flops={"fp16": 1e14}, dtypes=("fp32", "fp16"), bandwidth=1e12, watts=100.0),
    usd_per_hour=2.0,
)
SLOW = Device(
    kind="slow",
    backend="cuda",
    memory=16 * 10**9,
    sheet=DataSheet(flops={"fp16": 4e13}, dtypes=("fp32", "fp16"), bandwidth=3e11, watts=70.0),
    usd_per_hour=0.5,
)
KINDS = {"F": FAST, "S": SLOW}


def cluster(*sites: tuple[Device, ...], rtt_s: float = 0.05, bandwidth: float = 1e9 / 8) -> Cluster:
    """A host a site with these devices, every two sites linked alike."""
    made = tuple(
        Site(
            name=f"s{i}", hosts=(Host(name=f"h{i}", devices=devices, cpus=32, memory=512 * 10**9),)
        )
        for i, devices in enumerate(sites)
    )
    pairs = [(a, b) for a in range(len(sites)) for b in range(a + 1, len(sites))]
    links = tuple(Link(a=f"s{a}", b=f"s{b}", rtt_s=rtt_s, bandwidth=bandwidth) for a, b in pairs)
    return Cluster(sites=made, links=links)


@functools.cache
def ranking(
    *sites: str,
    model: str = "gpt2",
    allow: tuple[str, ...] = ("data", "zero2", "diloco"),
    objective: str = "time",
    batch: int = 8,
) -> Ranking:
    """Few techniques of a small model on sites of devices, an F for a fast and an S for a slow
    one."""
    train = TrainSpec(steps=1000, batch=batch, seq_len=1024, precision="fp16")
    spec = models.presets()[model].spec
    return rank_plans(
        spec,
        cluster(*(tuple(KINDS[letter] for letter in site) for site in sites)),
        train,
        load_engine("farspan"),
        objective=objective,
        allow=allow,
    )  # type: ignore[arg-type]
