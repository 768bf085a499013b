"""What every technique promises: a whole plan that fits, the same each time, and no slower on
better hardware."""

from __future__ import annotations

import dataclasses
import itertools
import random

import msgspec
import pytest

from farspan import models, techniques
from farspan.domain.cluster import Cluster, Device
from farspan.domain.plan import Plan
from farspan.domain.problems import EXIT_CODES, Problem
from farspan.estimate.estimate_plan import estimate, price, step
from farspan.techniques import Task
from farspan.techniques._fastest_fitting import shortage
from tests.techniques.worlds import KINDS, cluster, random_cluster, random_model, task

WORLDS = range(12)


def world(seed: int) -> Task:
    rng = random.Random(seed)
    return task(random_model(rng), random_cluster(rng, 6), batch=rng.choice((6, 8, 16)))


def faster(cluster_: Cluster, factor: float) -> Cluster:
    """The same with devices and links `factor` times as fast."""

    def better(device: Device) -> Device:
        return device.but(
            flops={dtype: rate * factor for dtype, rate in device.sheet.flops.items()},
            bandwidth=device.sheet.bandwidth * factor,
        )

    sites = tuple(
        msgspec.structs.replace(
            site,
            hosts=tuple(
                msgspec.structs.replace(host, devices=tuple(map(better, host.devices)))
                for host in site.hosts
            ),
        )
        for site in cluster_.sites
    )
    links = tuple(
        msgspec.structs.replace(link, rtt_s=link.rtt_s / factor, bandwidth=link.bandwidth * factor)
        for link in cluster_.links
    )
    return msgspec.structs.replace(cluster_, sites=sites, links=links)


@pytest.mark.parametrize("name", techniques.technique_names())
def test_every_technique_keeps_the_contract(name: str):
    planned = 0
    for seed in WORLDS:
        asked = world(seed)
        made = techniques.technique(name).plan(asked)
        if isinstance(made, Problem):
            assert made.code in EXIT_CODES and made.what and made.fact and made.remedy
            continue
        planned += 1
        assert made.technique == name and made.inputs == asked.inputs
        assert_whole(asked, made)
        assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made
        assert techniques.technique(name).plan(world(seed)).hash == made.hash
        found = price(made, asked.costs)
        assert shortage(asked, made, found)[0] <= 0
        assert found.step_s == pytest.approx(
            found.compute_s + found.communication_s + found.bubble_s
        )
        better = estimate(made, asked.graph, faster(asked.cluster, 1.5), asked.engine)
        assert better.step_s <= found.step_s * (1 + 1e-9)
    assert planned, "no world gave this technique a plan"


@pytest.mark.parametrize("family", ["smollm3", "olmo2", "gemma3"])
def test_every_technique_plans_models_whose_layers_differ(family: str):
    model = models.family(family).shape(d_model=512, layers=7, context=1024, vocab_size=1024)
    where = cluster((("fast", "fast"), ("fast", "fast")), (("fast", "fast"), ("fast", "fast")))
    asked = task(model, where, seq_len=1024)
    for name in techniques.technique_names():
        made = techniques.technique(name).plan(asked)
        assert isinstance(made, Plan), name
        assert_whole(asked, made)
        assert shortage(asked, made, price(made, asked.costs))[0] <= 0


def assert_whole(asked: Task, made: Plan) -> None:
    """Every device once, every unit once a replica, every sequence once a step."""
    ranks = [
        rank for replica in made.replicas for stage in replica.stages for rank in stage.mesh.ranks
    ]
    assert sorted(ranks) == list(asked.ranks)
    assert sum(replica.batch for replica in made.replicas) == asked.train.batch
    for replica in made.replicas:
        bounds = [stage.units for stage in replica.stages]
        assert bounds[0][0] == 0 and bounds[-1][1] == asked.graph.units
        assert all(
            a[1] == b[0] and a[0] < a[1]
            for a, b in itertools.pairwise([*bounds, (bounds[-1][1],) * 2])
        )
        for stage in replica.stages:
            assert sum(stage.rows) == replica.batch and min(stage.rows) >= 1
            hosts = [asked.costs.network.hosts[rank] for rank in stage.mesh.ranks]
            kinds = [asked.costs.network.devices[rank].kind for rank in stage.mesh.ranks]
            for group in stage.mesh.batch:
                at = [stage.mesh.ranks.index(rank) for rank in group]
                # A tensor axis stays inside a host, among like devices.
                assert len({hosts[i] for i in at}) == len({kinds[i] for i in at}) == 1


@pytest.mark.parametrize("seed", WORLDS)
def test_more_freedom_is_never_slower(seed: int):
    asked = world(seed)
    found = {
        name: techniques.technique(name).plan(asked) for name in ("data", "shard", "pipeshard")
    }
    step = {
        name: price(made, asked.costs).step_s
        for name, made in found.items()
        if isinstance(made, Plan)
    }
    if len(asked.ranks) == 1:
        assert set(step) <= {"data"}
        return
    assert step.get("pipeshard", 1e9) <= step.get("shard", 1e9) * (1 + 1e-9)
    assert step.get("shard", 1e9) <= step.get("data", 1e9) * (1 + 1e-9)


