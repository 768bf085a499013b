"""The question to every technique: a model and its training, on a cluster, under an engine."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import as_json
from farspan.domain.engine import Engine
from farspan.domain.graph import OpGraph
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Edge, Inputs, Plan, PlannedDevice, Replica, Stage, Sync
from farspan.domain.problems import Problem
from farspan.domain.struct_files import content_hash
from farspan.domain.train import TrainSpec
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.semantics.kernel_choice import BYTES

#: TCP streams between two stages: beyond, one more adds little (`farspan probe` tries 1 to 16) and
#: costs a socket a pair.
MAX_STREAMS = 8


@dataclass(frozen=True)
class Task:
    """One question to a technique. Ranks are the devices in the cluster's order."""

    model: ModelSpec
    graph: OpGraph
    cluster: Cluster
    train: TrainSpec
    engine: Engine
    #: Content hash of the corpus; empty where there is none yet.
    corpus: str = ""
    #: Which of the cluster's devices to use, by their place in it; None is all.
    only: tuple[int, ...] | None = None
    #: What searches found out about parts of this question, shared between the tasks of one
    #: ranking.
    memo: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    #: Bytes a parameter that a plan must leave room for, as the replica that it is to become.
    outer: int = 0

    @functools.cached_property
    def devices(self) -> tuple[PlannedDevice, ...]:
        devices = []
        for site in self.cluster.sites:
            for host in site.hosts:
                for index, device in enumerate(host.devices):
                    planned = PlannedDevice(
                        host=host.name,
                        site=site.name,
                        backend=device.backend,
                        index=index,
                        threads=device.slot.threads,
                        kind=device.kind,
                    )
                    devices.append(planned)
        if self.only is None:
            return tuple(devices)
        return tuple(devices[place] for place in self.only)

    @functools.cached_property
    def sites(self) -> dict[str, tuple[int, ...]]:
        """Ranks by site, of sites that have any."""
        ranks: dict[str, tuple[int, ...]] = {}
        for rank, site in enumerate(self.costs.network.sites):
            ranks[site] = (*ranks.get(site, ()), rank)
        return ranks

    @functools.cached_property
    def costs(self) -> Costs:
        """Costs of plans for these devices; tasks that differ in their batch share them."""
        return self.costs_on(self.devices)

    def costs_on(self, devices: tuple[PlannedDevice, ...]) -> Costs:
        """Return the costs of plans on these devices, which run their steps as they are planned."""
        key = ("costs", devices, msgspec.structs.replace(self.train, batch=1))
        known: Costs | None = self.memo.get(key)
        if known is not None:
            return known.with_batch(self.train, self.outer)
        network = Network(self.cluster, devices, self.engine)
        costs = Costs(self.graph, self.train, network, self.outer)
        self.memo[key] = costs
        return costs

    @functools.cached_property
    def inputs(self) -> Inputs:
        return Inputs(cluster=content_hash(as_json(self.cluster)), corpus=self.corpus)

    @functools.cached_property
    def _answers(self) -> dict[str, Plan | Problem]:
        return {}

    def answer(self, technique: str, plan: Callable[[Task], Plan | Problem]) -> Plan | Problem:
        """Return a technique's answer, and keep it: other techniques need it too."""
        if technique not in self._answers:
            self._answers[technique] = plan(self)
        return self._answers[technique]

    @property
    def ranks(self) -> range:
        return range(len(self.devices))

    def plan(self, technique: str, replicas: Sequence[Replica], sync: Sync | None = None) -> Plan:
        return Plan(
            technique=technique,
            model=self.model,
            train=self.train,
            replicas=tuple(replicas),
            devices=self.devices,
            inputs=self.inputs,
            engine=self.engine.name,
            sync=sync,
        )

    def replica(
        self, stages: Sequence[Stage], microbatches: int, in_flight: Sequence[int]
    ) -> Replica:
        edges = []
        for before, after in itertools.pairwise(stages):
            edges.append(self._edge(before.mesh.ranks[-1], after.mesh.ranks[0]))
        return Replica(
            stages=tuple(stages),
            edges=tuple(edges),
            microbatches=microbatches,
            in_flight=tuple(in_flight),
        )

    def _edge(self, a: int, b: int) -> Edge:
        """Return the edge between the stages of two ranks.

        Activations are quantized only between sites.
        """
        bits: Literal[8, 16, 32] = 32 if BYTES[self.train.precision] == 4 else 16
        sites = self.costs.network.sites
        if sites[a] != sites[b] and self.train.wan_bits < bits:
            bits = self.train.wan_bits
        return Edge(bits=bits, streams=self.streams(a, b))

    def streams(self, a: int, b: int) -> int:
        """Return the TCP streams that fill the link between two ranks, if one's window does not."""
        network = self.costs.network
        if network.hosts[a] == network.hosts[b]:
            return 1
        wire = network.wire(a, b, collective=False, streams=1)
        return max(1, min(MAX_STREAMS, math.ceil(wire.line / wire.rate)))

    @functools.cached_property
    def _known_likeness(self) -> dict[tuple[int, ...], int]:
        return {}

    def likeness(self, ranks: Sequence[int]) -> int:
        """Return a number that two ranges of devices share if plans on them cost the same.

        They do for equal figures, division into hosts, links between these, kinds of devices in the
        question (the engine depends on them), and memory to leave free.
        """
        key = tuple(ranks)
        if key not in self._known_likeness:
            traits = ("likeness", self._device_traits(key))
            self._known_likeness[key] = self.memo.setdefault(traits, len(self.memo))
        return self._known_likeness[key]

    def _device_traits(self, ranks: tuple[int, ...]) -> object:
        network = self.costs.network
        hosts = list(dict.fromkeys(network.hosts[rank] for rank in ranks))
        places = tuple(hosts.index(network.hosts[rank]) for rank in ranks)
        links = []
        for a, b in itertools.combinations(hosts, 2):
            link = network.link(a, b)
            speed = (link.rtt_s, link.bandwidth, link.window, link.loss, link.busy_s, link.pace)
            links.append((speed, *link.in_flight.items()))
        rates = []
        for host in hosts:
            own = [rank for rank in ranks if network.hosts[rank] == host]
            rates.append(network.ring_rate(own))
        devices = tuple(self.costs.figures[rank] for rank in ranks)
        backends = frozenset(device.backend for device in network.devices)
        return devices, places, tuple(rates), tuple(links), backends, self.outer

    def fits(self, replica: Replica) -> bool:
        """Return whether the replica fits in the memory of every device."""
        seen = set()
        for index, stage in enumerate(replica.stages):
            for coordinate, ranks in enumerate(stage.mesh.batch):
                key = (index, self.costs.alike[ranks[0]], stage.rows[coordinate])
                if key in seen:
                    continue
                seen.add(key)
                needed = self.costs.memory(replica, index, coordinate).total
                if needed > self.capacity(ranks[0]):
                    return False
        return True

    def capacity(self, rank: int) -> float:
        """Return bytes that a plan may fill on a device."""
        return self.engine.fill * self.costs.network.devices[rank].memory


def cannot(what: str, where: str, fact: str, remedy: str) -> Problem:
    """Return why a technique has no plan here, for another reason than memory."""
    return Problem(code="cannot-plan", what=what, where=where, fact=fact, remedy=remedy)
