"""The plans that techniques emit on small clusters, for a model of ordinary size: made to run by
one as deep and as divisible whose dims are a few numbers long."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

from msgspec.structs import replace

from farspan import models
from farspan.domain.cluster import Cluster, DataSheet, Device, Host, Link, Site
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.plan import Plan, Replica, Stage
from farspan.domain.train import TrainSpec
from farspan.planning.rank_plans import rank_plans
from tests.runtime.plans import TRAIN

GB = 10**9
MOST_DEVICES = 8
#: Memories that a model of 100 to 400 M parameters fills quite, nearly, and by far not.
MEMORIES = (3 * GB, 6 * GB, 24 * GB)


def random_cluster(rng: random.Random) -> Cluster:
    """Up to three sites of up to two hosts, devices alike inside a host more often than not."""
    kinds = []
    for i in range(2):
        memory = rng.choice(MEMORIES)
        flops = rng.choice((1, 4, 6)) * 1e12
        bandwidth = rng.choice((1, 4)) * 1e11
        sheet = DataSheet(flops={"fp32": flops}, bandwidth=bandwidth)
        kinds.append(Device(kind=f"k{i}", backend="cpu", memory=memory, sheet=sheet))
    left = rng.randint(2, MOST_DEVICES)
    sites = list[Site]()
    if rng.random() < 0.2:
        return _linked(rng, _alike(rng, kinds[0]))
    for s in range(rng.randint(1, 3)):
        hosts = list[Host]()
        for h in range(rng.randint(1, 2)):
            count = min(left, rng.choice((1, 2, 2, 3, 4)))
            left -= count
            devices = (
                [rng.choice(kinds)] * count if rng.random() < 0.8 else rng.choices(kinds, k=count)
            )
            hosts += [Host(name=f"s{s}h{h}", devices=tuple(devices))] if count else []
        sites += [Site(name=f"s{s}", hosts=tuple(hosts))] if hosts else []
    return _linked(rng, sites)


def _alike(rng: random.Random, kind: Device) -> list[Site]:
    """Two or more sites with as many devices in each."""
    sites = rng.randint(2, 3)
    devices = (kind,) * rng.randint(2, MOST_DEVICES // sites)
    return [
        Site(name=f"s{s}", hosts=(Host(name=f"s{s}h0", devices=devices),)) for s in range(sites)
    ]


def _linked(rng: random.Random, sites: list[Site]) -> Cluster:
    links = tuple(
        Link(
            a=a.name,
            b=b.name,
            rtt_s=rng.choice((1e-3, 0.02, 0.1)),
            bandwidth=rng.choice((1e9, 1e10)) / 8,
        )
        for i, a in enumerate(sites)
        for b in sites[i + 1 :]
    )
    return Cluster(sites=tuple(sites), links=links)


def random_model(rng: random.Random) -> ModelSpec:
    if rng.random() < 0.4:
        return models.family("gpt2").shape(
            d_model=768, layers=rng.randint(3, 6), heads=12, vocab_size=32768, context=256
        )
    return models.family("llama").shape(
        d_model=rng.choice((768, 1536)),
        layers=rng.randint(3, 6),
        heads=12,
        kv_heads=rng.choice((4, 6)),
        vocab_size=32768,
        context=256,
        tied=rng.random() < 0.5,
    )


@functools.cache
def planned(seed: int) -> tuple[Plan, ...]:
    """What every technique answers on a cluster and on its parts, each kind of plan once, ready to
    run."""
    return tuple(_planned(seed))


def _planned(seed: int) -> Iterator[Plan]:
    rng = random.Random(seed)
    train = TrainSpec(steps=1000, batch=rng.choice((8, 12, 16)), seq_len=256, precision="fp32")
    ranking = rank_plans(random_model(rng), random_cluster(rng), train, load_engine("farspan"))
    seen = set[object]()
    for one in ranking.candidates:
        if (key := structure(one.plan)) not in seen:
            seen.add(key)
            yield shrunk(one.plan)


def structure(plan: Plan) -> object:
    """What makes two plans exercise the same: everything but the numbers of rows, layers and
    buckets."""
    sites = [device.site for device in plan.devices]
    return (
        tuple(map(functools.partial(_structure, sites), plan.replicas)),
        plan.sync and plan.sync.overlap,
        plan.model.tied,
    )


def _structure(sites: list[str], replica: Replica) -> object:
    def of(stage: Stage, depth: int) -> object:
        names = [sites[rank] for rank in stage.mesh.ranks]
        places = tuple(names.index(name) for name in names)
        return (
            stage.mesh.shape,
            stage.mesh.axes,
            places,
            stage.zero,
            stage.recompute,
            tuple(stage.splits.items()),
            stage.grad_sync.topology,
            stage.grad_sync.bits,
            len(set(stage.rows)) > 1,
            depth >= replica.microbatches,
        )

    stages = tuple(map(of, replica.stages, replica.in_flight))
    return (
        stages,
        tuple((edge.bits, edge.streams > 1) for edge in replica.edges),
        replica.microbatches > 1,
    )


def shrunk(plan: Plan) -> Plan:
    """The same plan for a model of the same layers and heads, and of dims that divide alike."""
    spec = plan.model
    small = replace(spec, d_model=4 * spec.heads, d_ff=48, vocab_size=336, context=12)
    share = count_parameters(small) / count_parameters(spec)
    train = replace(TRAIN, batch=plan.train.batch, recompute=plan.train.recompute)
    return replace(
        plan,
        model=small,
        train=train,
        replicas=tuple(_shrunk(one, share) for one in plan.replicas),
        sync=replace(plan.sync, every=2) if plan.sync else None,
        inputs=replace(plan.inputs, corpus="7e57" * 4),
    )


def _shrunk(replica: Replica, share: float) -> Replica:
    """As many buckets as before."""
    stages = []
    for stage in replica.stages:
        size = stage.grad_sync.bucket_bytes
        sync = replace(
            stage.grad_sync, bucket_bytes=None if size is None else max(1, round(size * share))
        )
        stages.append(replace(stage, grad_sync=sync))
    return replace(replica, stages=tuple(stages))
