"""The loss of the head as one compiled kernel, on GPUs that have a compiler.

Written with PyTorch's own operators it takes seven kernels and reads or writes each logit sixteen
times; compiled it reads logits twice and writes their gradient over them. CPUs keep the operators,
and never import the compiler.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from farspan.runtime.compiler import describe_failure

#: (logits (N, W) that their gradient overwrites, targets (N,), V) -> summed loss: of W columns
#: those from V on are padding.
FusedLoss = Callable[[Tensor, Tensor, int], Tensor]
#: Triton has kernels from Volta on (https://github.com/triton-lang/triton, "Compatibility").
LEAST_CAPABILITY = (7, 0)
#: Rows and columns of the loss that shows whether the compiler works.
SAMPLE = (256, 320)


def cross_entropy_and_gradient_(logits_NW: Tensor, targets_N: Tensor, V: int) -> Tensor:
    """Return the summed cross-entropy in nats of one chunk of logits, whose gradient overwrites
    them; columns from V on count for nothing, as do targets of -1."""
    sum_dtype = torch.promote_types(logits_NW.dtype, torch.float32)
    column_1W = torch.arange(logits_NW.shape[1], device=logits_NW.device).unsqueeze(0)
    wide_NW = logits_NW.to(sum_dtype).masked_fill(column_1W >= V, float("-inf"))
    log_sum_N1 = wide_NW.logsumexp(dim=1, keepdim=True)
    valid_N1 = (targets_N >= 0).unsqueeze(1)
    is_target_NW = column_1W == targets_N.unsqueeze(1)
    target_N1 = wide_NW.where(is_target_NW, 0.0).sum(dim=1, keepdim=True)
    loss = (log_sum_N1 - target_N1).where(valid_N1, 0.0).sum()
    gradient_NW = (wide_NW - log_sum_N1).exp() - is_target_NW.to(sum_dtype)
    logits_NW.copy_(gradient_NW.where(valid_N1, 0.0))
    return loss


def find_obstacle(device: torch.device) -> str:
    """Return why the loss is not compiled on a device, or nothing where it can be."""
    if device.type != "cuda":
        return f"{device.type} devices compute it with PyTorch's operators"
    if importlib.util.find_spec("triton") is None:
        return "Triton, PyTorch's compiler for GPUs, is not installed"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda and capability < LEAST_CAPABILITY:
        return f"Triton has no kernels for compute capability {capability[0]}.{capability[1]}"
    return ""


@functools.cache
def compile_loss(device: torch.device, dtype: torch.dtype) -> FusedLoss:
    """Return the compiled loss, after it has computed a sample in this dtype. Raises what the
    compiler raises."""
    compiled = cast(FusedLoss, torch.compile(cross_entropy_and_gradient_, fullgraph=True))
    logits = torch.zeros(SAMPLE, dtype=dtype, device=device)
    targets = torch.zeros(SAMPLE[0], dtype=torch.int64, device=device)
    compiled(logits, targets, SAMPLE[1])
    return compiled


def choose_loss(device: torch.device, dtype: torch.dtype) -> tuple[FusedLoss | None, str]:
    """Return the compiled loss, or None; and a warning where a compiler is there and fails."""
    if find_obstacle(device):
        return None, ""
    try:
        return compile_loss(device, dtype), ""
    # Whatever a compiler, a driver or a full disk raises: the operators give the same loss.
    except Exception as error:
        cause = describe_failure(error)
        return None, f"the loss could not be compiled, and takes longer for it: {cause}"
