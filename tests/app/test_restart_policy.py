"""Which faults a run starts again for, how often, and which end it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from farspan.app.restart_policy import (
    CURABLE,
    MAX_FRUITLESS_STARTS,
    MAX_SAME_FAULT,
    NOTICE_S,
    Faults,
    Seen,
)
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.problems import EXIT_CODES, Problem
from tests import tiny
from tests.launch.test_launchers import TRAIN

LOST = Problem(
    code="worker-lost",
    what="rank 1 on b was lost",
    where="log",
    fact="gone",
    remedy="resume",
    rank=1,
)


def seen(problem: Problem = LOST, step: int = 7, at: float = 0.0) -> Seen:
    return Seen(problem=problem, step=step, at=at)


@pytest.mark.parametrize("code", sorted(EXIT_CODES))
def test_run_ends_at_once_for_errors_that_a_restart_cannot_fix(code):
    problem = replace(LOST, code=code)
    ended = Faults().decide_restart(seen(problem), trained=True)
    assert (ended is None) == (code in CURABLE)
    assert ended is None or ended == problem


def test_an_error_of_a_workers_own_ends_the_run():
    own = replace(LOST, cause="own")
    assert Faults().decide_restart(seen(own), trained=True) == own
    assert Faults().decide_restart(seen(replace(LOST, cause="exchange")), trained=True) is None


def test_host_unreachable_before_the_first_step_ends_the_run_at_once():
    away = replace(LOST, code="host-unreachable")
    assert Faults().decide_restart(seen(away), trained=False) == away
    assert Faults().decide_restart(seen(away), trained=True) is None
    assert Faults().decide_restart(seen(), trained=False) is None


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=80))
def test_a_run_ends_when_a_fault_comes_back_or_starts_bring_no_new_step(history):
    """Whatever comes: it ends at the third that is the same, or where starts have brought no new
    step so often, and with the fault's own cause."""
    faults = Faults()
    step = 0
    seen_before = list[tuple[int, int]]()
    for progress, rank in history:
        step += progress
        seen_before.append((step, rank))
        problem = replace(LOST, rank=rank)
        ended = faults.decide_restart(seen(problem, step), trained=True)
        same = seen_before.count((step, rank))
        fruitless = sum(other == step for other, _ in seen_before) - 1
        assert (ended is not None) == (same >= MAX_SAME_FAULT or fruitless >= MAX_FRUITLESS_STARTS)
        if ended is not None:
            assert ended.fact.startswith(f"{problem.fact}; ") and ended.code == problem.code
            return


def test_run_that_makes_a_step_between_faults_goes_on_for_ever():
    faults = Faults()
    for step in range(500):
        assert faults.decide_restart(seen(step=step, at=float(step)), trained=True) is None


def test_only_a_host_that_is_taken_away_whole_is_leaving_and_for_its_notice():
    """Not one that has workers left or shows nothing of it, and not this machine, on which the
    supervisor runs."""
    device = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
    names = ("here", "whole", "part", "signalled", "idle")
    hosts = tuple(
        Host(name=name, devices=(device,) * 2, enter=() if name == "here" else None)
        for name in names
    )
    cluster = Cluster(sites=(Site(name="a", hosts=hosts),))
    plan = tiny.plan(TRAIN, rows=(1,) * 8)
    at = [replace(plan.devices[0], host=name) for name in names[:4] for _ in range(2)]
    plan = replace(plan, devices=tuple(at))
    ranks = (0, 1, 2, 3, 4, 6, 7)
    problem = replace(LOST, code="preempted", ranks=ranks, leaving=names[:3])
    faults = Faults()
    faults.mark_preempted(seen(problem, at=100.0), plan, cluster)
    assert faults.leaving_hosts(100.0) == faults.leaving_hosts(99.9 + NOTICE_S) == {"whole"}
    assert faults.leaving_hosts(100.0 + NOTICE_S) == set()
    faults.mark_preempted(seen(replace(problem, ranks=()), at=500.0), plan, cluster)
    assert faults.leaving_hosts(500.0) == set()
