"""Which dtype a trained model takes on a device.

A trained model is used with its matrices in 16 bits, and all else in fp32: with a residual stream
in bf16 nDCG@10 fell by 0.014 to 0.023, with one in fp32 it changed by less than 0.006 either way
(tests/retrieval/test_half_precision.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from farspan.domain.train import Precision
from farspan.runtime.model.decoder import Decoder
from farspan.runtime.native_dtypes import has_native_bf16


class ComputeDtype(NamedTuple):
    """A dtype of products, and why it is taken."""

    dtype: torch.dtype
    reason: str


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
