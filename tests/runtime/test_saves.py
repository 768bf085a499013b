"""Checkpoints of a state that lies on many workers: what they take of a disk, and how rank 0 hands
them out again."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.runtime.checkpoint import checkpoint_folder
from tests.runtime import jobs
from tests.runtime.fleet import Fleet
from tests.runtime.plans import HAND_PICKED
from tests.runtime.test_resume import state
from tests.runtime.verify import Case


@pytest.mark.parametrize(
    "name", ["zero 3", "unlike rows and depths, several streams", "replicas unlike"]
)
def test_a_checkpoint_takes_what_is_asked_of_the_disk_for_it(fleet: Fleet, folder: Path, name: str):
    plan = replace(HAND_PICKED[name], train=replace(HAND_PICKED[name].train, steps=2))
    case = Case(folder, plan)
    fleet.run(jobs.train, case.world, plan, case.path)
    saved = sum(tensor.nbytes for tensor in state(case.path).values())
    assert saved == checkpoint_folder.bytes_needed(plan) - checkpoint_folder.MAX_HEADER_BYTES


def test_of_what_rank_0_hands_out_it_holds_two_messages_a_worker(fleet: Fleet, folder: Path):
    plan = HAND_PICKED["zero 3"]
    case = Case(folder, plan)
    held = fleet.run(jobs.hand_out, case.world, plan, case.path)
    assert 0 < held[0] <= 2 * (case.world - 1)
