"""What doctor says of each card: the fast paths that it takes and why, slices, and who holds it."""

from __future__ import annotations

import shutil

import pytest
import torch

from farspan.app.examine_machines import Diagnosis
from farspan.domain.device_report import DeviceReport
from farspan.domain.plan import PlannedDevice
from farspan.domain.problems import Refusal
from farspan.runtime.device import describe_others, open_device
from farspan.runtime.model.compute_dtype import inference_dtype
from farspan.runtime.native_dtypes import hardware_dtypes
from farspan.runtime.probing.fast_paths import describe_device, report_devices
from tests.runtime.cards import (
    A100,
    B200,
    GB,
    H100,
    MI50,
    MI300,
    RTX4090,
    SLICE,
    T4,
    V100,
    Card,
    pose_as_card,
)

NAMES = ["dtype", "attention", "head loss", "compile", "graph"]


def lines_of(report: DeviceReport) -> list[str]:
    """The lines that doctor prints of a device."""
    diagnosis = Diagnosis(
        versions={}, devices=(), disk_free_bytes=0, reports=(report,), notes=(), findings=()
    )
    return [f"{name:12} {fact}" for name, fact in diagnosis.rows]


@pytest.mark.parametrize(
    ("card", "dtype", "attention", "loss", "compiles", "graph", "wheel"),
    [
        (T4, "fp16", "memory-efficient", "compiled", "no", "no", "own code"),
        (V100, "fp16", "memory-efficient", "compiled", "no", "no", "own code"),
        (A100, "bf16", "FlashAttention 2", "compiled", "auto", "auto", "own code"),
        (RTX4090, "bf16", "FlashAttention 2", "compiled", "auto", "auto", "code of its family"),
        (H100, "bf16", "cuDNN", "compiled", "auto", "auto", "own code"),
        (B200, "bf16", "FlashAttention 2", "compiled", "auto", "auto", "own code"),
        (MI300, "bf16", "PyTorch's choice", "compiled", "no", "no", "ROCm"),
        (MI50, "fp16", "PyTorch's choice", "compiled", "no", "no", "ROCm"),
    ],
)
def test_each_card_is_described_by_what_it_takes_and_why(
    monkeypatch, card: Card, dtype, attention, loss, compiles, graph, wheel
):
    pose_as_card(monkeypatch, card)
    (report,) = report_devices("auto")
    assert report.name == card.name and report.capability == card.capability
    taken = {path.name: path.takes for path in report.paths}
    assert list(taken) == [*NAMES, "wheel"]
    assert list(taken.values()) == [dtype, attention, loss, compiles, graph, wheel]
    assert all(path.why for path in report.paths)
    assert report.list_findings("device 0") == ()
    lines = lines_of(report)
    assert all(len(line) <= 80 for line in lines), lines
    assert len(lines) == 2 + len(taken)


def test_reasons_name_what_a_card_lacks(monkeypatch):
    def whys(card: Card, *, triton: bool = True) -> dict[str, str]:
        device = pose_as_card(monkeypatch, card, triton=triton)
        return {path.name: path.why for path in describe_device(device, card.name).paths}

    old = whys(T4)
    assert "loss scale" in old["dtype"] and "8.0" in old["dtype"]
    assert "8.0" in old["compile"] and "loss scale" in old["graph"]
    bare = whys(H100, triton=False)
    assert "Triton" in bare["compile"] and "Triton" in bare["head loss"]
    assert "sm_90" in bare["wheel"]
    assert "driver compiles it" in whys(Card("a later card", (13, 0), 128 * GB))["wheel"]
    assert "sm_86" in whys(RTX4090)["wheel"]


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_devices_without_a_driver_of_nvidia_are_described_too(monkeypatch, kind):
    report = describe_device(torch.device(kind), "a machine")
    taken = {path.name: path.takes for path in report.paths}
    assert list(taken) == NAMES
    assert taken["head loss"] == "operators"
    assert taken["compile"] == taken["graph"] == "no"
    assert taken["dtype"] == ("bf16" if "bf16" in hardware_dtypes(torch.device(kind)) else "fp32")
    assert report.memory is None and report.list_findings("device 0") == ()
    assert all(len(line) <= 80 for line in lines_of(report))


