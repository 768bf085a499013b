"""The steps of a trial: what is told of few of them, and of the model that they train."""

from __future__ import annotations

import pytest

from farspan.domain.plan import PlannedDevice
from farspan.domain.train import TrainSpec
from farspan.runtime.probe import Measure, measure, quick
from tests import tiny


def test_of_few_steps_the_quickest_is_told_and_of_more_their_lower_quartile():
    assert quick([3.0, 2.0]) == 2.0
    assert quick([3.0, 2.0, 9.0]) == 2.0
    assert quick([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0]) == 2.0


def test_a_trial_trains_the_model_of_the_plan():
    found = measure(Measure(
        device=PlannedDevice(host="here", backend="cpu", index=0, threads=1), model=tiny.SPEC,
        train=TrainSpec(steps=1, batch=2, seq_len=16, precision="fp32"), precisions=("fp32", "bf16"), seconds=0.1,
    ))  # fmt: skip
    assert (found.rows, found.seq_len, set(found.speeds)) == (2, 16, {"fp32", "bf16"})
    for speed in found.speeds.values():
        assert speed.tokens_per_s == pytest.approx(32 / speed.step_s) and speed.memory_bytes > 10**7
