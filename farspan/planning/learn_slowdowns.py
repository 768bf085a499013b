"""What trials show of devices, links and kinds of parallelism: the slowdowns at which the estimator
would have predicted what was measured.

A slowdown multiplies the seconds of all that a host's devices of one kind compute, of all that
crosses one link, or of the steps of all plans with stages, or with a tensor axis, or with sums over
a batch axis: what the estimator misses of one such plan it misses of the next. With x the
logarithms of the slowdowns, p(x) the estimator's logarithms of the plans' steps, and of what single
devices compute in them, and m the measured ones, x minimises

    |(p(x) - m) / NOISE|^2 + |x / DOUBT|^2

by Gauss and Newton's steps: the maximum a posteriori under normal errors (Tarantola 2005, section
3.2). Without evidence a slowdown stays what it was; a plan that crosses no link is no evidence of
its slowdown.
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
from farspan.estimate.estimate_plan import price
from farspan.planning.why import costs_of

#: Standard deviations of logarithms: of one trial's step from the next one's, and of the
#: estimator's rates from what a plan meets. Choices: repeats in benchmarks/results/wan.jsonl differ
#: by 3 %; rates that nobody probed are known worse.
NOISE = 0.05
DOUBT = {"device": 0.25, "link": 0.25, "parallelism": 0.2}
#: Steps of the search, and the change of a slowdown's logarithm that slopes are taken over.
SEARCH_ROUNDS = 4
STEP = 0.02

Vector = npt.NDArray[np.float64]


class Observation(NamedTuple):
    """A plan, its measured seconds a step, and those that single ranks compute in it."""

    plan: Plan
    step_s: float
    compute_s: Mapping[int, float] = {}


class Paced(NamedTuple):
    """What has a slowdown: the devices of kind `b` in host `a`, the link between two sites or
    hosts, or a kind `a` of parallelism."""

    what: Literal["device", "link", "parallelism"]
    a: str
    b: str = ""


class Learned(NamedTuple):
    """The cluster with its learned slowdowns, and those of kinds of parallelism."""

    cluster: Cluster
    slowdowns: Mapping[str, float]

    def slowdown(self, plan: Plan) -> float:
        """Return the product of the slowdowns of a plan's kinds of parallelism."""
        return math.prod(self.slowdowns.get(kind, 1.0) for kind in sorted(parallelism_of(plan)))


def parallelism_of(plan: Plan) -> frozenset[str]:
    """Return the kinds of parallelism of a plan; none for a single device."""
    kinds = set()
    if len(plan.replicas) > 1:
        kinds.add("meetings")
    for replica in plan.replicas:
        if len(replica.stages) > 1:
            kinds.add("stages")
        for stage in replica.stages:
            if stage.mesh.size("tensor") > 1:
                kinds.add("tensor")
            if len(stage.mesh.batch) > 1:
                kinds.add("sums")
    return frozenset(kinds)


def learn_slowdowns(cluster: Cluster, seen: Sequence[Observation]) -> Learned:
    """Return the slowdowns that explain what was seen; the cluster itself without anything seen."""
    parts = sorted(parts_of(cluster, seen))
    if not parts:
        return Learned(cluster, {})
    computing = [_ranks_without_communication(observation, cluster) for observation in seen]
    seconds: list[float] = []
    for observation, ranks in zip(seen, computing, strict=True):
        seconds += (observation.step_s, *(observation.compute_s[rank] for rank in ranks))
    measured = np.log(seconds)

    def apply_slowdowns(x: Vector) -> Learned:
        slowdowns = {part: math.exp(value) for part, value in zip(parts, x, strict=True)}
        by_kind = {part.a: slowdowns[part] for part in parts if part.what == "parallelism"}
        return Learned(with_slowdowns(cluster, slowdowns), by_kind)

    def predict(x: Vector) -> Vector:
        slowed = apply_slowdowns(x)
        seconds: list[float] = []
        for observation, ranks in zip(seen, computing, strict=True):
            plan = observation.plan
            costs = costs_of(plan, slowed.cluster)
            times = devices(plan, costs) if ranks else {}
            step_s = price(plan, costs, brief=True).step_s * slowed.slowdown(plan)
            seconds += (step_s, *(times[rank].compute_s for rank in ranks))
        return np.log(seconds)

    doubt = np.array([DOUBT[part.what] for part in parts])
    x: Vector = np.zeros(len(parts))
    for _ in range(SEARCH_ROUNDS):
        current = predict(x)
        slopes = [(predict(x + STEP * unit) - current) / STEP for unit in np.eye(len(parts))]
        # The prior as further rows: all in units of their standard deviations.
        rows = np.concatenate([np.stack(slopes, axis=1) / NOISE, np.diag(1 / doubt)])
        residuals = np.concatenate([(measured - current) / NOISE, -x / doubt])
        x = x + np.linalg.lstsq(rows, residuals, rcond=None)[0]
    return apply_slowdowns(x)


def _ranks_without_communication(observation: Observation, cluster: Cluster) -> list[int]:
    """Return the ranks that only compute in their passes: their times show how fast they are."""
    if not observation.compute_s:
        return []
    times = devices(observation.plan, costs_of(observation.plan, cluster))
    ranks = []
    for rank in observation.compute_s:
        time = times.get(rank)
        if time is not None and time.compute_s and not time.inside_s:
            ranks.append(rank)
    return ranks


def parts_of(cluster: Cluster, seen: Sequence[Observation]) -> frozenset[Paced]:
    """Return all that any of the plans uses: kinds by host, links between its hosts, and kinds of
    parallelism."""
    parts: set[Paced] = set()
    hosts = {host.name: host for host in cluster.hosts}
    for observation in seen:
        plan = observation.plan
        ends = {at.host for at in plan.devices}
        ends |= {cluster.site_of(name).name for name in ends}
        for at in plan.devices:
            parts.add(Paced("device", at.host, hosts[at.host].devices[at.index].kind))
        for link in cluster.links:
            if {link.a, link.b} <= ends:
                parts.add(Paced("link", link.a, link.b))
        parts |= {Paced("parallelism", kind) for kind in parallelism_of(plan)}
    return frozenset(parts)


def with_slowdowns(cluster: Cluster, slowdowns: Mapping[Paced, float]) -> Cluster:
    """Return the cluster whose parts take their slowdown times as long as they did."""

    def slow_down(host: Host, index: int) -> Device:
        device = host.devices[index]
        slowdown = slowdowns.get(Paced("device", host.name, device.kind), 1.0)
        return device.but(pace=device.learned.pace * slowdown)

    links = []
    for link in cluster.links:
        slowdown = slowdowns.get(Paced("link", link.a, link.b), 1.0)
        links.append(replace(link, pace=link.pace * slowdown))
    return replace(cluster.with_devices(slow_down), links=tuple(links))
