"""Measures a cluster: every device, every link, the collectives over all. The result is a Cluster
like any other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations
from typing import NamedTuple, TypeVar

import msgspec

from farspan.domain.cluster import Cluster, Device, Host, Link
from farspan.domain.clusterfile import MAX_LOSS
from farspan.domain.model import ModelSpec
from farspan.domain.plan import PlannedDevice
from farspan.domain.probe import (
    AllReduceQuery,
    DescribeQuery,
    DeviceRates,
    LeftOut,
    Query,
    RatesQuery,
    UnitsQuery,
    UnitTimes,
)
from farspan.domain.problems import Problem, Refusal
from farspan.domain.units import counted, format_bytes
from farspan.launch.examine import HostPath, agents, reach, stream
from farspan.launch.hosts import Agent
from farspan.launch.probe import Probe
from farspan.launch.rendezvous import arrange

T = TypeVar("T")
#: What mends too little memory.
SMALLER = (
    "--model and --seq-len with a smaller model or shorter sequences, or leave the device out of "
    "the cluster"
)
STREAMS = (1, 2, 4, 8, 16)
PINGS = 40
#: Datagrams that loss is counted on, and the pause between two.
DATAGRAMS = 2000
GAP_S = 0.0005
#: Bytes of the all-reduces: one that only the round trips cost, a bucket, and one that the line
#: decides.
ALLREDUCE_BYTES = (8, 4_000_000, 64_000_000)
#: Bytes of the all-reduce over the devices of one host.
INSIDE_BYTES = 16_000_000
#: Sequences that a model's units are timed over.
SEQUENCES = (1, 2, 4, 8)
#: Rows of the matrix products: a CPU is busy with a few hundred, a GPU with a few thousand.
ROWS = {"cpu": 512, "mps": 2048, "cuda": 8192}
#: Sequences whose activations are sent at once, and bytes of one of their numbers: a microbatch of
#: a pipeline in bf16.
SENT_ROWS = 8
SENT_BYTES = 2
#: A single stream is window-limited where several get this much more.
LIMITED = 1.5


class Measured(NamedTuple):
    """What was found; why devices are not measured in whole, by host and place there; what needed
    too much memory."""

    cluster: Cluster
    failed: dict[tuple[str, int], Problem]
    notes: tuple[str, ...]


def measure(
    cluster: Cluster,
    model: ModelSpec,
    say: Callable[[str], None],
    *,
    seq_len: int | None = None,
) -> Measured:
    """The same cluster with measured devices, links and collectives, at the shapes of `model`; its
    units over sequences of `seq_len` tokens, by default as long as its context. A device that fails
    keeps what was known of it, and the others are measured.

    Raises Refusal (host-unreachable) for a host or a link that does not work.
    """
    activation_bytes = SENT_ROWS * model.context * model.d_model * SENT_BYTES
    measured_links = links(cluster, activation_bytes, say)
    with ExitStack() as stack:
        probes = {
            host.name: [
                stack.enter_context(
                    Probe(host, threads=device.slot.threads, device=i, remedy=SMALLER)
                )
                for i, device in enumerate(host.devices)
            ]
            for host in cluster.hosts
        }
        measuring = _Measuring(model, seq_len or model.context, say, probes, {}, [])
        for host in cluster.hosts:
            for index in range(len(host.devices)):
                # It has started: what it takes for that disturbs nobody's rates any more.
                measuring.of(host, index, DescribeQuery("cpu", None), Cluster)
        measured: Sequence[Host] = cluster.hosts
        # Hosts side by side, and each step of it on all at once: those of a lab share a machine's
        # memory.
        with ThreadPoolExecutor(len(cluster.hosts)) as pool:
            for part in (_alone, _crowded, _local_rate):
                measured = list(pool.map(lambda host, do=part: do(host, measuring), measured))
        by_name = {host.name: host for host in measured}
        sites = tuple(
            msgspec.structs.replace(site, hosts=tuple(by_name[host.name] for host in site.hosts))
            for site in cluster.sites
        )
        allreduce = _allreduce(cluster, measuring) if len(cluster.devices) > 1 else {}
    measured_cluster = msgspec.structs.replace(
        cluster, sites=sites, links=measured_links, allreduce_s=allreduce
    )
    return Measured(measured_cluster, measuring.failed, tuple(measuring.notes))


def shapes(model: ModelSpec, rows: int) -> list[tuple[int, int, int]]:
    """(m, k, n) of the model's matrix products: queries with keys and values, output, up, down,
    head."""
    d = model.d_model
    kv = model.kv_heads * (model.d_model // model.heads)
    products = [(d, d + 2 * kv), (d, d), (d, model.d_ff), (model.d_ff, d), (d, model.vocab_size)]
    return [(rows, k, n) for k, n in dict.fromkeys(products)]


class _Measuring(NamedTuple):
    """What is timed of a model, over sequences so long; and what came of it."""

    model: ModelSpec
    seq_len: int
    say: Callable[[str], None]
    probes: dict[str, list[Probe]]
    failed: dict[tuple[str, int], Problem]
    notes: list[str]

    def of(self, host: Host, index: int, query: Query, kind: type[T]) -> T | None:
        """What a device's probe answers; None of one that has failed, now or before."""
        if (host.name, index) in self.failed:
            return None
        try:
            return self.probes[host.name][index].ask(query, kind)
        except Refusal as refusal:
            self.fail(host, index, refusal.problem)
            return None

    def fail(self, host: Host, index: int, problem: Problem) -> None:
        self.failed[host.name, index] = problem
        self.say(f"device {index} of {host.name} has failed: {problem.what} ({problem.fact})")

    def note(self, host: Host, index: int, left_out: Sequence[LeftOut]) -> None:
        for omission in left_out:
            rows = (
                f" of {', '.join(map(str, omission.rows))} sequences at a time"
                if omission.rows
                else ""
            )
            needs = f"{format_bytes(omission.needed)} needed, {format_bytes(omission.free)} free"
            text = f"device {index} of {host.name}: left out {omission.what}{rows}: {needs}"
            self.say(text)
            self.notes.append(text)

    def units(self, host: Host, index: int) -> UnitTimes | None:
        device = host.devices[index]
        query = UnitsQuery(
            _planned(host, index),
            self.model,
            self.seq_len,
            SEQUENCES,
            device.sheet.precisions,
            device.memory,
        )
        return self.of(host, index, query, UnitTimes)

    def working(self, host: Host) -> list[int]:
        """A host's devices that have not failed."""
        return [
            index for index in range(len(host.devices)) if (host.name, index) not in self.failed
        ]


