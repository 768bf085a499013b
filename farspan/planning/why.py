"""Why a plan was chosen, in sentences made of the estimates' own numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

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
from farspan.domain.words import joined
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.estimate.traffic import Exchange, traffic
from farspan.planning.candidate import Candidate
from farspan.planning.ranking import (
    SAME,
    Ranking,
    by_money,
    called,
    devices_line,
    difference,
    equal_loss_note,
    factor,
    refused_by_reason,
    same_plan,
    spent,
    step_s,
    time_line,
    words_of,
)
from farspan.semantics.communications import PURPOSE_NAMES

#: A term is named where it makes up at least this share of what one plan takes longer than another.
NAMED = 0.2
#: More pieces than this are told as so many devices of each kind.
PIECES = 4
#: Round trips are named where they take at least this share of an exchange.
TRIPS = 0.1


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Sentences: the choice; against the next and each technique's best; what is left out; what is
    not known."""

    choice: str
    against: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def costs_of(plan: Plan, cluster: Cluster) -> Costs:
    """What a plan's estimate is made from."""
    plan_engine = engine(plan.engine)
    return Costs(models.graph(plan.model), plan.train, Network(cluster, plan.devices, plan_engine))


def why(ranking: Ranking) -> Why:
    """All that there is to say about a choice."""
    if ranking.chosen is None:
        return Why(choice=choice(ranking), against=_misfits(ranking))
    return Why(
        choice=choice(ranking),
        against=(*against(ranking), *_misfits(ranking)),
        left_out=left_out(ranking),
        unknown=unknown(ranking),
    )


def choice(ranking: Ranking) -> str:
    """One sentence: what is chosen, where, how long it takes, and what a step is made of; or that
    nothing is."""
    if ranking.chosen is None:
        return _nothing(ranking)
    chosen = ranking.candidates[ranking.chosen]
    estimate = chosen.estimate
    best = {
        "time": "fastest",
        "cost": "cheapest",
        "loss_per_dollar": "best in loss for a dollar",
        "fewest_devices": "on the fewest devices at about the least time",
    }[ranking.objective]
    money = "" if estimate.usd is None else f", {spent(chosen)}"
    parts = {
        "compute": estimate.compute_s,
        "exposed communication": estimate.communication_s,
        "waiting for other stages": estimate.bubble_s,
    }
    split = joined(
        [
            f"{part / estimate.step_s:.0%} {name}"
            for name, part in parts.items()
            if part >= 0.005 * estimate.step_s
        ]
    )
    return (
        f"{called(chosen)} ({devices_line(ranking.cluster, chosen.places)}) is {best}: "
        f"{time_line(chosen)}{money}{equal_loss_note(chosen)}. "
        f"A step of {short_time(estimate.step_s)} is {split}."
    )


def _nothing(ranking: Ranking) -> str:
    if ranking.candidates:
        first = ranking.candidates[0]
        reason = first.unchosen or "it has no price"
        return f"Nothing is chosen: {called(first)} would take {_long_time(first)}, but {reason}."
    problems = [refused.problem for refused in ranking.refused]
    problem = next(
        (problem for problem in problems if problem.code == "out-of-memory"), problems[0]
    )
    return f"Nothing is chosen: {problem.what} ({problem.fact})."


def _long_time(candidate: Candidate) -> str:
    return f"{time_line(candidate)}{equal_loss_note(candidate)}"


def against(ranking: Ranking) -> tuple[str, ...]:
    """Why the chosen plan wins: against each technique's best, the next candidate first."""
    assert ranking.chosen is not None
    chosen = ranking.candidates[ranking.chosen]
    rivals: list[Candidate] = []
    for candidate in ranking.candidates:
        first = all(other.technique != candidate.technique for other in (chosen, *rivals))
        if candidate is not chosen and (first or not rivals):
            rivals.append(candidate)
    same = [rival.technique for rival in rivals if same_plan(rival.plan, chosen.plan)]
    sentences = []
    if same:
        sentences.append(
            f"{joined(same)} {'finds' if len(same) == 1 else 'find'} the same plan on "
            f"{chosen.where}."
        )
    by_text: dict[tuple[str, str], list[str]] = {}
    for rival in rivals:
        if rival.technique not in same:
            by_text.setdefault((rival.where, _versus(ranking, rival, chosen)), []).append(
                rival.technique
            )
    for (where, text), names in by_text.items():
        sentences.append(
            f"{joined(names)} on {where} {text.replace('is', 'are', 1) if len(names) > 1 else text}"
        )
    if note := equal_loss_note(chosen):
        sentences.append(f"{called(chosen)} is compared by its time{note}.")
    return tuple(sentences)


