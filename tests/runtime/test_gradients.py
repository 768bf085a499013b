"""Every plan computes what one process would: gradients, losses and norms of real workers against
the reference.

`make test` runs those picked by hand, of every technique. The planner's and random ones are slow,
and `make gradients` tries hundreds of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan import models
from farspan.domain.cluster import Cluster, DataSheet, Device, Host, Link, Site
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan
from farspan.domain.train import Muon, Regularization
from farspan.estimate.estimate_plan import estimate
from tests.examples import slow_but
from tests.runtime import jobs
from tests.runtime.fleet import Fleet
from tests.runtime.planned import planned, structure
from tests.runtime.plans import HAND_PICKED
from tests.runtime.random_plans import LATER_MODELS, random_plan
from tests.runtime.verify import Case, verify

pytestmark = pytest.mark.usefixtures("one_thread")
#: One of each mechanism, trained for longer.
LONG = (
    "hierarchical",
    "zero 1",
    "zero 2",
    "zero 3",
    "hybrid 3",
    "recomputed",
    "megatron",
    "two axes out of order",
    "a unit each, several streams",
    "tensor widths by stage",
    "replicas unlike",
    "replicas unlike, overlapped",
)
MUON_KEPT = (
    "zero 3",
    "megatron",
    "data and tensor, zero 3",
    "a unit each, several streams",
    "replicas unlike, overlapped",
)
#: One of each way in which the matrices of a block may be divided.
MUON = (
    "one worker",
    "hierarchical",
    "zero 1",
    "zero 2",
    "zero 3",
    "hybrid 3",
    "recomputed",
    "megatron",
    "rows",
    "megatron, sequences and vocabulary",
    "two axes out of order",
    "three axes",
    "data and tensor, zero 3",
    "a unit each, several streams",
    "tensor widths by stage",
    "replicas unlike",
    "replicas unlike, overlapped",
)
#: One of each way in which rows may be divided.
REGULARIZED = (
    "one worker",
    "uneven rows, fewer than microbatches",
    "zero 3",
    "recomputed",
    "rows",
    "rows, none for one",
    "megatron, sequences and vocabulary",
    "a table with a copy and parts, rows between blocks",
    "a unit each, several streams",
    "replicas unlike, overlapped",
)
REGULARIZED_KEPT = (
    "uneven rows, fewer than microbatches",
    "megatron, sequences and vocabulary",
    "a unit each, several streams",
    "replicas unlike, overlapped",
)
PLANNED = 10
RANDOM = 60
#: Plans of later families: of all of them, and one that divides data and operators.
LATER = 20
LATER_SEED = 55


@functools.cache
def sample() -> list[tuple[str, Plan]]:
    """The planner's plans for several workers, of as many kinds and clusters as may be."""
    found: dict[object, tuple[str, Plan]] = {}
    for seed in itertools.count():
        for plan in planned(seed):
            key = plan.technique, len(plan.replicas[0].stages) > 1, plan.model.tied
            if len(plan.devices) > 1 and key not in found:
                found[key] = f"{plan.technique} of cluster {seed}", plan
                break
        if len(found) == PLANNED:
            break
    return list(found.values())


@pytest.mark.parametrize("name", HAND_PICKED)
def test_a_plan_computes_what_one_process_would(fleet: Fleet, folder: Path, name: str):
    assert not verify(fleet, folder, HAND_PICKED[name]).faults


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_plan_computes_over_twenty_steps_what_one_process_would(
    fleet: Fleet, folder: Path, name: str
):
    plan = HAND_PICKED[name]
    verdict = verify(fleet, folder, replace(plan, train=replace(plan.train, steps=20)))
    assert not verdict.faults


@pytest.mark.parametrize("name", slow_but(MUON_KEPT, MUON))
def test_matrices_are_updated_as_one_process_would(fleet: Fleet, folder: Path, name: str):
    plan = HAND_PICKED[name]
    train = replace(
        plan.train, steps=6, optimizer=replace(plan.train.optimizer, muon=Muon(embedding=3.0))
    )
    verdict = verify(fleet, folder, replace(plan, train=train))
    assert not verdict.faults


