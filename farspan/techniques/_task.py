"""What every technique is asked: a model and its training, on a cluster, under an engine."""

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
from farspan.domain.codec import content_hash
from farspan.domain.engine import Engine
from farspan.domain.graph import OpGraph
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Edge, Inputs, Plan, PlannedDevice, Replica, Stage, Sync
from farspan.domain.problems import Problem
from farspan.domain.train import TrainSpec
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.semantics.kernel_choice import BYTES

#: Streams between two stages: beyond, one more adds little (`farspan probe` tries 1 to 16) and
#: costs a socket a pair.
MOST_STREAMS = 8


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
        everything = [
            PlannedDevice(
                host=host.name,
                site=site.name,
                backend=device.backend,
                index=index,
                threads=device.slot.threads,
                kind=device.kind,
            )
            for site in self.cluster.sites
            for host in site.hosts
            for index, device in enumerate(host.devices)
        ]
        return tuple(
            everything if self.only is None else (everything[place] for place in self.only)
        )

    @functools.cached_property
    def sites(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each site that has any."""
        ranks: dict[str, tuple[int, ...]] = {}
        for rank, site in enumerate(self.costs.network.sites):
            ranks[site] = (*ranks.get(site, ()), rank)
        return ranks

    @functools.cached_property
    def costs(self) -> Costs:
        """What plans for these devices cost: with all that is known of them from questions with
        another batch."""
        alike = ("costs", self.only, msgspec.structs.replace(self.train, batch=1))
        known: Costs | None = self.memo.get(alike)
        if known is not None:
            return known.with_batch(self.train, self.outer)
        costs = Costs(
            self.graph, self.train, Network(self.cluster, self.devices, self.engine), self.outer
        )
        self.memo[alike] = costs
        return costs

    @functools.cached_property
    def inputs(self) -> Inputs:
        return Inputs(cluster=content_hash(as_json(self.cluster)), corpus=self.corpus)

    @functools.cached_property
    def _answers(self) -> dict[str, Plan | Problem]:
        return {}

    def answer(self, technique: str, plan: Callable[[Task], Plan | Problem]) -> Plan | Problem:
        """What a technique answers, kept: others ask for it again."""
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
        edges = tuple(
            self._edge(a.mesh.ranks[-1], b.mesh.ranks[0]) for a, b in itertools.pairwise(stages)
        )
        return Replica(
            stages=tuple(stages), edges=edges, microbatches=microbatches, in_flight=tuple(in_flight)
        )

    def _edge(self, a: int, b: int) -> Edge:
        """What crosses between stages that meet at these ranks: rounded no further inside a
        site."""
        bits: Literal[8, 16, 32] = 32 if BYTES[self.train.precision] == 4 else 16
        if (
            self.costs.network.sites[a] != self.costs.network.sites[b]
            and self.train.wan_bits < bits
        ):
            bits = self.train.wan_bits
        return Edge(bits=bits, streams=self.streams(a, b))

    def streams(self, a: int, b: int) -> int:
        """TCP streams that fill the line between two ranks, where one stream's window does not."""
        network = self.costs.network
        if network.hosts[a] == network.hosts[b]:
            return 1
        wire = network.wire(a, b, collective=False, streams=1)
        return max(1, min(MOST_STREAMS, math.ceil(wire.line / wire.rate)))

    @functools.cached_property
    def _known_likeness(self) -> dict[tuple[int, ...], int]:
        return {}

    def likeness(self, ranks: Sequence[int]) -> int:
        """A number for what makes two runs of devices take the same: figures, division into hosts,
        and the links between these; how the engine works on all of the question's kinds of devices;
        and what must be left free."""
        key = tuple(ranks)
        if key not in self._known_likeness:
            self._known_likeness[key] = self.memo.setdefault(
                ("likeness", self._likeness(key)), len(self.memo)
            )
        return self._known_likeness[key]

    def _likeness(self, ranks: tuple[int, ...]) -> object:
        network = self.costs.network
        hosts = list(dict.fromkeys(network.hosts[rank] for rank in ranks))
        places = tuple(hosts.index(network.hosts[rank]) for rank in ranks)
        links = tuple(network.link(a, b) for i, a in enumerate(hosts) for b in hosts[i + 1 :])
        figures = tuple(
            (
                link.rtt_s,
                link.bandwidth,
                link.window,
                link.loss,
                link.busy_s,
                link.pace,
                *link.in_flight.items(),
            )
            for link in links
        )
        rates = tuple(
            network.ring_rate([rank for rank in ranks if network.hosts[rank] == host])
            for host in hosts
        )
        kinds = frozenset(device.backend for device in network.devices)
        return (
            tuple(self.costs.figures[rank] for rank in ranks),
            places,
            rates,
            figures,
            kinds,
            self.outer,
        )

    def fits(self, replica: Replica) -> bool:
        """Whether every device of the replica holds what it must."""
        seen = set()
        for i, stage in enumerate(replica.stages):
            for c, ranks in enumerate(stage.mesh.batch):
                key = (i, self.costs.alike[ranks[0]], stage.rows[c])
                if key not in seen and self.costs.memory(replica, i, c).total > self.capacity(
                    ranks[0]
                ):
                    return False
                seen.add(key)
        return True

    def capacity(self, rank: int) -> float:
        """Bytes that a plan may fill on a device."""
        return self.engine.fill * self.costs.network.devices[rank].memory


def cannot(what: str, where: str, fact: str, remedy: str) -> Problem:
    """Why a technique has no plan here, for another reason than memory."""
    return Problem(code="cannot-plan", what=what, where=where, fact=fact, remedy=remedy)
