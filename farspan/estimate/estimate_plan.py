"""`estimate`: what any Plan would take. It reads the plan's structure, never the name of the
technique that made it.

A step of one replica is the longest of its stages' cycles: from a stage's first forward pass to the
end of its update. All replicas step side by side; every `sync.every` steps they also exchange their
parameters' changes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from farspan.domain.cluster import Cluster, Device
from farspan.domain.cost import Estimate, Memory, Workload
from farspan.domain.engine import Engine
from farspan.domain.graph import OpGraph
from farspan.domain.model import train_flops_per_token
from farspan.domain.plan import Plan, Replica
from farspan.domain.train import Precision
from farspan.estimate.assumption_sentences import assumptions
from farspan.estimate.between_stages import Tie, Ways, crossing, edges, sent_between, tie
from farspan.estimate.compute import product_dtype
from farspan.estimate.gradient_sync import carried_s, leaving
from farspan.estimate.memory import MEETING, OVERLAPPING
from farspan.estimate.network import Network
from farspan.estimate.scaling_law import fitted_loss
from farspan.estimate.schedule import Simulated, simulate_pipeline
from farspan.estimate.stage import Costs
from farspan.estimate.stage_time import StageTime, stage_time
from farspan.estimate.token_efficiency import token_efficiency
from farspan.semantics.communications import meeting
from farspan.semantics.pass_order import depths_in_flight

#: Factors on steps of devices whose arithmetic no data sheet, probe or trial tells. A choice: an
#: Intel core with AMX takes 0.24 (bf16) and 0.6 (fp32) of what is predicted for an unknown one.
BLIND = (0.2, 2.0)
#: Of devices that took part in a trial. A choice.
TRIED = (0.75, 1.3)
#: So many times wider at least are factors on networks where a line's rate is assumed. A choice.
GUESSED = 1.5
#: The least factor on CPU cores of which only the catalogue tells: it assumes their clock and takes
#: their memory's rate from a socket with all cores busy. [fitted] to
#: benchmarks/results/regret.jsonl: single devices of an Intel with AMX take 0.47 to 0.63 of what is
#: predicted in fp32, all plans 0.5 to 0.8.
ASSUMED = 0.4


class ReplicaStep(NamedTuple):
    """One replica's step: seconds in all and as the slowest stage sees them, and the simulation."""

    seconds: float
    compute: float
    communication: float
    bubble: float
    network: float
    simulated: Simulated


def estimate(plan: Plan, graph: OpGraph, cluster: Cluster, engine: Engine) -> Estimate:
    """Time, memory, money, energy and loss of a plan. Raises NoLink where two of its hosts are not
    linked, KeyError where the cluster lacks a device, ValueError where it splits what the model
    does not have."""
    costs = Costs(graph, plan.train, Network(cluster, plan.devices, engine))
    return price(plan, costs)


def price(plan: Plan, costs: Costs, *, brief: bool = False) -> Estimate:
    """As `estimate`, with what was priced before kept in `costs`: searches price hundreds of plans
    of one model. A `brief` one lists no assumptions."""
    network = costs.network
    steps = [step(replica, costs) for replica in plan.replicas]
    slowest = max(steps, key=lambda replica_step: replica_step.seconds)
    outer, sent = _outer(plan, costs, slowest)
    step_s = slowest.seconds + outer
    for replica in plan.replicas:
        for site, size in sent_by(replica, costs).items():
            sent[site] = sent.get(site, 0.0) + size
    used = [
        network.devices[rank]
        for replica in plan.replicas
        for stage in replica.stages
        for rank in stage.mesh.ranks
    ]
    worth = token_efficiency(plan, costs.graph.parameters())
    priced = Estimate(
        step_s=step_s,
        compute_s=slowest.compute,
        communication_s=slowest.communication + outer,
        bubble_s=slowest.bubble,
        memory=_memory(plan, costs),
        workload=_workload(plan, costs, used, sent),
        token_efficiency=worth.tokens,
        token_efficiency_interval=worth.interval,
        evidence=worth.evidence,
        interval=_interval(network, step_s, slowest.network + outer, used, plan),
        assumptions=() if brief else assumptions(plan, costs),
    )
    return with_loss(priced, costs.graph.parameters())


