"""Candidates in order, and against each other: which is how much slower or costlier, what each is
called in a sentence, and the table of all that terminals, pages and notebooks show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from farspan.domain.cluster import Cluster
from farspan.domain.model import ModelSpec, count_parameters
from farspan.domain.notebook import html_table
from farspan.domain.objective import Objective
from farspan.domain.plan import Plan
from farspan.domain.plan_words import join_words
from farspan.domain.units import counted, format_count, format_seconds, format_usd
from farspan.planning.candidate import Candidate, Refused

#: Less of a difference than this is none: estimates are rounded to about as much.
ROUNDING_NOISE = 0.001
RANKING_HEADS = (
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
LEFT_ALIGNED = {"technique", "where", "verdict"}


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates, best first; `chosen` is the place of the best that may be chosen; and techniques
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
        return ranking_html(self)

    @property
    def listed(self) -> tuple[Candidate | Refused, ...]:
        """All of them in the order in which they are numbered: what has no plan comes last."""
        return self.candidates + self.refused


def by_money(ranking: Ranking) -> bool:
    """Return whether the objective compares money."""
    return ranking.objective in ("cost", "loss_per_dollar")


def relative_cost(ranking: Ranking, candidate: Candidate, base: Candidate) -> float:
    """Return the time, or the dollars, of `candidate` over those of `base`."""
    if not by_money(ranking) or candidate.usd is None or not base.usd:
        return candidate.time_s / base.time_s
    return candidate.usd / base.usd


def format_difference(value: float, words: tuple[str, str] = ("slower", "faster")) -> str:
    """Return `24 % slower` of 1.24, `3.5 x slower` of 3.5, `10 % faster` of 0.9."""
    if abs(value - 1) < ROUNDING_NOISE:
        return "as fast" if words[0] == "slower" else "as cheap"
    word = words[value < 1]
    if value >= 10:
        return f"{value:,.0f} x {word}"
    if value >= 2:
        return f"{value:.2g} x {word}"
    percent = 100 * abs(value - 1)
    digits = int(percent < 9.95)
    return f"{percent:.{digits}f} % {word}"


def describe_verdict(ranking: Ranking, candidate: Candidate | Refused) -> str:
    """Return a few words: chosen, how much slower (or costlier), or that there is no plan."""
    if isinstance(candidate, Refused):
        return "does not fit" if candidate.problem.code == "out-of-memory" else "no plan"
    if ranking.chosen is None:
        return "not chosen"
    chosen = ranking.candidates[ranking.chosen]
    if candidate is chosen:
        return "chosen"
    words = ("costlier", "cheaper") if by_money(ranking) else ("slower", "faster")
    return format_difference(relative_cost(ranking, candidate, chosen), words)


def refused_by_reason(ranking: Ranking) -> dict[str, list[Refused]]:
    """Group the techniques that have no plan anywhere by the reason, without their names."""
    planned = {candidate.technique for candidate in ranking.candidates}
    reasons: dict[str, list[Refused]] = {}
    for refused in ranking.refused:
        if refused.technique not in planned:
            problem = refused.problem
            what = f"it {problem.predicate}" if problem.subject else problem.what
            reasons.setdefault(f"{what} ({problem.fact})", []).append(refused)
    return reasons


def candidate_name(candidate: Candidate) -> str:
    """Write `zero2 on gat`."""
    return f"{candidate.technique} on {candidate.where}"


def devices_line(cluster: Cluster, places: Sequence[int]) -> str:
    """Write `2 rtx6000 and 2 t4`."""
    counts = Counter(cluster.devices[place].kind for place in places)
    return join_words([f"{count} {kind}" for kind, count in counts.items()])


def time_bounds_s(candidate: Candidate) -> tuple[float, float]:
    """Return the seconds between which `time_s` is predicted to lie, queues included."""
    low_s, high_s = map(candidate.expected_s, candidate.estimate.equal_loss_interval_s)
    return candidate.queue_s + low_s, candidate.queue_s + high_s


def format_spending(candidate: Candidate) -> str:
    """Write `free`, `$1.20`, or `?` where a device's price is unknown."""
    if candidate.usd is None:
        return "?"
    return "free" if candidate.usd == 0 else format_usd(candidate.usd)


def time_line(candidate: Candidate) -> str:
    """Write `6 min 28 s (5 min 10 s to 8 min 00 s)`."""
    low, high = (format_seconds(seconds) for seconds in time_bounds_s(candidate))
    return f"{format_seconds(candidate.time_s)} ({low} to {high})"


def equal_loss_note(candidate: Candidate) -> str:
    """Write ` to equal loss, at 1.13 x the tokens; its 1,000 steps take 1 h 16 min`; nothing of a
    synchronous run, whose tokens all count in full."""
    estimate = candidate.estimate
    if estimate.token_efficiency == 1.0:
        return ""
    tokens = f"{1 / estimate.token_efficiency:.3g} x the tokens"
    steps = counted(candidate.plan.train.steps, "step")
    steps_time = format_seconds(candidate.queue_s + estimate.whole_s)
    return f" to equal loss, at {tokens}; its {steps} take {steps_time}"


