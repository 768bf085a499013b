"""Small clusters, an engine whose figures are round, and random plans that no technique emits."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from farspan import models
from farspan.domain.cluster import Cluster, Device, Host, Link, Site
from farspan.domain.engine import Engine, load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.plan import (
    Edge,
    GradSync,
    Inputs,
    Mesh,
    Plan,
    PlannedDevice,
    Replica,
    Stage,
    Sync,
)
from farspan.domain.train import TrainSpec
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs

TIED = models.family("gpt2").shape(d_model=64, layers=4, heads=4, vocab_size=96, context=32)
UNTIED = models.family("llama").shape(
    d_model=64, layers=4, heads=4, kv_heads=2, vocab_size=96, context=32, tied=False
)


def plain(**changes: object) -> Engine:
    """An engine without overheads: every term but the one under test is 0 or 1."""
    widths = {"fp32": (4, 4, 8), "tf32": (4, 4, 8), "bf16": (2, 4, 12), "fp16": (2, 4, 12)}
    weights, gradients, optimizer = (
        {name: each[i] for name, each in widths.items()} for i in range(3)
    )
    known = {
        "name": "plain",
        "source": "tests",
        "efficiency": dict.fromkeys(widths, 1.0),
        "bandwidth": 1.0,
        "launch_s": 0.0,
        "window": 10**12,
        "local_rate": 1e10,
        "message_s": 1e-3,
        "overlap": 0.0,
        "sends_awaited": False,
        "receives_ahead": True,
        "weight_bytes": weights,
        "gradient_bytes": gradients,
        "optimizer_bytes": optimizer,
        "fill": 0.9,
        "framework": 0,
        "host_framework": 0,
        "logits_chunk": None,
        "interval": (1.0, 1.0),
        "network_interval": (1.0, 1.0),
    }
    return Engine(**known | changes)


def device(**changes: object) -> Device:
    """A device whose products reach what its data sheet says."""
    known = {"flops": {"fp32": 1e12}, "bandwidth": 1e11} | changes
    return Device(kind="gpu", backend="cuda", memory=10**10).but(
        **{"measured": known["flops"]} | known
    )


def cluster(*sites: list[list[Device]], links: tuple[Link, ...] = (), **changes: object) -> Cluster:
    """Sites A, B, ... of hosts a0, a1, ...; `links` between them."""
    made = []
    for name, hosts in zip("ABCDEF", sites, strict=False):
        here = tuple(
            Host(name=f"{name.lower()}{i}", devices=tuple(devices))
            for i, devices in enumerate(hosts)
        )
        made.append(Site(name=name, hosts=here, **changes))
    return Cluster(sites=tuple(made), links=links)


def planned(there: Cluster) -> tuple[PlannedDevice, ...]:
    return tuple(
        PlannedDevice(host=host.name, backend=one.backend, index=i, threads=one.slot.threads)
        for host in there.hosts
        for i, one in enumerate(host.devices)
    )


def train(**changes: object) -> TrainSpec:
    return TrainSpec(**{"steps": 100, "batch": 8, "seq_len": 16, "precision": "fp32"} | changes)


def mesh(*ranks: int, **axes: int) -> Mesh:
    """`mesh(0, 1, 2, 3, data=2, tensor=2)`; one data axis unless said."""
    axes = axes or {"data": len(ranks)}
    return Mesh(ranks=ranks, shape=tuple(axes.values()), axes=tuple(axes))


def stage(
    on: Mesh, rows: tuple[int, ...], units: tuple[int, int] = (0, 6), **changes: object
) -> Stage:
    known = {"units": units, "mesh": on, "rows": rows, "grad_sync": GradSync(bucket_bytes=None)}
    return Stage(**known | changes)


def plan(
    there: Cluster,
    *replicas: Replica,
    spec: ModelSpec = TIED,
    sync: Sync | None = None,
    **changes: object,
) -> Plan:
    return Plan(
        technique="none",
        model=spec,
        train=train(**changes),
        replicas=replicas,
        devices=planned(there),
        inputs=Inputs(cluster="c" * 16, corpus="c" * 16),
        sync=sync,
    )


def costs(there: Cluster, using: Engine, spec: ModelSpec = TIED, **changes: object) -> Costs:
    return Costs(models.graph(spec), train(**changes), Network(there, planned(there), using))


def pipeline(
    stages: list[Stage], microbatches: int, depths: tuple[int, ...], bits: int = 32
) -> Replica:
    return Replica(
        stages=tuple(stages),
        edges=(Edge(bits=bits),) * (len(stages) - 1),
        microbatches=microbatches,
        in_flight=depths,
    )


ENGINES = ("farspan", "awaiting")


def named(name: str) -> Engine:
    """The runtime's own engine, or one that awaits its sends and posts receives just in time."""
    own = load_engine("farspan")
    late = {
        "sends_awaited": True,
        "receives_ahead": False,
        "overlap": 0.0,
        "streams": 2,
        "collective_bytes": 10**6,
    }
    return own if name == "farspan" else msgspec.structs.replace(own, name=name, **late)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """One to three sites of unlike GPUs in one or two hosts each, every pair of sites linked
    somehow."""
    sites = []
    for _ in range(draw(st.integers(1, 3))):
        hosts = []
        for _ in range(draw(st.integers(1, 2))):
            speed = draw(st.sampled_from([1e10, 3e10, 2e11]))
            one = device(
                flops={"fp32": speed, "bf16": 4 * speed},
                bandwidth=draw(st.sampled_from([1e9, 1e10, 1e11])),
            )
            hosts.append([one] * draw(st.integers(1, 2)))
        sites.append(hosts)
    names = "ABC"[: len(sites)]
    links = tuple(draw(_links(a, b)) for i, a in enumerate(names) for b in names[i + 1 :])
    return cluster(*sites, links=links, egress_usd_per_byte=1e-11)


