"""Measures a cluster: every device, every link, the collectives over all of them. The result is a
Cluster like any other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import combinations, repeat
from typing import NamedTuple, TypeVar

import msgspec

from farspan.domain.cluster import Cluster, Device, Host, Link, UnitTime
from farspan.domain.gpus import Wheel
from farspan.domain.model import ModelSpec
from farspan.domain.plan import PlannedDevice
from farspan.domain.probe_requests import (
    AllReduceQuery,
    DescribeQuery,
    DeviceRates,
    InstalledQuery,
    LeftOut,
    Query,
    RatesQuery,
    UnitsQuery,
    UnitTimes,
)
from farspan.domain.problems import Problem, Refusal
from farspan.domain.units import counted, format_bytes
from farspan.launch.agent_pool import AgentPool
from farspan.launch.link_measurement import (
    measure_link,
)
from farspan.launch.network_examination import start_agents
from farspan.launch.probe_client import Probe
from farspan.launch.rendezvous import arrange_rendezvous
from farspan.semantics.compile_choice import choose_compile

T = TypeVar("T")
#: What mends too little memory.
SMALLER_MODEL = (
    "--model and --seq-len with a smaller model or shorter sequences, or leave the device out of "
    "the cluster"
)
#: Bytes of the all-reduces: one that only the round trips cost, a bucket, and one that the
#: bandwidth decides.
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


class MeasuredLink(NamedTuple):
    """The measured cluster; why devices are not measured in whole, by host and place there; what
    needed too much memory."""

    cluster: Cluster
    failed: dict[tuple[str, int], Problem]
    notes: tuple[str, ...]


def measure_cluster(
    cluster: Cluster,
    model: ModelSpec,
    report: Callable[[str], None],
    *,
    seq_len: int | None = None,
) -> MeasuredLink:
    """Return the cluster with measured devices, links and collectives, at the shapes of `model`.

    Its units are timed over sequences of `seq_len` tokens, by default as long as its context. A
    device that fails keeps what was known of it, and the others are measured.

    Raises Refusal (host-unreachable) for a host or a link that does not work.
    """
    activation_bytes = SENT_ROWS * model.context * model.d_model * SENT_BYTES
    measured_links = measure_links(cluster, activation_bytes, report)
    with ExitStack() as stack:
        probes = dict[str, list[Probe]]()
        for host in cluster.hosts:
            probes[host.name] = []
            for i, device in enumerate(host.devices):
                probe = Probe(host, threads=device.slot.threads, device=i, remedy=SMALLER_MODEL)
                probes[host.name].append(stack.enter_context(probe))
        measuring = _Measuring(model, seq_len or model.context, report, probes, {}, [])
        for host in cluster.hosts:
            for index in range(len(host.devices)):
                # It has started: what it takes for that disturbs nobody's rates any more.
                measuring.ask(host, index, DescribeQuery("cpu", None), Cluster)

        # Hosts side by side, and each step of it on all at once: those of a lab share a machine's
        # memory.
        measured: Sequence[Host] = cluster.hosts
        with ThreadPoolExecutor(len(cluster.hosts)) as pool:
            parts = (_examine_gpus, _measure_alone, _measure_co_located, _measure_local_rate)
            for measure_part in parts:
                measured = list(pool.map(measure_part, measured, repeat(measuring)))
        by_name = {host.name: host for host in measured}
        sites = []
        for site in cluster.sites:
            hosts = tuple(by_name[host.name] for host in site.hosts)
            sites.append(msgspec.structs.replace(site, hosts=hosts))
        allreduce_s = _measure_allreduce(cluster, measuring)
    measured_cluster = msgspec.structs.replace(
        cluster, sites=tuple(sites), links=measured_links, allreduce_s=allreduce_s
    )
    return MeasuredLink(measured_cluster, measuring.failed, tuple(measuring.notes))


def matmul_shapes(model: ModelSpec, rows: int) -> list[tuple[int, int, int]]:
    """List (m, k, n) of the model's matrix products: queries with keys and values, output, up,
    down, head."""
    d = model.d_model
    kv = model.kv_heads * (d // model.heads)
    products = [(d, d + 2 * kv), (d, d), (d, model.d_ff), (model.d_ff, d), (d, model.vocab_size)]
    return [(rows, k, n) for k, n in dict.fromkeys(products)]


class _Measuring(NamedTuple):
    """What is timed of a model, over sequences of `seq_len` tokens; and what failed."""

    model: ModelSpec
    seq_len: int
    report: Callable[[str], None]
    probes: dict[str, list[Probe]]
    failed: dict[tuple[str, int], Problem]
    notes: list[str]

    def ask(self, host: Host, index: int, query: Query, kind: type[T]) -> T | None:
        """Return the answer of a device's probe; None of one that has failed, now or before."""
        if (host.name, index) in self.failed:
            return None
        try:
            return self.probes[host.name][index].ask(query, kind)
        except Refusal as refusal:
            self.record_failure(host, index, refusal.problem)
            return None

    def record_failure(self, host: Host, index: int, problem: Problem) -> None:
        self.failed[host.name, index] = problem
        self.report(f"device {index} of {host.name} has failed: {problem.what} ({problem.fact})")

    def report_left_out(self, host: Host, index: int, left_out: Sequence[LeftOut]) -> None:
        for omission in left_out:
            text = f"device {index} of {host.name}: left out {omission.what}"
            if omission.rows:
                text += f" of {', '.join(map(str, omission.rows))} sequences at a time"
            text += f": {format_bytes(omission.needed)} needed, {format_bytes(omission.free)} free"
            self.report(text)
            self.notes.append(text)

    def time_units(self, host: Host, index: int) -> UnitTimes | None:
        device = host.devices[index]
        planned = _planned_device(host, index)
        dtypes = device.sheet.precisions
        query = UnitsQuery(planned, self.model, self.seq_len, SEQUENCES, dtypes, device.memory)
        return self.ask(host, index, query, UnitTimes)

    def time_compiled_units(self, host: Host, index: int) -> tuple[UnitTime, ...]:
        """Time compiled units where plans for the device may compile: few, as each number of rows
        takes a compile."""
        device = host.devices[index]
        if not choose_compile(device, host.triton, math.inf).value:
            return ()
        rows = (SEQUENCES[0], SEQUENCES[-1])
        planned = _planned_device(host, index)
        query = UnitsQuery(
            planned, self.model, self.seq_len, rows, ("bf16",), device.memory, compiled=True
        )
        timed = self.ask(host, index, query, UnitTimes)
        return () if timed is None else timed.times

    def working_devices(self, host: Host) -> list[int]:
        """List a host's devices that have not failed."""
        return [i for i in range(len(host.devices)) if (host.name, i) not in self.failed]


