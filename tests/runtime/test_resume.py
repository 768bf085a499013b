"""A run that was stopped in the middle goes on as if it had not been: the same bits, however its
state is divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from farspan.domain.run import RunFolder
from farspan.runtime.checkpoint import checkpoint_folder
from tests.examples import slow_but
from tests.runtime import jobs, stored_tensors
from tests.runtime.fleet import Fleet
from tests.runtime.plans import HAND_PICKED, picked
from tests.runtime.test_rounding import with_sums
from tests.runtime.verify import Case

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6
UNTIL = 3
NAMES = (
    "uneven rows, fewer than microbatches",
    "zero 1",
    "zero 2",
    "zero 3",
    "hybrid 3",
    "data and tensor, zero 1",
    "tensor widths by stage",
    "unlike rows and depths, several streams",
    "replicas unlike",
    "replicas unlike, overlapped",
    "tensor axis against ZeRO, overlapped",
)
#: What `make test` resumes.
KEPT = (
    "zero 1",
    "hybrid 3",
    "data and tensor, zero 1",
    "unlike rows and depths, several streams",
    "replicas unlike, overlapped",
    "zero 3 muon",
)
MUON = ("zero 3 muon", "data and tensor, zero 1 muon", "replicas unlike, overlapped muon")


def state(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint."""
    return stored_tensors.tensors(stored_tensors.newest(RunFolder(path)))


@pytest.mark.parametrize("name", slow_but(KEPT, NAMES + MUON))
def test_a_run_that_was_stopped_ends_with_the_same_bits(fleet: Fleet, folder: Path, name: str):
    plan = replace(picked(name), train=replace(picked(name).train, steps=STEPS))
    whole = Case(folder, plan)
    stopped = Case(folder, plan)
    wanted = fleet.run(jobs.train, whole.world, plan, whole.path)
    first = fleet.run(jobs.train, stopped.world, plan, stopped.path, UNTIL)
    again = fleet.run(jobs.train, stopped.world, plan, stopped.path)
    assert {one.reason for one in first} == {"interrupted"} and UNTIL <= len(
        first[0].losses
    ) < STEPS
    assert {one.reason for one in again} == {"done"}
    for rank, one in enumerate(wanted):
        assert first[rank].losses + again[rank].losses == one.losses
        assert first[rank].norms + again[rank].norms == one.norms
    assert again[0].validation == wanted[0].validation
    ours = state(stopped.path)
    theirs = state(whole.path)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


#: Divided over batch axes, in stages, and in replicas that synchronize now and then.
PREEMPTED = ("zero 3", "unlike rows and depths, several streams", "replicas unlike, overlapped")


@pytest.mark.parametrize("ranks", [(0,), (1, 2)])
@pytest.mark.parametrize("name", slow_but(PREEMPTED[:1], (*PREEMPTED, "sums of 8 bits")))
def test_a_preemption_saves_at_the_step_and_the_state_of_a_stop(
    fleet: Fleet, folder: Path, name: str, ranks: tuple[int, ...]
):
    in_8_bits = with_sums(HAND_PICKED["hierarchical"], 8)
    plan = in_8_bits if name == "sums of 8 bits" else picked(name)
    plan = replace(plan, train=replace(plan.train, steps=STEPS))
    preempted = Case(folder, plan)
    stopped = Case(folder, plan)
    wanted = fleet.run(jobs.train, stopped.world, plan, stopped.path, UNTIL)
    found = fleet.run(jobs.train_preempted, preempted.world, plan, preempted.path, UNTIL, ranks)
    for trained, named, step in found:
        assert (trained.reason, named) == ("preempted", ranks)
        assert step == len(trained.losses) < STEPS
    assert [trained.losses for trained, _, _ in found] == [one.losses for one in wanted]
    assert found[0][0].saved == wanted[0].saved == [found[0][2]]
    ours = state(preempted.path)
    theirs = state(stopped.path)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_preemption_of_all_workers_is_a_stop(fleet: Fleet, folder: Path):
    plan = replace(picked("zero 1"), train=replace(picked("zero 1").train, steps=STEPS))
    case = Case(folder, plan)
    every = tuple(range(case.world))
    found = fleet.run(jobs.train_preempted, case.world, plan, case.path, UNTIL, every)
    assert {(trained.reason, named) for trained, named, _ in found} == {("interrupted", ())}


def test_an_exchange_under_way_is_taken_up_by_workers_that_had_not_moved_too(
    fleet: Fleet, folder: Path
):
    """As after steps that all overflowed: replica 1 is still at the model of the last meeting."""
    base = HAND_PICKED["replicas unlike, overlapped"]
    plan = replace(base, train=replace(base.train, steps=STEPS))
    case = Case(folder, plan)
    first = fleet.run(jobs.train, case.world, plan, case.path, UNTIL)
    checkpoints = RunFolder(case.path).checkpoints
    newest = next(checkpoint_folder.newest_first(checkpoints))
    tensors = stored_tensors.tensors(newest)
    for name in [name for name in tensors if name.startswith("model/")]:
        tensors[name.replace("model/", "replica-1/master/")] = tensors[name]
    stored_tensors.write(checkpoints, tensors, checkpoint_folder.verify(newest))
    again = fleet.run(jobs.train, case.world, plan, case.path)
    assert {one.reason for one in again} == {"done"}
    assert len(first[0].losses) + len(again[0].losses) == STEPS
