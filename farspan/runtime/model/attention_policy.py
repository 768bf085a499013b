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
    #: What a person reads of it: the kernel, and why it is taken.
    kernel: str
    reason: str


#: PyTorch chooses, and takes grouped queries as they are.
DEFAULT_POLICY = AttentionPolicy((), False, "PyTorch's choice", "no device was chosen for")


def attention_policy(device: torch.device, dtype: torch.dtype) -> AttentionPolicy:
    """Return the policy for a device and a dtype."""
    if device.type != "cuda":
        return AttentionPolicy((), False, "PyTorch's choice", f"a {device.type} device")
    if dtype.itemsize != 2:
        why = f"no flash kernel computes in {dtype}"
        return AttentionPolicy((), True, "memory-efficient", why)
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda is None:
        return AttentionPolicy((), False, "PyTorch's choice", "an AMD GPU")
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability < FLASH_CAPABILITY:
        return AttentionPolicy((), True, "memory-efficient", f"no flash kernel for {name}")
    if capability == CUDNN_CAPABILITY:
        return AttentionPolicy(CUDNN_FIRST, False, "cuDNN", f"the fastest for {name}")
    return AttentionPolicy((), False, "FlashAttention 2", f"the fastest for {name}")


def inference_policy(device: torch.device, dtype: torch.dtype) -> AttentionPolicy:
    """Return the policy for texts of many lengths: cuDNN makes a plan for each shape that it meets
    (ATen/native/cudnn/MHA.cpp, its graph cache), which costs more than its kernel saves."""
    policy = attention_policy(device, dtype)
    if not policy.backends:
        return policy
    return AttentionPolicy((), policy.repeats_keys, "FlashAttention 2", "texts have many lengths")
