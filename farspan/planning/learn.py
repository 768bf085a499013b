"""What trials say of devices, links and ways of dividing the work: the paces at which the estimator
would have predicted what was measured.

A pace multiplies the seconds of all that a host's devices of one kind compute, of all that crosses
one link, or of the steps of all plans with stages, or with a tensor axis, or with sums over a batch
axis: what the estimator misses of one such plan it misses of the next. With x the logarithms of the
paces, p(x) the estimator's logarithms of the plans' steps, and of what single devices compute in
them, and m the measured ones, x minimises

    |(p(x) - m) / NOISE|^2 + |x / DOUBT|^2

by Gauss and Newton's steps: the maximum a posteriori under normal errors (Tarantola 2005, section
3.2). Without evidence a pace stays what it was; a plan that crosses no link says nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Device, Host
from farspan.domain.plan import Plan
from farspan.estimate.devices import devices
from farspan.estimate.price import price
from farspan.planning.why import costs_of

#: Standard deviations of logarithms: of one trial's step from the next one's, and of the
#: estimator's rates from what a plan meets. Choices: repeats in benchmarks/results/wan.jsonl differ
#: by 3 %; rates that nobody probed are known worse.
NOISE = 0.05
DOUBT = {"device": 0.25, "link": 0.25, "way": 0.2}
#: Steps of the search, and the change of a pace's logarithm that slopes are taken over.
ROUNDS = 4
STEP = 0.02

Paces = npt.NDArray[np.float64]


class Observation(NamedTuple):
    """A plan, its measured seconds a step, and those that single ranks compute in it."""

    plan: Plan
    step_s: float
    compute_s: Mapping[int, float] = {}


class Paced(NamedTuple):
    """What keeps a pace: the devices of kind `b` in host `a`, the link between two sites or hosts,
    or a way `a` of dividing the work."""

    what: Literal["device", "link", "way"]
    a: str
    b: str = ""


class Learned(NamedTuple):
    """The cluster at its learned paces, and those of the ways: a step takes the product of its
    plan's."""

    cluster: Cluster
    ways: Mapping[str, float]

    def way(self, plan: Plan) -> float:
        return math.prod(self.ways.get(way, 1.0) for way in sorted(ways_of(plan)))


def ways_of(plan: Plan) -> frozenset[str]:
    """How a plan divides the work between its devices; nothing for a single one."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    ways = {
        "stages": any(len(replica.stages) > 1 for replica in plan.replicas),
        "tensor": any(stage.mesh.size("tensor") > 1 for stage in stages),
        "sums": any(len(stage.mesh.batch) > 1 for stage in stages),
        "meetings": len(plan.replicas) > 1,
    }
    return frozenset(way for way, used in ways.items() if used)


def learn(cluster: Cluster, seen: Sequence[Observation]) -> Learned:
    """The paces that explain what was seen; the cluster itself without anything seen."""
    parts = sorted(parts_of(cluster, seen))
    if not parts:
        return Learned(cluster, {})
    computing = [_alone(observation, cluster) for observation in seen]
    measured = np.log(
        [
            s
            for observation, ranks in zip(seen, computing, strict=True)
            for s in (observation.step_s, *(observation.compute_s[rank] for rank in ranks))
        ]
    )

    def learned(x: Paces) -> Learned:
        paces = {part: math.exp(value) for part, value in zip(parts, x, strict=True)}
        ways = {part.a: pace for part, pace in paces.items() if part.what == "way"}
        return Learned(with_paces(cluster, paces), ways)

    def predicted(x: Paces) -> Paces:
        paced = learned(x)
        seconds: list[float] = []
        for observation, ranks in zip(seen, computing, strict=True):
            costs = costs_of(observation.plan, paced.cluster)
            times = devices(observation.plan, costs) if ranks else {}
            step_s = price(observation.plan, costs, brief=True).step_s * paced.way(observation.plan)
            seconds += (step_s, *(times[rank].compute_s for rank in ranks))
        return np.log(seconds)

    doubt = np.array([DOUBT[part.what] for part in parts])
    x: Paces = np.zeros(len(parts))
    for _ in range(ROUNDS):
        current = predicted(x)
        slopes = np.stack(
            [(predicted(x + STEP * unit) - current) / STEP for unit in np.eye(len(parts))], axis=1
        )
        # The prior as further rows: all in units of their standard deviations.
        rows = np.concatenate([slopes / NOISE, np.diag(1 / doubt)])
        lacking = np.concatenate([(measured - current) / NOISE, -x / doubt])
        x = x + np.linalg.lstsq(rows, lacking, rcond=None)[0]
    return learned(x)


def _alone(observation: Observation, cluster: Cluster) -> list[int]:
    """The ranks whose passes hold nothing but arithmetic: what they compute says how fast they
    are."""
    if not observation.compute_s:
        return []
    times = devices(observation.plan, costs_of(observation.plan, cluster))
    return [
        rank
        for rank in observation.compute_s
        if rank in times and times[rank].compute_s and not times[rank].inside_s
    ]


def parts_of(cluster: Cluster, seen: Sequence[Observation]) -> frozenset[Paced]:
    """All that any of the plans uses: kinds by host, links between its hosts, and ways."""
    parts: set[Paced] = set()
    for observation in seen:
        hosts = {at.host for at in observation.plan.devices}
        by_name = {host.name: host for host in cluster.hosts if host.name in hosts}
        parts |= {
            Paced("device", at.host, by_name[at.host].devices[at.index].kind)
            for at in observation.plan.devices
        }
        ends = hosts | {cluster.site_of(name).name for name in hosts}
        parts |= {
            Paced("link", link.a, link.b) for link in cluster.links if {link.a, link.b} <= ends
        }
        parts |= {Paced("way", way) for way in ways_of(observation.plan)}
    return frozenset(parts)


def with_paces(cluster: Cluster, paces: Mapping[Paced, float]) -> Cluster:
    """The cluster whose parts take so many times as long as they did."""

    def paced(host: Host, index: int) -> Device:
        device = host.devices[index]
        pace = paces.get(Paced("device", host.name, device.kind), 1.0)
        return device.but(pace=device.learned.pace * pace)

    links = tuple(
        replace(link, pace=link.pace * paces.get(Paced("link", link.a, link.b), 1.0))
        for link in cluster.links
    )
    return replace(cluster.with_devices(paced), links=links)