def _examine_gpus(host: Host, measuring: _Measuring) -> Host:
    """Examine a host's GPUs through its PyTorch: compute capability, and whether it has Triton."""
    indices = [i for i, device in enumerate(host.devices) if device.backend == "cuda"]
    if not indices:
        return host
    wheel = measuring.ask(host, indices[0], InstalledQuery(), Wheel)
    if wheel is None:
        return host
    devices = list(host.devices)
    # ROCm's numbers are other ones; and where a GPU is left out places do not tell which is which.
    if wheel.hip is None and len(wheel.seen) == len(indices):
        for index, gpu in zip(indices, wheel.seen, strict=True):
            major, minor = gpu.capability
            devices[index] = devices[index].but(capability=major + minor / 10)
    return msgspec.structs.replace(host, devices=tuple(devices), triton=wheel.triton)


def _measure_alone(host: Host, measuring: _Measuring) -> Host:
    """Measure a host's devices one after another: those that share cores must not disturb each
    other."""
    done = list[Device]()
    bare = [device.but(enter=None) for device in host.devices]
    for index, device in enumerate(host.devices):
        measuring.report(f"device {index} of {host.name}: {device.kind}")
        planned = _planned_device(host, index)
        products = tuple(matmul_shapes(measuring.model, ROWS[device.backend]))
        query = RatesQuery(planned, products, device.sheet.precisions, device.memory)
        measured = measuring.ask(host, index, query, DeviceRates)
        if measured is not None:
            measuring.report_left_out(host, index, measured.left_out)
            memory = min(device.memory, measured.memory)
            device = device.but(
                rates=measured.rates,
                bandwidth=measured.bandwidth,
                memory=memory,
                launch_s=measured.launch_s,
            )
            # Those that are alike need not all be timed alone.
            twin = bare.index(bare[index])
            times = done[twin].times.units if twin < index else ()
            if not times:
                timed = measuring.time_units(host, index)
                if timed is not None:
                    measuring.report_left_out(host, index, timed.left_out)
                    times = timed.times + measuring.time_compiled_units(host, index)
            failed = (host.name, index) in measuring.failed
            device = device.but(units=times, origin=device.origin if failed else "measured")
        done.append(device)
    return msgspec.structs.replace(host, devices=tuple(done))


