"""What to rent: every priced device kind of the catalogue, in several counts, for one model and its
tokens.

Up to eight devices are one host; more are hosts of eight, with the network that a cluster file
without links means (`domain.cluster`), or the rate that is asked about. Each offer is priced like
any cluster: the best technique over all of its devices. Devices of an offer are alike, so parts of
it are other offers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from farspan import models, techniques
from farspan.domain import catalog
from farspan.domain.assumed_networks import AssumedNetwork
from farspan.domain.cluster import SITE_BANDWIDTH, SITE_RTT_S, Cluster, Device, Host, Site
from farspan.domain.cost import OVERHEAD_SHARE
from farspan.domain.engine import Engine
from farspan.domain.graph import OpGraph
from farspan.domain.model import ModelSpec
from farspan.domain.problems import Refusal
from farspan.domain.suggest import any_of
from farspan.domain.suggest_device import suggest_device
from farspan.domain.train import TrainSpec
from farspan.planning.candidate import Candidate, Refused
from farspan.planning.cluster_parts import ClusterPart
from farspan.planning.model_speed import on_one_device
from farspan.planning.rank_plans import price_technique
from farspan.semantics.kernel_choice import BYTES
from farspan.techniques import Task

COUNTS = (1, 2, 4, 8, 16, 32)
#: Devices of a host: what clouds rent with fast links inside.
HOST = 8
#: The technique that searches for seconds; the others plan in milliseconds.
SEARCHED = "pipeshard"
#: An offer within this share of what arithmetic alone takes is not searched for more.
GAIN = 0.05
#: Devices of all offers that are searched, together: the most promising offers come first (about
#: 0.2 s a device).
EFFORT = 64


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Some devices of one kind, and the best technique on them. `usd_per_hour` is of all of
    them."""

    kind: str
    count: int
    usd_per_hour: float
    #: Where the price is from, and when.
    source: str
    checked: str
    cluster: Cluster
    best: Candidate | Refused
    #: Whether pipelines were searched too: only where they might beat every other offer in time or
    #: dollars.
    searched: bool
    #: Whether it ends in time, and within the dollars, that were given, and within the lease; False
    #: where it does not fit.
    meets: bool = False

    @property
    def time_s(self) -> float:
        """Seconds of the run; infinite where nothing fits."""
        return _time_s(self.best)

    @property
    def usd(self) -> float:
        """Dollars of the run; infinite where nothing fits."""
        return self.usd_per_hour * self.time_s / 3600


class Rent(msgspec.Struct, frozen=True, kw_only=True):
    """Offers by dollars, those that fit first. `frontier` are those that no other beats in time and
    dollars both."""

    offers: tuple[Offer, ...]
    frontier: tuple[int, ...]
    #: Within the hours: the cheapest; within dollars alone: the fastest; without a budget: the
    #: cheapest.
    chosen: int | None
    #: Bytes a second, and the round trip, between hosts; known machines have their own where
    #: nothing was asked about (`known`, by the kind of device).
    bandwidth: float
    known: dict[str, AssumedNetwork]
    rtt_s: float


class Budget(NamedTuple):
    """Seconds and dollars at most; infinite where not given."""

    seconds: float = math.inf
    usd: float = math.inf

    def meets(self, time_s: float, usd: float) -> bool:
        return time_s < math.inf and time_s <= self.seconds and usd <= self.usd


class Terms(NamedTuple):
    """How rented hosts are taken away: times a second of each, without notice, and the seconds
    of their lease."""

    preemptions_per_s: float | msgspec.UnsetType = msgspec.UNSET
    lease_s: float | None = None