def test_rows_follow_speed_and_no_other_division_is_much_faster():
    where = cluster((("fast", "fast"), ("slow",)))
    asked = task(random_model(random.Random(1), layers=4), where, batch=60)
    made = techniques.technique("data").plan(asked)
    assert isinstance(made, Plan)
    (replica,) = made.replicas
    (stage,) = replica.stages

    def seconds(*rows: int) -> float:
        other = msgspec.structs.replace(
            replica, stages=(msgspec.structs.replace(stage, rows=rows),)
        )
        return step(other, asked.costs).seconds

    rows = stage.rows
    assert min(rows[:2]) > rows[2] > 0 and sum(rows) == 60
    best = min(seconds(a, b, 60 - a - b) for a in range(1, 59) for b in range(1, 60 - a))
    assert seconds(*rows) <= 1.01 * best


def test_technique_that_does_not_fit_names_the_device_and_missing_memory():
    small = msgspec.structs.replace(KINDS["tiny"], memory=300_000_000)
    where = cluster((("tiny",),))
    host = msgspec.structs.replace(where.sites[0].hosts[0], devices=(small,))
    where = msgspec.structs.replace(
        where, sites=(msgspec.structs.replace(where.sites[0], hosts=(host,)),)
    ).named("my cluster.yaml")
    made = techniques.technique("data").plan(task(random_model(random.Random(1), layers=6), where))
    assert isinstance(made, Problem) and made.code == "out-of-memory"
    assert (
        "tiny is short of" in made.what
        and "s0h0" in made.where
        and "usable 270 MB of 300 MB" in made.fact
    )
    assert made.remedy == "ask what fits: farspan fit model --cluster 'my cluster.yaml'"


def test_a_technique_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(Exception, match="pipeshard"):
        techniques.technique("pipeshar")


def test_replicas_of_different_shape_sync_in_fp32():
    """Workers round only what all of them round alike (runtime/parallel/outer_step.py)."""

    def bits(*sites: tuple[tuple[str, ...], ...]) -> int:
        asked = task(random_model(random.Random(1), layers=4), cluster(*sites))
        asked = dataclasses.replace(asked, train=msgspec.structs.replace(asked.train, wan_bits=8))
        made = techniques.plan("diloco", asked)
        assert isinstance(made, Plan) and made.sync is not None
        return made.sync.bits

    assert bits((("fast", "fast"),), (("fast", "fast"),)) == 8
    assert bits((("fast",),), (("fast", "fast"),)) == 32


def test_diloco_plan_leaves_memory_for_the_outer_optimizer_state():
    """A site's own plan would fill its device and leave none: then it is divided into more
    microbatches."""
    model = random_model(random.Random(1), layers=6)
    roomy = task(model, cluster((("fast",),), (("fast",),)), batch=64)
    alone = techniques.plan("data", dataclasses.replace(roomy, only=(0,)))
    assert isinstance(alone, Plan)
    needed = price(alone, dataclasses.replace(roomy, only=(0,)).costs).memory[0].total
    # Room for the plan of all sequences at once, but not for eight bytes a parameter more.
    tight = msgspec.structs.replace(
        KINDS["fast"], memory=int((needed + 4 * roomy.graph.parameters()) / roomy.engine.fill)
    )
    sites = tuple(
        msgspec.structs.replace(
            site, hosts=tuple(msgspec.structs.replace(h, devices=(tight,)) for h in site.hosts)
        )
        for site in roomy.cluster.sites
    )
    train = msgspec.structs.replace(roomy.train, batch=2 * alone.replicas[0].batch)
    asked = dataclasses.replace(
        roomy, cluster=msgspec.structs.replace(roomy.cluster, sites=sites), train=train, memo={}
    )
    made = techniques.plan("diloco", asked)
    assert isinstance(made, Plan), made
    assert shortage(asked, made, price(made, asked.costs))[0] <= 0


def test_outer_sync_interval_is_short_enough_to_receive_a_stop_request():
    """They hear it, save and end where they meet, and a launcher that was interrupted kills after
    ten minutes."""

    def planned(slower: float) -> tuple[int, float]:
        where = faster(cluster((("fast",),), (("fast",),), rtt_s=0.1), 1 / slower)
        asked = task(random_model(random.Random(1), layers=4), where)
        asked = dataclasses.replace(asked, train=msgspec.structs.replace(asked.train, steps=10_000))
        made = techniques.plan("diloco", asked)
        assert isinstance(made, Plan) and made.sync is not None
        return made.sync.every, made.sync.every * price(made, asked.costs).step_s

    rounds = [planned(10.0**power) for power in range(7)]
    assert rounds[0][0] == 300, "nothing hinders the most that is tried"
    assert all(seconds <= 300 or every == 10 for every, seconds in rounds)
    assert rounds[-1][0] == 10
