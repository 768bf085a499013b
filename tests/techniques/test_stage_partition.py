"""The stage search against enumeration of everything that it may choose from, and against the full
estimator."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest

from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.estimate.estimate_plan import price
from farspan.estimate.stage_time import stage_time
from farspan.techniques import pipeshard
from farspan.techniques._fastest_fitting import shortage
from farspan.techniques._search.even_grid import even_splits
from farspan.techniques._search.slices import Tables, slices, stage_of
from farspan.techniques._search.stage_partition import StageSearch
from tests.techniques.worlds import cluster, random_cluster, random_model, task

CASES = 24


def case(seed: int, devices: int, layers: int):
    rng = random.Random(seed)
    model = random_model(rng, layers=rng.randint(1, layers))
    return task(model, random_cluster(rng, devices), batch=rng.choice((4, 8))), rng.choice((2, 4))


def device_cuts(search: StageSearch):
    """Every way to cut the device order into slices, by enumeration of places."""
    n = len(search.order)
    allowed = set(slices(search.task, search.order))
    for inner in range(n):
        for cuts in itertools.combinations(range(1, n), inner):
            runs = [type(next(iter(allowed)))(a, b) for a, b in itertools.pairwise((0, *cuts, n))]
            if all(run in allowed for run in runs):
                yield runs


def enumerate_all(asked, tables: Tables, search: StageSearch) -> tuple[float, int]:
    """The least objective over all cuts of devices and units and all options, each stage priced by
    itself; and how many combinations that were."""
    known: dict = {}

    def stage(run, units, to_come):
        """Seconds of every option that memory lets be deep enough, and how many options there
        are."""
        key = (run, units)
        if key not in known:
            ranks = [search.order[i] for i in range(*run)]
            found = []
            for option in tables.options(ranks):
                seconds, cycle, fixed, each = tables._price_stage(ranks, option, units)
                deep = 0 if fixed > 0 else min(tables.microbatches, int(-fixed // max(each, 1.0)))
                found.append((seconds, cycle, deep))
            known[key] = found
        return [
            (s, c) for s, c, depth in known[key] if depth >= min(tables.microbatches, to_come)
        ], len(known[key])

    best = math.inf
    size = 0
    units = asked.graph.units
    for runs in device_cuts(search):
        for inner in itertools.combinations(range(1, units), len(runs) - 1):
            bounds = list(itertools.pairwise((0, *inner, units)))
            priced = [
                stage(run, cut, len(runs) - i)
                for i, (run, cut) in enumerate(zip(runs, bounds, strict=True))
            ]
            size += math.prod(count for _, count in priced)
            wires = [
                search.link(b.start, min(search.hosts[a], search.hosts[b]))
                for a, b in itertools.pairwise(runs)
            ]
            way = sum(wire.p2p_latency for wire in wires)
            busy = max((wire.p2p_occupancy for wire in wires), default=0.0)
            for picks in itertools.product(*(options for options, _ in priced)):
                slowest = max(*(cycle for _, cycle in picks), (tables.microbatches - 1) * busy)
                best = min(best, sum(seconds for seconds, _ in picks) + way + slowest)
    return best, size


@pytest.mark.parametrize("seed", range(CASES))
def test_the_search_equals_enumeration_of_cuts_meshes_and_recompute(seed: int):
    asked, parts = case(seed, devices=5, layers=4)
    tables = Tables(asked, parts)
    total = 0
    for order in pipeshard.orders(asked):
        search = StageSearch(asked, order, tables)
        least, size = enumerate_all(asked, tables, search)
        total += size
        found = min(
            (solution.objective for solution in search.partition_stages()), default=math.inf
        )
        assert found == pytest.approx(least, rel=1e-6) if least < math.inf else found == math.inf
    print(
        f"seed {seed}: {total:,} pipelines over {len(pipeshard.orders(asked))} orders of "
        f"{len(asked.ranks)} devices"
    )


def test_orders_of_sites_differ_by_all_that_their_lines_do():
    """Round trips alone are alike: the pipeline must still go round the slow line."""
    three = cluster((("fast",),), (("fast",),), (("fast",),), rtt_s=0.05, bandwidth=10e9 / 8)
    slow = msgspec.structs.replace(three.links[0], bandwidth=1e8 / 8)
    asked = task(
        random_model(random.Random(1), layers=6),
        msgspec.structs.replace(three, links=(slow, *three.links[1:])),
    )
    found = pipeshard.orders(asked)
    assert any(order in found for order in ((0, 2, 1), (1, 2, 0)))


def test_a_tensor_axis_of_the_even_grid_stays_among_like_devices_of_one_host():
    unlike = task(
        random_model(random.Random(1), layers=4),
        cluster(tuple(("fast", "tiny") for _ in range(4))),
        batch=16,
    )
    across = task(
        random_model(random.Random(1), layers=4),
        cluster((("fast",) * 2, ("fast",) * 3, ("fast",) * 3)),
        batch=16,
    )
    alike = task(
        random_model(random.Random(1), layers=4), cluster((("fast",) * 4, ("fast",) * 4)), batch=16
    )
    widths = [
        {
            stage.mesh.size("tensor")
            for replica in even_splits(one, (1, 2))
            for stage in replica.stages
        }
        for one in (unlike, across, alike)
    ]
    assert widths[0] == widths[1] == {1} and 2 in widths[2]


@pytest.mark.parametrize("seed", range(100, 100 + CASES))
def test_every_solution_of_the_search_is_a_plan_that_the_estimator_prices_as_its_tables_do(
    seed: int,
):
    asked, parts = case(seed, devices=6, layers=6)
    tables = Tables(asked, parts)
    search = StageSearch(asked, tuple(asked.ranks), tables)
    for solution in itertools.islice(search.partition_stages(), 3):
        for cut in solution.cuts:
            stage = stage_of(cut.ranks, cut.option, cut.units, parts)
            time = stage_time(asked.costs, stage, stage.rows, parts)
            run = next(
                run
                for run in search.ranges
                if [search.order[i] for i in range(*run)] == list(cut.ranks)
            )
            seconds = time.passes.forward + time.passes.backward
            expected = seconds, (parts - 1) * seconds + time.exposed + time.update
            blocks = cut.units[1] - cut.units[0] - sum(search.ends(run))
            told = [
                (lane.seconds[:, blocks], lane.cycle[:, blocks]) for lane in search.stage_costs[run]
            ]
            pairs = [pair for s, c in told for pair in zip(s, c, strict=True)]
            assert any(pair == pytest.approx(expected, rel=1e-3) for pair in pairs)


@pytest.mark.parametrize("seed", range(200, 200 + CASES))
def test_plans_fit_and_cover_every_unit(seed: int):
    asked, _ = case(seed, devices=6, layers=6)
    made = pipeshard.plan(asked)
    if isinstance(made, Problem):
        assert made.code in ("out-of-memory", "cannot-plan")
        return
    assert isinstance(made, Plan)
    found = price(made, asked.costs)
    assert shortage(asked, made, found)[0] <= 0
    (replica,) = made.replicas
    assert replica.stages[0].units[0] == 0 and replica.stages[-1].units[1] == asked.graph.units
    assert all(a.units[1] == b.units[0] for a, b in itertools.pairwise(replica.stages))
    assert sorted(rank for stage in replica.stages for rank in stage.mesh.ranks) == list(
        asked.ranks
    )
    assert all(sum(stage.rows) == asked.train.batch for stage in replica.stages)
