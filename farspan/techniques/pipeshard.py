"""Pipeline stages over device orders, each stage with a mesh and an intra-operator plan of its own.

The search states its orders: of up to three sites all; of more as given, by speed both ways, and
along the shortest round trips both ways; hosts inside a site and devices inside a host as given;
with a tied table each also with half of the first site's devices last. For each order and number of
microbatches the stage search meets every optimum of its additive objective; the best few are priced
by the full estimator, with the depth in flight that covers the round trips, and the best of those
is moved cut by cut while that helps.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from farspan.domain.plan import Plan, Replica
from farspan.domain.problems import Problem, command
from farspan.estimate.estimate_plan import step
from farspan.techniques import shard
from farspan.techniques._bounds import passes_s, stages_s
from farspan.techniques._search.even_grid import even_splits
from farspan.techniques._search.local_moves import ALL_MOVES, improved
from farspan.techniques._search.one_stage import one_device
from farspan.techniques._search.slices import EVERY_RUN, Tables, stage_of
from farspan.techniques._search.stage_partition import Solution, StageSearch
from farspan.techniques._task import Task, cannot

#: Solutions of the stage search that the full estimator prices: on up to EVERY_RUN devices, and on
#: more.
MAX_PRICED = 32
MAX_PRICED_ON_MANY = 16
#: Up to this number of devices the usual grid is tried too.
MAX_DEVICES_FOR_GRID = 64
#: The best of these that moves start from; on many devices the best alone.
MAX_STARTS = 3
#: Microbatches of a step: beyond, per-microbatch overheads outweigh what remains of the bubble.
MAX_MICROBATCHES = 64
#: Each number of microbatches is at least this factor times the one before.
MICROBATCH_FACTOR = 1.4
#: Up to this number of sites every order is tried.
MAX_SITES_FOR_ALL_ORDERS = 3

#: Seconds of a step, and the replica that takes them.
Timed = tuple[float, Replica]


def plan(task: Task) -> Plan | Problem:
    """Return the best pipeline, or a single stage where that is faster."""
    problem = one_device(task, "pipeshard")
    if problem:
        return problem
    candidates: list[Timed] = []
    pipeline = best_pipeline(task)
    if pipeline is not None:
        candidates.append(pipeline)
    single = shard.plan(task)
    if isinstance(single, Plan):
        replica = single.replicas[0]
        candidates.append((step(replica, task.costs).seconds, replica))
    elif not candidates:
        return single if single.code == "out-of-memory" else no_pipeline_fits(task)
    _, fastest = min(candidates, key=step_seconds)
    return task.plan("pipeshard", [fastest])


def no_pipeline_fits(task: Task) -> Problem:
    return cannot(
        "no pipeline fits these devices",
        "the cluster",
        f"{len(task.ranks)} devices, batch {task.train.batch}",
        f"ask what fits: {command('fit', 'model', '--cluster', task.cluster.name)}",
    )


def step_seconds(timed: Timed) -> float:
    return timed[0]


def best_pipeline(task: Task) -> Timed | None:
    """Return the fastest pipeline of two or more stages that fits, if any."""
    num_devices = len(task.ranks)
    max_starts = MAX_STARTS if num_devices <= ALL_MOVES else 1
    timed = _priced_solutions(task, max_starts)
    if ALL_MOVES < num_devices <= MAX_DEVICES_FOR_GRID or not timed:
        limit = min(map(step_seconds, timed), default=math.inf)
        even = _best_even_split(task, limit)
        timed += [even] if even else []
    timed.sort(key=step_seconds)
    moved = [improved(task, *start) for start in timed[:max_starts]]
    return min(moved, key=step_seconds, default=None)


def _priced_solutions(task: Task, max_starts: int) -> list[Timed]:
    """Return at least the `max_starts` fastest solutions of the stage search, fully priced.

    They keep the order of their objectives. A replica with a lower bound above those is not
    simulated.
    """
    max_solutions = MAX_PRICED if len(task.ranks) <= EVERY_RUN else MAX_PRICED_ON_MANY
    replicas = []
    for solution, microbatches in _solutions(task, max_solutions):
        replicas.append(stages_at(task, solution, microbatches))
    lower_bounds = [stages_s(replica, task.costs) for replica in replicas]
    timed: dict[int, Timed] = {}
    for index in sorted(range(len(replicas)), key=lower_bounds.__getitem__):
        fastest = sorted(map(step_seconds, timed.values()))[:max_starts]
        if len(fastest) == max_starts and lower_bounds[index] > fastest[-1]:
            break
        pipeline = at_best_depth(task, replicas[index])
        if pipeline:
            timed[index] = pipeline
    return [timed[index] for index in sorted(timed)]


class _Search(NamedTuple):
    """The stage search of one order; `tied_s` is what a tied embedding adds to its objectives."""

    upper_bound: float
    number: int
    tied_s: float
    stages: StageSearch


class _Ranked(NamedTuple):
    """A solution with its whole objective; the numbers order equal ones."""

    objective: float
    search: int
    number: int
    solution: Solution
    microbatches: int


def _solutions(task: Task, max_solutions: int) -> list[tuple[Solution, int]]:
    """Return the best solutions of all orders and numbers of microbatches, with the latter.

    The search with the lowest upper bound is first: the rest is then rejected sooner.
    """
    searches: list[_Search] = []
    for microbatches in microbatch_counts(task):
        tables = Tables(task, microbatches)
        for order in orders(task):
            stages = StageSearch(task, order, tables)
            tied = tied_s(task, order)
            upper_bound = stages.quick_upper_bound() + tied
            searches.append(_Search(upper_bound, len(searches), tied, stages))

    best: list[_Ranked] = []
    for search in sorted(searches, key=lambda search: search[:2]):
        limit = best[-1].objective if len(best) == max_solutions else math.inf
        for number, solution in enumerate(search.stages.partition_stages(limit - search.tied_s)):
            if len(solution.cuts) > 1:
                objective = solution.objective + search.tied_s
                microbatches = search.stages.microbatches
                best.append(_Ranked(objective, search.number, number, solution, microbatches))
        best = heapq.nsmallest(max_solutions, best, key=lambda ranked: ranked[:3])
    return [(ranked.solution, ranked.microbatches) for ranked in best]


def _best_even_split(task: Task, limit: float) -> Timed | None:
    """Return the fastest even split below `limit` seconds that fits.

    The stage search on whole hosts does not contain these.
    """
    fastest = None
    lower_bounds: dict[tuple[int, int, int], float] = {}
    for replica in even_splits(task, microbatch_counts(task)):
        # The passes do not depend on ZeRO's level.
        tensor = replica.stages[0].mesh.size("tensor")
        shape = (replica.microbatches, len(replica.stages), tensor)
        if shape not in lower_bounds:
            lower_bounds[shape] = passes_s(replica, task.costs)
        if lower_bounds[shape] >= limit or not task.fits(replica):
            continue
        if stages_s(replica, task.costs) >= limit:
            continue
        seconds = step(replica, task.costs).seconds
        if seconds < limit:
            limit = seconds
            fastest = (seconds, replica)
    return fastest


def tied_s(task: Task, order: Sequence[int]) -> float:
    """Return seconds that a tied embedding's gradient takes from the last stage to the first, and
    its rows back."""
    if not task.graph.tied:
        return 0.0
    network = task.costs.network
    streams = task.streams(order[0], order[-1])
    wire = network.wire(order[0], order[-1], collective=False, streams=streams)
    nbytes = 4 * task.graph.size("vd")
    return 2 * (wire.delay_s + network.send_s(wire, nbytes) + wire.copy_byte_s * nbytes)


def microbatch_counts(task: Task) -> list[int]:
    """Return numbers of microbatches that divide the batch.

    On many devices the fewest is 4: a pipeline over them would mostly wait.
    """
    batch = task.train.batch
    fewest = 4 if len(task.ranks) > EVERY_RUN and batch % 4 == 0 else 1
    counts: list[int] = []
    for count in range(fewest, min(batch, MAX_MICROBATCHES) + 1):
        if batch % count == 0 and (not counts or count >= MICROBATCH_FACTOR * counts[-1]):
            counts.append(count)
    return counts


def orders(task: Task) -> list[tuple[int, ...]]:
    """Return the device orders to search (module docstring), without equal ones.

    Two orders are equal if the devices are alike at every place, and the links between them.
    """
    network = task.costs.network
    by_site: dict[str, list[int]] = {}
    for rank in task.ranks:
        by_site.setdefault(network.sites[rank], []).append(rank)
    site_names = list(by_site)
    site_orders = list(dict.fromkeys(_site_orders(task, site_names, by_site)))

    # A tied embedding is cheapest where both ends of the pipeline lie in one site: half of the
    # first site's devices go last. Of many orders only the first is rotated so: on fast links that
    # saves little, on slow ones the shortest is first.
    candidates = [(order, False) for order in site_orders]
    if task.graph.tied:
        few = len(site_names) <= MAX_SITES_FOR_ALL_ORDERS
        candidates += [(order, True) for order in (site_orders if few else site_orders[:1])]

    orders = []
    seen = set()
    for site_order, is_rotated in candidates:
        ranks = tuple(itertools.chain.from_iterable(by_site[site] for site in site_order))
        if is_rotated:
            first = len(by_site[site_order[0]])
            moved = min(max(1, first // 2), first - 1)
            ranks = ranks[moved:] + ranks[:moved]
        pairs = zip(ranks, (*ranks[1:], ranks[-1]), strict=True)
        key = tuple((task.costs.alike[a], _link_key(task, a, b)) for a, b in pairs)
        if key not in seen:
            seen.add(key)
            orders.append(ranks)
    return orders


def _link_key(task: Task, a: int, b: int) -> tuple[object, ...]:
    """Return the key that the time of messages between two ranks depends on."""
    wire = task.costs.network.wire(a, b, collective=False, streams=task.streams(a, b))
    is_local = wire.sites[0] == wire.sites[1]
    return wire.delay_s, wire.rate, wire.line, wire.timed, wire.copy_byte_s, is_local


def _site_orders(
    task: Task, sites: list[str], by_site: dict[str, list[int]]
) -> Iterator[tuple[str, ...]]:
    if len(sites) <= MAX_SITES_FOR_ALL_ORDERS:
        yield from itertools.permutations(sites)
        return
    network = task.costs.network

    def rtt_s(a: str, b: str) -> float:
        return network.rtt_s(by_site[a][0], by_site[b][0])

    def block_seconds(site: str) -> float:
        return sum(task.costs.unit_s(by_site[site][0], task.graph.block, 1, {}, 1))

    # From each site the nearest remaining one, and so on: the shortest of these chains.
    chains = []
    for start in sites:
        chain = [start]
        remaining = [site for site in sites if site != start]
        while remaining:
            nearest = min(remaining, key=functools.partial(rtt_s, chain[-1]))
            chain.append(nearest)
            remaining.remove(nearest)
        chains.append((sum(map(rtt_s, chain, chain[1:])), tuple(chain)))
    shortest = min(chains)[1]
    fastest_first = tuple(sorted(sites, key=block_seconds))
    yield shortest
    yield shortest[::-1]
    yield tuple(sites)
    yield fastest_first
    yield fastest_first[::-1]


def stages_at(task: Task, solution: Solution, microbatches: int) -> Replica:
    """Return a solution's replica, with the most microbatches in flight that memory holds."""
    stages = []
    in_flight = []
    for cut in solution.cuts:
        stages.append(stage_of(cut.ranks, cut.option, cut.units, microbatches))
        in_flight.append(min(microbatches, cut.depth))
    return task.replica(stages, microbatches, in_flight)


def at_best_depth(task: Task, deepest: Replica) -> Timed | None:
    """Return the fastest step of a pipeline over numbers of microbatches in flight, if one fits.

    1F1B's, or more up to those of `deepest`: these cover round trips, but delay the first backward
    pass.
    """
    num_stages = len(deepest.stages)
    few_devices = len(task.ranks) <= EVERY_RUN
    timed: dict[tuple[int, ...], Timed] = {}
    for extra in (0, 2, 8, deepest.microbatches) if few_devices else (0, 8):
        in_flight = []
        for stage, limit in enumerate(deepest.in_flight):
            in_flight.append(min(limit, num_stages - stage + extra))
        depths = tuple(in_flight)
        if depths in timed:
            continue
        replica = msgspec.structs.replace(deepest, in_flight=depths)
        if not task.fits(replica):
            break
        timed[depths] = (step(replica, task.costs).seconds, replica)
    return min(timed.values(), key=step_seconds, default=None)
