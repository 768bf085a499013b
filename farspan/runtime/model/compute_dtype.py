"""Which dtypes a device computes in, and which of them a trained model takes there.

A trained model is used with its matrices in 16 bits, and all else in fp32: with a residual stream
in bf16 nDCG@10 fell by 0.014 to 0.023, with one in fp32 it changed by less than 0.006 either way
(tests/retrieval/test_half_precision.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from farspan.domain.cluster import DType
from farspan.domain.train import Precision
from farspan.runtime.model.decoder import Decoder

#: NVIDIA's matrix units multiply bf16 from Ampere on (CUDA C++ Programming Guide, "Compute
#: Capabilities"); `torch.cuda.is_bf16_supported` is true also where it is emulated.
BF16_CAPABILITY = (8, 0)
#: AMD's do in CDNA 2 and 3 (MI200, MI300) at fp16's rate, and in RDNA 3 and 4 ("AMD matrix cores",
#: table of instructions).
BF16_GCN = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


class ComputeDtype(NamedTuple):
    """A dtype of products, and why it is taken."""

    dtype: torch.dtype
    reason: str


def has_native_bf16(device: torch.device) -> bool:
    """Return whether a GPU multiplies bf16 on its matrix units."""
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.startswith(BF16_GCN)
    return torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


def hardware_dtypes(device: torch.device) -> tuple[DType, ...]:
    """Return the dtypes that a device computes in hardware."""
    if device.type == "mps":
        return ("fp32", "bf16", "fp16")
    if device.type == "cuda":
        return ("fp32", "bf16", "fp16") if has_native_bf16(device) else ("fp32", "fp16")
    # bf16 where the CPU multiplies it in hardware (AVX-512 BF16 or AMX).
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ("fp32", "bf16")
    return ("fp32",)


def halve_matrices(model: Decoder, dtype: torch.dtype) -> None:
    """Put the matrices of a model's blocks in a dtype, once instead of in each pass. Tables, norms
    and the head stay in fp32."""
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)


def autocast_products(model: Decoder) -> torch.autocast:
    """Return the context in which products and attention take the dtype of a model's matrices:
    norms, sums and the residual stream keep theirs."""
    dtype = product_dtype(model)
    enabled = dtype != torch.float32
    device = model.tok.weight.device
    return torch.autocast(device.type, dtype if enabled else torch.bfloat16, enabled=enabled)


def product_dtype(model: Decoder) -> torch.dtype:
    """Return the dtype of the matrices of a model's blocks."""
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            return module.weight.dtype
    return torch.float32


def inference_dtype(device: torch.device, trained: Precision) -> ComputeDtype:
    """Return the dtype in which a trained model embeds and writes on a device; `trained` is the
    precision of its training.

    Only GPUs take 16 bits: of a CPU and an Apple GPU nobody has measured a gain.
    """
    if device.type != "cuda":
        return ComputeDtype(torch.float32, f"{device.type} devices use models in fp32")
    if has_native_bf16(device):
        return ComputeDtype(torch.bfloat16, "the card multiplies it on its matrix units")
    if trained == "fp16":
        # Each of its validations has computed in it without an overflow.
        return ComputeDtype(torch.float16, "no bf16 on this card, and the model was trained in it")
    return ComputeDtype(
        torch.float32, "no bf16 on this card, and in fp16 a model not trained in it may overflow"
    )
