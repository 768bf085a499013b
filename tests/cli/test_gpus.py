"""GPUs that the driver lists and PyTorch cannot use: never a run on the CPU without a word. Drivers
are recorded."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from farspan.domain.problems import EXIT_CODES
from tests import smi
from tests.cli.conftest import Farspan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch can use GPUs")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return f"{smi.install(tmp_path / 'bin', smi.H100)}:{os.environ['PATH']}"


def parts_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def test_doctor_reports_driver_wheel_architectures_and_fix_for_unusable_gpus(
    farspan: Farspan, path: str
):
    done = farspan("doctor", PATH=path)
    assert done.returncode == EXIT_CODES["device-unusable"]
    for part in (
        "device-unusable",
        "550.90.07",
        f"torch {torch.__version__}",
        "get_arch_list() is []",
        f"pip install torch=={torch.__version__.split('+')[0]}+cu126",
        "parallel.device: cpu",
    ):
        assert part in done.stdout


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(
    "words", [("train", "run.yaml"), ("plan", "run.yaml"), ("select", "run.yaml")]
)
def test_commands_do_not_fall_back_from_an_unusable_gpu_to_the_cpu(
    farspan: Farspan, tmp_path: Path, path: str, words, device
):
    extra = ("--run", str(tmp_path / "run")) if words[0] == "train" else ()
    done = farspan(*words, *extra, "--set", f"parallel.device={device}", PATH=path)
    assert done.returncode == 43, parts_of(done)
    assert "error[device-unusable]" in parts_of(done) and not (tmp_path / "run").exists()


def test_demo_does_not_fall_back_from_an_unusable_gpu_to_the_cpu(
    farspan: Farspan, tmp_path: Path, path: str
):
    done = farspan("demo", "--run", str(tmp_path / "demo"), PATH=path)
    assert done.returncode == 43 and "error[device-unusable]" in parts_of(done)


@pytest.mark.parametrize("how", ["device", "environment"])
def test_train_uses_the_cpu_when_requested_or_gpus_are_hidden(
    farspan: Farspan, tmp_path: Path, path: str, how: str
):
    words = ("train", "run.yaml", "--run", str(tmp_path / "run"))
    if how == "device":
        done = farspan(*words, "--set", "parallel.device=cpu", PATH=path)
        assert "GPU" not in parts_of(done)
    else:
        done = farspan(*words, PATH=path, CUDA_VISIBLE_DEVICES="")
        assert "CUDA_VISIBLE_DEVICES hides the NVIDIA GPUs" in parts_of(done)
    assert done.returncode == 0, parts_of(done)


def test_a_driver_that_is_not_loaded_is_noted(farspan: Farspan, tmp_path: Path):
    path = f"{smi.install(tmp_path / 'bin', said=smi.FAILED, code=9)}:{os.environ['PATH']}"
    done = farspan("doctor", "--json", PATH=path)
    said = json.loads(done.stdout)
    assert (
        done.returncode == 0
        and [f["code"] for f in said["findings"] if f["code"] == "device-unusable"] == []
    )
    (note,) = said["notes"]
    assert (
        "couldn't communicate with the NVIDIA driver" in note
        and said["devices"][0]["backend"] == "cpu"
    )


@pytest.mark.parametrize("words", [("train", "--run", "granted"), ("plan",)])
def test_gpu_that_slurm_has_given_and_pytorch_does_not_see_is_refused(
    farspan: Farspan, desk: Path, words
):
    given = {"SLURM_GPUS_ON_NODE": "1", "SLURMD_NODENAME": "n7", "CUDA_VISIBLE_DEVICES": "0"}
    done = farspan(words[0], "run.yaml", *words[1:], **given)
    assert done.returncode == EXIT_CODES["device-missing"], parts_of(done)
    for part in ("node n7", "Slurm: 1 GPU; PyTorch sees: none", "set parallel.device: cpu"):
        assert part in done.stderr
    assert not (desk / "granted").exists()


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (("--set", "parallel.device=cpu"), {"SLURM_GPUS_ON_NODE": "1"}),
        ((), {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": ""}),
        ((), {"SLURM_GPUS_ON_NODE": "0", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}),
    ],
)
def test_job_without_gpus_or_with_gpus_that_its_user_leaves_out_takes_the_cpu(
    farspan: Farspan, words, given
):
    done = farspan("plan", "run.yaml", *words, **given)
    assert done.returncode == 0, parts_of(done)
