"""Epochs: what a start of a run writes counts until another has begun, and no longer."""

from __future__ import annotations

import pytest

from farspan.domain import epoch
from farspan.domain.epoch import Epoch, Ledger
from farspan.domain.problems import Refusal


def test_epoch_ledger_records_the_last_valid_step_of_each_earlier_start(tmp_path):
    path = tmp_path / "epochs.json"
    assert [epoch.advance(path, newest) for newest in (-1, 40, 40, 90)] == [1, 2, 3, 4]
    ledger = epoch.read_ledger(path)
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
    epoch.require(path, 0)
    epoch.advance(path, -1)
    epoch.require(path, 1)
    epoch.advance(path, 3)
    with pytest.raises(
        Refusal, match="it is of start 1 of the run, which is at start 2"
    ) as refusal:
        epoch.require(path, 1)
    assert refusal.value.problem.code == "superseded" and refusal.value.problem.exit_code == 45


def test_worker_reads_its_epoch_from_the_environment():
    assert epoch.given({}) is None
    assert epoch.given({epoch.EPOCH: '{"number":3,"skip":[7]}'}) == Epoch(number=3, skip=(7,))
    with pytest.raises(Refusal):
        epoch.given({epoch.EPOCH: '{"number":-1}'})