def with_loss(priced: Estimate, parameters: int) -> Estimate:
    """Return the estimate with the loss that the tokens of its run lead to; None outside the law's
    range."""
    return msgspec.structs.replace(priced, loss=fitted_loss(parameters, priced.tokens_done))


def step(replica: Replica, costs: Costs) -> ReplicaStep:
    """One step of one replica, simulated."""
    times = [timed_stage(replica, i, costs) for i in range(len(replica.stages))]
    ways, tied = edges(replica, costs), tie(replica, costs)
    simulated = run(replica, costs, times, ways)
    seconds = _period(replica, costs, times, ways, tied, simulated)
    busy = []
    summed = [end + time.exposed for end, time in zip(simulated.ends, times, strict=True)]
    for i, (time, wait) in enumerate(zip(times, tied.waits(summed, simulated.ends), strict=True)):
        waits = replica.microbatches * (time.passes.forward_wait + time.passes.backward_wait)
        compute = simulated.computed[i] - waits + time.update
        busy.append((compute, waits + simulated.sending[i] + time.exposed + wait))
    compute, communication = max(busy, key=sum)
    network = communication + sum(hop.delay + hop.busy for hops in ways for hop in hops)
    bubble = max(0.0, seconds - compute - communication)
    return ReplicaStep(seconds, compute, communication, bubble, network, simulated)


def sent_by(replica: Replica, costs: Costs) -> dict[str, float]:
    """Bytes of a step of a replica that leave each site."""
    sent = sent_between(replica, costs)
    for stage in replica.stages:
        for site, size in stage_time(costs, stage, stage.rows, replica.microbatches).sent.items():
            sent[site] = sent.get(site, 0.0) + size
    return sent


def timed_stage(
    replica: Replica, index: int, costs: Costs, rows: Sequence[int] | None = None
) -> StageTime:
    """Return a stage's times, for `rows` (None: its own); its passes include the processor time
    that brings a microbatch in and out."""
    stage, network = replica.stages[index], costs.network
    time = stage_time(costs, stage, stage.rows if rows is None else rows, replica.microbatches)
    if not (replica.edges and costs.engine.move_cost):
        return time  # Others than processors compute, or nothing comes in and out.
    site = network.sites[stage.mesh.ranks[0]]
    carried = sum(
        carried_s(
            network,
            stage.mesh.ranks,
            site,
            max(crossing(replica, costs, edge, False).values(), default=0.0),
        )
        for edge in (index - 1, index)
        if 0 <= edge < len(replica.edges)
    )
    passes = time.passes._replace(
        forward=time.passes.forward + carried, backward=time.passes.backward + carried
    )
    return time._replace(passes=passes)


def _period(
    replica: Replica,
    costs: Costs,
    times: list[StageTime],
    ways: Ways,
    tied: Tie,
    simulated: Simulated,
) -> float:
    """Seconds from one step to the next: where receives are posted ahead, a stage begins its next
    step while others still finish theirs, and the longest cycle of waiting for one another decides
    (Baccelli et al. 1992, chapter 3)."""
    norm_delays = _norm_delays(replica, costs)
    starts = _next(times, tied, norm_delays, simulated.ends)
    if not costs.engine.receives_ahead or len(times) == 1:
        return max(starts)
    begins = _begins(simulated, len(times))
    if all(
        start - begin <= starts[0] * (1 + 1e-12)
        for start, begin in zip(starts, begins, strict=True)
    ):
        return starts[0]  # Nobody waits longer than the first stage does for itself.
    between = starts
    for _ in times:
        later = _next(times, tied, norm_delays, run(replica, costs, times, ways, starts).ends)
        between = [after - before for before, after in zip(starts, later, strict=True)]
        if max(between) - min(between) <= 1e-12 * max(later):
            break  # Steady: each step is the last one, that much later.
        starts = later
    return max(between)  # Not steady yet, it is a bound: the greatest of these only falls.


