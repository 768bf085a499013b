"""On one NVIDIA GPU: gradients and losses as on the CPU in float64, in fp32 and bf16, flash
attention, compiled; updates as on the CPU; a whole run by the command line, with a resume."""

from __future__ import annotations

import pytest
import torch

from tests.runtime import gpu_checks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="waits for a machine with an NVIDIA GPU"
)
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", gpu_checks.GRADIENT_BOUNDS)
def test_gradients_on_a_gpu_equal_one_process_in_float64(precision, compiled):
    gpu_checks.check_gradients(GPU, precision, compiled)


@pytest.mark.parametrize("optimizer", gpu_checks.OPTIMIZERS)
def test_three_steps_on_a_gpu_are_those_of_a_cpu(optimizer):
    gpu_checks.check_updates(GPU, gpu_checks.OPTIMIZERS[optimizer])


def test_a_run_on_a_gpu_is_stopped_resumed_embedded_and_searched(tmp_path):
    gpu_checks.check_whole_run(tmp_path, "cuda", gpu_checks.WholeRun())


def test_a_gradient_that_is_computed_again_on_a_gpu_has_the_same_bits():
    gpu_checks.check_repeated_gradients(GPU)


@pytest.mark.parametrize("optimizer", gpu_checks.OPTIMIZERS)
def test_recorded_steps_on_a_gpu_are_those_made_one_by_one(optimizer):
    gpu_checks.check_recorded_steps(GPU, gpu_checks.OPTIMIZERS[optimizer])
