"""Two plans side by side."""

from __future__ import annotations

import pytest

from farspan.domain.units import format_seconds, format_usd
from farspan.planning.diff import PlanSide, compare_plans
from farspan.planning.ranking import time_bounds_s
from tests.planning.worlds import ranking


def side(one, index):
    candidate = one.candidates[index]
    return PlanSide(
        name=str(index),
        plan=candidate.plan,
        estimate=candidate.estimate,
        queue_s=candidate.queue_s,
    )


def test_a_plan_differs_in_nothing_from_itself():
    one = ranking("FF", "SS")
    same = compare_plans(side(one, 0), side(one, 0), one.cluster)
    assert same.configuration == ()
    assert all(row.ratio in (None, 1.0) for row in same.figures)


def test_configuration_and_figures_are_the_plans():
    one = ranking("FF", "SS", allow=("data", "zero2"))
    a = side(one, 0)
    b = side(one, -1)
    found = compare_plans(a, b, one.cluster)
    rows = {row.what: row for row in found.configuration}
    assert rows["devices"].a != rows["devices"].b
    assert set(rows).isdisjoint(found.same)
    figures = {row.what: row for row in found.figures}
    assert figures["step"].ratio == pytest.approx(b.estimate.step_s / a.estimate.step_s)
    assert figures["memory of the fullest device"].ratio == pytest.approx(
        b.estimate.memory_bytes / a.estimate.memory_bytes
    )
    assert figures["dollars"].ratio == pytest.approx(b.estimate.usd / a.estimate.usd)


def test_plan_difference_shows_replicas_with_their_outer_sync_interval():
    one = ranking("FF", "SS")
    index = next(i for i, c in enumerate(one.candidates) if c.technique == "diloco")
    sync = one.candidates[index].plan.sync
    other = next(i for i, c in enumerate(one.candidates) if c.technique == "data")
    found = compare_plans(side(one, other), side(one, index), one.cluster)
    rows = {row.what: row for row in found.configuration}
    assert rows["replicas"].a == "1"
    assert rows["replicas"].b.startswith(
        f"2, which meet every {sync.every} steps in {sync.bits} bits"
    )


def test_plan_difference_compares_the_times_and_dollars_of_the_table():
    one = ranking("FF", "SS")
    index = next(i for i, c in enumerate(one.candidates) if c.technique == "diloco")
    diloco = one.candidates[index]
    sync = one.candidates[0]
    assert diloco.time_s > diloco.estimate.run_s
    found = compare_plans(side(one, 0), side(one, index), one.cluster)
    rows = {row.what: row for row in found.figures}
    assert (rows["run to equal loss"].a, rows["run to equal loss"].b) == (
        format_seconds(sync.time_s),
        format_seconds(diloco.time_s),
    )
    assert rows["run to equal loss"].ratio == pytest.approx(diloco.time_s / sync.time_s)
    assert (rows["interval, low"].b, rows["interval, high"].b) == tuple(
        map(format_seconds, time_bounds_s(diloco))
    )
    assert rows["dollars to equal loss"].b == format_usd(diloco.usd)
    assert rows["the run's own steps"].b == format_seconds(diloco.estimate.run_s)


def test_difference_of_synchronous_plans_has_one_time():
    one = ranking("FF", "SS", allow=("data", "zero2"))
    names = [row.what for row in compare_plans(side(one, 0), side(one, 1), one.cluster).figures]
    assert "run" in names and not [name for name in names if "equal loss" in name]
    assert "the run's own steps" not in names
