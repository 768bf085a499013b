"""Every technique on every part of a cluster that makes sense, priced and put in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from farspan import models, techniques
from farspan.domain.cluster import Cluster
from farspan.domain.cost import Estimate
from farspan.domain.engine import Engine
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.objective import TOLERANCE, Objective
from farspan.domain.problems import Problem, Refusal
from farspan.domain.train import TrainSpec
from farspan.estimate.estimate_plan import price
from farspan.estimate.interruptions import expect_interruptions
from farspan.estimate.scaling_law import scaling_law_loss
from farspan.planning.candidate import Candidate, Refused
from farspan.planning.cluster_parts import ClusterPart, all_parts, whole_cluster
from farspan.planning.device_modes import find_graph_problem, settle_modes
from farspan.planning.fork_map import count_cores, fork_map
from farspan.planning.ranking import Ranking
from farspan.semantics.state_copies import share_made_again
from farspan.techniques import Task

#: From these devices on a ranking takes a second or more, which processes share.
MANY = 9
#: What the dollars of a plan are multiplied by for which the law of losses knows no gain: more than
#: any gain is small.
NO_GAIN = 1e12


def rank_plans(
    model: ModelSpec,
    cluster: Cluster,
    train: TrainSpec,
    engine: Engine,
    *,
    objective: Objective = "time",
    allow: Sequence[str] = (),
    tolerance: float = TOLERANCE,
    corpus: str = "",
    parts: bool = True,
) -> Ranking:
    """Price the techniques of `allow` (none: all) on the whole cluster and, with `parts`, on its
    parts.

    Raises Refusal for an unknown technique, or an objective in money where no price is known.
    """
    graph = models.graph(model)
    allowed = tuple(allow) or techniques.technique_names()
    memo: dict[object, object] = {}

    def plan_on(part: ClusterPart) -> _Answers:
        only = None if len(part.places) == len(cluster.devices) else part.places
        task = Task(model, graph, cluster, train, engine, corpus, only, memo)
        answers = [price_technique(task, part, name) for name in allowed]
        return _Answers(
            priced=tuple(answer for answer in answers if isinstance(answer, Candidate)),
            refused=tuple(answer for answer in answers if isinstance(answer, Refused)),
        )

    processes = count_cores() if len(cluster.devices) >= MANY else 1
    tried_parts = all_parts(cluster) if parts else [whole_cluster(cluster)]
    priced: list[Candidate] = []
    refused: list[Refused] = []
    for answers in fork_map(plan_on, tried_parts, processes, _Answers):
        priced += answers.priced
        refused += answers.refused

    # A technique that has no plan on any part is refused once, for the largest.
    planned = {answer.technique for answer in priced}
    planless: dict[str, Refused] = {}
    for answer in refused:
        if answer.technique not in planned:
            planless.setdefault(answer.technique, answer)
    candidates, chosen = order_candidates(priced, objective, tolerance)
    return Ranking(
        model=model,
        cluster=cluster,
        objective=objective,
        candidates=candidates,
        refused=tuple(planless[name] for name in sorted(planless)),
        chosen=chosen,
    )


def order_candidates(
    candidates: Sequence[Candidate], objective: Objective, tolerance: float = TOLERANCE
) -> tuple[tuple[Candidate, ...], int | None]:
    """Return the candidates, best first, and the place of the one to choose."""
    key = objective_key(objective, candidates, tolerance)
    best_first = sorted(candidates, key=lambda each: (each.technique, each.places))
    best_first.sort(key=lambda candidate: (not candidate.eligible, key(candidate)))
    has_choice = best_first and best_first[0].eligible and key(best_first[0]) < math.inf
    return tuple(best_first), 0 if has_choice else None


def price_technique(task: Task, part: ClusterPart, name: str) -> Candidate | Refused:
    """Price one technique's answer."""
    answer = techniques.plan(name, task)
    if isinstance(answer, Problem):
        return Refused(technique=name, where=part.name, places=part.places, problem=answer)
    problem = find_graph_problem(answer)
    if problem is not None:
        return Refused(technique=name, where=part.name, places=part.places, problem=problem)
    estimate = price(answer, task.costs)
    plan = settle_modes(answer, task.costs, estimate)
    if plan.devices != answer.devices:
        estimate = price(plan, task.costs_on(plan.devices))
    hosts = [device.host for device in plan.devices]
    queue_s = max(task.cluster.site_of(host).queue_s for host in hosts)
    every_s = plan.train.checkpoint_every_s
    parameters = count_parameters(plan.model)
    again = share_made_again(plan, task.cluster)
    interruptions = expect_interruptions(task.cluster, hosts, parameters, every_s, again=again)
    work_s = estimate.equal_loss_s
    expected_s = work_s if interruptions is None else interruptions.expected_s(work_s)
    return Candidate(
        technique=name,
        where=part.name,
        places=part.places,
        plan=plan,
        estimate=estimate,
        time_s=queue_s + expected_s,
        queue_s=queue_s,
        lease_s=task.cluster.lease_s(hosts),
        interruptions=interruptions,
        barred=_find_bar(task, estimate),
    )


