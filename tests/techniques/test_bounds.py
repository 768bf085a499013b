"""What searches leave out: bounds are never above what is priced, and without them the same is
found."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import msgspec
import pytest

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.engine import load_engine
from farspan.estimate.estimate_plan import price, step
from farspan.estimate.gradient_sync import gradient_sync_times
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.techniques import Task, pipeshard
from farspan.techniques._bounds import passes_s, stages_s
from farspan.techniques._fastest_fitting import fastest_fitting
from farspan.techniques._search.even_grid import even_splits
from farspan.techniques._search.local_moves import _neighbours
from farspan.techniques._search.slices import Tables
from farspan.techniques._search.stage_partition import StageSearch
from farspan.techniques.diloco import _with_ranks
from tests.examples import slow_after
from tests.techniques.worlds import cluster, random_cluster, random_model, task

CASES = 16
#: A pipeline of many moves is tried up to so many.
MOVES = 12


def on_processors(where: Cluster) -> Cluster:
    """The same cluster of CPU workers, whose messages take of their own time."""
    sites = tuple(
        msgspec.structs.replace(
            site,
            hosts=tuple(
                msgspec.structs.replace(
                    host, cpus=4, devices=tuple(d.but(backend="cpu") for d in host.devices)
                )
                for host in site.hosts
            ),
        )
        for site in where.sites
    )
    return msgspec.structs.replace(where, sites=sites)


def world(seed: int, devices: int = 10, layers: int = 12, name: str = "farspan") -> Task:
    rng = random.Random(seed)
    where = random_cluster(rng, devices)
    asked = task(
        random_model(rng, layers=rng.randint(2, layers)), where, batch=rng.choice((8, 12, 16))
    )
    if name == "farspan" and rng.random() < 0.5:
        where = on_processors(where)
    train = msgspec.structs.replace(
        asked.train, wan_bits=rng.choice((8, 32)), recompute=rng.random() < 0.3
    )
    return Task(asked.model, asked.graph, where, train, load_engine(name))


def pipelines(asked: Task):
    """Even splits, what the stage search finds, and what moves make of that."""
    yield from even_splits(asked, pipeshard.microbatch_counts(asked))
    for solution, parts in pipeshard._solutions(asked, 6):
        deepest = pipeshard.stages_at(asked, solution, parts)
        yield deepest
        yield from itertools.islice(_neighbours(asked, deepest), MOVES)


@pytest.mark.parametrize("name", ["farspan", "alpa2022", "torch2024"])
@pytest.mark.parametrize("seed", slow_after(5, range(CASES)))
def test_no_bound_is_above_the_step(seed: int, name: str):
    asked = world(seed, name=name)
    for replica in pipelines(asked):
        seconds = step(replica, asked.costs).seconds
        assert passes_s(replica, asked.costs) <= seconds
        assert stages_s(replica, asked.costs) <= seconds


def searches(asked: Task):
    for parts in pipeshard.microbatch_counts(asked):
        tables = Tables(asked, parts)
        for order in pipeshard.orders(asked):
            yield StageSearch(asked, order, tables), pipeshard.tied_s(asked, order), parts


@pytest.mark.parametrize("seed", slow_after(5, range(100, 100 + CASES)))
def test_a_limit_leaves_out_what_is_above_it_and_nothing_else(seed: int):
    asked = world(seed)
    for search, _, _ in searches(asked):
        everything = list(search.partition_stages())
        for found in everything[:: max(1, len(everything) // 4)]:
            limited = [
                one
                for one in search.partition_stages(found.objective)
                if one.objective <= found.objective
            ]
            assert limited == [one for one in everything if one.objective <= found.objective]


@pytest.mark.parametrize("seed", slow_after(5, range(200, 200 + CASES)))
def test_no_stage_is_below_the_least_cycle(seed: int):
    for search, _, _ in searches(world(seed)):
        bound = math.inf
        while (solved := search._solve_below(bound)) is not None:
            bound = 0.8 * solved[1]
            assert solved[1] >= search.least_cycle


@pytest.mark.parametrize("seed", slow_after(5, range(300, 300 + CASES)))
def test_the_best_solutions_are_those_of_a_search_without_limits(seed: int):
    asked = world(seed)
    everything = [
        (solution.objective + tied, place, number, solution, parts)
        for place, (search, tied, parts) in enumerate(searches(asked))
        for number, solution in enumerate(search.partition_stages())
        if len(solution.cuts) > 1
    ]
    best = heapq.nsmallest(5, everything, key=lambda row: row[:3])
    assert pipeshard._solutions(asked, 5) == [(solution, parts) for *_, solution, parts in best]


@pytest.mark.parametrize("seed", slow_after(5, range(400, 400 + CASES)))
def test_the_fastest_that_fits_is_that_of_all_priced(seed: int):
    asked = world(seed)
    replicas = list(even_splits(asked, pipeshard.microbatch_counts(asked)))
    fitting = [
        (step(one, asked.costs).seconds, i) for i, one in enumerate(replicas) if asked.fits(one)
    ]
    assert fastest_fitting(asked, replicas) == (min(fitting)[1] if fitting else None)


@pytest.mark.parametrize("seed", slow_after(5, range(CASES)))
def test_alike_sites_have_the_same_step_after_relabelling(seed: int):
    rng = random.Random(seed)
    site = tuple(tuple(rng.choices(("fast", "slow"), k=rng.randint(1, 3))) for _ in range(2))
    asked = task(random_model(rng, layers=4), cluster(site, (("fast",),), site), batch=12)
    first, _, last = asked.sites.values()
    assert asked.likeness(first) == asked.likeness(last)
    alone = Task(asked.model, asked.graph, asked.cluster, asked.train, asked.engine, only=first)
    found = pipeshard.plan(alone).replicas[0]
    here, there = (step(_with_ranks(found, ranks), asked.costs).seconds for ranks in (first, last))
    assert here == pytest.approx(there, rel=1e-12)


@pytest.mark.parametrize("seed", slow_after(5, range(CASES)))
def test_sums_once_a_step_do_not_depend_on_microbatches(seed: int):
    """`stage_time` keeps them for all."""
    asked = world(seed)
    for replica in even_splits(asked, (1, 2)):
        for stage in replica.stages:
            assert stage.zero < 2
            assert gradient_sync_times(asked.costs, stage, 1) == gradient_sync_times(
                asked.costs, stage, 6
            )


def test_costs_of_another_batch_are_those_of_a_fresh_start():
    asked = world(3)
    halved = msgspec.structs.replace(asked.train, batch=asked.train.batch // 2)
    plan = pipeshard.plan(asked)
    known = asked.costs.with_batch(halved, 8)
    fresh = Costs(
        models.graph(asked.model), halved, Network(asked.cluster, asked.devices, asked.engine), 8
    )
    assert price(plan, known) == price(plan, fresh)
