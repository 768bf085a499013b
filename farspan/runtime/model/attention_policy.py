"""Which of PyTorch's attention kernels a device takes, and why."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

#: FlashAttention and the grouped queries of PyTorch's kernels need it (Ampere).
FLASH_CAPABILITY = (8, 0)
#: cuDNN's kernel is 1.7 to 2.3 times as fast as FlashAttention 2 in training shapes on Hopper,
#: 0.82 times on A100, 0.88 on Blackwell, and equal on Ada (transformers#48163, pytorch#142132).
CUDNN_CAPABILITY = (9, 0)
CUDNN_FIRST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


class AttentionPolicy(NamedTuple):
    """How attention is computed on one device in one dtype."""

    #: Kernels in the order in which they are tried; empty leaves it to PyTorch.
    backends: tuple[SDPBackend, ...]
    #: Whether keys and values are repeated for grouped queries, as no fast kernel takes them.
    repeats_keys: bool
    #: What a person reads of it.
    reason: str


#: PyTorch chooses, and takes grouped queries as they are.
DEFAULT_POLICY = AttentionPolicy((), False, "PyTorch's choice")


def attention_policy(device: torch.device, dtype: torch.dtype) -> AttentionPolicy:
    """Return the policy for a device and a dtype."""
    if device.type != "cuda":
        return AttentionPolicy((), False, f"PyTorch's choice on {device.type} devices")
    if dtype.itemsize != 2:
        return AttentionPolicy((), True, f"no flash kernel computes in {dtype}")
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda is None:
        return AttentionPolicy((), False, "PyTorch's choice on AMD GPUs")
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability < FLASH_CAPABILITY:
        return AttentionPolicy((), True, f"no flash kernel for {name}: memory-efficient attention")
    if capability == CUDNN_CAPABILITY:
        return AttentionPolicy(CUDNN_FIRST, False, f"cuDNN's kernel, the fastest for {name}")
    return AttentionPolicy((), False, f"FlashAttention 2, the fastest for {name}")
