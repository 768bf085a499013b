"""A plan as pictures need it: what runs where, what crosses which link, what happens when, and what
fills memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from farspan.domain.cost import Estimate, Memory
from farspan.domain.plan import Plan, Replica
from farspan.domain.plan_words import stage_words, units_words
from farspan.domain.units import counted, format_bytes, format_rate, short_time
from farspan.estimate.estimate_plan import ReplicaStep, step, timed_stage
from farspan.estimate.schedule import PassSpan
from farspan.estimate.stage import Costs
from farspan.estimate.stage_time import StageTime
from farspan.estimate.traffic import Exchange, traffic
from farspan.semantics.communications import PURPOSE_NAMES, Purpose

#: What fills memory, in the order in which bars stack it.
MEMORY_PARTS = tuple(Memory(**dict.fromkeys(Memory.__struct_fields__, 0.0)).shown)


class DeviceBox(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring devices of a host that are alike and do alike. `stage` counts on over replicas,
    from 0."""

    host: str
    kind: str
    count: int
    stage: int
    rows: int
    memory: Memory
    capacity: int
    usable: float

    @property
    def name(self) -> str:
        return f"{self.count} x {self.kind}" if self.count > 1 else self.kind

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.usable


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    boxes: tuple[DeviceBox, ...]


class SiteView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    hosts: tuple[HostView, ...]


class PictureFlow(msgspec.Struct, frozen=True, kw_only=True):
    """What crosses between two sites, or two hosts of one site, in a step, both ways together."""

    a: str
    b: str
    between_sites: bool
    bytes: dict[Purpose, float]
    rtt_s: float
    rate: float

    @property
    def total(self) -> float:
        return sum(self.bytes.values())

    @property
    def what(self) -> str:
        """`2.84 GB a step: gradients`."""
        purposes = sorted(self.bytes, key=lambda name: -self.bytes[name])
        if len(purposes) == 1:
            return f"{format_bytes(self.total)} a step: {PURPOSE_NAMES[purposes[0]]}"
        parts = ", ".join(
            f"{PURPOSE_NAMES[name]} {format_bytes(self.bytes[name])}" for name in purposes
        )
        return f"{format_bytes(self.total)} a step: {parts}"

    @property
    def link(self) -> str:
        return f"{short_time(self.rtt_s)}, {format_rate(self.rate)}"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage does from `start` to `end`; `number` is the microbatch from 1, or 0."""

    kind: str
    number: int
    start: float
    end: float


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's step."""

    name: str
    words: str
    stage: int
    marks: tuple[Mark, ...]
    #: The replica that it belongs to, and how many replicas do exactly this.
    replica: int = 1
    alike: int = 1


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """All that is drawn of one plan."""

    plan: Plan
    estimate: Estimate
    sites: tuple[SiteView, ...]
    flows: tuple[PictureFlow, ...]
    lanes: tuple[Lane, ...]
    #: Seconds of the slowest replica's own step, without the meetings of replicas.
    own_s: float

    @property
    def boxes(self) -> list[DeviceBox]:
        return [box for site in self.sites for host in site.hosts for box in host.boxes]

    @property
    def ends(self) -> float:
        """Seconds of the longest lane."""
        return max(mark.end for lane in self.lanes for mark in lane.marks)


def picture(plan: Plan, estimate: Estimate, costs: Costs) -> Picture:
    """Return a plan and its estimate, ready to be drawn."""
    own_s = max(step(replica, costs).seconds for replica in plan.replicas)
    return Picture(
        plan=plan,
        estimate=estimate,
        sites=_sites(plan, estimate, costs),
        flows=_flows(traffic(plan, costs), costs),
        lanes=_merged(list(lanes(plan, costs))),
        own_s=own_s,
    )


def _merged(lanes: list[Lane]) -> tuple[Lane, ...]:
    """Lanes of replicas that do exactly the same as one."""
    groups: dict[tuple[object, ...], list[Lane]] = {}
    for lane in lanes:
        marks = tuple(
            (mark.kind, mark.number, round(mark.start, 9), round(mark.end, 9))
            for mark in lane.marks
        )
        groups.setdefault((lane.name, marks), []).append(lane)
    return tuple(msgspec.structs.replace(same[0], alike=len(same)) for same in groups.values())


