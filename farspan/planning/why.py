"""Why a plan was chosen: a table of what takes longer in the other plans, and what is not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.engine import engine
from farspan.domain.plan import Plan
from farspan.domain.units import (
    counted,
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    short_time,
)
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.estimate.traffic import Exchange, traffic
from farspan.planning.candidate import Candidate
from farspan.planning.ranking import (
    Ranking,
    by_money,
    called,
    devices_line,
    equal_loss_note,
    factor,
    refused_by_reason,
    same_plan,
    spent,
    time_line,
    verdict,
)
from farspan.semantics.communications import PURPOSE_NAMES

#: The slowest exchange is named where exposed communication is at least this share of a step.
NAMED = 0.2
#: Of more plans, or parts that a plan leaves out, the others are counted.
MOST_NAMES = 4
HEADS = ("plan", "time", "compute", "exposed", "waiting", "facts")
BEST = {
    "time": "fastest",
    "cost": "cheapest",
    "loss_per_dollar": "best in loss for a dollar",
    "fewest_devices": "on the fewest devices at about the least time",
}


class Reason(NamedTuple):
    """One row of HEADS: what a plan takes in all, the parts of its step, and its facts."""

    plan: str
    time: str = ""
    compute: str = ""
    communication: str = ""
    waiting: str = ""
    facts: str = ""

    def __str__(self) -> str:
        """Return the row as one line: `data on gat: time 29 h, compute 3.5 s; 2 a30`."""
        cells = zip(HEADS[1:-1], self[1:-1], strict=True)
        figures = ", ".join(f"{head} {cell}" for head, cell in cells if cell)
        return f"{self.plan}: {'; '.join(filter(None, (figures, self.facts)))}"


class Why(NamedTuple):
    """The choice in a line; rows on the other plans, on what is left out, on what is not known."""

    choice: str
    against: tuple[Reason, ...] = ()
    left_out: tuple[Reason, ...] = ()
    unknown: tuple[Reason, ...] = ()

    def as_json(self) -> dict[str, str | list[str]]:
        """Return each part by its name, its rows as lines."""
        rows = {name: [str(row) for row in getattr(self, name)] for name in self._fields[1:]}
        return {"choice": self.choice, **rows}


def costs_of(plan: Plan, cluster: Cluster) -> Costs:
    """Return the costs that a plan's estimate is made from."""
    plan_engine = engine(plan.engine)
    return Costs(models.graph(plan.model), plan.train, Network(cluster, plan.devices, plan_engine))


def why(ranking: Ranking) -> Why:
    """Return all reasons of a choice."""
    if ranking.chosen is None:
        return Why(choice(ranking), _without_plan(ranking))
    chosen = ranking.candidates[ranking.chosen]
    return Why(
        choice(ranking),
        (*_against(ranking, chosen), *_without_plan(ranking)),
        _left_out(ranking, chosen),
        _unknown(ranking, chosen),
    )


def choice(ranking: Ranking) -> str:
    """Return the chosen plan with its time, money and the parts of its step; or why none is."""
    if ranking.chosen is None:
        return f"Nothing is chosen: {_nothing(ranking)}."
    chosen = ranking.candidates[ranking.chosen]
    estimate = chosen.estimate
    parts = {
        "compute": estimate.compute_s,
        "exposed communication": estimate.communication_s,
        "waiting for other stages": estimate.bubble_s,
    }
    shares = {name: part / estimate.step_s for name, part in parts.items()}
    split = ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.005)
    money = "" if estimate.usd is None else f", {spent(chosen)}"
    return (
        f"{called(chosen)} ({devices_line(ranking.cluster, chosen.places)}) is "
        f"{BEST[ranking.objective]}: {time_line(chosen)}{money}{equal_loss_note(chosen)}. "
        f"Step of {short_time(estimate.step_s)}: {split}."
    )