def _versus(ranking: Ranking, rival: Candidate, chosen: Candidate) -> str:
    how = difference(factor(ranking, rival, chosen), words_of(ranking))
    took = format_seconds(rival.time_s) + (f", {spent(rival)}" if by_money(ranking) else "")
    text = (
        f"is {how} on {devices_line(ranking.cluster, rival.places)}: {took}{equal_loss_note(rival)}"
    )
    if reasons := _reasons(ranking, rival, chosen):
        text += f"; {'; '.join(reasons)}"
    return f"{text}. It is not chosen, because {rival.unchosen}." if rival.unchosen else f"{text}."


def _reasons(ranking: Ranking, rival: Candidate, base: Candidate) -> list[str]:
    """What takes longer; and where money is compared, what for how long is paid."""
    reasons = slower_because(ranking.cluster, rival, base)
    if by_money(ranking) and factor(ranking, rival, base) > 1 + SAME:
        rival_s, base_s = (each.time_s - each.queue_s for each in (rival, base))
        paid = f"{counted(len(rival.places), 'device')} for {format_seconds(rival_s)}"
        reasons = [
            f"{paid}, not {counted(len(base.places), 'device')} for {format_seconds(base_s)}",
            *reasons,
        ]
    return reasons


def slower_because(cluster: Cluster, rival: Candidate, base: Candidate) -> list[str]:
    """What of `rival` takes longer than of `base`, the largest part first; empty where nothing
    does."""
    a, b, steps = rival.estimate, base.estimate, rival.plan.train.steps
    parts: dict[Callable[[Cluster, Candidate, Candidate], str], float] = {
        _compute: a.compute_s - b.compute_s,
        _communication: a.communication_s - b.communication_s,
        _bubble: a.bubble_s - b.bubble_s,
        _tokens: (step_s(rival) - a.step_s) - (step_s(base) - b.step_s),
        _queue: (rival.queue_s - base.queue_s) / steps,
    }
    longer = {say: part for say, part in parts.items() if part > 0}
    if sum(parts.values()) <= SAME * b.step_s:
        return []
    said = sorted(longer, key=lambda say: -longer[say])
    return [
        say(cluster, rival, base) for say in said if longer[say] >= NAMED * sum(longer.values())
    ]


def _compute(cluster: Cluster, rival: Candidate, base: Candidate) -> str:
    took = short_time(rival.estimate.compute_s)
    text = f"its arithmetic takes {took} of a step, not {short_time(base.estimate.compute_s)}"
    if len(rival.places) < len(base.places):
        does = "does" if len(rival.places) == 1 else "do"
        return (
            f"{text}: {counted(len(rival.places), 'device')} {does} what {len(base.places)} share"
        )
    peaks = [_peak(cluster, each) for each in (rival, base)]
    if peaks[0] is not None and peaks[1] is not None and peaks[0] < 0.95 * peaks[1]:
        sheets = (
            f"{devices_line(cluster, rival.places)} have {format_flops(peaks[0])} by their data "
            "sheets"
        )
        return f"{text}: {sheets}, {devices_line(cluster, base.places)} {format_flops(peaks[1])}"
    if _recomputes(rival.plan) and not _recomputes(base.plan):
        return f"{text}: to fit it computes activations again in the backward pass"
    parts = [max(replica.microbatches for replica in each.plan.replicas) for each in (rival, base)]
    if parts[0] > parts[1]:
        return (
            f"{text}: {parts[0]} microbatches where "
            f"{'one does' if parts[1] == 1 else f'{parts[1]} do'}"
        )
    return text