def _sites(plan: Plan, estimate: Estimate, costs: Costs) -> tuple[SiteView, ...]:
    """Sites in the order in which the plan comes to them."""
    boxes = sorted(_boxes(plan, estimate, costs), key=lambda pair: pair[0])
    hosts: dict[str, list[DeviceBox]] = {}
    for _, box in boxes:
        hosts.setdefault(box.host, []).append(box)
    sites: dict[str, list[HostView]] = {}
    for host, host_boxes in hosts.items():
        merged = [
            msgspec.structs.replace(alike[0], count=len(alike))
            for _, group in itertools.groupby(host_boxes)
            for alike in [list(group)]
        ]
        sites.setdefault(costs.network.site(host), []).append(
            HostView(name=host, boxes=tuple(merged))
        )
    return tuple(SiteView(name=name, hosts=tuple(hosts)) for name, hosts in sites.items())


def _boxes(
    plan: Plan, estimate: Estimate, costs: Costs
) -> Iterator[tuple[tuple[int, int], DeviceBox]]:
    """(stage and rank, box) of every device."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    ranks = sorted(rank for stage in stages for rank in stage.mesh.ranks)
    memory = dict(zip(ranks, estimate.memory, strict=True))
    for number, stage in enumerate(stages):
        for rows, group in zip(stage.rows, stage.mesh.batch, strict=True):
            for rank in group:
                device = costs.network.devices[rank]
                yield (
                    (number, rank),
                    DeviceBox(
                        host=costs.network.hosts[rank],
                        kind=device.kind,
                        count=1,
                        stage=number,
                        rows=rows,
                        memory=memory[rank],
                        capacity=device.memory,
                        usable=costs.engine.fill * device.memory,
                    ),
                )


def _flows(exchanges: tuple[Exchange, ...], costs: Costs) -> tuple[PictureFlow, ...]:
    """Flows between sites, the heaviest first, then those inside sites."""
    network = costs.network
    carried: dict[tuple[str, str, bool], dict[Purpose, float]] = {}
    ends: dict[tuple[str, str, bool], tuple[str, str]] = {}
    for exchange in exchanges:
        for (a, b), size in exchange.by_hosts.items():
            sites = (network.site(a), network.site(b))
            key = (a, b, False) if sites[0] == sites[1] else (*sites, True)
            sums = carried.setdefault(key, {})
            sums[exchange.purpose] = sums.get(exchange.purpose, 0.0) + size
            ends.setdefault(key, (a, b))
    flows = []
    for key, sums in carried.items():
        wire = network.between(*ends[key], "activations" not in sums, costs.engine.streams)
        rtt = network.link(*ends[key]).rtt_s
        flows.append(
            PictureFlow(
                a=key[0], b=key[1], between_sites=key[2], bytes=sums, rtt_s=rtt, rate=wire.rate
            )
        )
    return tuple(sorted(flows, key=lambda flow: (not flow.between_sites, -flow.total)))


def lanes(plan: Plan, costs: Costs) -> Iterator[Lane]:
    """Yield the simulated step of every stage, replica by replica."""
    number = 0
    tied_s = sum(
        exchange.seconds for exchange in traffic(plan, costs) if exchange.purpose == "tied table"
    )
    for which, replica in enumerate(plan.replicas, start=1):
        timed = step(replica, costs)
        times = [timed_stage(replica, i, costs) for i in range(len(replica.stages))]
        updates_at = _norm_delay_s(timed, times, costs)
        for i, stage in enumerate(replica.stages):
            marks = [
                mark
                for span in timed.simulated.spans
                if span.stage == i
                for mark in _marks(span, times[i])
            ]
            end = timed.simulated.ends[i]
            sums = times[i].exposed
            if costs.graph.tied and len(times) > 1 and i in (0, len(times) - 1):
                # The ends of a pipeline also exchange the gradient of the table that both hold.
                sums += tied_s
            if sums > 0:
                marks.append(
                    Mark(kind="sums", number=0, start=end, end=min(updates_at, end + sums))
                )
            marks.append(
                Mark(kind="update", number=0, start=updates_at, end=updates_at + times[i].update)
            )
            yield Lane(
                name=f"stage {i + 1}" if len(replica.stages) > 1 else "all devices",
                words=f"{_where(replica, i, costs)}: {stage_words(stage, plan.model.layers)}",
                stage=number,
                marks=tuple(sorted(marks, key=lambda mark: mark.start)),
                replica=which,
            )
            number += 1


def _norm_delay_s(timed: ReplicaStep, times: list[StageTime], costs: Costs) -> float:
    """When every stage knows the norm of all gradients and may update: after the last sum, by the
    step's length."""
    simulated = timed.simulated
    begins = [
        min(span.start for span in simulated.spans if span.stage == i) for i in range(len(times))
    ]
    if not costs.engine.receives_ahead:
        begins = [0.0] * len(times)
    latest = max(end + time.exposed for end, time in zip(simulated.ends, times, strict=True))
    return max(
        latest,
        timed.seconds - max(time.update - begin for time, begin in zip(times, begins, strict=True)),
    )


