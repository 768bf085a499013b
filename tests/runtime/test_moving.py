"""Checkpoints that move: what one plan saved another goes on from, on other devices, with the same
losses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder
from farspan.domain.train import Muon, Optimizer
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.manifest import MANIFEST
from farspan.semantics.identity import training_key
from tests.examples import slow_after, slow_but
from tests.runtime import jobs, reference, stored_tensors
from tests.runtime.fleet import Fleet
from tests.runtime.plans import HAND_PICKED, TRAIN, picked, plan
from tests.runtime.random_plans import MODELS, MOST_RANKS, divided
from tests.runtime.test_resume import MUON, state
from tests.runtime.verify import Case

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6
UNTIL = 3
BATCH = 24
#: Pairs of random plans.
PAIRS = 60
#: Whose checkpoints are written whole and read again in `make test`.
KEPT = ("hybrid 3", "tensor widths by stage", "replicas unlike, overlapped", MUON[0])
#: As far as sums of fp32 in another order may be apart after so many steps.
SAME = 1e-5


def synchronous(
    rng: random.Random, model: int, world: int, optimizer: Optimizer = TRAIN.optimizer
) -> Plan:
    """Any division of a synchronous step of BATCH sequences over so many ranks."""
    train = replace(TRAIN, steps=STEPS, seed=model, seq_len=8, optimizer=optimizer)
    sites = sorted(rng.randrange(3) for _ in range(world))
    return plan(
        divided(rng, MODELS[model], world, BATCH), sites=sites, model=MODELS[model], train=train
    )


def apart(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs)


@pytest.mark.parametrize("seed", slow_after(4, range(PAIRS)))
def test_any_plan_resumes_from_the_checkpoint_of_another_with_the_same_losses(
    fleet: Fleet, folder: Path, seed: int
):
    rng = random.Random(seed)
    optimizer = replace(TRAIN.optimizer, muon=Muon()) if seed % 2 else TRAIN.optimizer
    before, after = (
        synchronous(rng, seed % len(MODELS), rng.randint(1, MOST_RANKS), optimizer)
        for _ in range(2)
    )
    assert training_key(before) == training_key(after)
    case = Case(folder, before)
    other = Case(folder, after)
    wanted = reference.train(before, case.data, case.weights)
    begun = fleet.run(jobs.train, case.world, before, case.path, UNTIL)
    again = fleet.run(jobs.train, other.world, after, case.path)
    losses = begun[0].losses + again[0].losses
    assert len(begun[0].losses) < STEPS == len(losses)
    assert max(map(apart, losses, wanted.losses[0])) < SAME
    assert again[0].validation is not None and apart(again[0].validation, wanted.validation) < SAME


@pytest.mark.parametrize("name", slow_but(KEPT, [*HAND_PICKED, *MUON]))
def test_a_checkpoint_through_whole_tensors_and_back_is_the_same(
    fleet: Fleet, folder: Path, name: str
):
    """Saved by many workers, written whole by one, restored by the many and saved again: no bit is
    another."""
    plan = replace(picked(name), train=replace(picked(name).train, steps=STEPS))
    case = Case(folder, plan)
    fleet.run(jobs.train, case.world, plan, case.path, UNTIL)
    run = RunFolder(case.path)
    saved = state(case.path)
    newest = stored_tensors.newest(run)
    assert set(saved) == set(checkpoint_folder.shapes_of(plan, checkpoint_folder.kinds_of(plan)))
    stored_tensors.write(run.checkpoints, saved, checkpoint_folder.verify(newest))
    assert [path.name for path in newest.iterdir() if path.name != MANIFEST] == [
        "part-00000.safetensors"
    ]
    fleet.run(jobs.restore_and_save, case.world, plan, case.path)
    again = state(case.path)
    assert again.keys() == saved.keys() and all(
        torch.equal(again[key], saved[key]) for key in saved
    )


@pytest.mark.parametrize("name", ["zero 3", "hybrid 3", "unlike rows and depths, several streams"])
def test_a_worker_reads_its_own_slices_and_no_more(fleet: Fleet, folder: Path, name: str):
    picked = replace(HAND_PICKED[name], train=replace(HAND_PICKED[name].train, steps=STEPS))
    case = Case(folder, picked)
    fleet.run(jobs.train, case.world, picked, case.path, UNTIL)
    for read, owned in fleet.run(jobs.restore_and_save, case.world, picked, case.path):
        assert 0 < read <= owned
