"""Smaller and larger microbatches of a plan: its training stays the same, and it holds together."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farspan.domain.plan import Edge, GradSync, Mesh, Plan, Replica, Stage, Sync, find_flaw
from farspan.planning.microbatches import (
    double_microbatches,
    halve_microbatches,
    largest_microbatch,
)
from farspan.semantics.identity import plan_key, training_key
from tests import tiny
from tests.launch.test_launchers import TRAIN

SIX = replace(TRAIN, batch=6)


def pipeline(rows: int, microbatches: int) -> Plan:
    """Two stages of one device each."""
    plan = tiny.plan(replace(TRAIN, batch=rows))
    stages = []
    for rank, units in enumerate(((0, 2), (2, 4))):
        mesh = Mesh(ranks=(rank,), shape=(1,), axes=("data",))
        sync = GradSync(bucket_bytes=20_000)
        stages.append(Stage(units=units, mesh=mesh, rows=(rows,), grad_sync=sync))
    replica = Replica(
        stages=tuple(stages),
        edges=(Edge(bits=32),),
        microbatches=microbatches,
        in_flight=(2, 1),
    )
    return replace(plan, replicas=(replica,), devices=plan.devices * 2)


@pytest.mark.parametrize(
    ("plan", "before", "after"),
    [
        (tiny.plan(SIX, micro_rows=6), 6, 3),
        (tiny.plan(SIX, micro_rows=3), 3, 2),
        (tiny.plan(SIX, micro_rows=2), 2, 1),
        (tiny.plan(SIX, rows=(4, 2), micro_rows=4), 4, 2),
        (tiny.plan(SIX, rows=(5, 1), micro_rows=2), 2, 1),
        (pipeline(8, 2), 4, 2),
    ],
)
def test_half_a_microbatch_is_of_the_same_training(plan, before, after):
    halved = halve_microbatches(plan)
    assert halved is not None and find_flaw(halved) == ""
    assert largest_microbatch(plan.replicas[0]) == before
    assert largest_microbatch(halved.replicas[0]) == after
    assert training_key(halved) == training_key(plan) and plan_key(halved) != plan_key(plan)
    doubled = double_microbatches(halved)
    assert doubled is not None and find_flaw(doubled) == ""
    assert largest_microbatch(doubled.replicas[0]) > after


def test_a_step_of_several_microbatches_is_not_recorded():
    plan = tiny.plan(SIX, micro_rows=6)
    plan = replace(plan, devices=(replace(plan.devices[0], graph=True, compile=True),))
    halved = halve_microbatches(plan)
    assert halved is not None
    assert halved.devices == plan.devices


@pytest.mark.parametrize(
    "plan",
    [tiny.plan(SIX, micro_rows=1), pipeline(6, 2), pipeline(2, 2)],
)
def test_one_sequence_and_rows_that_do_not_divide_are_not_halved(plan):
    assert halve_microbatches(plan) is None


@pytest.mark.parametrize("plan", [tiny.plan(SIX, micro_rows=6), pipeline(4, 1)])
def test_what_is_computed_at_once_is_not_doubled(plan):
    assert double_microbatches(plan) is None


def test_only_the_replica_that_lacked_memory_is_halved():
    first = tiny.plan(SIX, rows=(4,), micro_rows=4).replicas[0]
    stage = first.stages[0]
    second = replace(first, stages=(replace(stage, mesh=replace(stage.mesh, ranks=(1,))),))
    plan = tiny.plan(SIX, rows=(3, 3))
    plan = replace(plan, replicas=(first, second), sync=Sync(every=4))
    halved = halve_microbatches(plan, rank=1)
    assert halved is not None
    assert halved.replicas[0] == first and halved.replicas[1].microbatches == 2
    both = halve_microbatches(plan)
    assert both is not None and [replica.microbatches for replica in both.replicas] == [2, 2]