def _alone(host: Host, measuring: _Measuring) -> Host:
    """A host's devices one after another: those that share cores must not disturb each other."""
    done = list[Device]()
    bare = [device.but(enter=None) for device in host.devices]
    for index, device in enumerate(host.devices):
        measuring.say(f"device {index} of {host.name}: {device.kind}")
        products = tuple(shapes(measuring.model, ROWS[device.backend]))
        query = RatesQuery(_planned(host, index), products, device.sheet.precisions, device.memory)
        measured = measuring.of(host, index, query, DeviceRates)
        if measured is not None:
            measuring.note(host, index, measured.left_out)
            device = device.but(
                rates=measured.rates,
                bandwidth=measured.bandwidth,
                memory=min(device.memory, measured.memory),
            )
            # Those that are alike need not all be timed alone.
            times = next(
                (
                    twin.times.units
                    for other, twin in zip(bare, done, strict=False)
                    if other == bare[index]
                ),
                (),
            )
            if not times and (timed := measuring.units(host, index)) is not None:
                measuring.note(host, index, timed.left_out)
                times = timed.times
            whole = (host.name, index) not in measuring.failed
            device = device.but(units=times, origin="measured" if whole else device.origin)
        done.append(device)
    return msgspec.structs.replace(host, devices=tuple(done))


