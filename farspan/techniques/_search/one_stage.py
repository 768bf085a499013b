"""Plans of one stage: rows handed out by speed, sizes of gradient buckets, the fewest microbatches
that fit memory."""

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
from farspan.semantics.matrices import matrices
from farspan.techniques._out_of_memory import best
from farspan.techniques._task import Task, cannot

#: PyTorch DDP's default, from Li et al., arXiv 2006.15704; and one of which less is left when a
#: backward pass ends.
BUCKET_BYTES = 25 * 2**20
BUCKETS = (BUCKET_BYTES, 4 * 2**20)
#: Workers of a site rarely all send at once. [fitted] to two of each of two sites at 103 ms and 1
#: Gbit/s: with 0.72 of the line each, steps that sum 34 MB take as long as without a limit and
#: steps that sum 118 MB 0.6 to 0.7 times as long; with half of it, up to 8 % and 5 % longer than
#: that.
CROWDED = 1.44


def rows_by_speed(rows: int, seconds: Sequence[float], quantum: int = 1) -> list[int]:
    """`rows` sequences handed out so that the slowest coordinate ends earliest; `seconds` a
    sequence each.

    In portions of `quantum` rows, one at least for everyone. Greedy is optimal here: times grow
    evenly with rows.
    """
    portions = rows // quantum
    pace = sum(1 / s for s in seconds)
    given = [max(1, math.floor(portions / s / pace) - 1) for s in seconds]
    while (spare := portions - sum(given)) < 0:
        slowest = max(
            (i for i in range(len(given)) if given[i] > 1), key=lambda i: given[i] * seconds[i]
        )
        given[slowest] -= 1
    queue = [((given[i] + 1) * s, i) for i, s in enumerate(seconds)]
    heapq.heapify(queue)
    for _ in range(spare):
        _, i = heapq.heappop(queue)
        given[i] += 1
        heapq.heappush(queue, ((given[i] + 1) * seconds[i], i))
    return [portion * quantum for portion in given]