def _nothing(ranking: Ranking) -> str:
    if ranking.candidates:
        first = ranking.candidates[0]
        return f"{called(first)}, {time_line(first)}: {first.unchosen or 'it has no price'}"
    problems = [refused.problem for refused in ranking.refused]
    short = [problem for problem in problems if problem.code == "out-of-memory"]
    problem = (short or problems)[0]
    return f"{problem.what} ({problem.fact})"


def _against(ranking: Ranking, chosen: Candidate) -> list[Reason]:
    """Return the rows of the chosen plan, of the next one, and of each technique's best."""
    best: dict[str, Candidate] = {}
    for candidate in ranking.candidates:
        if candidate is not chosen and (candidate.technique != chosen.technique or not best):
            best.setdefault(candidate.technique, candidate)
    # Techniques whose plans are alike share a row.
    techniques: dict[Reason, list[str]] = {}
    for technique, rival in best.items():
        techniques.setdefault(_row(ranking, rival, f" on {rival.where}"), []).append(technique)
    rows = [row._replace(plan=", ".join(names) + row.plan) for row, names in techniques.items()]
    return [_row(ranking, chosen, called(chosen)), *rows]


def _row(ranking: Ranking, candidate: Candidate, plan: str) -> Reason:
    estimate = candidate.estimate
    cluster = ranking.cluster
    parts = (estimate.compute_s, estimate.communication_s, estimate.bubble_s)
    # Sums of floats leave some 1e-16 of a step where nothing waits.
    shown = [short_time(part) if part > 1e-9 * estimate.step_s else "0 s" for part in parts]
    facts = [fact for fact, holds in _facts(ranking, candidate).items() if holds]
    if estimate.communication_s >= NAMED * estimate.step_s:
        costs = costs_of(candidate.plan, cluster)
        slowest = traffic(candidate.plan, costs)[0]
        facts.append(" ".join(filter(None, exchange_row(slowest, costs))))
    time = format_seconds(candidate.time_s)
    return Reason(plan, time, shown[0], shown[1], shown[2], ", ".join(facts))


def _facts(ranking: Ranking, candidate: Candidate) -> dict[str, bool]:
    """Return what may be said of a plan's place in the order, devices and division of the work,
    and whether it holds."""
    plan = candidate.plan
    worth = candidate.estimate.token_efficiency
    cluster = ranking.cluster
    sheets = [cluster.devices[place].sheet.flops for place in candidate.places]
    peaks = [flops.get(plan.train.precision, 0.0) for flops in sheets]
    longest = max(plan.replicas, key=lambda replica: (len(replica.stages), replica.microbatches))
    recompute = any(stage.recompute for replica in plan.replicas for stage in replica.stages)
    chosen = ranking.candidates[ranking.chosen or 0]
    same = candidate is not chosen and same_plan(plan, chosen.plan)
    return {
        "the chosen plan" if same else verdict(ranking, candidate): True,
        spent(candidate): by_money(ranking),
        f"not chosen: {candidate.unchosen}": candidate.unchosen is not None,
        f"{1 / worth:.3g} x the tokens to equal loss": worth != 1.0,
        f"{format_seconds(candidate.queue_s)} in a queue": candidate.queue_s > 0,
        devices_line(cluster, candidate.places): True,
        f"{format_flops(sum(peaks))} peak": all(peaks),
        counted(len(longest.stages), "stage"): len(longest.stages) > 1,
        counted(longest.microbatches, "microbatch"): True,
        "recompute": recompute,
    }