def _crowded(host: Host, measuring: _Measuring) -> Host:
    """A host's devices with the times of units while all of them compute."""
    if len(indices := measuring.working(host)) < 2:
        return host
    measuring.say(f"all devices of {host.name} together")
    devices = list(host.devices)

    def ask(index: int) -> UnitTimes | None:
        return measuring.units(host, index)

    with ThreadPoolExecutor(len(indices)) as pool:
        for index, timed in zip(indices, pool.map(ask, indices), strict=True):
            times = () if timed is None else timed.times
            crowd = (msgspec.structs.replace(unit, together=len(indices)) for unit in times)
            devices[index] = devices[index].but(units=(*devices[index].times.units, *crowd))
    return msgspec.structs.replace(host, devices=tuple(devices))


def _local_rate(host: Host, measuring: _Measuring) -> Host:
    """Bytes a second that each device of a host sends in an all-reduce over all of them: a ring of
    2 (n - 1) steps with a part each."""
    if (n := len(indices := measuring.working(host))) < 2:
        return host
    seconds = _together([(host, index) for index in indices], (INSIDE_BYTES,), measuring).get(
        INSIDE_BYTES
    )
    if seconds is None:
        return host
    return msgspec.structs.replace(host, local_rate=2 * (n - 1) / n * INSIDE_BYTES / seconds)


def _planned(host: Host, index: int) -> PlannedDevice:
    device = host.devices[index]
    return PlannedDevice(
        host=host.name,
        backend=device.backend,
        index=index,
        threads=device.slot.threads,
        kind=device.kind,
    )


def _allreduce(cluster: Cluster, measuring: _Measuring) -> dict[int, float]:
    """Over all devices; nothing where one has failed, as what the others take is no figure of the
    cluster."""
    if measuring.failed:
        return {}
    measuring.say(f"all-reduce over {counted(len(cluster.devices), 'device')}")
    every = [(host, index) for host in cluster.hosts for index in range(len(host.devices))]
    return _together(every, ALLREDUCE_BYTES, measuring)


def _together(
    ranks: Sequence[tuple[Host, int]], sizes: Sequence[int], measuring: _Measuring
) -> dict[int, float]:
    """Seconds of all-reduces over these devices; of none where one of them fails, which the others
    then do, too."""
    meeting = arrange(list({host.name: host for host, _ in ranks}.values()))
    problems = dict[int, Problem]()

    def ask(rank: int) -> dict[int, float]:
        host, index = ranks[rank]
        try:
            query = AllReduceQuery(
                _planned(host, index),
                rank,
                len(ranks),
                meeting.address,
                meeting.port,
                meeting.secret,
                meeting.interfaces.get(host.name),
                tuple(sizes),
            )
            return measuring.probes[host.name][index].ask(query, dict[int, float])
        except Refusal as refusal:
            problems[rank] = refusal.problem
            return {}

    with ThreadPoolExecutor(len(ranks)) as pool:
        seconds = list(pool.map(ask, range(len(ranks))))
    causes = {
        rank: problem for rank, problem in problems.items() if problem.code != "worker-lost"
    } or problems
    for rank, problem in causes.items():
        host, index = ranks[rank]
        measuring.fail(host, index, problem)
    return {} if problems else seconds[0]


def links(cluster: Cluster, activation_bytes: int, say: Callable[[str], None]) -> tuple[Link, ...]:
    """Every link: between hosts of a site, and between the first hosts of two sites.

    Raises Refusal (host-unreachable) for a host or a link that does not work.
    """
    with agents(cluster.hosts) as (reached, unreachable):
        for problem in unreachable.values():
            raise Refusal.of(problem)
        measured = []
        for a, b in _pairs(cluster):
            one_site = cluster.site_of(a.name) is cluster.site_of(b.name)
            names = (
                (a.name, b.name)
                if one_site
                else (cluster.site_of(a.name).name, cluster.site_of(b.name).name)
            )
            say(f"link {names[0]} - {names[1]}")
            link = _link(reached[a.name], reached[b.name], activation_bytes)
            measured.append(named(link, names, cluster))
    return tuple(measured)


