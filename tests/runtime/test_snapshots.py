"""Copies of the state for a checkpoint, by a device that copies late, while training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from farspan.runtime.checkpoint import snapshot
from farspan.runtime.comm.host_staging import HostStaging
from tests.examples import slow_but
from tests.runtime import jobs, stored_tensors
from tests.runtime.copies import slow_copies
from tests.runtime.fleet import Fleet
from tests.runtime.plans import HAND_PICKED
from tests.runtime.verify import Case

#: Where workers send, the copies of their messages come after that of the snapshot.
SAVED = ("one worker", "zero 3", "two stages", "replicas unlike, overlapped")
SAVED_KEPT = ("one worker", "zero 3")


def checkpoints(path: Path) -> list[Path]:
    return sorted((path / "checkpoints").glob("step-*"))


def test_a_snapshot_that_the_host_has_no_memory_for_is_fetched(monkeypatch):
    sources = [torch.arange(1000.0), torch.arange(2000.0).view(40, 50)]
    with slow_copies(0) as made:
        monkeypatch.setattr(snapshot, "available_host_memory", lambda: 30_000)
        snapshots = snapshot.Snapshots(HostStaging(torch.device("cpu")))
        for checkpoint_bytes, chunks in ((12_000, 1), (16_000, 0)):
            copies = snapshots.take(sources, checkpoint_bytes)
            assert len(snapshots._chunks) == chunks
            snapshots.wait()
            assert all(map(torch.equal, copies, sources))
            snapshots.close()
    assert made()[0].changed == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", slow_but(SAVED_KEPT, SAVED))
def test_a_snapshot_is_of_its_step_while_training_goes_on(fleet: Fleet, folder: Path, name: str):
    train = replace(HAND_PICKED[name].train, checkpoint_every_s=1e-9, validate_every=2)
    plan = replace(HAND_PICKED[name], train=train)
    case = Case(folder, plan)
    fleet.run(jobs.train, case.world, plan, case.path)
    wanted = {step.name: stored_tensors.tensors(step) for step in checkpoints(case.path)}
    case = Case(folder, plan)
    answers = fleet.run(jobs.train_with_slow_copies, case.world, plan, case.path, 7)
    assert all(copied.changed == [] for _, copied in answers)
    assert len(wanted) > 1
    for step, tensors in wanted.items():
        found = stored_tensors.tensors(case.path / "checkpoints" / step)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