@pytest.mark.parametrize("name", slow_but(REGULARIZED_KEPT, REGULARIZED))
def test_dropout_masking_reshuffling_and_averaging_are_the_same_in_every_plan(
    fleet: Fleet, folder: Path, name: str
):
    plan = HAND_PICKED[name]
    regularization = Regularization(dropout=0.2, mask=0.2, reshuffle=True)
    # The corpus is read twice.
    train = replace(
        plan.train,
        steps=2 * 400 // plan.train.tokens_per_step,
        regularization=regularization,
        optimizer=replace(plan.train.optimizer, average=0.8),
    )
    assert not verify(fleet, folder, replace(plan, train=train)).faults


@pytest.mark.slow
@pytest.mark.parametrize("number", range(PLANNED))
def test_a_plan_of_the_planner_computes_what_one_process_would(
    fleet: Fleet, folder: Path, number: int
):
    name, plan = sample()[number]
    assert not verify(fleet, folder, plan).faults, name


def test_a_plan_whose_operators_divide_the_rows_of_every_microbatch_computes_the_same(
    fleet: Fleet, folder: Path
):
    plan = planned(31)[1]
    stage = plan.replicas[0].stages[0]
    assert (
        plan.replicas[0].microbatches > 1
        and stage.mesh.size("tensor") == 2
        and "b" in stage.splits.values()
    )
    assert not verify(fleet, folder, plan).faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RANDOM))
def test_a_random_plan_computes_what_one_process_would(fleet: Fleet, folder: Path, seed: int):
    assert not verify(fleet, folder, random_plan(seed)).faults


@pytest.mark.parametrize("model", LATER_MODELS, ids=lambda model: model.family)
def test_a_random_plan_of_a_later_family_computes_what_one_process_would(
    fleet: Fleet, folder: Path, model: ModelSpec
):
    assert not verify(fleet, folder, random_plan(LATER_SEED, [model])).faults


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(LATER))
def test_random_plans_of_later_families_compute_what_one_process_would(
    fleet: Fleet, folder: Path, seed: int
):
    assert not verify(fleet, folder, random_plan(seed, LATER_MODELS)).faults


@pytest.mark.parametrize("name", ["zero 3", "data and tensor, zero 3"])
def test_divided_parameters_of_a_block_are_not_gathered_before_it_needs_them(
    fleet: Fleet, folder: Path, name: str
):
    case = Case(folder, HAND_PICKED[name])
    assert fleet.run(jobs.staying, case.world, case.plan, case.path) == [[]] * case.world


def test_the_planners_plans_are_of_many_kinds():
    found = list(itertools.chain.from_iterable(map(planned, range(12))))
    assert len({structure(plan) for plan in found}) > 40
    assert {plan.technique for plan in found} >= {
        "data",
        "zero1",
        "zero2",
        "fsdp",
        "pipeshard",
        "diloco",
    }


def cluster(plan: Plan) -> Cluster:
    """One of CPUs that has the plan's devices."""
    device = Device(
        kind="cpu",
        backend="cpu",
        memory=2**30,
        sheet=DataSheet(flops={"fp32": 1e11}, bandwidth=1e10),
    )
    hosts = dict.fromkeys((device.site, device.host) for device in plan.devices)
    sites = [
        Site(name=site, hosts=(Host(name=host, devices=(device,) * len(plan.devices)),))
        for site, host in hosts
    ]
    links = (
        Link(a=a.name, b=b.name, rtt_s=0.05, bandwidth=1e8)
        for a, b in itertools.combinations(sites, 2)
    )
    return Cluster(sites=tuple(sites), links=tuple(links))


def test_every_plan_that_workers_can_run_has_a_finite_estimate():
    for plan in (*HAND_PICKED.values(), *map(random_plan, range(100))):
        found = estimate(plan, models.graph(plan.model), cluster(plan), load_engine("farspan"))
        assert 0 < found.step_s < math.inf and len(found.memory) == len(plan.devices)
