"""Which GPUs a wheel of PyTorch can use, and what is said where it cannot."""

from __future__ import annotations

import msgspec
import pytest

from farspan.domain.gpus import (
    Gpu,
    Nvidia,
    TorchGpu,
    Wheel,
    has_code_for,
    is_kind,
    judge_gpus,
    judge_granted_gpus,
)

#: `torch.cuda.get_arch_list()` of the wheels of PyTorch 2.13 for Linux x86-64.
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CPU = Wheel(torch="2.13.0+cpu", cuda=None)
NEW = Wheel(torch="2.13.0+cu130", cuda="13.0", archs=CU130)
OLD = Wheel(torch="2.13.0+cu126", cuda="12.6", archs=CU126)
INSTALL = "pip install torch==2.13.0"
INDEX = "--index-url https://download.pytorch.org/whl/"
UPDATE = "update the NVIDIA driver to"
H100 = Gpu(name="NVIDIA H100 80GB HBM3", driver="550.90.07", capability=(9, 0), uuid="GPU-aa")
GTX1080 = Gpu(name="NVIDIA GeForce GTX 1080", driver="580.95.05", capability=(6, 1), uuid="GPU-bb")
RTX4090 = Gpu(name="NVIDIA GeForce RTX 4090", driver="580.95.05", capability=(8, 9), uuid="GPU-cc")
RTX5090 = Gpu(name="NVIDIA GeForce RTX 5060", driver="570.86.10", capability=(12, 0), uuid="GPU-dd")
A100 = Gpu(
    name="NVIDIA A100-SXM4-40GB", driver="580.82.07", capability=(8, 0), uuid="GPU-ee", mig=True
)


def seen(*gpus, **changes):
    cards = tuple(TorchGpu(name=gpu.name, capability=gpu.capability) for gpu in gpus)
    return msgspec.structs.replace(NEW, seen=cards, **changes)


def with_driver(gpu, version):
    return msgspec.structs.replace(gpu, driver=version)


@pytest.mark.parametrize(
    ("capability", "archs", "able"),
    [
        ((9, 0), CU130, True),
        ((7, 0), CU130, False),
        ((6, 1), CU130, False),
        ((6, 1), CU126, True),
        ((8, 9), CU126, True),
        ((8, 7), ("sm_89",), False),
        ((12, 0), CU126, False),
        ((12, 1), CU130, True),
        ((13, 0), CU130, True),
        ((13, 0), CU126, False),
        ((9, 0), ("compute_80",), True),
        ((7, 5), ("compute_80",), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 0), ("sm_90a", "compute_90a"), False),
        ((10, 3), ("sm_100f",), True),
        ((12, 0), ("sm_100f",), False),
        ((11, 0), CU130, False),
        ((8, 0), ("gfx90a", "sm_80"), True),
        ((3, 5), (), True),
    ],
)
def test_a_wheel_has_code_for_a_card_of_its_major_version_or_ptx_for_later_ones(
    capability, archs, able
):
    assert has_code_for(capability, archs) is able


@pytest.mark.parametrize(
    ("gpu", "wheel", "why", "fix"),
    [
        (H100, CPU, "built without CUDA", f"{INSTALL}+cu126 {INDEX}cu126"),
        (
            with_driver(H100, "580.95.05"),
            CPU,
            "built without CUDA",
            f"{INSTALL}+cu130 {INDEX}cu130",
        ),
        (
            H100,
            NEW,
            "the driver is too old: CUDA 13.0 needs 580.65.06",
            f"{UPDATE} 580.65.06 or newer, or: {INSTALL}+cu126",
        ),
        (GTX1080, seen(GTX1080), "the wheel has no code for sm_61", f"{INSTALL}+cu126"),
        (GTX1080, NEW, "the wheel has no code for sm_61", f"{INSTALL}+cu126"),
        (GTX1080, CPU, "built without CUDA", f"{INSTALL}+cu126"),
        (
            with_driver(GTX1080, "470.256.02"),
            CPU,
            "built without CUDA",
            f"{UPDATE} 525.60.13 or newer, then: {INSTALL}+cu126",
        ),
        (RTX5090, NEW, "the driver is too old", f"{UPDATE} 580.65.06 or newer; or"),
        (
            RTX5090,
            msgspec.structs.replace(OLD, seen=seen(RTX5090).seen),
            "no code for sm_120",
            f"{UPDATE} 580.65.06 or newer, then: {INSTALL}+cu130",
        ),
        (A100, NEW, "MIG is on", "nvidia-smi mig"),
        (
            A100,
            msgspec.structs.replace(NEW, visible="MIG-5f2c2b2e"),
            "CUDA_VISIBLE_DEVICES is MIG-5f2c2b2e; MIG is on, and CUDA finds no such instance",
            "nvidia-smi -L lists",
        ),
        (
            RTX4090,
            msgspec.structs.replace(NEW, visible="7"),
            "CUDA_VISIBLE_DEVICES is 7",
            "nvidia-modprobe",
        ),
        (
            RTX4090,
            msgspec.structs.replace(NEW, error="CUDA unknown error"),
            "CUDA unknown error",
            "nvidia-modprobe",
        ),
        (
            Gpu(name="Tesla K80", driver="470.256.02", capability=(3, 7)),
            NEW,
            "too old",
            "use another GPU",
        ),
        (
            RTX4090,
            Wheel(torch="2.13.0+rocm7.2", cuda=None, hip="7.2"),
            "built without CUDA",
            "cu130",
        ),
        (msgspec.structs.replace(H100, capability=None), NEW, "the driver is too old", "580.65.06"),
    ],
)
def test_gpus_that_none_can_be_used_of_are_refused_with_driver_wheel_and_fix(gpu, wheel, why, fix):
    problem, notes = judge_gpus(Nvidia(gpus=(gpu,)), wheel)
    assert problem is not None and notes == ()
    assert problem.code == "device-unusable" and gpu.name in problem.what
    assert why in problem.fact and gpu.driver in problem.fact
    assert wheel.torch in problem.fact and str(list(wheel.archs)) in problem.fact
    assert fix in problem.remedy and "parallel.device: cpu" in problem.remedy