def _peak(cluster: Cluster, candidate: Candidate) -> float | None:
    """FLOP/s of a candidate's devices together by their data sheets; None where one is unknown."""
    known = [
        cluster.devices[place].sheet.flops.get(candidate.plan.train.precision)
        for place in candidate.places
    ]
    return None if None in known else sum(rate or 0.0 for rate in known)


def _recomputes(plan: Plan) -> bool:
    return any(stage.recompute for replica in plan.replicas for stage in replica.stages)


def _communication(cluster: Cluster, rival: Candidate, base: Candidate) -> str:
    text = f"exposed communication takes {short_time(rival.estimate.communication_s)} of a step"
    if base.estimate.communication_s > SAME * base.estimate.step_s:
        text += f", not {short_time(base.estimate.communication_s)}"
    costs = costs_of(rival.plan, cluster)
    longest = next(iter(traffic(rival.plan, costs)), None)
    return text if longest is None else f"{text}: {exchange_line(longest, costs)}"


def exchange_line(exchange: Exchange, costs: Costs) -> str:
    """What an exchange sends over its slowest link, and what that takes."""
    name = PURPOSE_NAMES[exchange.purpose]
    if not exchange.by_hosts:
        return f"{name} inside one host take {short_time(exchange.seconds)}"
    (a, b), size = slowest_pair(exchange, costs)
    network = costs.network
    link, wire = (
        network.link(a, b),
        network.between(a, b, exchange.purpose not in ("activations",), costs.engine.streams),
    )
    sites = (network.site(a), network.site(b))
    ends = f"between {a} and {b}" if sites[0] == sites[1] else f"between {sites[0]} and {sites[1]}"
    text = f"{format_bytes(size)} of {name} a step {ends} at {format_rate(wire.rate)}"
    trips = round(exchange.latency_s / link.rtt_s) if link.rtt_s else 0
    if exchange.latency_s >= TRIPS * exchange.seconds and trips >= 1:
        waits = "1 round trip" if trips == 1 else f"{trips:,} round trips"
        text += f" and {waits} of {short_time(link.rtt_s)} one after another"
    return f"{text}, {short_time(exchange.seconds)} in all"


def slowest_pair(exchange: Exchange, costs: Costs) -> tuple[tuple[str, str], float]:
    """The hosts between which an exchange has most to wait for, and the bytes there, both ways
    together."""
    sums: dict[tuple[str, str], float] = {}
    network = costs.network
    for (a, b), size in exchange.by_hosts.items():
        # Hosts of the same two sites share the line between these.
        key = (a, b) if network.site(a) == network.site(b) else (network.site(a), network.site(b))
        sums[key] = sums.get(key, 0.0) + size
    hosts = {
        (a, b) if network.site(a) == network.site(b) else (network.site(a), network.site(b)): (a, b)
        for a, b in reversed(exchange.by_hosts)
    }

    def load(key: tuple[str, str]) -> float:
        wire = network.between(*hosts[key], True, costs.engine.streams)
        return sums[key] / wire.rate + 2 * wire.delay_s

    worst = max(sums, key=load)
    return hosts[worst], sums[worst]


def _bubble(cluster: Cluster, rival: Candidate, base: Candidate) -> str:
    replica = max(rival.plan.replicas, key=lambda each: len(each.stages))
    text = f"its stages wait {short_time(rival.estimate.bubble_s)} of a step for each other"
    if base.estimate.bubble_s > SAME * base.estimate.step_s:
        text += f", not {short_time(base.estimate.bubble_s)}"
    return f"{text}: {len(replica.stages)} stages, {counted(replica.microbatches, 'microbatch')}"


def _tokens(cluster: Cluster, rival: Candidate, base: Candidate) -> str:
    plan = rival.plan
    every = (
        ""
        if plan.sync is None
        else f" with {len(plan.replicas)} replicas that meet every {plan.sync.every} steps"
    )
    return f"the same loss needs {1 / rival.estimate.token_efficiency:.3g} x the tokens{every}"


def _queue(cluster: Cluster, rival: Candidate, base: Candidate) -> str:
    return f"it waits {format_seconds(rival.queue_s)} in a queue first"


