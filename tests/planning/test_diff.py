"""Two plans side by side."""

from __future__ import annotations

import pytest

from farspan.planning.diff import PlanSide, difference
from tests.planning.worlds import ranking


def side(one, index):
    candidate = one.candidates[index]
    return PlanSide(name=str(index), plan=candidate.plan, estimate=candidate.estimate)


def test_a_plan_differs_in_nothing_from_itself():
    one = ranking("FF", "SS")
    same = difference(side(one, 0), side(one, 0), one.cluster)
    assert same.configuration == ()
    assert all(row.ratio in (None, 1.0) for row in same.figures)


def test_configuration_and_figures_are_the_plans():
    one = ranking("FF", "SS", allow=("data", "zero2"))
    a, b = side(one, 0), side(one, -1)
    found = difference(a, b, one.cluster)
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
    found = difference(side(one, other), side(one, index), one.cluster)
    rows = {row.what: row for row in found.configuration}
    assert rows["replicas"].a == "1"
    assert rows["replicas"].b.startswith(
        f"2, which meet every {sync.every} steps in {sync.bits} bits"
    )