def _next(
    times: Sequence[StageTime],
    tied: Tie,
    norm_delays: Sequence[Sequence[float]],
    ends: Sequence[float],
) -> list[float]:
    """Return when each stage can begin its next step: after an update that needs the gradient norm
    of all stages, which arrives after `norm_delays`."""
    summed = [end + time.exposed for end, time in zip(ends, times, strict=True)]
    known = [end + wait for end, wait in zip(summed, tied.waits(summed, ends), strict=True)]
    starts = [
        max(map(operator.add, known, delays)) + time.update
        for delays, time in zip(norm_delays, times, strict=True)
    ]
    if tied.across:
        starts[-1] = max(starts[-1], summed[0] + tied.back + times[-1].update)
    return starts


def _norm_delays(replica: Replica, costs: Costs) -> list[list[float]]:
    """Of each stage, how long what each stage knows of the gradient norm takes to it."""
    stages = range(len(replica.stages))
    return [
        [_delay(replica, costs, j, i) if j != i else _inside(replica, costs, i) for j in stages]
        for i in stages
    ]


def _inside(replica: Replica, costs: Costs, stage: int) -> float:
    """Return the one-way time between the farthest devices of a stage that know different parts of
    the gradient norm, and exchange them with receives posted ahead."""
    at = replica.stages[stage]
    alike = at.mesh.size("tensor") == 1 and not (at.zero and at.mesh.size("data") > 1)
    ranks = list({costs.network.hosts[rank]: rank for rank in at.mesh.ranks}.values())
    if alike or len(ranks) == 1 or not costs.engine.receives_ahead:
        return 0.0
    wires = (costs.network.wire(a, b, collective=False) for a in ranks for b in ranks if a != b)
    return max(wire.delay_s for wire in wires) + costs.engine.message_s


def run(
    replica: Replica,
    costs: Costs,
    times: Sequence[StageTime],
    ways: Ways,
    starts: Sequence[float] | None = None,
) -> Simulated:
    """Return the simulated passes of one step of a replica, whose stages are free from `starts` on;
    all from 0 by default."""
    return simulate_pipeline(
        [time.passes.forward for time in times],
        [time.passes.backward for time in times],
        *ways,
        replica.microbatches,
        depths_in_flight(replica),
        sends_awaited=costs.engine.sends_awaited,
        receives_ahead=costs.engine.receives_ahead,
        starts=starts,
    )


def _delay(replica: Replica, costs: Costs, a: int, b: int) -> float:
    """One way between two stages: what the global gradient norm needs before any update."""
    sender, receiver = replica.stages[a].mesh.ranks[0], replica.stages[b].mesh.ranks[0]
    return costs.network.wire(sender, receiver, collective=False).delay_s + costs.engine.message_s


def _begins(simulated: Simulated, stages: int) -> list[float]:
    first = [math.inf] * stages
    for span in simulated.spans:
        first[span.stage] = min(first[span.stage], span.start)
    return first


def _outer(plan: Plan, costs: Costs, slowest: ReplicaStep) -> tuple[float, dict[str, float]]:
    """Seconds a step, and bytes by site, of the exchange between replicas."""
    met = meeting(plan, costs.graph.parameters(), costs.engine)
    if met is None or plan.sync is None:
        return 0.0, {}
    took, sent = costs.network.seconds(met), leaving(costs.network, [met])
    hidden = plan.sync.every * slowest.seconds if plan.sync.overlap else 0.0
    busy = _met(plan, costs) / plan.sync.every
    every = [
        rank for replica in plan.replicas for stage in replica.stages for rank in stage.mesh.ranks
    ]
    busy += max(
        (carried_s(costs.network, every, site, 2 * size) for site, size in sent.items()),
        default=0.0,
    )
    return max(0.0, took - hidden) / plan.sync.every + busy, sent