def _marks(span: PassSpan, time: StageTime) -> Iterator[Mark]:
    """Yield a pass, and behind it what of it is communication: where inside the pass that falls is
    not drawn."""
    waits = {"forward": time.passes.forward_wait, "backward": time.passes.backward_wait}.get(
        span.kind, 0.0
    )
    yield Mark(kind=span.kind, number=span.microbatch + 1, start=span.start, end=span.end - waits)
    if waits:
        yield Mark(kind="sums", number=0, start=span.end - waits, end=span.end)


def _where(replica: Replica, index: int, costs: Costs) -> str:
    """`2 a30 in vm1`."""
    ranks = replica.stages[index].mesh.ranks
    pairs = [(costs.network.devices[rank].kind, costs.network.hosts[rank]) for rank in ranks]
    places = [f"{pairs.count(pair)} {pair[0]} in {pair[1]}" for pair in dict.fromkeys(pairs)]
    if len(places) <= 4:
        return ", ".join(places)
    return f"{len(ranks)} devices in {counted(len({host for _, host in pairs}), 'host')}"


def stage_line(shown: Picture, box: DeviceBox) -> str:
    """`stage 2: blocks 13-24`, of a box."""
    return part_words(shown.plan, box.stage)


def part_words(plan: Plan, stage: int) -> str:
    """`stage 2: blocks 13-24`, of a stage that is counted over replicas."""
    stages = [(replica, i) for replica in plan.replicas for i in range(len(replica.stages))]
    replica, index = stages[stage]
    units = units_words(replica.stages[index].units, plan.model.layers)
    number = [each is replica for each in plan.replicas].index(True) + 1
    if len(replica.stages) > 1:
        units = f"stage {index + 1}: {units}"
    if len(plan.replicas) == 1:
        return units
    return f"replica {number}{', ' if len(replica.stages) > 1 else ': '}{units}"


def lane_name(shown: Picture, lane: Lane) -> str:
    """`stage 2`, `replica 1, stage 2`, or `8 replicas, stage 2`."""
    if len(shown.plan.replicas) == 1:
        return lane.name
    replica_label = f"{lane.alike} replicas" if lane.alike > 1 else f"replica {lane.replica}"
    return replica_label if lane.name == "all devices" else f"{replica_label}, {lane.name}"


def format_slowdowns(shown: Picture) -> str:
    """How steps follow one another, and what meetings add."""
    text = f"steps follow each other every {short_time(shown.estimate.step_s)}"
    meeting = shown.estimate.step_s - shown.own_s
    if shown.plan.sync is None or meeting <= 1e-3 * shown.own_s:
        return text
    every = shown.plan.sync.every
    return (
        f"{text}, {short_time(meeting)} of it for the replicas' meeting after every {every} of them"
    )


def rows_line(box: DeviceBox) -> str:
    """`8 rows each`."""
    return f"{box.rows} row{'s' * (box.rows != 1)}{' each' * (box.count > 1)}"


def bars(shown: Picture) -> list[tuple[str, DeviceBox]]:
    """(label, box) for every distinct device: kind, what fills it and how much."""
    groups: dict[tuple[object, ...], list[DeviceBox]] = {}
    for box in shown.boxes:
        parts = tuple(round(size, -6) for size in box.memory.shown.values())
        groups.setdefault((box.kind, box.capacity, parts), []).append(box)
    labelled = []
    for group in groups.values():
        count, hosts = (
            sum(box.count for box in group),
            list(dict.fromkeys(box.host for box in group)),
        )
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        labelled.append(
            (
                f"{count} x {group[0].kind} in {where}"
                if count > 1
                else f"{group[0].kind} in {where}",
                group[0],
            )
        )
    return labelled