@pytest.mark.parametrize(
    ("gpus", "wheel"),
    [
        ((), CPU),
        ((H100,), seen(H100)),
        ((RTX4090, RTX4090), seen(RTX4090, RTX4090)),
        ((A100, A100), seen(A100)),
        ((RTX4090, H100), seen(RTX4090, visible="0")),
        ((RTX4090, H100), seen(H100, visible="GPU-aa")),
        ((RTX4090,), seen(RTX4090, archs=())),
    ],
)
def test_usable_and_deliberately_hidden_gpus_give_no_finding(gpus, wheel):
    assert judge_gpus(Nvidia(gpus=gpus), wheel) == (None, ())


@pytest.mark.parametrize("visible", ["", "-1", " "])
def test_hiding_all_gpus_is_a_choice(visible):
    for wheel in (CPU, NEW):
        problem, notes = judge_gpus(
            Nvidia(gpus=(H100,)), msgspec.structs.replace(wheel, visible=visible)
        )
        assert problem is None and notes == ("CUDA_VISIBLE_DEVICES hides the NVIDIA GPUs",)


def test_a_gpu_of_several_that_cannot_be_used_is_left_out_with_a_note():
    problem, (note,) = judge_gpus(Nvidia(gpus=(GTX1080, RTX4090)), seen(GTX1080, RTX4090))
    assert problem is None
    assert (
        note.startswith("NVIDIA GeForce GTX 1080 (sm_61) is left out")
        and "cu126" in note
        and "sm_75" in note
    )
    problem, (note,) = judge_gpus(Nvidia(gpus=(RTX4090, RTX4090)), seen(RTX4090))
    assert problem is None and note.startswith("1 of 2 GPUs are left out")
    amd = Wheel(
        torch="2.13.0+rocm7.2",
        cuda=None,
        hip="7.2",
        seen=(TorchGpu(name="AMD Radeon", capability=(11, 0)),),
    )
    problem, (note,) = judge_gpus(Nvidia(gpus=(RTX4090,)), amd)
    assert problem is None and "left out" in note and "ROCm 7.2" in note


def test_a_driver_that_does_not_answer_is_noted_and_refuses_nothing():
    problem, (note,) = judge_gpus(Nvidia(failure="it has not answered within 10 s"), CPU)
    assert problem is None and "it has not answered within 10 s" in note
    assert judge_gpus(Nvidia(failure="Field x"), seen(RTX4090)) == (None, ())


def test_a_finding_of_another_host_names_it_in_its_fix():
    problem, _ = judge_gpus(Nvidia(gpus=(H100,)), CPU, "gpu1")
    assert problem is not None and problem.remedy.startswith("on gpu1: pip install")
    assert problem.where == "host gpu1" and "parallel.device" not in problem.remedy


@pytest.mark.parametrize(
    ("name", "kind", "same"),
    [
        ("NVIDIA A30", "a30", True),
        ("NVIDIA A30", "NVIDIA A30", True),
        ("Tesla T4", "a30", False),
        ("NVIDIA L40S", "l40", False),
        ("NVIDIA H200 NVL", "h200", True),
        ("NVIDIA GeForce GTX 1080", "h100", False),
        ("NVIDIA H100 NVL", "h100", False),
        ("NVIDIA RTX A2000", "a2", False),
        ("NVIDIA RTX A6000-48Q", "a6000", True),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx4080", False),
        ("NVIDIA RTX A4000 Laptop GPU", "rtx-a4000", True),
        ("NVIDIA GeForce RTX 5060", "NVIDIA GeForce RTX 5060", True),
        ("NVIDIA A30", "NVIDIA GeForce RTX 5060", False),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", True),
    ],
)
def test_a_gpu_is_of_a_kind_by_its_drivers_name_or_the_catalogues(name, kind, same):
    assert is_kind(name, kind) is same


@pytest.mark.parametrize(
    ("wheel", "fix"),
    [
        (CPU, f"{INSTALL}+cu130 {INDEX}cu130"),
        (msgspec.structs.replace(NEW, error="no driver"), "srun --nodelist=n1 --gpus=1 nvidia-smi"),
        (Wheel(torch="2.13.0", cuda=None, hip="6.4"), "srun --nodelist=n1 --gpus=1 rocm-smi"),
        (seen(GTX1080), f"{INSTALL}+cu126 {INDEX}cu126"),
    ],
)
def test_gpus_of_a_job_that_pytorch_cannot_use_have_a_fix(wheel, fix):
    problem = judge_granted_gpus(2, wheel, "n1")
    assert problem is not None and problem.code == "device-missing"
    assert problem.remedy.startswith(f"{fix}; or, to use the CPU: set parallel.device: cpu")
    assert "Slurm: 2 GPUs" in problem.fact and str(wheel) in problem.fact


def test_gpus_of_a_job_that_pytorch_can_use_are_no_problem():
    assert judge_granted_gpus(2, seen(H100), "n1") is None