def _met(plan: Plan, costs: Costs) -> float:
    """Seconds of the slowest device to make its changes, and the outer step on all of them."""
    moved = 4 * costs.engine.meeting_passes
    return max(
        costs.stream_s(rank, costs.owned(stage) * moved)
        for replica in plan.replicas
        for stage in replica.stages
        for rank in stage.mesh.ranks
    )


def _memory(plan: Plan, costs: Costs) -> tuple[Memory, ...]:
    by_rank: dict[int, Memory] = {}
    outer = 0 if plan.sync is None else OVERLAPPING if plan.sync.overlap else MEETING
    for replica in plan.replicas:
        for i, stage in enumerate(replica.stages):
            for coordinate, ranks in enumerate(stage.mesh.batch):
                memory = costs.memory(replica, i, coordinate, outer)
                by_rank |= dict.fromkeys(ranks, memory)
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def _workload(plan: Plan, costs: Costs, used: list[Device], sent: dict[str, float]) -> Workload:
    """Return the workload of the run, on the devices `used`; `sent` are bytes of a step that leave
    a site, by site."""
    train = plan.train
    egress = {site.name: site.egress_usd_per_byte for site in costs.network.cluster.sites}
    return Workload(
        steps=train.steps,
        tokens_per_step=train.tokens_per_step,
        deadline_s=train.deadline_s,
        devices=len(used),
        flops_per_step=train.tokens_per_step * train_flops_per_token(plan.model, train.seq_len),
        peak_flops=_sum(
            device.sheet.flops.get(product_dtype(device, train.precision, costs.engine)) or None
            for device in used
        ),
        usd_per_hour=_sum(device.usd_per_hour for device in used),
        watts=_sum(device.sheet.watts for device in used),
        egress_usd_per_step=sum(egress[site] * size for site, size in sent.items()),
    )


def _sum(figures: Iterable[float | None]) -> float | None:
    """Return the sum; None where one is unknown."""
    known = list(figures)
    return None if None in known else math.fsum(figure for figure in known if figure is not None)


def _interval(
    network: Network, step_s: float, network_s: float, used: list[Device], plan: Plan
) -> tuple[float, float]:
    """Return the widest of the devices' factors and the engine's own on networks, weighed by what
    of the step is which. Where a network's rate is assumed, what such networks are found to carry
    makes it wider."""
    engine = network.engine
    factors = [
        _factors(engine, device, plan.train.precision)
        for device in {id(device): device for device in used}.values()
    ]
    low, high = min(low for low, _ in factors), max(high for _, high in factors)
    if all(device.learned.pace != 1.0 for device in used) and len(used) > 1:
        high = 2.0  # A trial on one device does not show what several do to each other.
    share = min(1.0, network_s / step_s) if step_s else 0.0
    between = engine.probed_interval if share and network.probed else engine.network_interval
    assumed = network.assumed_range(
        frozenset(
            network.hosts[rank]
            for replica in plan.replicas
            for stage in replica.stages
            for rank in stage.mesh.ranks
        )
    )
    if assumed is not None:
        between = min(between[0] / GUESSED, assumed[0]), max(between[1] * GUESSED, assumed[1])
    return (1 - share) * low + share * between[0], (1 - share) * high + share * between[1]


def _factors(engine: Engine, device: Device, precision: Precision) -> tuple[float, float]:
    """Return the factors by the source of a device's speed: a trial, a probe, a data sheet, a kind
    of core, or none."""
    if device.learned.pace != 1.0:
        return TRIED
    dtype = product_dtype(device, precision, engine)
    if any(dtype in rate.flops for rate in device.times.rates):
        return engine.probed_interval
    if dtype not in device.sheet.flops:
        return BLIND
    low, high = engine.interval
    return (min(low, ASSUMED), high) if device.backend == "cpu" else (low, high)
