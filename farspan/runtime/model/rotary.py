"""Rotary positions (arXiv 2104.09864), by layer.

Shapes: B rows (sequences), S positions, H heads, E head size, R dims of a head that rotate.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from farspan.domain.model import ModelSpec, RopeScaling


@functools.lru_cache(maxsize=16)
def rotary_table(
    spec: ModelSpec,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    in_window: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (S, R) of rotary positions, halves repeated as in Llama (arXiv
    2104.09864), computed in fp32; `in_window` those of layers with a window."""
    # Kept for passes that need gradients, too, which take no tensors of inference mode.
    with torch.inference_mode(False):
        frequencies_R2 = rotary_frequencies(spec, device, in_window=in_window)
        positions_S = torch.arange(length, device=device).float()
        angles_SR2 = torch.outer(positions_S, frequencies_R2)
        angles_SR = torch.cat((angles_SR2, angles_SR2), dim=-1)
        return angles_SR.cos().to(dtype), angles_SR.sin().to(dtype)


def layer_rotation(
    spec: ModelSpec, layer: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Return the rotary table of a layer, from 0; None where it has no rotary positions."""
    if not spec.rotates(layer):
        return None
    in_window = spec.window_size(layer) is not None
    return rotary_table(spec, length, device, dtype, in_window=in_window)


def rotary_frequencies(spec: ModelSpec, device: torch.device, *, in_window: bool = False) -> Tensor:
    """Return the angles (R / 2) by which each position turns a pair of dims further."""
    dims_R2 = torch.arange(0, spec.turned_dims, 2, device=device).float()
    rope_theta = spec.window.rope_theta if in_window and spec.window else spec.rope_theta
    frequencies_R2 = rope_theta ** (-dims_R2 / spec.turned_dims)
    if in_window or not spec.rope_scaling:
        return frequencies_R2
    return _scale_frequencies(frequencies_R2, spec.rope_scaling)


def _scale_frequencies(frequencies_R2: Tensor, scaling: RopeScaling) -> Tensor:
    """Return frequencies (R / 2) of rotary positions as Llama 3.1 has them (arXiv 2407.21783; the
    blend is that of `apply_scaling` in meta-llama/llama-models)."""
    turns_R2 = scaling.original_context * frequencies_R2 / (2 * math.pi)
    low = scaling.low_freq_factor
    blend_R2 = ((turns_R2 - low) / (scaling.high_freq_factor - low)).clamp(0, 1)
    return frequencies_R2 * (blend_R2 + (1 - blend_R2) / scaling.factor)


def apply_rotary(x_BHSE: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Return x with the first R dims of each head turned."""
    num_turned = cos_SR.shape[-1]
    if num_turned < x_BHSE.shape[-1]:
        x_BHSR, rest = x_BHSE.tensor_split([num_turned], dim=-1)
        return torch.cat((apply_rotary(x_BHSR, cos_SR, sin_SR), rest), dim=-1)
    first, second = x_BHSE.chunk(2, dim=-1)
    turned_BHSE = torch.cat((-second, first), dim=-1) * sin_SR
    return x_BHSE * cos_SR + turned_BHSE
