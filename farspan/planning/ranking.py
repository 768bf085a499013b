"""Candidates in order, and against each other: which is how much slower or costlier, what each is
called in a sentence, and the table of all that terminals, pages and notebooks show."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farspan.domain.cluster import Cluster
from farspan.domain.model import ModelSpec, parameters
from farspan.domain.notebook import html_table
from farspan.domain.objective import Objective
from farspan.domain.plan import Plan
from farspan.domain.units import counted, format_count, format_seconds, format_usd
from farspan.domain.words import joined
from farspan.planning.candidate import Candidate, Refused

#: Less of a difference than this is none: estimates are rounded to about as much.
SAME = 0.001
HEADS = (
    "#",
    "technique",
    "where",
    "GB/device",
    "step %",
    "tok/s",
    "TFLOP/s",
    "minutes",
    "cost",
    "verdict",
)
#: Columns that are aligned to the left.
LEFT = {"technique", "where", "verdict"}


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates, best first, of which `chosen` is the best that may be chosen; and techniques
    without a plan, by name."""

    model: ModelSpec
    cluster: Cluster
    objective: Objective
    candidates: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    chosen: int | None

    def __repr__(self) -> str:
        return f"<Ranking: {headline(self)}>"

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def listed(self) -> tuple[Candidate | Refused, ...]:
        """All of them in the order in which they are numbered: what has no plan comes last."""
        return self.candidates + self.refused


def by_money(ranking: Ranking) -> bool:
    """Whether the objective compares money."""
    return ranking.objective in ("cost", "loss_per_dollar")


def factor(ranking: Ranking, candidate: Candidate, base: Candidate) -> float:
    """How many times as long, or as many dollars, `candidate` takes as `base`."""
    if not by_money(ranking) or candidate.usd is None or not base.usd:
        return candidate.time_s / base.time_s
    return candidate.usd / base.usd


def difference(value: float, words: tuple[str, str] = ("slower", "faster")) -> str:
    """Return `24 % slower` of 1.24, `3.5 x slower` of 3.5, `10 % faster` of 0.9."""
    if abs(value - 1) < SAME:
        return "as fast" if words[0] == "slower" else "as cheap"
    word = words[value < 1]
    if value >= 2:
        return f"{value:.2g} x {word}" if value < 10 else f"{value:,.0f} x {word}"
    percent = 100 * abs(value - 1)
    return f"{percent:.{int(percent < 9.95)}f} % {word}"


def verdict(ranking: Ranking, candidate: Candidate | Refused) -> str:
    """A few words: chosen, how much slower (or costlier), or that there is no plan."""
    if isinstance(candidate, Refused):
        return "does not fit" if candidate.problem.code == "out-of-memory" else "no plan"
    if ranking.chosen is None:
        return "not chosen"
    chosen = ranking.candidates[ranking.chosen]
    if candidate is chosen:
        return "chosen"
    words = ("costlier", "cheaper") if by_money(ranking) else ("slower", "faster")
    return difference(factor(ranking, candidate, chosen), words)


def refused_by_reason(ranking: Ranking) -> dict[str, list[Refused]]:
    """The techniques that have no plan anywhere, by why that is, without their names."""
    planned = {candidate.technique for candidate in ranking.candidates}
    reasons: dict[str, list[Refused]] = {}
    for refused in ranking.refused:
        if refused.technique not in planned:
            problem = refused.problem
            reason = (
                f"{f'it {problem.predicate}' if problem.subject else problem.what} ({problem.fact})"
            )
            reasons.setdefault(reason, []).append(refused)
    return reasons


def called(candidate: Candidate) -> str:
    """`zero2 on gat`."""
    return f"{candidate.technique} on {candidate.where}"


def devices_line(cluster: Cluster, places: Sequence[int]) -> str:
    """`2 rtx6000 and 2 t4`."""
    kinds = [cluster.devices[place].kind for place in places]
    return joined([f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)])


def bounds(candidate: Candidate) -> tuple[float, float]:
    """Seconds between which `time_s` is expected to lie, queues included."""
    low_s, high_s = candidate.estimate.equal_loss_interval_s
    return candidate.queue_s + low_s, candidate.queue_s + high_s


def spent(candidate: Candidate) -> str:
    """`free`, `$1.20`, or `?` where a device's price is unknown."""
    if candidate.usd is None:
        return "?"
    return "free" if candidate.usd == 0 else format_usd(candidate.usd)


def time_line(candidate: Candidate) -> str:
    """`6 min 28 s (5 min 10 s to 8 min 00 s)`."""
    low, high = bounds(candidate)
    return f"{format_seconds(candidate.time_s)} ({format_seconds(low)} to {format_seconds(high)})"


