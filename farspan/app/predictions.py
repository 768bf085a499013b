"""Questions that need no run: what each technique would take, what fits, what to rent, a plan for
another system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from farspan.app import clusters
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.objective import TOLERANCE, Objective
from farspan.domain.problems import Refusal, command
from farspan.domain.suggest import advise, known_names
from farspan.domain.units import format_count, parse_duration, parse_frequency, parse_rate
from farspan.planning.candidate import Candidate, Refused
from farspan.planning.plan_question import Question, model_of, train_of
from farspan.planning.rank_plans import rank_plans
from farspan.planning.ranking import Ranking
from farspan.semantics.identity import lasting

if TYPE_CHECKING:
    from farspan.app.resolving import Resolved
    from farspan.domain.cluster import Cluster
    from farspan.domain.config import ParallelConfig
    from farspan.domain.plan import Plan
    from farspan.domain.train import TrainSpec
    from farspan.planning.fit import Ground, LargestModels, Limit
    from farspan.planning.rent import Rent


class Exported(Protocol):
    """A plan as the file of another system."""

    @property
    def version(self) -> str:
        """The system, as the file was written for it."""

    @property
    def file(self) -> str:
        """The file's usual name."""

    @property
    def text(self) -> str:
        """What is in it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the file cannot express and its user must do."""


class Exporter(Protocol):
    """What an entry point of `farspan.exports` offers: plans as one system's configuration."""

    def export(self, plan: Plan) -> Exported:
        """Return the plan's file; raises Refusal (cannot-export) with every reason why not."""

    def exportable(self, ranking: Ranking) -> Plan | None:
        """Return the chosen plan, or refuse with the best one that the system can run."""


Fitting = Literal["model", "batch", "memory"]
#: A tolerance beyond this asks for nothing that a planner could answer.
MAX_TOLERANCE = 10.0


class PlanQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A question in flags: a model and its training on a cluster, by name, and the techniques that
    are compared (none: all)."""

    question: Question
    cluster: str | None = None
    objective: Objective | None = None
    allow: tuple[str, ...] = ()
    tolerance: float = TOLERANCE

    @property
    def train(self) -> Callable[[ModelSpec, Cluster], TrainSpec]:
        """The training that is asked for, of any model on any cluster."""
        return lambda model, cluster: train_of(self.question, model, cluster)

    def check(self) -> None:
        """Refuse what cannot be answered, before anything is priced."""
        from farspan import techniques

        check_tolerance(self.tolerance)
        known = techniques.technique_names()
        for name in self.allow:
            if name not in known:
                raise Refusal(
                    "out-of-range",
                    what=f"there is no technique {name!r}",
                    where="--technique",
                    fact=known_names(name, known),
                    remedy=advise(name, known, option="--technique"),
                )


def check_tolerance(tolerance: float) -> None:
    """Refuse a tolerance that asks for nothing that a planner could answer."""
    if not 0 <= tolerance <= MAX_TOLERANCE:
        raise Refusal(
            "out-of-range",
            what=f"the tolerance {tolerance:g} is out of range",
            where="--tolerance",
            fact=f"it is a share of the fastest plan's time, from 0 to {MAX_TOLERANCE:g}",
            remedy="--tolerance 0.1",
        )


# -- every technique priced
#   ------------------------------------------------------------------------------------------------


def price_model(query: PlanQuery) -> Ranking:
    """Price every technique for a model on a cluster: needs neither text nor machines."""
    query.check()
    if query.cluster is None:
        raise Refusal(
            "usage",
            what="--model needs --cluster",
            where="farspan plan",
            fact="without it there is nothing to plan for",
            remedy=command("plan", "--model", query.question.model, "--cluster", "fabric/gat-amst"),
        )
    model = model_of(query.question.model)
    cluster = clusters.find_cluster(query.cluster)
    return rank_plans(
        model,
        cluster,
        query.train(model, cluster),
        load_engine("farspan"),
        objective=query.objective or "time",
        allow=query.allow,
        tolerance=query.tolerance,
    )


def price_resolved(resolved: Resolved, parallel: ParallelConfig, query: PlanQuery) -> Ranking:
    """Price every technique for a run.yaml; the query takes precedence over its keys."""
    from farspan.app.resolving import allowed_techniques

    return rank_plans(
        resolved.model,
        resolved.cluster,
        resolved.train,
        load_engine("farspan"),
        objective=query.objective or parallel.objective,
        allow=query.allow or allowed_techniques(parallel),
        tolerance=query.tolerance,
        corpus=resolved.corpus.hash,
    )


def resolved_values(resolved: Resolved, ranking: Ranking) -> dict[str, tuple[Any, str]]:
    """Return each value of a run.yaml and where it came from, with what the chosen plan (or the
    best one, where none is chosen) does on its devices."""
    from farspan.planning.device_modes import explain_modes
    from farspan.planning.why import costs_of

    values = resolved.values
    if ranking.candidates:
        best = ranking.candidates[ranking.chosen or 0]
        costs = costs_of(best.plan, ranking.cluster)
        values |= explain_modes(best.plan, costs, best.estimate)
    return values


def candidate_as_json(candidate: Candidate | Refused, cluster: Cluster) -> dict[str, Any]:
    """Return a candidate, or a technique without a plan, as `--json` prints it."""
    device_names = []
    for host in cluster.hosts:
        for i, device in enumerate(host.devices):
            device_names.append(f"{host.name}/{device.backend}:{i}")
    devices = [device_names[place] for place in candidate.places]
    row: dict[str, Any] = {
        "technique": candidate.technique,
        "where": candidate.where,
        "devices": devices,
        "fits": True,
        "problem": None,
        "unchosen": None,
        "estimate": None,
        "plan": None,
    }
    if isinstance(candidate, Refused):
        return row | {"fits": False, "problem": candidate.problem}
    estimate = candidate.estimate
    totals = [part.total for part in estimate.memory]
    figures = {
        "minutes": candidate.time_s / 60,
        "memory_bytes": dict(zip(devices, totals, strict=True)),
    }
    interruptions = candidate.interruptions
    if interruptions is not None:
        row["interruptions"] = interruptions.as_json(estimate.equal_loss_s)
        row["interruptions"]["expected_usd"] = candidate.usd
    return row | {
        "unchosen": candidate.unchosen,
        "estimate": {**estimate.as_json(), **figures},
        "plan": lasting(candidate.plan, cluster),
    }


# -- what fits
#   ------------------------------------------------------------------------------------------------


def _search_ground(query: PlanQuery) -> Ground:
    from farspan.planning.fit import Ground

    assert query.cluster is not None
    cluster = clusters.find_cluster(query.cluster)
    return Ground(cluster, load_engine("farspan"), query.train, query.allow)


def find_limit(what: Fitting, query: PlanQuery) -> LargestModels:
    """Find the largest model (of the family that is asked for), the most sequences at once, or the
    least memory a device. Raises Refusal where nothing fits."""
    from farspan.planning.choose_model import DEFAULT_FAMILY
    from farspan.planning.fit import batch_ladder, find_hardest_rung, memory_ladder, model_ladder
    from farspan.planning.plan_question import CONTEXT, VOCABULARY

    ground = _search_ground(query)
    name = query.question.model
    model = model_of(name) if name else None
    if model is None:
        assert what == "model"
        ladder = model_ladder(ground, DEFAULT_FAMILY, VOCABULARY, CONTEXT)
    elif what == "model":
        ladder = model_ladder(ground, model.family, model.vocab_size, model.context)
    elif what == "batch":
        ladder = batch_ladder(ground, model)
    else:
        ladder = memory_ladder(ground, model)
    answer = find_hardest_rung(ground, ladder)
    if answer is None:
        raise _nothing_fits(query, ground, model)
    return answer


def require_fit(query: PlanQuery, ranking: Ranking) -> None:
    """Refuse where no technique has a plan on any part because memory is short."""
    codes = [refused.problem.code for refused in ranking.refused]
    if not ranking.candidates and "out-of-memory" in codes:
        raise _nothing_fits(query, _search_ground(query), ranking.model)


def is_reproducible(limit: Limit) -> bool:
    """Return whether `--model` with the answer's size makes the same shape."""
    return model_of(limit.typed) == limit.plan.model


