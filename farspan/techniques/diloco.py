"""DiLoCo: a replica a site, each trained by itself, whose changes meet every H steps (arXiv
2311.08105).

Each replica is the best plan of its site, of a few kinds; it reads a share of every step's
sequences that its speed earns. What fewer meetings cost in tokens is in `estimate.replicas`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farspan.domain.plan import Mesh, Plan, Replica, Stage, Sync
from farspan.domain.problems import Problem
from farspan.estimate.memory import MEETING
from farspan.estimate.price import price
from farspan.techniques import data, fsdp, pipeshard, zero2
from farspan.techniques._out_of_memory import best
from farspan.techniques._search.one_stage import rows_by_speed, too_few_rows
from farspan.techniques._task import Task, cannot

#: Its losses are not those of synchronous steps.
EXACT = False
#: Steps between meetings that are tried: those that Charles et al. (arXiv 2503.09799, section 5)
#: compare beyond 1.
EVERY = (10, 30, 100, 300)
#: Seconds between meetings at most, where the fewest steps allow: only there workers hear that they
#: shall stop or that a deadline is near, save, and a launcher that was interrupted waits twice as
#: long (launch.workers.SAVE_S).
ROUND_S = 300.0


def plan(task: Task) -> Plan | Problem:
    """The best of H and of exchanges that overlap or not; a replica for every site with devices."""
    sites = tuple(task.sites.values())
    if len(sites) < 2:
        return cannot(
            "replicas that meet rarely need several sites",
            "the cluster",
            f"one site, {next(iter(task.sites))}",
            "use data: inside one site gradients are summed every step",
        )
    if task.train.batch < len(task.ranks):
        return too_few_rows(task, len(task.ranks))
    even = [max(len(ranks), task.train.batch // len(sites)) for ranks in sites]
    seconds = [_pace(task, ranks, rows) for ranks, rows in zip(sites, even, strict=True)]
    shares = _shares(task.train.batch, seconds, [len(ranks) for ranks in sites])
    replicas = []
    for ranks, share in zip(sites, shares, strict=True):
        # Sites that are alike and read alike have the same plan.
        key = ("alone", task.likeness(ranks), share)
        site_plan = task.memo[key] = task.memo.get(key) or _alone(task, ranks, share)
        if isinstance(site_plan, Problem):
            return site_plan
        replicas.append(_moved(site_plan.replicas[0], ranks))
    # Only replicas that are divided alike can round the same numbers together
    # (runtime/parallel/outer_step.py).
    bits = task.train.wan_bits if len(set(map(_form, replicas))) == 1 else 32
    often = task.plan("diloco", replicas, Sync(every=EVERY[0], bits=bits))
    most = max(
        EVERY[0], min(task.train.steps // 10, ROUND_S / price(often, task.costs, brief=True).step_s)
    )
    plans = [
        task.plan("diloco", replicas, Sync(every=every, overlap=overlap, bits=bits))
        for every in EVERY
        if every <= most
        for overlap in (False, True)
    ]
    return best(task, plans)


def _shares(batch: int, seconds: Sequence[float], least: Sequence[int]) -> list[int]:
    """Sequences of a step for each site by its seconds a sequence, a sequence a device at least:
    what that raises above the batch is taken, one by one, from the site that ends last and has
    more."""
    shares = [
        max(share, count) for share, count in zip(rows_by_speed(batch, seconds), least, strict=True)
    ]
    while sum(shares) > batch:
        spare = [site for site, share in enumerate(shares) if share > least[site]]
        shares[max(spare, key=lambda site: shares[site] * seconds[site])] -= 1
    return shares


def _form(replica: Replica) -> tuple[object, ...]:
    """How a replica is divided."""
    return tuple(
        (
            stage.units,
            stage.mesh.axes,
            stage.mesh.shape,
            stage.zero,
            tuple(sorted(stage.splits.items())),
            stage.grad_sync.bucket_bytes,
        )
        for stage in replica.stages
    )


def _site_task(task: Task, ranks: Sequence[int], rows: int) -> Task:
    """The same question to one site alone, with its share of every step."""
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


def _pace(task: Task, ranks: Sequence[int], rows: int) -> float:
    """Seconds a sequence of a site whose devices share them by speed: what its share of a step
    follows from."""
    costs = task.costs
    graph = task.graph
    each = max(1, rows // len(ranks))
    units = graph.kinds(0, graph.units)
    times = (
        sum(n * sum(costs.unit_s(rank, unit, each, {}, 1)) for unit, n in units) / each
        for rank in ranks
    )
    return 1 / sum(1 / seconds for seconds in times)


def _alone(task: Task, ranks: Sequence[int], rows: int) -> Plan | Problem:
    site_task = _site_task(task, ranks, rows)
    answers = [other.plan(site_task) for other in (data, zero2, fsdp)]
    plans = [answer for answer in answers if isinstance(answer, Plan)]
    if not plans or len({site_task.costs.network.hosts[rank] for rank in site_task.ranks}) > 1:
        # Inside one host a pipeline is of use where nothing else fits.
        answers.append(pipeshard.plan(site_task))
        plans += [answer for answer in answers[-1:] if isinstance(answer, Plan)]
    return (
        best(site_task, plans)
        if plans
        else next(answer for answer in answers if isinstance(answer, Problem))
    )


def _moved(replica: Replica, ranks: Sequence[int]) -> Replica:
    """The replica of a plan for one site, with the ranks that its devices have in the whole
    cluster."""

    def moved(stage: Stage) -> Stage:
        mesh = stage.mesh
        new = Mesh(
            ranks=tuple(ranks[rank] for rank in mesh.ranks), shape=mesh.shape, axes=mesh.axes
        )
        return msgspec.structs.replace(stage, mesh=new)

    return msgspec.structs.replace(replica, stages=tuple(map(moved, replica.stages)))
