"""DiLoCo (arXiv 2311.08105): a replica in each site, synchronized every H steps.

Each replica is the best plan of its site, of a few kinds, and gets a share of every step's
sequences by its speed. `estimate.token_efficiency` has the tokens that fewer outer steps cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farspan.domain.plan import Mesh, Plan, Replica, Sync
from farspan.domain.problems import Problem
from farspan.estimate.estimate_plan import price
from farspan.estimate.memory import MEETING
from farspan.techniques import data, fsdp, pipeshard, zero2
from farspan.techniques._fastest_fitting import fastest_plan_that_fits
from farspan.techniques._search.one_stage import divide_rows_by_speed, too_few_rows
from farspan.techniques._task import Task, cannot

#: Its losses are not those of synchronous steps.
EXACT = False
#: Steps between outer steps that are tried: those that Charles et al. (arXiv 2503.09799, section 5)
#: compare beyond 1.
EVERY = (10, 30, 100, 300)
#: Seconds between outer steps, where the fewest steps allow. Only there workers receive a stop or a
#: deadline and save; an interrupted launcher waits twice as long (launch.workers.SAVE_S).
MAX_ROUND_S = 300.0


def plan(task: Task) -> Plan | Problem:
    """Return the best plan over H, with and without overlapped outer steps."""
    sites = tuple(task.sites.values())
    if len(sites) < 2:
        return cannot(
            "replicas that synchronize rarely need several sites",
            "the cluster",
            f"one site, {next(iter(task.sites))}",
            "use data: inside one site gradients are summed every step",
        )
    if task.train.batch < len(task.ranks):
        return too_few_rows(task, len(task.ranks))

    # Each site's share of the batch, and its best plan.
    replicas = []
    for ranks, share in zip(sites, _site_shares(task, sites), strict=True):
        # Alike sites with the same share have the same plan.
        key = ("site plan", task.likeness(ranks), share)
        if key not in task.memo:
            task.memo[key] = _site_plan(task, ranks, share)
        site_plan = task.memo[key]
        if isinstance(site_plan, Problem):
            return site_plan
        replicas.append(_with_ranks(site_plan.replicas[0], ranks))

    # Only replicas that are divided alike can quantize the same numbers together
    # (runtime/parallel/outer_step.py).
    is_uniform = len(set(map(_division, replicas))) == 1
    bits = task.train.wan_bits if is_uniform else 32
    frequent = task.plan("diloco", replicas, Sync(every=EVERY[0], bits=bits))
    step_s = price(frequent, task.costs, brief=True).step_s
    max_steps = max(EVERY[0], min(task.train.steps // 10, MAX_ROUND_S / step_s))
    plans = []
    for every in EVERY:
        for overlap in (False, True) if every <= max_steps else ():
            sync = Sync(every=every, overlap=overlap, bits=bits)
            plans.append(task.plan("diloco", replicas, sync))
    return fastest_plan_that_fits(task, plans)


def _site_shares(task: Task, sites: Sequence[Sequence[int]]) -> list[int]:
    """Return the sequences of a step for each site."""
    mean_rows = task.train.batch // len(sites)
    seconds = [_sequence_s(task, ranks, max(len(ranks), mean_rows)) for ranks in sites]
    return _shares(task.train.batch, seconds, [len(ranks) for ranks in sites])


def _shares(batch: int, seconds: Sequence[float], least: Sequence[int]) -> list[int]:
    """Divide a batch by the seconds of a sequence on each site, `least` sequences at least.

    What that exceeds the batch by is taken from the site that ends last and has more than `least`.
    """
    shares = list(map(max, divide_rows_by_speed(batch, seconds), least))
    while sum(shares) > batch:
        reducible = [site for site, share in enumerate(shares) if share > least[site]]
        slowest = max(reducible, key=lambda site: shares[site] * seconds[site])
        shares[slowest] -= 1
    return shares


def _division(replica: Replica) -> tuple[object, ...]:
    """Return how a replica's parameters are divided."""
    stages = []
    for stage in replica.stages:
        mesh = (stage.mesh.axes, stage.mesh.shape)
        splits = tuple(sorted(stage.splits.items()))
        stages.append((stage.units, mesh, stage.zero, splits, stage.grad_sync.bucket_bytes))
    return tuple(stages)


def _site_task(task: Task, ranks: Sequence[int], rows: int) -> Task:
    """Return the same question to one site alone, with its share of every step."""
    places = tuple(rank if task.only is None else task.only[rank] for rank in ranks)
    train = msgspec.structs.replace(task.train, batch=rows)
    return Task(
        task.model,
        task.graph,
        task.cluster,
        train,
        task.engine,
        task.corpus,
        places,
        task.memo,
        MEETING,
    )


def _sequence_s(task: Task, ranks: Sequence[int], rows: int) -> float:
    """Return seconds of a sequence on a site whose devices share them by speed."""
    graph = task.graph
    device_rows = max(1, rows // len(ranks))
    units = graph.kinds(0, graph.units)
    speed = 0.0
    for rank in ranks:
        passes_s = 0.0
        for unit, count in units:
            passes_s += count * sum(task.costs.unit_s(rank, unit, device_rows, {}, 1))
        speed += 1 / (passes_s / device_rows)
    return 1 / speed


def _site_plan(task: Task, ranks: Sequence[int], rows: int) -> Plan | Problem:
    site_task = _site_task(task, ranks, rows)
    answers = [other.plan(site_task) for other in (data, zero2, fsdp)]
    hosts = site_task.costs.network.hosts
    num_hosts = len({hosts[rank] for rank in site_task.ranks})
    # Inside one host a pipeline is of use where nothing else fits.
    if num_hosts > 1 or all(isinstance(answer, Problem) for answer in answers):
        answers.append(pipeshard.plan(site_task))
    plans = [answer for answer in answers if isinstance(answer, Plan)]
    return fastest_plan_that_fits(site_task, plans) if plans else answers[0]


def _with_ranks(replica: Replica, ranks: Sequence[int]) -> Replica:
    """Return a site's replica with the ranks that its devices have in the whole cluster."""
    stages = []
    for stage in replica.stages:
        mesh = stage.mesh
        own = tuple(ranks[rank] for rank in mesh.ranks)
        moved = Mesh(ranks=own, shape=mesh.shape, axes=mesh.axes)
        stages.append(msgspec.structs.replace(stage, mesh=moved))
    return msgspec.structs.replace(replica, stages=tuple(stages))
