"""Every plan computes what one process would: gradients, losses and norms of real workers against the reference.

`make gradients` tries many more plans of the planner's and random ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.domain.plan import Plan
from tests.runtime.fleet import Fleet
from tests.runtime.planned import planned, structure
from tests.runtime.plans import HAND_PICKED
from tests.runtime.random_plans import random_plan
from tests.runtime.verify import verify

pytestmark = pytest.mark.usefixtures("one_thread")
#: One of each mechanism, trained for longer.
LONG = (
    "hierarchical", "zero 1", "zero 2", "zero 3", "hybrid 3", "recomputed", "megatron", "two axes out of order",
    "a unit each, several streams", "tensor widths by stage", "replicas unlike", "replicas unlike, overlapped",
)  # fmt: skip
PLANNED, RANDOM = 10, 14


def sample() -> Iterator[tuple[str, Plan]]:
    """The planner's plans for several workers, of as many kinds and clusters as may be; and random ones."""
    seen = set[object]()
    for seed in range(40):
        for plan in planned(seed):
            key = plan.technique, len(plan.replicas[0].stages) > 1, plan.model.tied
            if len(plan.devices) > 1 and key not in seen:
                seen.add(key)
                yield f"planned: {plan.technique} of cluster {seed}", plan
                break
        if len(seen) == PLANNED:
            break
    yield from ((f"random: {seed}", random_plan(seed)) for seed in range(RANDOM))


SAMPLE = dict(sample())


@pytest.mark.parametrize("name", HAND_PICKED)
def test_a_plan_computes_what_one_process_would(fleet: Fleet, folder: Path, name: str):
    plan = HAND_PICKED[name]
    steps = 20 if name in LONG else plan.train.steps
    verdict = verify(fleet, folder, replace(plan, train=replace(plan.train, steps=steps)))
    assert not verdict.faults


@pytest.mark.parametrize("name", SAMPLE)
def test_so_does_a_plan_of_the_planners_and_a_random_one(fleet: Fleet, folder: Path, name: str):
    assert not verify(fleet, folder, SAMPLE[name]).faults


def test_the_planners_plans_are_of_many_kinds():
    found = list(itertools.chain.from_iterable(map(planned, range(12))))
    assert len({structure(plan) for plan in found}) > 40
    assert {plan.technique for plan in found} >= {"data", "zero1", "zero2", "fsdp", "pipeshard", "diloco"}