def _find_bar(task: Task, estimate: Estimate) -> str | None:
    if not estimate.evidence:
        return "no published run in this setting says how many more tokens it needs"
    short = []
    for host in task.cluster.hosts:
        if host.memory is not None and host_bytes(task, host.name) > host.memory:
            short.append(host.name)
    return f"{', '.join(short)} has too little memory for its workers" if short else None


def host_bytes(task: Task, host: str) -> float:
    """Return the bytes of a host's own memory that its workers of other devices take, and rank 0's
    copy of a checkpoint."""
    on_host = [device.host == host and device.backend != "cpu" for device in task.devices]
    workers = sum(on_host)
    state = 12 * task.graph.trained_parameters() if workers and task.devices[0].host == host else 0
    return workers * task.engine.host_framework + state


class _Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What all techniques answer on one part."""

    priced: tuple[Candidate, ...]
    refused: tuple[Refused, ...]


def objective_key(
    objective: Objective, candidates: Sequence[Candidate], tolerance: float
) -> Callable[[Candidate], float]:
    """Return the figure that the objective orders by; less is better."""
    if objective in ("cost", "loss_per_dollar"):
        if candidates and all(candidate.estimate.usd is None for candidate in candidates):
            raise Refusal(
                "out-of-range",
                what=f"the objective {objective} needs prices",
                where="--objective",
                fact="no plan's devices all have a price",
                remedy="give devices a price in the cluster file: price: 0.50",
            )
        return _effective_usd if objective == "cost" else _loss_per_dollar
    if objective != "fewest_devices":
        return lambda candidate: candidate.time_s
    times = [candidate.time_s for candidate in candidates if candidate.eligible]
    slowest = (1 + tolerance) * min(times, default=math.inf)

    def count_devices(candidate: Candidate) -> float:
        too_slow = 1e6 if candidate.time_s > slowest else 0
        return len(candidate.places) + too_slow + candidate.time_s * 1e-12

    return count_devices


def _effective_usd(candidate: Candidate) -> float:
    # A free cluster's plans differ in time alone.
    return math.inf if candidate.usd is None else candidate.usd + 1e-9 * candidate.time_s


def _loss_per_dollar(candidate: Candidate) -> float:
    """Return the dollars for each nat that the loss falls below a uniform guess (arXiv 2410.19456
    with a scaling law's loss). For the order alone the law is also followed outside its range."""
    usd = candidate.estimate.usd
    if usd is None:
        return math.inf
    model = candidate.plan.model
    law_loss = scaling_law_loss(count_parameters(model), candidate.estimate.tokens_done)
    gained = math.log(model.vocab_size) - law_loss
    spent = usd + 1e-9 * candidate.time_s
    # So few tokens that the law knows of no gain: by dollars, and after all that gain.
    return spent / gained if gained > 0 else NO_GAIN * (1 + spent)
