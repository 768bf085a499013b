"""The kernels of a model on its device: attention, and the loss of the head."""

from __future__ import annotations

import torch

from farspan.runtime.model.attention_policy import AttentionPolicy, attention_policy
from farspan.runtime.model.decoder import Attention, Decoder
from farspan.runtime.model.fused_loss import choose_loss


def select_kernels(model: Decoder, device: torch.device, dtype: torch.dtype) -> str:
    """Let a model compute with the fastest kernels that a device has for a dtype.

    Returns a warning where a compiler is there and fails: the model then computes without it.
    """
    set_attention(model, attention_policy(device, dtype))
    warning = ""
    if model.has_head:
        model.fused_loss, warning = choose_loss(device, dtype)
    return warning


def set_attention(model: Decoder, policy: AttentionPolicy) -> None:
    """Let all blocks of a model compute attention by one policy."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.policy = policy
