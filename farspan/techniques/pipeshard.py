"""Pipeline stages over device orders, each stage with a mesh and an intra-operator plan of its own.

The search states its orders: of up to three sites all; of more as given, by speed both ways, and
along the shortest round trips both ways; hosts inside a site and devices inside a host as given;
with a tied table each also with half of the first site's devices last. For each order and number of
microbatches the stage search meets every optimum of its additive objective; the best few are priced
by the full estimator, with the depth in flight that covers the round trips, and the best of those
is moved cut by cut while that helps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec

from farspan.domain.plan import Plan, Replica
from farspan.domain.problems import Problem
from farspan.estimate.price import step
from farspan.techniques import shard
from farspan.techniques._bounds import passes_s, stages_s
from farspan.techniques._search.even import even_splits
from farspan.techniques._search.moves import ALL_MOVES, improved
from farspan.techniques._search.one_stage import one_device
from farspan.techniques._search.slices import EVERY_RUN, Tables, stage_of
from farspan.techniques._search.stages import Solution, StageSearch
from farspan.techniques._task import Task, cannot

#: Solutions of the stage search that are priced in full: on few devices, and on more than
#: EVERY_RUN.
PRICED = (32, 16)
#: Up to so many devices the usual grid is tried too.
MOST_EVEN = 64
#: The best of these that moves start from; on many devices the best alone.
STARTS = 3
#: Microbatches a step at most: beyond, per-microbatch overheads outweigh what is left of the
#: bubble.
MOST_MICROBATCHES = 64
#: Of more sites than this not every order is tried.
EVERY_ORDER = 3


def plan(task: Task) -> Plan | Problem:
    """The best pipeline, or a single stage where that is faster."""
    if alone := one_device(task, "pipeshard"):
        return alone
    candidates = [pipeline for pipeline in (best_pipeline(task),) if pipeline is not None]
    single = shard.plan(task)
    if isinstance(single, Plan):
        candidates.append((step(single.replicas[0], task.costs).seconds, single.replicas[0]))
    if not candidates:
        assert isinstance(single, Problem)
        return (
            single
            if single.code == "out-of-memory"
            else cannot(
                "no pipeline fits these devices",
                "the cluster",
                f"{len(task.ranks)} devices, batch {task.train.batch}",
                "ask what fits: farspan fit model, with the same cluster",
            )
        )
    return task.plan("pipeshard", [min(candidates, key=lambda pair: pair[0])[1]])


def best_pipeline(task: Task) -> tuple[float, Replica] | None:
    """The best pipeline of two and more stages with the seconds of its step, if any fits."""
    few = len(task.ranks) <= ALL_MOVES
    timed = _timed(task, STARTS if few else 1)
    if ALL_MOVES < len(task.ranks) <= MOST_EVEN or not timed:
        timed += _best_even(task, min((seconds for seconds, _ in timed), default=math.inf))
    timed.sort(key=lambda pair: pair[0])
    starts = timed[: STARTS if few else 1]
    return min((improved(task, *start) for start in starts), key=lambda pair: pair[0], default=None)


def _timed(task: Task, wanted: int) -> list[tuple[float, Replica]]:
    """The `wanted` fastest of the solutions of the stage search, fully priced, and some others. The
    order is that of their objectives; what a bound shows to be beyond those wanted is not
    simulated."""
    replicas = [
        stages_at(task, *found) for found in _solutions(task, PRICED[len(task.ranks) > EVERY_RUN])
    ]
    least = [stages_s(replica, task.costs) for replica in replicas]
    timed: dict[int, tuple[float, Replica]] = {}
    for place in sorted(range(len(replicas)), key=least.__getitem__):
        fastest = sorted(seconds for seconds, _ in timed.values())[:wanted]
        if len(fastest) == wanted and least[place] > fastest[-1]:
            break
        if pipeline := at_best_depth(task, replicas[place]):
            timed[place] = pipeline
    return [timed[place] for place in sorted(timed)]


def _solutions(task: Task, most: int) -> list[tuple[Solution, int]]:
    """The best few solutions of the stage search over all orders and numbers of microbatches, with
    the latter. Where one is in sight is searched first: the sooner the rest is known to be
    worse."""
    searches: list[tuple[float, int, float, int, StageSearch]] = []
    for parts in microbatch_counts(task):
        tables = Tables(task, parts)
        for order in orders(task):
            search, tied = StageSearch(task, order, tables), tied_s(task, order)
            searches.append((search.glimpse() + tied, len(searches), tied, parts, search))
    found: list[tuple[float, int, int, Solution, int]] = []
    for _, place, tied, parts, search in sorted(searches, key=lambda row: row[:2]):
        worst = found[-1][0] if len(found) == most else math.inf
        for number, solution in enumerate(search.solutions(worst - tied)):
            if len(solution.cuts) > 1:
                found.append((solution.objective + tied, place, number, solution, parts))
        found = heapq.nsmallest(most, found, key=lambda row: row[:3])
    return [(solution, parts) for *_, solution, parts in found]


def _best_even(task: Task, best: float) -> list[tuple[float, Replica]]:
    """The even split that beats `best` seconds and fits, if any: what the search's runs of hosts do
    not contain."""
    even: list[tuple[float, Replica]] = []
    least: dict[tuple[int, int, int], float] = {}
    for replica in even_splits(task, microbatch_counts(task)):
        # ZeRO's level is no matter of passes.
        shape = replica.microbatches, len(replica.stages), replica.stages[0].mesh.size("tensor")
        least[shape] = least[shape] if shape in least else passes_s(replica, task.costs)
        if least[shape] >= best or not task.fits(replica):
            continue
        if (
            stages_s(replica, task.costs) < best
            and (seconds := step(replica, task.costs).seconds) < best
        ):
            best, even = seconds, [(seconds, replica)]
    return even


def tied_s(task: Task, order: Sequence[int]) -> float:
    """Seconds that a tied table's gradient takes from the last stage to the first, and its rows
    back."""
    if not task.graph.tied:
        return 0.0
    first, last = order[0], order[-1]
    wire = task.costs.network.wire(first, last, collective=False, streams=task.streams(first, last))
    return 2 * (wire.delay_s + task.costs.network.send_s(wire, 4 * task.graph.size("vd")))


def microbatch_counts(task: Task) -> list[int]:
    """Numbers of microbatches that divide the batch, each at least 1.4 times the one before; on
    many devices not so few that a pipeline over them would mostly wait."""
    batch = task.train.batch
    fewest = 4 if len(task.ranks) > EVERY_RUN and batch % 4 == 0 else 1
    divisors = [m for m in range(fewest, min(batch, MOST_MICROBATCHES) + 1) if batch % m == 0]
    counts: list[int] = []
    for count in divisors:
        if not counts or count >= 1.4 * counts[-1]:
            counts.append(count)
    return counts


def orders(task: Task) -> list[tuple[int, ...]]:
    """The device orders that are searched (module docstring); equal sequences of alike devices
    count once."""
    network = task.costs.network
    by_site: dict[str, list[int]] = {}
    for rank in task.ranks:
        by_site.setdefault(network.sites[rank], []).append(rank)
    names = list(by_site)
    orders, seen = [], set()
    sites = list(dict.fromkeys(_site_orders(task, names, by_site)))
    # Of many orders only the first is turned: on fast links that saves little, on slow ones the
    # shortest is first.
    turned = [
        (order, 1)
        for order in (sites if len(names) <= EVERY_ORDER else sites[:1])
        if task.graph.tied
    ]
    for order, half in [*((order, 0) for order in sites), *turned]:
        first = by_site[order[0]]
        # A tied table is cheapest where both ends of the pipeline lie in one site: part of the
        # first goes last.
        turn = min(half * max(1, len(first) // 2), len(first) - 1)
        ranks = tuple(rank for name in order for rank in by_site[name])
        ranks = ranks[turn:] + ranks[:turn]
        pairs = zip(ranks, (*ranks[1:], ranks[-1]), strict=True)
        key = tuple((task.costs.alike[a], _hop(task, a, b)) for a, b in pairs)
        if key not in seen:
            seen.add(key)
            orders.append(ranks)
    return orders


def _hop(task: Task, a: int, b: int) -> tuple[object, ...]:
    """What decides the time of messages from one rank to another."""
    wire = task.costs.network.wire(a, b, collective=False, streams=task.streams(a, b))
    return wire.delay_s, wire.rate, wire.line, wire.timed, wire.sites[0] == wire.sites[1]


def _site_orders(
    task: Task, names: list[str], by_site: dict[str, list[int]]
) -> Iterator[tuple[str, ...]]:
    if len(names) <= EVERY_ORDER:
        yield from itertools.permutations(names)
        return
    network = task.costs.network

    def rtt(a: str, b: str) -> float:
        return network.rtt_s(by_site[a][0], by_site[b][0])

    def pace(name: str) -> float:
        return sum(task.costs.unit_s(by_site[name][0], task.graph.block, 1, {}, 1))

    chains = []
    for start in names:
        chain, left = [start], [name for name in names if name != start]
        while left:
            chain.append(min(left, key=lambda name: rtt(chain[-1], name)))
            left.remove(chain[-1])
        chains.append((sum(map(rtt, chain, chain[1:])), tuple(chain)))
    shortest = min(chains)[1]
    fast = tuple(sorted(names, key=pace))
    yield from (shortest, shortest[::-1], tuple(names), fast, fast[::-1])


def stages_at(task: Task, solution: Solution, parts: int) -> Replica:
    """A solution's replica, with as many microbatches in flight as memory lets there be."""
    stages = [stage_of(cut.ranks, cut.option, cut.units, parts) for cut in solution.cuts]
    return task.replica(stages, parts, [min(parts, cut.depth) for cut in solution.cuts])


def at_best_depth(task: Task, deepest: Replica) -> tuple[float, Replica] | None:
    """The step of a pipeline, with the microbatches in flight of 1F1B, or more as far as it may:
    those cover round trips, but put off the first backward pass. None where it does not fit after
    all."""
    stages, timed = len(deepest.stages), dict[tuple[int, ...], tuple[float, Replica]]()
    for extra in (0, 2, 8, deepest.microbatches) if len(task.ranks) <= EVERY_RUN else (0, 8):
        depths = tuple(min(most, stages - i + extra) for i, most in enumerate(deepest.in_flight))
        replica = msgspec.structs.replace(deepest, in_flight=depths)
        if depths in timed:
            continue
        if not task.fits(replica):
            break
        timed[depths] = step(replica, task.costs).seconds, replica
    return min(timed.values(), key=lambda pair: pair[0], default=None)