def equal_loss_note(candidate: Candidate) -> str:
    """` to equal loss, at 1.13 x the tokens; its 1,000 steps take 1 h 16 min`; nothing of a
    synchronous run, whose tokens all count in full."""
    estimate = candidate.estimate
    if estimate.token_efficiency == 1.0:
        return ""
    steps_s = candidate.queue_s + estimate.whole_s
    return (
        f" to equal loss, at {1 / estimate.token_efficiency:.3g} x the tokens; its "
        f"{counted(candidate.plan.train.steps, 'step')} take {format_seconds(steps_s)}"
    )


def same_plan(plan: Plan, other: Plan) -> bool:
    """Whether two techniques found the same."""
    return (plan.replicas, plan.sync, plan.devices) == (other.replicas, other.sync, other.devices)


def headline(ranking: Ranking) -> str:
    """`12 plans, best zero2 on gat, 4 h 10 min`."""
    plans = counted(len(ranking.candidates), "plan")
    if ranking.chosen is None:
        return f"{plans}, none can be chosen"
    best = ranking.candidates[ranking.chosen]
    return f"{plans}, best {called(best)}, {format_seconds(best.time_s)}"


def html(ranking: Ranking) -> str:
    """Every candidate as a row of a table, and the techniques that have no plan."""
    rows = [candidate_cells(ranking, place) for place in range(len(ranking.candidates))]
    rows += [
        ["", refused.technique, refused.where, *[""] * (len(HEADS) - 4), refused.problem.what]
        for refused in ranking.refused
    ]
    right = [place for place, head in enumerate(HEADS) if head not in LEFT]
    chosen = [] if ranking.chosen is None else [ranking.chosen]
    return html_table(HEADS, rows, caption=question(ranking), right=right, strong=chosen)


def question(ranking: Ranking) -> str:
    """`gpt2, 24 layers x 1024, 355 M parameters; 16.8 M tokens ...; 4 a30 at gat and amst`."""
    model = ranking.model
    cluster = ranking.cluster
    text = (
        f"{model.family}, {model.layers} layers x {model.d_model}, "
        f"{format_count(parameters(model))} parameters"
    )
    if ranking.candidates:
        train = ranking.candidates[0].plan.train
        tokens = format_count(train.steps * train.tokens_per_step)
        text += (
            f"; {tokens} tokens in {counted(train.steps, 'step')} of {train.batch} x "
            f"{train.seq_len}, {train.precision}"
        )
    where = joined([site.name for site in cluster.sites])
    text += f"; {devices_line(cluster, range(len(cluster.devices)))} at {where}"
    return f"{text}; best in {ranking.objective.replace('_', ' ')}"


def used_ranks(plan: Plan) -> list[int]:
    """Return the ranks of all stages in order, as an estimate lists their memory."""
    ranks = []
    for replica in plan.replicas:
        for stage in replica.stages:
            ranks += stage.mesh.ranks
    return sorted(ranks)


def candidate_cells(ranking: Ranking, index: int) -> list[str]:
    """A cell for each of HEADS."""
    candidate = ranking.candidates[index]
    priced = candidate.estimate
    plan = candidate.plan
    ranks = sorted(
        rank for replica in plan.replicas for stage in replica.stages for rank in stage.mesh.ranks
    )
    capacity = [ranking.cluster.devices[candidate.places[rank]].memory for rank in ranks]
    used, of = max(
        ((part.total, size) for part, size in zip(priced.memory, capacity, strict=True)),
        key=lambda p: p[0] / p[1],
    )
    low, high = (seconds / 60 for seconds in bounds(candidate))
    minutes = f"{short_number(candidate.time_s / 60)} ({short_number(low)}-{short_number(high)})"
    return [
        str(index + 1),
        candidate.technique + ("*" if candidate.trial is not None and candidate.eligible else ""),
        candidate.where,
        f"{short_number(used / 1e9)} of {short_number(of / 1e9)}",
        step_shares(candidate),
        format_count(priced.tokens_per_s).replace(" ", ""),
        f"{priced.tflops_per_device:.3g}",
        minutes,
        spent(candidate),
        verdict(ranking, candidate),
    ]


def short_number(number: float) -> str:
    """Two digits or more: `0.42`, `6.5`, `24`, `1,240`, `12k`."""
    if number >= 10_000:
        return f"{number / 1000:,.0f}k"
    if number >= 9.95:
        return f"{number:,.0f}"
    return f"{number:.2g}" if number < 0.995 else f"{number:.1f}".removesuffix(".0")


def step_shares(candidate: Candidate) -> str:
    """Per cent of a step: compute / exposed communication / waiting for other stages."""
    priced = candidate.estimate
    parts = (priced.compute_s, priced.communication_s, priced.bubble_s)
    return "/".join(f"{100 * part / priced.step_s:.0f}" for part in parts)