def test_a_cpu_without_a_compiler_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    report = describe_device(torch.device("cpu"), "a machine")
    (compiles,) = [path for path in report.paths if path.name == "compile"]
    assert "g++" in compiles.why


def test_cards_of_one_kind_share_their_lines(monkeypatch):
    report = describe_device(pose_as_card(monkeypatch, H100), H100.name)
    diagnosis = Diagnosis(
        versions={}, devices=(), disk_free_bytes=0, reports=(report,) * 8, notes=(), findings=()
    )
    titles = [fact for name, fact in diagnosis.rows if name == "fast paths"]
    assert titles == ["8 x NVIDIA H100 80GB HBM3 (9.0)"]


def test_a_slice_of_a_divided_card_is_named_with_its_own_memory_and_share(monkeypatch):
    pose_as_card(monkeypatch, SLICE)
    (report,) = report_devices("cuda")
    assert report.memory == SLICE.memory
    assert report.slice == "{kind: a100-40, memory: 5GB, share: 14%}"
    assert any("MIG 1g.5gb" in line for line in lines_of(report))
    assert describe_device(pose_as_card(monkeypatch, A100), A100.name).slice == ""


def test_a_card_that_other_programs_fill_is_warned_of_with_what_is_free(monkeypatch):
    device = pose_as_card(monkeypatch, H100, free=20 * GB)
    (finding,) = describe_device(device, H100.name).list_findings("device 0")
    assert finding.severity == "warned" and finding.code == "device-busy"
    assert "20 GB of 85 GB are free" in finding.fact and "65 GB" in finding.fact
    assert "nvidia-smi" in finding.remedy and finding.where == "device 0"
    assert "other programs hold 65 GB" in describe_others(device)
    pose_as_card(monkeypatch, H100, free=84 * GB)
    assert describe_others(device) == "" and describe_others(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    "failure",
    [
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might",
        "CUDA error: all CUDA-capable devices are busy or unavailable",
        "CUDA error: out of memory",
    ],
)
def test_a_card_that_another_program_has_for_itself_is_refused(monkeypatch, failure):
    device = pose_as_card(monkeypatch, H100, failure=failure)
    (finding,) = describe_device(device, H100.name).list_findings("device 0")
    assert finding.severity == "refused" and finding.exit_code == 52
    with pytest.raises(Refusal) as caught:
        open_device(PlannedDevice(host="gpu1", backend="cuda", index=0, threads=1))
    problem = caught.value.problem
    assert problem.code == "device-busy" and problem.where == "gpu1"
    assert H100.name in problem.what and problem.fact == failure.splitlines()[0]
    assert "nvidia-smi" in problem.remedy


def test_another_error_of_the_driver_is_no_busy_card(monkeypatch):
    pose_as_card(monkeypatch, H100, failure="CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        open_device(PlannedDevice(host="gpu1", backend="cuda", index=0, threads=1))


@pytest.mark.parametrize(
    ("card", "trained", "dtype"),
    [
        (A100, "fp32", torch.bfloat16),
        (H100, "fp16", torch.bfloat16),
        (MI300, "bf16", torch.bfloat16),
        (T4, "fp16", torch.float16),
        (V100, "fp16", torch.float16),
        (T4, "fp32", torch.float32),
        (T4, "bf16", torch.float32),
        (MI50, "fp32", torch.float32),
    ],
)
def test_models_are_used_in_bf16_or_in_what_they_were_trained_in(monkeypatch, card, trained, dtype):
    chosen = inference_dtype(pose_as_card(monkeypatch, card), trained)
    assert chosen.dtype == dtype and chosen.reason


@pytest.mark.parametrize("kind", ["cpu", "mps"])
@pytest.mark.parametrize("trained", ["fp32", "bf16", "fp16"])
def test_models_are_used_in_fp32_elsewhere(kind, trained):
    assert inference_dtype(torch.device(kind), trained).dtype == torch.float32
