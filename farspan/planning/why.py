"""Why a plan was chosen: a table of what takes longer in the other plans, and what is not known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.engine import load_engine
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
    candidate_name,
    describe_verdict,
    devices_line,
    equal_loss_note,
    format_spending,
    interruptions_note,
    refused_by_reason,
    relative_cost,
    same_plan,
    time_line,
)
from farspan.semantics.communications import PURPOSE_NAMES

#: The slowest exchange is named where exposed communication is at least this share of a step.
NAMED = 0.2
#: Of more plans, or parts that a plan leaves out, the others are counted.
MOST_NAMES = 4
REASON_HEADS = ("plan", "time", "compute", "exposed", "waiting", "facts")
BEST_BY_OBJECTIVE = {
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
        cells = zip(REASON_HEADS[1:-1], self[1:-1], strict=True)
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
    plan_engine = load_engine(plan.engine)
    return Costs(models.graph(plan.model), plan.train, Network(cluster, plan.devices, plan_engine))


def explain_choice(ranking: Ranking) -> Why:
    """Return all reasons of a choice."""
    if ranking.chosen is None:
        return Why(describe_choice(ranking), _without_plan(ranking))
    chosen = ranking.candidates[ranking.chosen]
    against = (*_compare_techniques(ranking, chosen), *_without_plan(ranking))
    left_out = _left_out(ranking, chosen)
    return Why(describe_choice(ranking), against, left_out, _list_unknowns(ranking, chosen))


def describe_choice(ranking: Ranking) -> str:
    """Return the chosen plan with its time, money and the parts of its step; or why none is."""
    if ranking.chosen is None:
        return f"Nothing is chosen: {_explain_no_choice(ranking)}."
    chosen = ranking.candidates[ranking.chosen]
    estimate = chosen.estimate
    parts = {
        "compute": estimate.compute_s,
        "exposed communication": estimate.communication_s,
        "waiting for other stages": estimate.bubble_s,
    }
    shares = []
    for name, part_s in parts.items():
        share = part_s / estimate.step_s
        if share >= 0.005:
            shares.append(f"{share:.0%} {name}")
    devices = devices_line(ranking.cluster, chosen.places)
    money = "" if estimate.usd is None else f", {format_spending(chosen)}"
    time = f"{time_line(chosen)}{money}{equal_loss_note(chosen)}"
    step = f"Step of {short_time(estimate.step_s)}: {', '.join(shares)}."
    best = BEST_BY_OBJECTIVE[ranking.objective]
    note = interruptions_note(chosen)
    expects = f" {note}." if note else ""
    return f"{candidate_name(chosen)} ({devices}) is {best}: {time}. {step}{expects}"


def _explain_no_choice(ranking: Ranking) -> str:
    if ranking.candidates:
        first = ranking.candidates[0]
        return f"{candidate_name(first)}, {time_line(first)}: {first.unchosen or 'it has no price'}"
    problems = [refused.problem for refused in ranking.refused]
    short = [problem for problem in problems if problem.code == "out-of-memory"]
    problem = (short or problems)[0]
    return f"{problem.what} ({problem.fact})"


def _compare_techniques(ranking: Ranking, chosen: Candidate) -> list[Reason]:
    """Return the rows of the chosen plan, of the next one, and of each technique's best."""
    best: dict[str, Candidate] = {}
    for candidate in ranking.candidates:
        if candidate is not chosen and (candidate.technique != chosen.technique or not best):
            best.setdefault(candidate.technique, candidate)
    # Techniques whose plans are alike share a row.
    techniques: dict[Reason, list[str]] = {}
    for technique, rival in best.items():
        row = _describe_plan(ranking, rival, f" on {rival.where}")
        techniques.setdefault(row, []).append(technique)
    rows = [_describe_plan(ranking, chosen, candidate_name(chosen))]
    for row, alike in techniques.items():
        rows.append(row._replace(plan=", ".join(alike) + row.plan))
    return rows


