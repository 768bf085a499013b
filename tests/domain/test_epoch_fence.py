"""Epochs: what a start of a run writes counts until another has begun, and no longer."""

from __future__ import annotations

import pytest

from farspan.domain import epoch_fence
from farspan.domain.epoch_fence import Epoch, Ledger
from farspan.domain.problems import Refusal


def test_epoch_ledger_records_the_last_valid_step_of_each_earlier_start(tmp_path):
    path = tmp_path / "epochs.json"
    assert [epoch_fence.begin_epoch(path, newest) for newest in (-1, 40, 40, 90)] == [1, 2, 3, 4]
    ledger = epoch_fence.read_ledger(path)
    assert ledger == Ledger(epoch=4, ended={1: 40, 2: 40, 3: 90})
    for number, step, counts in (
        (1, 40, True),
        (1, 41, False),
        (2, 41, False),
        (3, 90, True),
        (3, 91, False),
    ):
        assert ledger.counts(number, step) is counts
    assert ledger.counts(4, 10**6) and ledger.counts(0, 10**6), "earlier versions have no epochs"


def test_superseded_worker_may_not_write(tmp_path):
    path = tmp_path / "epochs.json"
    epoch_fence.fence_stale_epoch(path, 0)
    epoch_fence.begin_epoch(path, -1)
    epoch_fence.fence_stale_epoch(path, 1)
    epoch_fence.begin_epoch(path, 3)
    with pytest.raises(
        Refusal, match="it is of start 1 of the run, which is at start 2"
    ) as refusal:
        epoch_fence.fence_stale_epoch(path, 1)
    assert refusal.value.problem.code == "superseded" and refusal.value.problem.exit_code == 45


DAMAGED = [b"", b"{}", b'{"epoch": 3, "en', b'{"epoch": -1, "ended": {}}', b"[]", b"\x00" * 40]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_ledger_excludes_no_checkpoint_and_lets_no_worker_write(tmp_path, content):
    path = tmp_path / "epochs.json"
    path.write_bytes(content)
    assert epoch_fence.readable_ledger(path).counts(1, 10**6)
    with pytest.raises(Refusal) as refusal:
        epoch_fence.fence_stale_epoch(path, 7)
    assert refusal.value.problem.code == "worker-lost"
    assert refusal.value.problem.remedy == f"farspan resume {tmp_path}"


def test_rebuilt_ledger_counts_what_is_saved_and_excludes_what_earlier_starts_still_save(tmp_path):
    path = tmp_path / "epochs.json"
    path.write_bytes(b"{")
    assert epoch_fence.begin_epoch(path, 80, epoch_fence.rebuild_ledger(4, 80)) == 5
    ledger = epoch_fence.read_ledger(path)
    assert all(ledger.counts(number, 80) for number in range(6))
    assert not any(ledger.counts(number, 81) for number in range(1, 5))
    assert ledger.counts(5, 81)


def test_worker_reads_its_epoch_from_the_environment():
    assert epoch_fence.read_own_epoch({}) is None
    assert epoch_fence.read_own_epoch(
        {epoch_fence.EPOCH_VARIABLE: '{"number":3,"skip":[7]}'}
    ) == Epoch(number=3, skip=(7,))
    with pytest.raises(Refusal):
        epoch_fence.read_own_epoch({epoch_fence.EPOCH_VARIABLE: '{"number":-1}'})
