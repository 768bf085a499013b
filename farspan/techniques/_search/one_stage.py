"""Plans of one stage: rows by speed, gradient buckets, the fewest microbatches that fit memory."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence

import msgspec

from farspan.domain.plan import GradSync, Mesh, Plan, Replica, Stage, Topology, Zero, row_quantum
from farspan.domain.problems import Problem
from farspan.domain.units import counted
from farspan.semantics.muon_matrices import matrices
from farspan.techniques._fastest_fitting import fastest_plan_that_fits
from farspan.techniques._task import Task, cannot

#: PyTorch DDP's default (Li et al., arXiv 2006.15704).
BUCKET_BYTES = 25 * 2**20
#: Bucket sizes that are tried: of a small one less is exposed when a backward pass ends.
BUCKET_SIZES = (BUCKET_BYTES, 4 * 2**20)
#: Co-located workers rarely all send at once: together they may exceed the link by this factor.
#: [fitted] to two workers of each of two sites at 103 ms and 1 Gbit/s: with 0.72 of the link each,
#: steps that sum 34 MB take as long as without a limit and steps that sum 118 MB 0.6 to 0.7 times
#: as long; with half of it, up to 8 % and 5 % longer than that.
LINK_OVERSUBSCRIPTION = 1.44


def divide_rows_by_speed(rows: int, seconds: Sequence[float], quantum: int = 1) -> list[int]:
    """Divide `rows` sequences so that the slowest coordinate ends earliest.

    `seconds`: of a sequence on each coordinate. Each gets portions of `quantum` rows, at least one.
    Greedy is optimal here: times grow evenly with rows.
    """
    portions = rows // quantum
    total_speed = sum(1 / s for s in seconds)
    counts = [max(1, math.floor(portions / s / total_speed) - 1) for s in seconds]
    while sum(counts) > portions:
        reducible = [i for i, count in enumerate(counts) if count > 1]
        slowest = max(reducible, key=lambda i: counts[i] * seconds[i])
        counts[slowest] -= 1
    queue = [((counts[i] + 1) * s, i) for i, s in enumerate(seconds)]
    heapq.heapify(queue)
    for _ in range(portions - sum(counts)):
        _, i = heapq.heappop(queue)
        counts[i] += 1
        heapq.heappush(queue, ((counts[i] + 1) * seconds[i], i))
    return [count * quantum for count in counts]


def stage_rows(
    task: Task, mesh: Mesh, splits: dict[str, str], rows: int, quantum: int = 1
) -> list[tuple[int, ...]]:
    """Return divisions of `rows` over the batch coordinates of a mesh that holds the whole model.

    The first is by the speed of each coordinate's slowest device at the mean load. The second is at
    the load of the one before, repeated while the last coordinate ends sooner.
    """
    ways = mesh.size("tensor")
    graph = task.graph
    costs = task.costs
    groups = mesh.batch
    units = graph.kinds(0, graph.units)

    def group_s(group: Sequence[int], group_rows: int) -> float:
        by_kind = {costs.alike[rank]: rank for rank in group}
        seconds = []
        for rank in by_kind.values():
            passes = [
                count * sum(costs.unit_s(rank, unit, group_rows, splits, ways))
                for unit, count in units
            ]
            seconds.append(sum(passes))
        return max(seconds)

    def divide_again(division: Sequence[int]) -> list[int]:
        pairs = zip(groups, division, strict=True)
        seconds = [group_s(group, group_rows) / group_rows for group, group_rows in pairs]
        return divide_rows_by_speed(rows, seconds, quantum)

    def slowest_s(division: Sequence[int]) -> float:
        return max(map(group_s, groups, division))

    first = divide_again([max(1, rows // len(groups))] * len(groups))
    divisions = [first]
    while True:
        other = divide_again(divisions[-1])
        if slowest_s(other) >= slowest_s(divisions[-1]):
            return [tuple(division) for division in divisions]
        divisions = [first, other]


def plans(
    task: Task, technique: str, mesh: Mesh, *, zero: Zero = 0, splits: dict[str, str] | None = None
) -> list[Plan]:
    """Return plans of one stage on this mesh, in the fewest microbatches that fit.

    There is one for each division of rows, topology and bucket size, with and without recompute.
    Splits of rows need a batch that the tensor axis divides, and at least one row for each of its
    ranks.
    """
    splits = splits or {}
    num_sites = len({task.costs.network.sites[rank] for rank in mesh.ranks})
    bits = task.train.wan_bits if num_sites > 1 else 32
    divisions = stage_rows(task, mesh, splits, task.train.batch, row_quantum(mesh, splits))
    recomputes = (True,) if task.train.recompute else (False, True)
    topologies = _topologies(task, mesh, num_sites)
    candidates = []
    for rows, recompute, topology, bucket in itertools.product(
        divisions, recomputes, topologies, BUCKET_SIZES
    ):
        sync = GradSync(
            bucket_bytes=bucket,
            topology=topology,
            bits=bits,
            wan_rate=wan_bandwidth_share(task, mesh, topology),
        )
        stage = Stage(
            units=(0, task.graph.units),
            mesh=mesh,
            rows=rows,
            grad_sync=sync,
            zero=zero,
            splits=splits,
            recompute=recompute,
        )
        candidates.append(task.plan(technique, [in_fewest_microbatches(task, stage)]))
    return candidates


def wan_bandwidth_share(task: Task, mesh: Mesh, topology: Topology) -> int | None:
    """Return bytes a second of each worker's connections to its peers in other sites.

    Together those of a site send LINK_OVERSUBSCRIPTION times what the slowest link between these
    sites carries. None where sums go around a ring, which crosses a link once, and where no
    bandwidth is known.
    """
    if topology == "flat" and mesh.size("site") == 1:
        return None
    network = task.costs.network
    sites = network.by_site(mesh.ranks)
    bandwidths = []
    for a, b in itertools.combinations(sites.values(), 2):
        link = network.link(network.hosts[a[0]], network.hosts[b[0]])
        if link.bandwidth is not None:
            bandwidths.append(link.bandwidth)
    if not bandwidths:
        return None
    share = min(1.0, LINK_OVERSUBSCRIPTION / max(map(len, sites.values())))
    return max(1, round(share * min(bandwidths)))


def _topologies(task: Task, mesh: Mesh, num_sites: int) -> tuple[Topology, ...]:
    """Return how gradients may be summed; quantized ones go between sites only."""
    if num_sites == 1 or len(mesh.batch) == num_sites:
        return ("flat",)
    return ("hierarchical",) if task.train.wan_bits < 32 else ("flat", "hierarchical")


def in_fewest_microbatches(task: Task, stage: Stage) -> Replica:
    """Return the stage as a replica with the fewest microbatches that fit.

    Memory is linear in a microbatch's rows except for the logits' cap, so bisection finds the
    number.
    """
    counts = microbatch_counts(stage)
    #: One coordinate for each kind of device and number of rows.
    coordinates = {}
    for coordinate, ranks in enumerate(stage.mesh.batch):
        coordinates[task.costs.alike[ranks[0]], stage.rows[coordinate]] = coordinate

    def replica(parts: int) -> Replica:
        return task.replica([stage], parts, (1,))

    def fits(parts: int) -> bool:
        candidate = replica(parts)
        for coordinate in coordinates.values():
            capacity = task.capacity(stage.mesh.batch[coordinate][0])
            if task.costs.memory(candidate, 0, coordinate).total > capacity:
                return False
        return True

    return replica(counts[bisect.bisect_left(counts, True, hi=len(counts) - 1, key=fits)])


def microbatch_counts(stage: Stage) -> Sequence[int]:
    """Return the numbers of microbatches that a stage's rows may come in.

    Where operators divide rows, each microbatch keeps a multiple of the tensor axis's size.
    """
    ways = row_quantum(stage.mesh, stage.splits)
    if ways == 1:
        return range(1, max(stage.rows) + 1)
    portions = math.gcd(*stage.rows) // ways
    return [count for count in range(1, portions + 1) if portions % count == 0]


def over_batch(task: Task, technique: str, zero: Zero) -> Plan | Problem:
    """Return the best plan of one stage over all devices with this ZeRO level."""
    ranks = tuple(task.ranks)
    if task.train.batch < len(ranks):
        return too_few_rows(task, len(ranks))
    if problem := too_many_owners(task, zero, len(ranks)):
        return problem
    mesh = Mesh(ranks=ranks, shape=(len(ranks),), axes=("data",))

    def best_plan(asked: Task) -> Plan | Problem:
        return fastest_plan_that_fits(asked, plans(asked, technique, mesh, zero=zero))

    return task.answer(technique, best_plan)


def too_few_rows(task: Task, coordinates: int) -> Problem:
    return cannot(
        "the batch has fewer sequences than there are devices",
        "run.yaml, key train.batch.global",
        f"{counted(task.train.batch, 'sequence')} a step, {coordinates} devices",
        f"set train.batch.global: {coordinates:d} sequences",
    )


def too_many_owners(task: Task, zero: Zero, ways: int) -> Problem | None:
    """Return why `ways` devices cannot divide the matrices that Muon updates whole, if so."""
    if not task.train.optimizer.muon or zero == 0:
        return None
    most = len(matrices(task.graph)) * (1 if zero == 3 else task.graph.layers)
    if ways <= most:
        return None
    of = "each block has" if zero == 3 else "the blocks have"
    return cannot(
        "Muon updates whole matrices, and there are fewer of them than devices to divide them over",
        "run.yaml, key train.optimizer",
        f"{of} {most} matrices, for {ways} devices",
        f"leave devices out: --cluster NAME:{most:d}; or set train.optimizer: adamw",
    )


def one_device(task: Task, technique: str) -> Problem | None:
    """Return why a technique that divides work has no plan for one device, if there is one."""
    if len(task.ranks) > 1:
        return None
    problem = cannot(
        f"{technique} divides work between devices, and there is only one",
        "the cluster",
        f"one {task.costs.network.devices[0].kind}",
        "use data: it runs on one device as on many",
    )
    return msgspec.structs.replace(problem, subject=technique)


def relabelled(plan: Plan | Problem, technique: str) -> Plan | Problem:
    return plan if isinstance(plan, Problem) else msgspec.structs.replace(plan, technique=technique)
