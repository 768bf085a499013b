"""Candidates against each other: which is how much slower or costlier, and what each would be
called in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.units import counted, format_seconds, format_usd
from farspan.domain.words import joined
from farspan.planning.rank import Candidate, Ranking, Refused

#: Less of a difference than this is none: estimates are rounded to about as much.
SAME = 0.001


def step_s(candidate: Candidate) -> float:
    """Seconds of a step, and of the further ones that the same loss takes where a token counts for
    less than one."""
    return candidate.estimate.step_s / candidate.estimate.token_efficiency


def by_money(ranking: Ranking) -> bool:
    """Whether the objective compares money."""
    return ranking.objective in ("cost", "loss_per_dollar")


def factor(ranking: Ranking, candidate: Candidate, base: Candidate) -> float:
    """How many times as long, or as many dollars, `candidate` takes as `base`."""
    if not by_money(ranking):
        return candidate.time_s / base.time_s
    return (
        candidate.time_s / base.time_s
        if candidate.usd is None or not base.usd
        else candidate.usd / base.usd
    )


def difference(value: float, words: tuple[str, str] = ("slower", "faster")) -> str:
    """`1.24` is `24 % slower`, `3.5` is `3.5 x slower`, `0.9` is `10 % faster`."""
    if abs(value - 1) < SAME:
        return "as " + ("fast" if words[0] == "slower" else "cheap")
    if value < 1:
        return f"{_percent(1 - value)} {words[1]}"
    return f"{_percent(value - 1)} {words[0]}" if value < 2 else f"{_times(value)} x {words[0]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def _times(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def words_of(ranking: Ranking) -> tuple[str, str]:
    return ("costlier", "cheaper") if by_money(ranking) else ("slower", "faster")


def verdict(ranking: Ranking, candidate: Candidate | Refused) -> str:
    """A few words: chosen, how much slower (or costlier), or that there is no plan."""
    if isinstance(candidate, Refused):
        return "does not fit" if candidate.problem.code == "out-of-memory" else "no plan"
    if ranking.chosen is None:
        return "not chosen"
    chosen = ranking.candidates[ranking.chosen]
    if candidate is chosen:
        return "chosen"
    return difference(factor(ranking, candidate, chosen), words_of(ranking))


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
