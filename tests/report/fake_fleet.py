"""Runs of several devices as workers leave them: events of every rank whose steps are simulated
from known paces.

Three stages at three sites, as in a pipeline over a wide-area network. What a worker waits for is
the receive before a pass; every host has a clock of its own.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from farspan import models
from farspan.domain.cluster import (
    Cluster,
    DataSheet,
    Device,
    DeviceTimes,
    Host,
    Link,
    MatmulRate,
    Site,
)
from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.engine import load_engine
from farspan.domain.plan import Edge, GradSync, Inputs, Mesh, Plan, PlannedDevice, Replica, Stage
from farspan.domain.run_events import Event, Finished, Span, Step, Traced
from farspan.domain.train import TrainSpec
from farspan.estimate.between_stages import edges
from farspan.estimate.estimate_plan import price
from farspan.estimate.network import Network
from farspan.estimate.schedule import Hop, simulate_pipeline
from farspan.estimate.stage import Costs
from farspan.estimate.stage_time import stage_time
from farspan.semantics.pass_order import depths_in_flight, order_1f1b_passes
from tests.report.fake_run import CORPUS, MODEL, START, started, write_run

SITES = ("gat", "amst", "star")
#: What a step holds behind its passes: the last exchange, the norms of all, the update.
COLLECTIVE_S = 0.4e-3
TOLD_S = 0.2e-3
TRACED = (2, 3, 200, 400, 600)


def cluster(bandwidth: float = 1e9 / 8) -> Cluster:
    probed = (MatmulRate(m=8192, k=512, n=512, flops={"bf16": 8e11}),)
    device = Device(
        kind="epyc",
        backend="cpu",
        memory=16 * 10**9,
        times=DeviceTimes(rates=probed),
        sheet=DataSheet(dtypes=("fp32", "bf16")),
    )
    sites = tuple(
        Site(name=name, hosts=(Host(name=name, devices=(device,), cpus=16, memory=64 * 10**9),))
        for name in SITES
    )
    pairs = [(a, b) for i, a in enumerate(SITES) for b in SITES[i + 1 :]]
    return Cluster(
        sites=sites,
        links=tuple(Link(a=a, b=b, rtt_s=0.02, bandwidth=bandwidth, busy_s=0.0) for a, b in pairs),
    )


def piped(steps: int) -> Plan:
    """Stage i on rank i, 8 microbatches."""
    units = (0, 3, 5, 8)
    stages = tuple(stage((units[i], units[i + 1]), (i,), (32,)) for i in range(3))
    return plan(
        steps,
        Replica(stages=stages, edges=(Edge(bits=16),) * 2, microbatches=8, in_flight=(5, 3, 1)),
    )


def side_by_side(steps: int) -> Plan:
    """The whole model on every rank, unlike numbers of rows."""
    return plan(steps, Replica(stages=(stage((0, 8), (0, 1, 2), (16, 8, 8)),), microbatches=4))


def stage(units: tuple[int, int], ranks: tuple[int, ...], rows: tuple[int, ...]) -> Stage:
    mesh = Mesh(ranks=ranks, shape=(len(ranks),), axes=("data",))
    return Stage(units=units, mesh=mesh, rows=rows, grad_sync=GradSync(bucket_bytes=25 * 2**20))


def plan(steps: int, replica: Replica) -> Plan:
    return Plan(
        technique="pipeline" if len(replica.stages) > 1 else "data",
        model=MODEL,
        train=TrainSpec(steps=steps, batch=32, seq_len=256, precision="bf16"),
        replicas=(replica,),
        devices=tuple(
            PlannedDevice(host=name, site=name, backend="cpu", index=0, threads=16)
            for name in SITES
        ),
        inputs=Inputs(cluster="c0ffee00c0ffee00", corpus=CORPUS.hash),
    )


@functools.cache
def _costs(where: bytes, train: bytes) -> Costs:
    found = load_engine("farspan")
    made = msgspec.json.decode(train, type=Plan)
    network = Network(msgspec.json.decode(where, type=Cluster), made.devices, found)
    return Costs(models.graph(MODEL), made.train, network)


def costs_of(made: Plan, where: Cluster) -> Costs:
    return _costs(msgspec.json.encode(where), msgspec.json.encode(made))


def fleet_run(
    folder: Path,
    *,
    steps: int = 620,
    paces: Sequence[float] = (1, 1, 1),
    links: Sequence[float] = (1, 1),
    sums: float = 1.0,
    clocks: Sequence[float] = (0, 0, 0),
    missing: Sequence[int] = (),
    traced: Sequence[int] = TRACED,
    slow: dict[int, float] | None = None,
    make: Callable[[int], Plan] = piped,
    backend: str = "cpu",
) -> Path:
    """A run that goes as predicted, but for devices that compute `paces` times as long, messages
    over the pipeline's edges that take `links` times as long, and sums of gradients that take
    `sums` times as long. Each host's clock is ahead by `clocks` seconds; `slow` multiplies single
    steps; ranks in `missing` leave no log."""
    where = cluster()
    made = make(steps)
    costs = costs_of(made, where)
    told = price(made, costs)
    lanes, step_s = _lanes(made, costs, paces, links, sums)
    events = {
        rank: _events(rank, made, lanes[rank], step_s, clocks[rank], traced, slow or {})
        for rank in range(3)
    }
    events = {
        rank: [
            msgspec.structs.replace(one, estimate=told) if hasattr(one, "estimate") else one
            for one in those
        ]
        for rank, those in events.items()
    }
    shown = tuple(msgspec.structs.replace(device, backend=backend) for device in made.devices)
    write_run(folder, events[0], msgspec.structs.replace(made, devices=shown))
    save_cluster_json(where, folder / "cluster.json")
    (folder / "logs").mkdir()
    for rank in {1, 2} - set(missing):
        lines = (msgspec.json.encode(event) + b"\n" for event in events[rank])
        (folder / "logs" / f"rank-{rank}.events.jsonl").write_bytes(b"".join(lines))
    return folder


def _lanes(
    made: Plan, costs: Costs, paces: Sequence[float], links: Sequence[float], sums: float
) -> tuple[list[list[Span]], float]:
    """What each rank does from the beginning of a step, and how long that takes."""
    (replica,) = made.replicas
    if len(replica.stages) == 1:
        return _whole(replica, costs, paces, sums)
    times = [stage_time(costs, stage, stage.rows, replica.microbatches) for stage in replica.stages]
    down, up = edges(replica, costs)
    found = simulate_pipeline(
        [time.passes.forward * pace for time, pace in zip(times, paces, strict=True)],
        [time.passes.backward * pace for time, pace in zip(times, paces, strict=True)],
        [Hop(hop.busy * by, hop.delay * by) for hop, by in zip(down, links, strict=True)],
        [Hop(hop.busy * by, hop.delay * by) for hop, by in zip(up, links, strict=True)],
        8,
        depths_in_flight(replica),
        sends_awaited=False,
        receives_ahead=True,
    )
    told = max(found.ends) + COLLECTIVE_S + TOLD_S
    lanes = []
    for rank in range(3):
        at = 0.0
        lane = list[Span]()
        for one in sorted(
            (one for one in found.spans if one.stage == rank), key=lambda one: one.start
        ):
            if rank != (0 if one.kind == "forward" else 2):
                lane.append(
                    Span(kind="receive", microbatch=one.microbatch, start=at, end=one.start)
                )
            lane.append(
                Span(kind=one.kind, microbatch=one.microbatch, start=one.start, end=one.end)
            )
            at = one.end
        lanes.append(lane + _tail(at, COLLECTIVE_S, told, times[rank].update * paces[rank]))
    return lanes, max(lane[-1].end for lane in lanes)


def _whole(
    replica: Replica, costs: Costs, paces: Sequence[float], sums: float
) -> tuple[list[list[Span]], float]:
    """Every rank goes through its own rows; sums of gradients end once the last has come to
    them."""
    (only,) = replica.stages
    ends = []
    lanes = []
    for rank, pace in enumerate(paces):
        rows = [count if c == rank else 0 for c, count in enumerate(only.rows)]
        passes = stage_time(costs, only, rows, replica.microbatches).passes
        at = 0.0
        lane = list[Span]()
        for kind, i in order_1f1b_passes(replica.microbatches, 1):
            took = pace * (passes.forward if kind == "forward" else passes.backward)
            lane.append(Span(kind=kind, microbatch=i, start=at, end=at + took))
            at += took
        lanes.append(lane)
        ends.append(at)
    slowest = stage_time(costs, only, only.rows, replica.microbatches)
    summed = max(ends) + sums * slowest.exposed
    lanes = [
        lane + _tail(end, summed - end, summed + TOLD_S, slowest.update * pace)
        for lane, end, pace in zip(lanes, ends, paces, strict=True)
    ]
    return lanes, max(lane[-1].end for lane in lanes)


def _tail(at: float, summing_s: float, told: float, update_s: float) -> list[Span]:
    return [
        Span(kind="collective", microbatch=None, start=at, end=at + summing_s),
        Span(kind="receive", microbatch=None, start=at + summing_s, end=told),
        Span(kind="update", microbatch=None, start=told, end=told + update_s),
    ]


def _events(
    rank: int,
    made: Plan,
    lane: list[Span],
    step_s: float,
    clock: float,
    traced: Sequence[int],
    slow: dict[int, float],
) -> list[Event]:
    """All ranks begin and end their steps together; noise and slow steps stretch all that is in
    them."""
    rng = random.Random(7)
    at = START + clock
    events: list[Event] = [started(at, plan=made)]
    for step in range(1, made.train.steps + 1):
        by = (1 + 0.02 * abs(rng.gauss(0, 1)) if step not in traced else 1.0) * slow.get(step, 1.0)
        began = at
        at = at + step_s * by
        events.append(
            Step(
                at=at,
                step=step,
                loss=9 - 4 * step / made.train.steps,
                lr=6e-4,
                grad_norm=1.0,
                tokens=made.train.tokens_per_step,
                step_s=step_s * by,
                memory_bytes=(rank + 7) * 10**8,
            )
        )
        if step in traced:
            spans = tuple(
                msgspec.structs.replace(one, start=began + one.start * by, end=began + one.end * by)
                for one in lane
            )
            events.append(Traced(at=at, step=step, rank=rank, spans=spans))
    return [
        *events,
        Finished(at=at, step=made.train.steps, reason="done", seconds=at - START - clock),
    ]