def interruptions_note(candidate: Candidate) -> str:
    """Write `Expects 2.4 interruptions (0.1 an hour) of 15 s and the steps since a save each, a
    save every 4 min: 24 h 10 min instead of 24 h`; nothing where no rate is given."""
    interruptions = candidate.interruptions
    if interruptions is None:
        return ""
    work_s = candidate.estimate.equal_loss_s
    expected_s = interruptions.expected_s(work_s)
    count = interruptions.per_s * expected_s
    often = f"{count:.2g} interruptions ({interruptions.per_s * 3600:.2g} an hour)"
    restart = format_seconds(interruptions.restart_s)
    if interruptions.again == 1:
        restart += " and the steps since a save"
    elif interruptions.again > 0:
        restart += f" and, after {interruptions.again:.0%} of them, the steps since a save"
    saves = f"a save every {format_seconds(interruptions.every_s)}"
    total = f"{format_seconds(expected_s)} instead of {format_seconds(work_s)}"
    return f"Expects {often} of {restart} each, {saves}: {total}"


def same_plan(plan: Plan, other: Plan) -> bool:
    """Return whether two techniques made the same plan."""
    same_stages = (plan.replicas, plan.sync) == (other.replicas, other.sync)
    return same_stages and plan.devices == other.devices


def headline(ranking: Ranking) -> str:
    """Write `12 plans, best zero2 on gat, 4 h 10 min`."""
    plans = counted(len(ranking.candidates), "plan")
    if ranking.chosen is None:
        return f"{plans}, none can be chosen"
    best = ranking.candidates[ranking.chosen]
    return f"{plans}, best {candidate_name(best)}, {format_seconds(best.time_s)}"


def ranking_html(ranking: Ranking) -> str:
    """Return a table of every candidate, and of the techniques that have no plan."""
    rows = [candidate_cells(ranking, place) for place in range(len(ranking.candidates))]
    blank = [""] * (len(RANKING_HEADS) - 4)
    for refused in ranking.refused:
        rows.append(["", refused.technique, refused.where, *blank, refused.problem.what])
    right = [place for place, head in enumerate(RANKING_HEADS) if head not in LEFT_ALIGNED]
    strong = [] if ranking.chosen is None else [ranking.chosen]
    return html_table(
        RANKING_HEADS, rows, caption=describe_question(ranking), right=right, strong=strong
    )


def describe_question(ranking: Ranking) -> str:
    """Write `gpt2, 24 layers x 1024, 355 M parameters; 16.8 M tokens ...; 4 a30 at gat`."""
    model = ranking.model
    cluster = ranking.cluster
    size = format_count(count_parameters(model))
    parts = [f"{model.family}, {model.layers} layers x {model.d_model}, {size} parameters"]
    if model.lora:
        parts.append(f"adapters of rank {model.lora.rank}")
    if ranking.candidates:
        train = ranking.candidates[0].plan.train
        tokens = format_count(train.steps * train.tokens_per_step)
        step = f"{train.batch} x {train.seq_len}, {train.precision}"
        parts.append(f"{tokens} tokens in {counted(train.steps, 'step')} of {step}")
    devices = devices_line(cluster, range(len(cluster.devices)))
    where = join_words([site.name for site in cluster.sites])
    parts.append(f"{devices} at {where}")
    parts.append(f"best in {ranking.objective.replace('_', ' ')}")
    return "; ".join(parts)


def used_ranks(plan: Plan) -> list[int]:
    """Return the ranks of all stages in order, as an estimate lists their memory."""
    ranks: list[int] = []
    for replica in plan.replicas:
        for stage in replica.stages:
            ranks += stage.mesh.ranks
    return sorted(ranks)


def candidate_cells(ranking: Ranking, index: int) -> list[str]:
    """Return a cell for each of HEADS."""
    candidate = ranking.candidates[index]
    priced = candidate.estimate
    tried = "*" if candidate.trial is not None and candidate.eligible else ""

    # The device whose memory is fullest.
    used = 0.0
    capacity = 1.0
    for rank, part in zip(used_ranks(candidate.plan), priced.memory, strict=True):
        device = ranking.cluster.devices[candidate.places[rank]]
        if part.total / device.memory > used / capacity:
            used = part.total
            capacity = device.memory
    low, high = (short_number(seconds / 60) for seconds in time_bounds_s(candidate))
    cells = [
        str(index + 1),
        candidate.technique + tried,
        candidate.where,
        f"{short_number(used / 1e9)} of {short_number(capacity / 1e9)}",
        step_shares(candidate),
        format_count(priced.tokens_per_s).replace(" ", ""),
        f"{priced.tflops_per_device:.3g}",
        f"{short_number(candidate.time_s / 60)} ({low}-{high})",
        format_spending(candidate),
        describe_verdict(ranking, candidate),
    ]
    return cells


def short_number(number: float) -> str:
    """Write two digits or more: `0.42`, `6.5`, `24`, `1,240`, `12k`."""
    if number >= 10_000:
        return f"{number / 1000:,.0f}k"
    if number >= 9.95:
        return f"{number:,.0f}"
    return f"{number:.2g}" if number < 0.995 else f"{number:.1f}".removesuffix(".0")


def step_shares(candidate: Candidate) -> str:
    """Write per cent of a step: compute / exposed communication / waiting for other stages."""
    priced = candidate.estimate
    parts = (priced.compute_s, priced.communication_s, priced.bubble_s)
    return "/".join(f"{100 * part / priced.step_s:.0f}" for part in parts)