def _nothing_fits(query: PlanQuery, ground: Ground, model: ModelSpec | None) -> Refusal:
    """Return why a model fits nowhere on a cluster, and the nearest things that do."""
    from farspan.planning.misfit import explain_misfit

    miss = None if model is None else explain_misfit(ground, model)
    if model is None or miss is None:
        return Refusal(
            "cannot-plan",
            what="no technique has a plan for these devices",
            where=f"--cluster {query.cluster}",
            fact="memory is not what is lacking",
            remedy="farspan plan, with the same arguments: it says why for each",
        )
    name = query.question.model
    on_cluster = ("--cluster", query.cluster)
    fits = []
    remedy = command("rent", "--model", name)
    if (smaller := miss.smaller) is not None:
        spec = smaller.plan.model
        shape = f"{spec.layers} layers x {spec.d_model}"
        size = f"{format_count(smaller.amount)} parameters ({shape})"
        fits.append(f"{size} by {smaller.technique} on {smaller.where}")
        remedy = command("fit", "model", "--model", name, *on_cluster)
        if is_reproducible(smaller):
            remedy = command("plan", "--model", smaller.typed, *on_cluster)
    if miss.seq_len is not None:
        fits.append(f"sequences of {miss.seq_len} tokens")
        remedy = command("plan", "--model", name, *on_cluster, "--seq-len", miss.seq_len)
    if miss.devices is not None:
        fits.append(f"{miss.devices} devices (every host {miss.times} times)")
    shortages = [str(miss.lacks)]
    if miss.host is not None:
        shortages.append(str(miss.host))
    short = "; ".join(dict.fromkeys(shortages))
    count = format_count(count_parameters(model))
    return Refusal(
        "out-of-memory",
        what=f"{model.family} of {count} parameters fits nowhere here; least is lacking by "
        f"{miss.technique}",
        where=miss.lacks.name,
        fact=f"{short}. What fits: {'; or '.join(fits) or 'nothing near it'}",
        remedy=remedy,
    )


# -- what to rent
#   ------------------------------------------------------------------------------------------------


def rank_rentals(
    query: PlanQuery,
    *,
    hours: float | None = None,
    usd: float | None = None,
    kinds: Sequence[str] = (),
    network: str | None = None,
    preemption: str | None = None,
    lease: str | None = None,
) -> Rent:
    """Rank the catalogue's devices (of these `kinds`, or all) and their counts by time and dollars,
    for a run that may take `hours` and `usd`. A host is taken away `preemption` (as 0.1/h) times
    in the mean, and after its `lease`."""
    from farspan.planning.quantities import parse_positive
    from farspan.planning.rent import Budget, Terms
    from farspan.planning.rent import price_offers as rank_offers

    budget = Budget()
    bandwidth = None
    if hours is not None:
        budget = budget._replace(seconds=3600.0 * parse_positive(float, hours, "--hours", "24"))
    if usd is not None:
        budget = budget._replace(usd=parse_positive(float, usd, "--usd", "24"))
    if network is not None:
        bandwidth = parse_positive(parse_rate, network, "--network", "100Gbit/s")
    terms = Terms()
    if preemption is not None:
        rate = parse_positive(
            parse_frequency, preemption, "--preemption", "0.1/h", within=("0", "1/min")
        )
        terms = terms._replace(preemptions_per_s=rate)
    if lease is not None:
        terms = terms._replace(lease_s=parse_positive(parse_duration, lease, "--lease", "24h"))
    return rank_offers(
        model_of(query.question.model),
        query.train,
        load_engine("farspan"),
        budget=budget,
        allow=query.allow,
        kinds=kinds,
        bandwidth=bandwidth,
        terms=terms,
    )


# -- other systems
#   ------------------------------------------------------------------------------------------------


def load_exporter(system: str) -> Exporter:
    """Load the exporter of plans for another system; a Refusal offers the nearest one."""
    from farspan.app.extensions import load_extension

    what = f"farspan writes no configuration for {system!r}"
    plugin: Exporter = load_extension(
        "exports", system, what, option="--export", code="out-of-range"
    )
    return plugin


def export_plan(plan: Plan, system: str, to: Path | None = None) -> tuple[Path, Exported]:
    """Write the plan as another system's configuration."""
    from farspan.domain.struct_files import write_atomically

    exported = load_exporter(system).export(plan)
    path = to or Path(exported.file)
    write_atomically(path, exported.text.encode())
    return path, exported