def price_offers(
    model: ModelSpec,
    train_for: Callable[[ModelSpec, Cluster], TrainSpec],
    engine: Engine,
    *,
    budget: Budget = Budget(),
    allow: Sequence[str] = (),
    counts: Sequence[int] = COUNTS,
    kinds: Sequence[str] = (),
    bandwidth: float | None = None,
    terms: Terms = Terms(),
) -> Rent:
    """Price every offer. `kinds` and `counts` leave some out; without a `bandwidth` hosts have what
    is assumed of their shape. Raises Refusal for a kind without a price."""
    renting = _Renting(model, models.graph(model), train_for, engine, tuple(allow))
    quick = []
    for kind, (device, price) in _priced_devices(kinds).items():
        for count in counts:
            cluster = rented_cluster(device, count, bandwidth, terms)
            quick.append(renting.offer(kind, cluster, price))
    offers = []
    for offer in renting.searched(quick):
        outlasts = isinstance(offer.best, Candidate) and offer.best.outlasts_lease
        meets = budget.meets(offer.time_s, offer.usd) and not outlasts
        offers.append(replace(offer, meets=meets))
    offers.sort(key=lambda offer: (offer.usd_per_hour, offer.kind, offer.count))
    offers.sort(key=lambda offer: (offer.usd, offer.time_s))
    assumed_bandwidth = SITE_BANDWIDTH if bandwidth is None else bandwidth
    return Rent(
        offers=tuple(offers),
        frontier=pareto_frontier([(offer.time_s, offer.usd) for offer in offers]),
        chosen=_choose_offer(offers, budget),
        bandwidth=assumed_bandwidth,
        known=_known_networks(offers) if bandwidth is None else {},
        rtt_s=SITE_RTT_S,
    )