def _measure_co_located(host: Host, measuring: _Measuring) -> Host:
    """Measure the times of units on a host's devices while all of them compute."""
    indices = measuring.working_devices(host)
    if len(indices) < 2:
        return host
    measuring.report(f"all devices of {host.name} together")
    devices = list(host.devices)
    with ThreadPoolExecutor(len(indices)) as pool:
        answers = list(pool.map(measuring.time_units, repeat(host), indices))
    for index, timed in zip(indices, answers, strict=True):
        if timed is not None:
            units = list(devices[index].times.units)
            for unit in timed.times:
                units.append(msgspec.structs.replace(unit, together=len(indices)))
            devices[index] = devices[index].but(units=tuple(units))
    return msgspec.structs.replace(host, devices=tuple(devices))


def _measure_local_rate(host: Host, measuring: _Measuring) -> Host:
    """Measure the bytes a second that each device of a host sends in an all-reduce over all of
    them: a ring of 2 (n - 1) steps with a part each."""
    ranks = [(host, index) for index in measuring.working_devices(host)]
    n = len(ranks)
    if n < 2:
        return host
    seconds = _time_allreduces(ranks, (INSIDE_BYTES,), measuring)
    if not seconds:
        return host
    local_rate = 2 * (n - 1) / n * INSIDE_BYTES / seconds[INSIDE_BYTES]
    return msgspec.structs.replace(host, local_rate=local_rate)


def _planned_device(host: Host, index: int) -> PlannedDevice:
    device = host.devices[index]
    return PlannedDevice(
        host=host.name,
        backend=device.backend,
        index=index,
        threads=device.slot.threads,
        kind=device.kind,
    )


def _measure_allreduce(cluster: Cluster, measuring: _Measuring) -> dict[int, float]:
    """Time all-reduces over all devices; none where one has failed, as what the others take is no
    figure of the cluster."""
    ranks = list[tuple[Host, int]]()
    for host in cluster.hosts:
        ranks += zip(repeat(host), range(len(host.devices)), strict=False)
    if measuring.failed or len(ranks) < 2:
        return {}
    measuring.report(f"all-reduce over {counted(len(ranks), 'device')}")
    return _time_allreduces(ranks, ALLREDUCE_BYTES, measuring)


def _time_allreduces(
    ranks: Sequence[tuple[Host, int]], sizes: tuple[int, ...], measuring: _Measuring
) -> dict[int, float]:
    """Return seconds of all-reduces over these devices; of none where one of them fails, which the
    others then do, too."""
    hosts = {host.name: host for host, _ in ranks}
    with closing(AgentPool()) as agents:
        rendezvous = arrange_rendezvous(list(hosts.values()), agents)
    problems = dict[int, Problem]()

    def ask(rank: int) -> dict[int, float]:
        host, index = ranks[rank]
        query = AllReduceQuery(
            _planned_device(host, index),
            rank,
            len(ranks),
            rendezvous.address,
            rendezvous.port,
            rendezvous.secret,
            rendezvous.interfaces.get(host.name),
            sizes,
        )
        try:
            return measuring.probes[host.name][index].ask(query, dict[int, float])
        except Refusal as refusal:
            problems[rank] = refusal.problem
            return {}

    with ThreadPoolExecutor(len(ranks)) as pool:
        seconds = list(pool.map(ask, range(len(ranks))))
    causes = [rank for rank, problem in problems.items() if problem.code != "worker-lost"]
    for rank in causes or problems:
        host, index = ranks[rank]
        measuring.record_failure(host, index, problems[rank])
    return {} if problems else seconds[0]


def measure_links(
    cluster: Cluster, activation_bytes: int, report: Callable[[str], None]
) -> tuple[Link, ...]:
    """Measure every link: between hosts of a site, and between the first hosts of two sites.

    Raises Refusal (host-unreachable) for a host or a link that does not work.
    """
    with start_agents(cluster.hosts) as (reached, unreachable):
        for problem in unreachable.values():
            raise Refusal.of(problem)
        pairs = list[tuple[Host, Host, tuple[str, str]]]()
        for site in cluster.sites:
            for a, b in combinations(site.hosts, 2):
                pairs.append((a, b, (a.name, b.name)))
        for site, other in combinations(cluster.sites, 2):
            pairs.append((site.hosts[0], other.hosts[0], (site.name, other.name)))
        measured = []
        for a, b, ends in pairs:
            report(f"link {' - '.join(ends)}")
            link = measure_link(reached[a.name], reached[b.name], activation_bytes)
            measured.append(name_link_ends(link, ends, cluster))
    return tuple(measured)


def name_link_ends(link: Link, ends: tuple[str, str], cluster: Cluster) -> Link:
    """Name the ends of a link in the cluster, with the loss that was known before where none
    could be counted."""
    loss = link.loss
    for known in cluster.links if loss is None else ():
        if {known.a, known.b} == set(ends):
            loss = known.loss
    return msgspec.structs.replace(link, a=ends[0], b=ends[1], loss=loss)
