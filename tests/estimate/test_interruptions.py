"""Expected times against an event simulation of drawn interruptions, and the best interval."""

from __future__ import annotations

import random
import statistics

import pytest

from farspan.estimate.interruptions import Interruptions, best_interval

HOUR_S = 3600.0


def simulate(case: Interruptions, work_s: float, draw: random.Random) -> float:
    """Return the seconds of one run: intervals of work with a save after each but the last;
    interruptions lose the interval, and also interrupt restarts and saves."""
    now_s = done_s = kept_s = 0.0
    next_s = draw.expovariate(case.per_s)
    restarting = False
    while done_s < work_s:
        part_s = min(case.every_s, work_s - done_s)
        save_s = case.save_s if done_s + part_s < work_s else 0.0
        takes_s = case.restart_s if restarting else part_s - kept_s + save_s
        if now_s + takes_s > next_s:
            is_kept = draw.random() >= case.again
            if is_kept and not restarting:
                kept_s = min(part_s, kept_s + next_s - now_s)
            elif not is_kept:
                kept_s = 0.0
            now_s = next_s
            next_s += draw.expovariate(case.per_s)
            restarting = True
            continue
        now_s += takes_s
        if not restarting:
            done_s += part_s
            kept_s = 0.0
        restarting = False
    return now_s


@pytest.mark.parametrize("per_hour", [0.1, 1, 6])
@pytest.mark.parametrize("save_s", [0.05, 5, 60])
@pytest.mark.parametrize("restart_s", [14.2, 300])
@pytest.mark.parametrize("every_s", [60, 300, 1800])
@pytest.mark.parametrize("again", [1.0, 0.5, 0.0])
def test_expected_time_is_that_of_drawn_interruptions(
    per_hour: float, save_s: float, restart_s: float, every_s: float, again: float
) -> None:
    case = Interruptions(
        per_s=per_hour / HOUR_S, save_s=save_s, restart_s=restart_s, every_s=every_s, again=again
    )
    work_s = 20 * HOUR_S
    draw = random.Random(1)
    mean_s = statistics.fmean(simulate(case, work_s, draw) for _ in range(120))
    assert case.expected_s(work_s) == pytest.approx(mean_s, rel=0.05)


def test_work_that_ends_before_its_first_save_is_started_again_whole() -> None:
    case = Interruptions(per_s=2 / HOUR_S, save_s=9.0, restart_s=20.0, every_s=7200.0)
    draw = random.Random(2)
    mean_s = statistics.fmean(simulate(case, HOUR_S, draw) for _ in range(20_000))
    assert case.expected_s(HOUR_S) == pytest.approx(mean_s, rel=0.05)


@pytest.mark.parametrize("per_hour", [0.02, 0.1, 1, 6])
@pytest.mark.parametrize("save_s", [0.05, 1, 20, 60])
def test_best_interval_takes_within_a_thousandth_of_the_least_time(
    per_hour: float, save_s: float
) -> None:
    per_s = per_hour / HOUR_S

    def time_at(every_s: float) -> float:
        case = Interruptions(per_s=per_s, save_s=save_s, restart_s=30.0, every_s=every_s)
        return case.expected_s(1e6)

    best = best_interval(per_s, save_s)
    least = min(time_at(best * 1.05**power) for power in range(-40, 41))
    assert time_at(best) <= 1.001 * least