def _misfits(ranking: Ranking) -> tuple[str, ...]:
    """A sentence for every reason why techniques have no plan anywhere."""
    return tuple(
        f"{joined([refused.technique for refused in alike])} {'have' if len(alike) > 1 else 'has'} "
        f"no plan: {reason}."
        for reason, alike in refused_by_reason(ranking).items()
    )


def left_out(ranking: Ranking) -> tuple[str, ...]:
    """ "Do not use that site": for every site, host or device that the chosen part leaves out, the
    best with it."""
    assert ranking.chosen is not None
    chosen = ranking.candidates[ranking.chosen]
    by_best: dict[int, tuple[Candidate, list[str], list[int]]] = {}
    for name, places in _unused(ranking.cluster, chosen.places):
        with_it = [
            candidate for candidate in ranking.candidates if set(candidate.places) & set(places)
        ]
        joint = [
            candidate for candidate in with_it if set(candidate.places) > set(chosen.places)
        ] or with_it
        if joint:
            best = min(joint, key=lambda candidate: factor(ranking, candidate, chosen))
            index = ranking.candidates.index(best)
            by_best.setdefault(index, (best, [], []))[1].append(name)
            by_best[index][2].extend(places)
    return tuple(
        _without(
            ranking,
            chosen,
            best,
            names if len(names) <= PIECES else [devices_line(ranking.cluster, places)],
        )
        for best, names, places in by_best.values()
    )


def _without(ranking: Ranking, chosen: Candidate, best: Candidate, names: Sequence[str]) -> str:
    own = [
        candidate
        for candidate in ranking.candidates
        if candidate.technique == chosen.technique and candidate.places == best.places
    ]
    text = f"Do not use {joined(list(names))}, because: "
    how = difference(factor(ranking, best, chosen), words_of(ranking))
    text += (
        f"the best with {'it' if len(names) == 1 else 'them'}, {called(best)}, is {how} "
        f"({format_seconds(best.time_s)}{equal_loss_note(best)})"
    )
    if reasons := _reasons(ranking, best, chosen):
        text += f": {'; '.join(reasons)}"
    if best.unchosen:
        text += f"; and {best.unchosen}"
    if own and own[0] is not best:
        same = own[0]
        text += (
            f". {called(same)} is {difference(factor(ranking, same, chosen), words_of(ranking))}"
        )
        if reasons := _reasons(ranking, same, chosen):
            text += f": {reasons[0]}"
    return f"{text}."


def _unused(cluster: Cluster, places: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """What of a cluster is left out, in the largest pieces: sites, hosts of used sites, devices of
    used hosts."""
    used, pieces, place = set(places), [], 0
    for site in cluster.sites:
        hosts = []
        for host in site.hosts:
            hosts.append((host, tuple(range(place, place + len(host.devices)))))
            place += len(host.devices)
        if not used & {each for _, inside in hosts for each in inside}:
            pieces.append((site.name, tuple(each for _, inside in hosts for each in inside)))
            continue
        for host, inside in hosts:
            rest = tuple(each for each in inside if each not in used)
            if rest == inside:
                pieces.append((host.name, rest))
            elif rest:
                pieces.append((f"{devices_line(cluster, rest)} of {host.name}", rest))
    return pieces


def unknown(ranking: Ranking) -> tuple[str, ...]:
    """What rests on assumptions: the order of those that are close, and what was never measured."""
    assert ranking.chosen is not None
    chosen = ranking.candidates[ranking.chosen]
    low, high = chosen.estimate.interval
    close = [
        candidate
        for candidate in ranking.candidates
        if candidate.eligible
        and not same_plan(candidate.plan, chosen.plan)
        and factor(ranking, candidate, chosen) < high
    ]
    sentences = [f"The estimate's interval is {low:.2f} to {high:.2f} times the predicted step."]
    if close:
        names = joined(
            [called(candidate) for candidate in close[:4]]
            + ([f"{len(close) - 4} more"] if len(close) > 4 else [])
        )
        lies = "lies" if len(close) == 1 else "lie"
        sentences.append(
            f"{names} {lies} inside it: a trial of each would decide, not this estimate."
        )
    return (*sentences, *(f"Assumed: {assumption}." for assumption in chosen.estimate.assumptions))