def _describe_plan(ranking: Ranking, candidate: Candidate, name: str) -> Reason:
    """Return the row of a plan: the parts of its step, and what holds of its place in the order,
    its devices and how it divides the work."""
    plan = candidate.plan
    estimate = candidate.estimate
    cluster = ranking.cluster
    parts = []
    for part_s in (estimate.compute_s, estimate.communication_s, estimate.bubble_s):
        # Sums of floats leave some 1e-16 of a step where nothing waits.
        parts.append(short_time(part_s) if part_s > 1e-9 * estimate.step_s else "0 s")

    chosen = ranking.candidates[ranking.chosen or 0]
    same = candidate is not chosen and same_plan(plan, chosen.plan)
    facts = ["the chosen plan" if same else describe_verdict(ranking, candidate)]
    if by_money(ranking):
        facts.append(format_spending(candidate))
    if candidate.unchosen is not None:
        facts.append(f"not chosen: {candidate.unchosen}")
    if estimate.token_efficiency != 1.0:
        facts.append(f"{1 / estimate.token_efficiency:.3g} x the tokens to equal loss")
    if candidate.queue_s > 0:
        facts.append(f"{format_seconds(candidate.queue_s)} in a queue")
    facts.append(devices_line(cluster, candidate.places))
    sheets = [cluster.devices[place].sheet for place in candidate.places]
    peaks = [sheet.flops.get(plan.train.precision, 0.0) for sheet in sheets]
    if all(peaks):
        facts.append(f"{format_flops(sum(peaks))} peak")
    longest = max(plan.replicas, key=lambda replica: (len(replica.stages), replica.microbatches))
    if len(longest.stages) > 1:
        facts.append(counted(len(longest.stages), "stage"))
    facts.append(counted(longest.microbatches, "microbatch"))
    if any(stage.recompute for stage in itertools.chain(*(r.stages for r in plan.replicas))):
        facts.append("recompute")
    if estimate.communication_s >= NAMED * estimate.step_s:
        costs = costs_of(plan, cluster)
        slowest = traffic(plan, costs)[0]
        facts.append(" ".join(filter(None, exchange_row(slowest, costs))))
    compute, communication, waiting = parts
    time = format_seconds(candidate.time_s)
    return Reason(name, time, compute, communication, waiting, ", ".join(facts))


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
        ends = (network.site(a), network.site(b))
        if ends[0] == ends[1]:
            ends = (a, b)
        sizes[ends] = sizes.get(ends, 0.0) + size
        hosts.setdefault(ends, (a, b))

    def load_s(ends: tuple[str, str]) -> float:
        wire = network.between(*hosts[ends], True, streams)
        return sizes[ends] / wire.rate + 2 * wire.delay_s

    slowest = max(sizes, key=load_s)
    shared = exchange.purpose != "activations"
    wire = network.between(*hosts[slowest], shared, streams)
    rtt_s = network.link(*hosts[slowest]).rtt_s
    round_trips = round(exchange.latency_s / rtt_s) if rtt_s else 0
    waits = f"{round_trips:,} x {short_time(rtt_s)} rtt" if round_trips else ""
    between = " - ".join(slowest)
    return purpose, between, format_bytes(sizes[slowest]), format_rate(wire.rate), waits, seconds


def _without_plan(ranking: Ranking) -> tuple[Reason, ...]:
    """Return a row for each reason why techniques have no plan anywhere."""
    rows = []
    for reason, alike in refused_by_reason(ranking).items():
        techniques = ", ".join(refused.technique for refused in alike)
        rows.append(Reason(techniques, facts=f"no plan: {reason}"))
    return tuple(rows)


def _left_out(ranking: Ranking, chosen: Candidate) -> tuple[Reason, ...]:
    """Return the best plan with each site, host or device that the chosen one leaves out."""
    pieces_by_plan: dict[int, list[str]] = {}
    for piece, places in _list_unused(ranking.cluster, chosen.places):
        with_it = [other for other in ranking.candidates if places.intersection(other.places)]
        joint = [other for other in with_it if set(other.places) > set(chosen.places)]
        if with_it:
            best = min(joint or with_it, key=lambda other: relative_cost(ranking, other, chosen))
            pieces_by_plan.setdefault(ranking.candidates.index(best), []).append(piece)
    rows = []
    for index, pieces in pieces_by_plan.items():
        plan = ranking.candidates[index]
        name = f"with {_join_few(pieces)}: {candidate_name(plan)}"
        rows.append(_describe_plan(ranking, plan, name))
    return tuple(rows)


def _join_few(texts: Sequence[str]) -> str:
    shown = list(texts[:MOST_NAMES])
    if len(texts) > MOST_NAMES:
        shown.append(f"{len(texts) - MOST_NAMES} more")
    return ", ".join(shown)


def _list_unused(cluster: Cluster, places: Sequence[int]) -> list[tuple[str, set[int]]]:
    """Return the unused parts of a cluster, in the largest pieces: sites, hosts of used sites,
    devices of used hosts."""
    pieces: list[tuple[str, set[int]]] = []
    place = 0
    for site in cluster.sites:
        hosts: list[tuple[str, set[int]]] = []
        first = place
        for host in site.hosts:
            end = place + len(host.devices)
            rest = set(range(place, end)).difference(places)
            name = host.name
            if len(rest) < len(host.devices):
                name = f"{devices_line(cluster, sorted(rest))} of {name}"
            if rest:
                hosts.append((name, rest))
            place = end
        whole = set(range(first, place))
        pieces += hosts if whole.intersection(places) else [(site.name, whole)]
    return pieces


def _list_unknowns(ranking: Ranking, chosen: Candidate) -> tuple[Reason, ...]:
    """Return the interval, the plans inside it, and what was assumed and never measured."""
    low, high = chosen.estimate.interval
    rows = [Reason("interval", facts=f"{low:.2f} to {high:.2f} x the predicted step")]
    close = []
    for candidate in ranking.candidates:
        near = candidate.eligible and relative_cost(ranking, candidate, chosen) < high
        if near and not same_plan(candidate.plan, chosen.plan):
            close.append(candidate_name(candidate))
    if close:
        rows.append(Reason("inside it", facts=f"{_join_few(close)}: a trial of each would decide"))
    rows += [Reason("assumed", facts=text) for text in chosen.estimate.assumptions]
    return tuple(rows)