def named(link: Link, names: tuple[str, str], cluster: Cluster) -> Link:
    """The link between these names of the cluster, with the loss that was known before where none
    could be counted."""
    known = {frozenset((old.a, old.b)): old.loss for old in cluster.links}
    loss = known.get(frozenset(names)) if link.loss is None else link.loss
    return msgspec.structs.replace(link, a=names[0], b=names[1], loss=loss)


def _pairs(cluster: Cluster) -> list[tuple[Host, Host]]:
    inside = [pair for site in cluster.sites for pair in combinations(site.hosts, 2)]
    return inside + [(a.hosts[0], b.hosts[0]) for a, b in combinations(cluster.sites, 2)]


def _link(a: Agent, b: Agent, activation_bytes: int) -> Link:
    there = _working(reach(a, b, PINGS))
    back = _working(reach(b, a, PINGS))
    rtt = min(there.rtt_s or 0.0, back.rtt_s or 0.0)
    streamed = {count: stream(a, b, count, rtt) for count in STREAMS}
    rates = {count: sent.rate for count, sent in streamed.items()}
    # The way back is timed where the line decides; the slower way counts.
    back_again = stream(b, a, STREAMS[-1], rtt)
    bandwidth = min(max(rates.values()), back_again.rate)
    kept = [sent.busy_s for sent in (*streamed.values(), back_again) if sent.busy_s is not None]
    limited = bandwidth > LIMITED * rates[1]
    return Link(
        a=a.host.name,
        b=b.host.name,
        rtt_s=rtt,
        jitter_s=max(there.jitter_s or 0.0, back.jitter_s or 0.0),
        bandwidth=bandwidth,
        window=round(rates[1] * rtt) if limited else None,
        in_flight={count: round(rate * rtt) for count, rate in rates.items()},
        transfer_s={activation_bytes: _transfer(a, b, activation_bytes, rtt)},
        loss=_loss(a, b),
        busy_s=statistics.median(kept) if kept else None,
        origin="measured",
    )


def _working(way: HostPath) -> HostPath:
    if way.failed:
        raise Refusal(
            "host-unreachable",
            what=f"{way.a} cannot reach {way.b}",
            where=f"link {way.a} -> {way.b}",
            fact=f"{way.failed}: {way.fact}",
            remedy="farspan doctor --cluster, with the same cluster",
        )
    return way


def _transfer(a: Agent, b: Agent, size: int, rtt_s: float) -> float:
    """Seconds from the first byte sent to the last one received: the answer's way back is taken
    off."""
    times = a.ask("transfer", **b.target, size=size, repeats=5, deadline_s=120)["seconds"]
    return float(max(0.0, statistics.median(times) - rtt_s / 2))


def _loss(a: Agent, b: Agent) -> float | None:
    tag = f"loss-{a.host.name}"
    before = b.ask("datagrams", tag=tag)["count"]
    a.ask("say", **b.target, tag=tag, count=DATAGRAMS, gap=GAP_S)
    # A question over the control connection takes longer than what is still under way.
    a.ask("reach", **b.target, deadline=5, pings=3)
    return lost(b.ask("datagrams", tag=tag)["count"] - before)


def lost(arrived: int) -> float | None:
    """The share of DATAGRAMS that is missing. None where not one came: the same way has just
    carried streams, so datagrams are filtered, and nothing is known. What the network doubles may
    make more of them arrive than were sent.
    """
    return min(MAX_LOSS, max(0.0, 1 - arrived / DATAGRAMS)) if arrived else None