@st.composite
def _links(draw: st.DrawFn, a: str, b: str) -> Link:
    return Link(
        a=a,
        b=b,
        rtt_s=draw(st.sampled_from([1e-4, 0.01, 0.2])),
        bandwidth=draw(st.sampled_from([None, 1e6, 1e8])),
        window=draw(st.sampled_from([None, 10**5])),
        loss=draw(st.sampled_from([None, 1e-4])),
        in_flight=draw(st.sampled_from([{}, {1: 10**5, 4: 3 * 10**5}])),
        transfer_s=draw(st.sampled_from([{}, {10**3: 0.2, 10**6: 0.5}])),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Cluster, Plan]:
    """Any cluster, and any valid plan on it: unlike stages, meshes of one to three axes, any ZeRO
    level, any splits."""
    there = draw(clusters())
    spec = draw(st.sampled_from([TIED, UNTIED]))
    ranks = draw(st.permutations(range(len(there.devices))))
    groups = _cut(draw, list(ranks), draw(st.integers(1, min(2, len(ranks)))))
    replicas = tuple(draw(_replicas(tuple(group), spec)) for group in groups)
    sync = None
    if len(replicas) > 1:
        sync = Sync(
            every=draw(st.sampled_from([1, 30])),
            bits=draw(st.sampled_from([4, 32])),
            overlap=draw(st.booleans()),
        )
    batch = sum(replica.batch for replica in replicas)
    precision = draw(st.sampled_from(["fp32", "bf16"]))
    return there, plan(there, *replicas, spec=spec, sync=sync, batch=batch, precision=precision)


def _cut(draw: st.DrawFn, items: list[int], parts: int) -> list[list[int]]:
    if parts == 1:
        return [items]
    places = sorted(
        draw(
            st.lists(
                st.integers(1, len(items) - 1), min_size=parts - 1, max_size=parts - 1, unique=True
            )
        )
    )
    return [items[a:b] for a, b in zip([0, *places], [*places, len(items)], strict=True)]


@st.composite
def _replicas(draw: st.DrawFn, ranks: tuple[int, ...], spec: ModelSpec) -> Replica:
    graph = models.graph(spec)
    count = draw(st.integers(1, min(3, len(ranks))))
    cuts = _cut(draw, list(range(graph.units)), count)
    microbatches = draw(st.sampled_from([1, 2, 4]))
    stages = []
    for units, group in zip(cuts, _cut(draw, list(ranks), count), strict=True):
        stages.append(
            draw(
                _stages(
                    (units[0], units[-1] + 1), tuple(group), microbatches, spec, piped=count > 1
                )
            )
        )
    depths = sorted(draw(st.lists(st.integers(1, 5), min_size=count, max_size=count)), reverse=True)
    edges = tuple(
        Edge(bits=draw(st.sampled_from([8, 16, 32])), streams=draw(st.integers(1, 3)))
        for _ in stages[1:]
    )
    return Replica(
        stages=tuple(stages), edges=edges, microbatches=microbatches, in_flight=tuple(depths)
    )


@st.composite
def _stages(
    draw: st.DrawFn,
    units: tuple[int, int],
    ranks: tuple[int, ...],
    microbatches: int,
    spec: ModelSpec,
    *,
    piped: bool,
) -> Stage:
    ways = draw(st.sampled_from([n for n in (1, 2) if len(ranks) % n == 0]))
    left = len(ranks) // ways
    sites = draw(st.sampled_from([n for n in (1, 2) if left % n == 0]))
    on = Mesh(ranks=ranks, shape=(sites, left // sites, ways), axes=("site", "data", "tensor"))
    graph = models.graph(spec)
    splits = {}
    if ways > 1:
        splits["residual"] = draw(st.sampled_from(["", "b"]))
        for op in (*graph.embedding, *graph.block, *graph.head):
            splits[op.name] = draw(st.sampled_from(["", "b", *op.divisible]))
    sync = GradSync(
        bucket_bytes=draw(st.sampled_from([None, 20_000])),
        topology=draw(st.sampled_from(["flat", "hierarchical"])),
    )
    zero = draw(st.integers(0, 3))
    recompute = draw(st.booleans())
    # Stages of one pipeline read the same sequences as each microbatch, which operators may divide
    # further.
    by_rows = "b" in splits.values()
    quantum = microbatches * (ways if by_rows else 1) if piped or by_rows else 1
    shares = tuple(quantum * len(part) for part in _cut(draw, list(range(48 // quantum)), left))
    return Stage(
        units=units,
        mesh=on,
        rows=shares,
        grad_sync=sync,
        zero=zero,
        splits=splits,
        recompute=recompute,
    )