def exchange_row(exchange: Exchange, costs: Costs) -> tuple[str, str, str, str, str, str]:
    """Return (purpose, between, bytes a step, rate, latency, seconds) of its slowest link."""
    purpose = PURPOSE_NAMES[exchange.purpose]
    seconds = short_time(exchange.seconds)
    if not exchange.by_hosts:
        return purpose, "inside one host", "", "", "", seconds
    network = costs.network
    streams = costs.engine.streams

    # Hosts of the same two sites share the path between these.
    sizes: dict[tuple[str, str], float] = {}
    hosts: dict[tuple[str, str], tuple[str, str]] = {}
    for (a, b), size in exchange.by_hosts.items():
        sites = (network.site(a), network.site(b))
        ends = (a, b) if sites[0] == sites[1] else sites
        sizes[ends] = sizes.get(ends, 0.0) + size
        hosts.setdefault(ends, (a, b))

    def load_s(ends: tuple[str, str]) -> float:
        wire = network.between(*hosts[ends], True, streams)
        return sizes[ends] / wire.rate + 2 * wire.delay_s

    slowest = max(sizes, key=load_s)
    wire = network.between(*hosts[slowest], exchange.purpose != "activations", streams)
    rtt_s = network.link(*hosts[slowest]).rtt_s
    trips = round(exchange.latency_s / rtt_s) if rtt_s else 0
    waits = f"{trips:,} x {short_time(rtt_s)} rtt" if trips else ""
    sent = format_bytes(sizes[slowest])
    return purpose, " - ".join(slowest), sent, format_rate(wire.rate), waits, seconds


def _without_plan(ranking: Ranking) -> tuple[Reason, ...]:
    """Return a row for each reason why techniques have no plan anywhere."""
    return tuple(
        Reason(", ".join(refused.technique for refused in alike), facts=f"no plan: {reason}")
        for reason, alike in refused_by_reason(ranking).items()
    )


def _left_out(ranking: Ranking, chosen: Candidate) -> tuple[Reason, ...]:
    """Return the best plan with each site, host or device that the chosen one leaves out."""
    left: dict[int, list[str]] = {}
    for name, places in _unused(ranking.cluster, chosen.places):
        with_it = [other for other in ranking.candidates if places.intersection(other.places)]
        joint = [other for other in with_it if set(other.places) > set(chosen.places)]
        if joint or with_it:
            best = min(joint or with_it, key=lambda other: factor(ranking, other, chosen))
            left.setdefault(ranking.candidates.index(best), []).append(name)
    plans = {index: ranking.candidates[index] for index in left}
    return tuple(
        _row(ranking, plans[index], f"with {_few(names)}: {called(plans[index])}")
        for index, names in left.items()
    )


def _few(names: Sequence[str]) -> str:
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*names[:MOST_NAMES], *more])


def _unused(cluster: Cluster, places: Sequence[int]) -> list[tuple[str, set[int]]]:
    """Return what of a cluster is left out, in the largest pieces: sites, hosts of used sites,
    devices of used hosts."""
    pieces = list[tuple[str, set[int]]]()
    place = 0
    for site in cluster.sites:
        hosts = list[tuple[str, set[int]]]()
        first = place
        for host in site.hosts:
            end = place + len(host.devices)
            rest = set(range(place, end)).difference(places)
            part = len(rest) < len(host.devices)
            kinds = f"{devices_line(cluster, sorted(rest))} of " if part else ""
            hosts.append((kinds + host.name, rest))
            place = end
        whole = set(range(first, place))
        used = whole.intersection(places)
        pieces += [piece for piece in hosts if piece[1]] if used else [(site.name, whole)]
    return pieces


def _unknown(ranking: Ranking, chosen: Candidate) -> tuple[Reason, ...]:
    """Return the interval, the plans inside it, and what was assumed and never measured."""
    low, high = chosen.estimate.interval
    close = [
        called(candidate)
        for candidate in ranking.candidates
        if candidate.eligible
        and not same_plan(candidate.plan, chosen.plan)
        and factor(ranking, candidate, chosen) < high
    ]
    rows = [Reason("interval", facts=f"{low:.2f} to {high:.2f} x the predicted step")]
    if close:
        rows.append(Reason("inside it", facts=f"{_few(close)}: a trial of each would decide"))
    return (*rows, *(Reason("assumed", facts=text) for text in chosen.estimate.assumptions))
