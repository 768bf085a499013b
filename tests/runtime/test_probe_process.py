"""The steps of a trial: what is told of few of them, and of the model that they train."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from farspan.domain.plan import PlannedDevice
from farspan.domain.probe_requests import MeasureQuery
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import content_hash
from farspan.domain.train import TrainSpec
from farspan.launch.processes import worker_environment
from farspan.runtime import probe_process
from farspan.runtime.device import check_kind
from farspan.runtime.probe_process import FEWEST_TOKENS, limit_shape, lower_quartile, measure
from tests import tiny


def test_quick_is_the_minimum_of_few_steps_and_the_lower_quartile_of_more():
    assert lower_quartile([3.0, 2.0]) == 2.0
    assert lower_quartile([3.0, 2.0, 9.0]) == 2.0
    assert lower_quartile([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0]) == 2.0


def test_a_trial_trains_the_model_of_the_plan():
    found = measure(
        MeasureQuery(
            device=PlannedDevice(host="here", backend="cpu", index=0, threads=1),
            model=tiny.SPEC,
            train=TrainSpec(steps=1, batch=2, seq_len=16, precision="fp32"),
            precisions=("fp32", "bf16"),
            seconds=0.1,
        )
    )
    assert (found.rows, found.seq_len, set(found.speeds)) == (2, 16, {"fp32", "bf16"})
    for speed in found.speeds.values():
        assert speed.tokens_per_s == pytest.approx(32 / speed.step_s) and speed.memory_bytes > 10**7


@pytest.mark.parametrize(
    ("asked", "most_tokens", "limited"),
    [
        ((8, 1024), 8192, (8, 1024)),
        ((8, 1024), 8191, (7, 1024)),
        ((8, 1024), 1500.0, (1, 1024)),
        ((8, 1024), 1023.9, (1, 512)),
        ((8, 1024), 0.1, (1, FEWEST_TOKENS)),
        ((8, 64), 0.1, (1, 64)),
        ((64, 64), 200, (3, 64)),
        ((1, 1000), 999, (1, 512)),
    ],
)
def test_a_trial_is_shortened_by_sequences_first(asked, most_tokens, limited):
    assert limit_shape(*asked, most_tokens) == limited


@pytest.mark.parametrize("longest", [1e-9, 1e9])
def test_steps_that_would_take_long_are_shortened_and_the_answer_says_so(longest, monkeypatch):
    monkeypatch.setattr(probe_process, "LONGEST_STEP_S", longest)
    model = msgspec.structs.replace(tiny.SPEC, context=4 * FEWEST_TOKENS)
    found = measure(
        MeasureQuery(
            device=PlannedDevice(host="here", backend="cpu", index=0, threads=1),
            model=model,
            train=TrainSpec(steps=1, batch=2, seq_len=2 * FEWEST_TOKENS, precision="fp32"),
            precisions=("fp32", "bf16"),
            seconds=0.1,
        )
    )
    asked = (2, 2 * FEWEST_TOKENS)
    shape = asked if longest > 1 else (1, FEWEST_TOKENS)
    assert (found.rows, found.seq_len) == shape
    for speed in found.speeds.values():
        assert speed.tokens_per_s == pytest.approx(shape[0] * shape[1] / speed.step_s)


@pytest.mark.parametrize(
    ("kind", "name", "fits"),
    [
        ("NVIDIA A30", "NVIDIA A30", True),
        ("a30", "NVIDIA A30", True),
        ("a30", "Tesla T4", False),
        ("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 4090", False),
        (None, "Tesla T4", True),
    ],
)
def test_a_worker_refuses_a_gpu_that_is_not_the_one_that_was_planned_for(kind, name, fits):
    planned = PlannedDevice(host="gpu1", backend="cuda", index=1, threads=1)
    planned = planned if kind is None else msgspec.structs.replace(planned, kind=kind)
    if fits:
        check_kind(planned, name)
        return
    with pytest.raises(Refusal) as refusal:
        check_kind(planned, name)
    problem = refusal.value.problem
    assert (problem.code, problem.where) == ("plan-mismatch", "gpu1")
    assert name in problem.fact and kind in problem.fact


def test_a_plan_of_before_there_were_kinds_keeps_its_hash():
    old = msgspec.json.decode(
        b'{"host":"a","site":"","backend":"cuda","index":0,"threads":1}', type=PlannedDevice
    )
    assert "kind" not in msgspec.to_builtins(old)
    assert content_hash(old) == content_hash(
        {"host": "a", "site": "", "backend": "cuda", "index": 0, "threads": 1}
    )


def test_cuda_counts_gpus_as_nvidia_smi_does_wherever_they_are_opened_or_listed():
    assert worker_environment(1)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    show = (
        "from farspan.runtime import device; import os; {}(); "
        "print(os.environ['CUDA_DEVICE_ORDER'])"
    )
    for name in ("device.usable_gpus", "device.installed_torch"):
        done = subprocess.run(
            [sys.executable, "-c", show.format(name)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
        )
        assert done.stdout.split() == ["PCI_BUS_ID"], done.stderr
