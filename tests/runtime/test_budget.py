"""Re-planning against simulated clocks: no overrun, no unfinished decay, no change without need."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.runtime.budget import TimeBudget

DEADLINE_S = 1000.0


def simulate(
    planned: int, pace: Callable[[float], float], first_s: float = 0.0
) -> tuple[list[tuple[int, float]], float]:
    """The number of steps in all as it changed, each with the time of the change, and the time at the end."""
    budget, steps, step, elapsed_s = TimeBudget(DEADLINE_S, planned), planned, 0, first_s
    changes = [(planned, 0.0)]
    while step < steps:
        elapsed_s += pace(elapsed_s)
        step += 1
        steps = budget.steps(step, elapsed_s, steps)
        if steps != changes[-1][0]:
            changes.append((steps, elapsed_s))
    return changes, elapsed_s


@settings(max_examples=200, deadline=None)
@given(st.integers(100, 5000), st.floats(0.05, 10.0), st.floats(0.0, 500.0))
def test_a_steady_pace_is_planned_for_once_and_early(planned, step_s, first_s):
    changes, elapsed_s = simulate(planned, lambda at: step_s, first_s)
    steps = changes[-1][0]
    assert steps <= planned
    assert elapsed_s <= DEADLINE_S
    assert len(changes) <= 2
    if first_s + planned * step_s <= DEADLINE_S:
        assert changes == [(planned, 0.0)]
    else:
        assert changes[-1][1] <= first_s + 0.1 * DEADLINE_S + 2 * step_s
        assert elapsed_s >= 0.9 * DEADLINE_S - step_s


@settings(max_examples=300, deadline=None)
@given(st.floats(0.3, 2.0), st.lists(st.tuples(st.floats(0.0, 1000.0), st.floats(0.7, 1.4)), max_size=4))
def test_however_the_pace_changes_the_schedule_ends_with_the_time(step_s, turns):
    def pace(at: float) -> float:
        return step_s * next((factor for since, factor in sorted(turns, reverse=True) if since <= at), 1.0)

    changes, elapsed_s = simulate(2000, pace)
    assert elapsed_s <= DEADLINE_S + pace(elapsed_s)
    assert len(changes) <= 11
    # At the deadline itself what is left of the schedule is given up: little enough for a learning rate near its floor.
    (before, _), (steps, _) = changes[-2:] if len(changes) > 1 else changes * 2
    assert before <= 1.1 * steps or changes[-1][1] <= 0.9 * DEADLINE_S


def test_a_pace_that_recovers_gives_the_steps_back():
    changes, elapsed_s = simulate(900, lambda at: 3.0 if at < 200 else 1.0)
    counts = [steps for steps, _ in changes]
    assert min(counts) < 400
    assert counts[-1] > 700
    assert 900 <= elapsed_s <= DEADLINE_S