def stage_rows(
    task: Task, mesh: Mesh, splits: dict[str, str], rows: int, quantum: int = 1
) -> list[tuple[int, ...]]:
    """Sequences of each batch coordinate of a mesh that holds the whole model, by the speed of its
    slowest device at a typical load; and at the load that this gives it, if the last one ends
    sooner so."""
    ways = mesh.size("tensor")
    graph = task.graph
    costs = task.costs
    groups = mesh.batch

    def seconds(group: Sequence[int], own: int) -> float:
        unlike = {costs.alike[rank]: rank for rank in group}.values()
        return max(
            sum(
                count * sum(costs.unit_s(rank, unit, own, splits, ways))
                for unit, count in graph.kinds(0, graph.units)
            )
            for rank in unlike
        )

    def again(given: Sequence[int]) -> list[int]:
        return rows_by_speed(
            rows, [seconds(*pair) / pair[1] for pair in zip(groups, given, strict=True)], quantum
        )

    def last(given: Sequence[int]) -> float:
        return max(seconds(*pair) for pair in zip(groups, given, strict=True))

    found = [again([max(1, rows // len(groups))] * len(groups))]
    while last(other := again(found[-1])) < last(found[-1]):
        found = [found[0], other]
    return list(map(tuple, found))


def plans(
    task: Task, technique: str, mesh: Mesh, *, zero: Zero = 0, splits: dict[str, str] | None = None
) -> list[Plan]:
    """One stage on this mesh, each topology and bucket, with and without recompute, in the fewest
    microbatches that fit. Splits of rows need a batch that the tensor axis divides, and as many
    rows a coordinate as it has ranks."""
    sites = {task.costs.network.sites[rank] for rank in mesh.ranks}
    ways = stage_rows(task, mesh, splits or {}, task.train.batch, row_quantum(mesh, splits or {}))
    candidates = []
    for rows, recompute in itertools.product(
        ways, (True,) if task.train.recompute else (False, True)
    ):
        for topology, bucket in itertools.product(_topologies(task, mesh, len(sites)), BUCKETS):
            bits = task.train.wan_bits if len(sites) > 1 else 32
            sync = GradSync(
                bucket_bytes=bucket,
                topology=topology,
                bits=bits,
                wan_rate=wan_rate(task, mesh, topology),
            )
            stage = Stage(
                units=(0, task.graph.units),
                mesh=mesh,
                rows=rows,
                grad_sync=sync,
                zero=zero,
                splits=splits or {},
                recompute=recompute,
            )
            candidates.append(task.plan(technique, [in_fewest_parts(task, stage)]))
    return candidates


def wan_rate(task: Task, mesh: Mesh, topology: Topology) -> int | None:
    """Bytes a second of each worker's connection to another site, where those of a site send
    straight to their like: together CROWDED times what the slowest line between these sites
    carries. None where sums go around a ring, which crosses a line once, and where no line is
    known."""
    if topology == "flat" and mesh.size("site") == 1:
        return None
    network = task.costs.network
    sites = network.by_site(mesh.ranks)
    links = (
        network.link(network.hosts[a[0]], network.hosts[b[0]])
        for a, b in itertools.combinations(sites.values(), 2)
    )
    lines = [link.bandwidth for link in links if link.bandwidth is not None]
    share = min(1.0, CROWDED / max(map(len, sites.values())))
    return max(1, round(share * min(lines))) if lines else None


def _topologies(task: Task, mesh: Mesh, sites: int) -> tuple[Topology, ...]:
    """How gradients may be summed: what is rounded goes between sites only, so inside them
    first."""
    if sites == 1 or len(mesh.batch) == sites:
        return ("flat",)
    return ("hierarchical",) if task.train.wan_bits < 32 else ("flat", "hierarchical")


def in_fewest_parts(task: Task, stage: Stage) -> Replica:
    """The stage as a replica whose microbatches are as large as every device's memory and its
    operators let them be.

    Memory is linear in a microbatch's rows but for the logits' cap, so the count follows by
    bisection.
    """
    counts = part_counts(stage)
    #: A coordinate of each kind of device and number of rows.
    unlike = {
        (task.costs.alike[ranks[0]], stage.rows[c]): c for c, ranks in enumerate(stage.mesh.batch)
    }.values()

    def replica(parts: int) -> Replica:
        return task.replica([stage], parts, (1,))

    def fits(parts: int) -> bool:
        candidate = replica(parts)
        capacities = ((c, task.capacity(stage.mesh.batch[c][0])) for c in unlike)
        return all(
            task.costs.memory(candidate, 0, c).total <= capacity for c, capacity in capacities
        )

    return replica(counts[bisect.bisect_left(counts, True, hi=len(counts) - 1, key=fits)])


def part_counts(stage: Stage) -> Sequence[int]:
    """Numbers of microbatches that a stage's rows may come in: any, or, where operators divide
    them, those that leave each microbatch as many as its tensor axis divides."""
    ways = row_quantum(stage.mesh, stage.splits)
    if ways == 1:
        return range(1, max(stage.rows) + 1)
    portions = math.gcd(*stage.rows) // ways
    return [count for count in range(1, portions + 1) if portions % count == 0]


def over_batch(task: Task, technique: str, zero: Zero) -> Plan | Problem:
    """The best plan of one stage over all devices whose batch axis carries state as ZeRO's level
    says."""
    ranks = tuple(task.ranks)
    if task.train.batch < len(ranks):
        return too_few_rows(task, len(ranks))
    if problem := too_many_owners(task, zero, len(ranks)):
        return problem
    mesh = Mesh(ranks=ranks, shape=(len(ranks),), axes=("data",))
    return task.answer(
        technique, lambda asked: best(asked, plans(asked, technique, mesh, zero=zero))
    )


def too_few_rows(task: Task, coordinates: int) -> Problem:
    return cannot(
        "the batch has fewer sequences than there are devices",
        "run.yaml, key train.batch.global",
        f"{counted(task.train.batch, 'sequence')} a step, {coordinates} devices",
        f"set train.batch.global: {coordinates:d} sequences",
    )


def too_many_owners(task: Task, zero: Zero, ways: int) -> Problem | None:
    """Why so many devices cannot divide matrices that Muon updates whole; None where they can."""
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
    """Why a technique that divides something between devices has no plan for one."""
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