def pareto_frontier(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Return the places of the points that no other beats in one number without losing in the
    other, by the first number."""
    unbeaten: list[int] = []
    least = math.inf
    for place in sorted(range(len(points)), key=lambda place: points[place]):
        first, second = points[place]
        if first < math.inf and second < least:
            unbeaten.append(place)
            least = second
    return tuple(unbeaten)


def _choose_offer(offers: Sequence[Offer], budget: Budget) -> int | None:
    inside = [place for place, offer in enumerate(offers) if offer.meets]
    if not inside:
        return None
    if budget.seconds == math.inf and budget.usd < math.inf:
        return min(inside, key=lambda place: (offers[place].time_s, offers[place].usd))
    return inside[0]


def _priced_devices(kinds: Sequence[str]) -> dict[str, tuple[Device, catalog.Price]]:
    """Return the devices of the catalogue that have a price, or those of them that are named."""
    priced = {}
    for kind, entry in catalog.load_devices().items():
        device = entry.device(kind)
        if entry.price is not None and device is not None:
            priced[kind] = (device, entry.price)
    for kind in kinds:
        if kind not in priced:
            likely = [name for name in suggest_device(kind) if name in priced and name != kind]
            fix = "give it a price in a cluster file, and plan for that"
            if likely:
                fix = any_of(likely, "--device")
            raise Refusal(
                "out-of-range",
                what=f"the catalogue has no price of {kind!r}",
                where="--device",
                fact=f"{len(priced)} kinds have one: `farspan cluster list` shows it",
                remedy=fix,
            )
    return {kind: pair for kind, pair in priced.items() if not kinds or kind in kinds}


def _known_networks(offers: Sequence[Offer]) -> dict[str, AssumedNetwork]:
    """Return the networks of known machines among offers of several hosts, by kind of device."""
    known = {}
    for offer in offers:
        hosts = offer.cluster.hosts
        network = offer.cluster.assumed_network(hosts[0].name, hosts[-1].name)
        if len(hosts) > 1 and network is not None and network.machine:
            known[offer.kind] = network
    return known


def rented_cluster(
    device: Device, count: int, bandwidth: float | None = None, terms: Terms = Terms()
) -> Cluster:
    """Return `count` devices of a kind as a cluster: hosts of eight, each joined to each."""
    hosts = []
    for first in range(0, count, HOST):
        name = f"node{first // HOST + 1}"
        hosts.append(Host(name=name, devices=(device,) * min(HOST, count - first)))
    cluster = Cluster(sites=(Site(name="cloud", hosts=tuple(hosts), **terms._asdict()),))
    links = []
    for a, b in itertools.combinations(hosts, 2):
        link = cluster.link(a.name, b.name)
        assert link is not None
        if bandwidth is not None:
            link = replace(link, bandwidth=bandwidth, origin="given")
        links.append(link)
    return replace(cluster, links=tuple(links))


class _Renting(NamedTuple):
    """One question, put to every offer."""

    model: ModelSpec
    graph: OpGraph
    train_for: Callable[[ModelSpec, Cluster], TrainSpec]
    engine: Engine
    allow: tuple[str, ...]

    def offer(self, kind: str, cluster: Cluster, price: catalog.Price) -> Offer:
        """Return an offer with the best technique that plans at once."""
        count = len(cluster.devices)
        quick = [name for name in self.allow or techniques.technique_names() if name != SEARCHED]
        best = self._best_answer(cluster, quick or [SEARCHED])
        return Offer(
            kind=kind,
            count=count,
            usd_per_hour=count * price.usd_per_hour,
            source=price.source,
            checked=price.checked,
            cluster=cluster,
            best=best,
            searched=not quick,
        )

    def searched(self, offers: Sequence[Offer]) -> list[Offer]:
        """Return the offers, with pipelines where these can still beat the others: an offer that
        would be beaten even at the least that any plan takes, or is near it, stays as it is."""
        revised = list(offers)
        if self.allow and SEARCHED not in self.allow:
            return revised
        bounds = [self._least_seconds(offer) for offer in revised]
        promise = [
            bound**2 * offer.usd_per_hour for bound, offer in zip(bounds, offers, strict=True)
        ]
        remaining = EFFORT
        for place in sorted(range(len(revised)), key=promise.__getitem__):
            offer = revised[place]
            least_s = bounds[place]
            near = offer.time_s <= (1 + GAIN) * least_s
            if offer.count == 1 or near or offer.count > remaining:
                continue
            # Another offer may take no more time and dollars than this one would at the very least.
            usd = offer.usd_per_hour * least_s / 3600
            if any(other.time_s <= least_s and other.usd <= usd for other in revised):
                continue
            remaining -= offer.count
            pipeline = self._best_answer(offer.cluster, [SEARCHED])
            best = min(offer.best, pipeline, key=_answer_order)
            revised[place] = replace(offer, best=best, searched=True)
        return revised

    def _least_seconds(self, offer: Offer) -> float:
        """Return the seconds of the run at least: if one device did a step at once, with all the
        memory it wants, and all shared that evenly; and between hosts either every sequence's
        activations or the sums of all gradients cross."""
        train = self.train_for(self.model, offer.cluster)
        alone = on_one_device(self.model, train, offer.cluster, self.engine)
        step_s = alone.compute_s / offer.count
        hosts = len(offer.cluster.hosts)
        if hosts > 1:
            elements = self.graph.size("bsd", b=train.batch, s=train.seq_len)
            activations = elements * BYTES[train.precision]
            sums = self.graph.trained_parameters() * 4 * 2 * (hosts - 1) / hosts
            bandwidth = offer.cluster.links[0].bandwidth or SITE_BANDWIDTH
            step_s = max(step_s, min(activations, sums) / bandwidth)
        return train.steps * step_s / (1 - OVERHEAD_SHARE)

    def _best_answer(self, cluster: Cluster, allowed: Sequence[str]) -> Candidate | Refused:
        train = self.train_for(self.model, cluster)
        task = Task(self.model, self.graph, cluster, train, self.engine)
        count = len(cluster.devices)
        name = f"{count} x {cluster.devices[0].kind}"
        part = ClusterPart(name=name, places=tuple(range(count)))
        return min((price_technique(task, part, name) for name in allowed), key=_answer_order)


def _time_s(answer: Candidate | Refused) -> float:
    return answer.time_s if isinstance(answer, Candidate) else math.inf


def _answer_order(answer: Candidate | Refused) -> tuple[bool, float]:
    return not (isinstance(answer, Candidate) and answer.eligible), _time_s(answer)
