"""Quantized messages over slow links, and the error feedback that sends the quantization residual
later."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Elements W that share a scale, so that an outlier coarsens few others (arXiv 2110.02861). A bf16
#: scale for 256 adds
#: 0.8% to 8 bits and 1.6% to 4; blocks of 64 would add four times that to make the steps of
#:   Gaussian numbers 15% finer.
SCALE_ELEMENTS = 256
SCALE_BYTES = 2
#: Elements encoded at a time: what lies between the passes stays in a core's own cache (2**20 take
#: 1.4 times as long on a CPU with 1 MiB of it), and each of the dozen operations has enough to do.
ENCODE_ELEMENTS = 2**17
#: The greatest code: codes are symmetric, so that zero is one of them.
GREATEST = {4: 7, 8: 127}
#: Smaller steps have no finite inverse, and blocks of zeros none at all.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Codec(NamedTuple):
    """Numbers as bytes: fp32, bf16, or by block a bf16 scale and one small integer each, rounded to
    the nearest.

    Encoded chunks follow one another, each as if it were alone: the scales of its blocks, 2 B each,
    then its codes: a byte each, or a byte for two, code + 8, the first in the low half. A block
    that holds an infinity or NaN decodes to none but these. Decoding is one exact product: equal
    bytes give equal bits on every device.
    """

    bits: Literal[4, 8, 16, 32]

    def encoded_size(self, n: int) -> int:
        """Return the bytes of n encoded numbers."""
        return self._scale_bytes(n) + (n * self.bits + 7) // 8

    def quantize(self, x: Tensor) -> Tensor:
        """x (n,) fp32 or bf16 -> (encoded_size(n),) uint8, in memory of its own."""
        data = torch.empty(self.encoded_size(len(x)), dtype=torch.uint8, device=x.device)
        for part, encoded in self.chunks(x, data):
            self.quantize_chunk(part, encoded)
        return data

    def dequantize(self, data: Tensor, n: int) -> Tensor:
        """(encoded_size(n),) uint8 -> (n,) fp32, in memory of its own."""
        x = torch.empty(n, dtype=torch.float32, device=data.device)
        for part, encoded in self.chunks(x, data):
            part.copy_(self._dequantize_chunk(encoded, len(part)))
        return x

    def add_dequantized(self, x: Tensor, data: Tensor) -> None:
        """x (n,) fp32 += what (encoded_size(n),) uint8 stand for."""
        for part, encoded in self.chunks(x, data):
            part.add_(self._dequantize_chunk(encoded, len(part)))

    def chunks(self, x: Tensor, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair elements with their bytes, chunk by chunk."""
        size = self.encoded_size(len(x))
        if len(data) != size:
            raise ValueError(f"{len(data)} bytes for {len(x)} numbers, which take {size}")
        return zip(
            x.split(ENCODE_ELEMENTS), data.split(self.encoded_size(ENCODE_ELEMENTS)), strict=True
        )

    def quantize_chunk(self, x: Tensor, data: Tensor) -> Tensor:
        """Encode one chunk (n,) into its bytes -> (n,) decoded numbers, perhaps rounded further."""
        if self.bits >= 16:
            rounded = x.to(self._dtype)
            data.copy_(rounded.view(torch.uint8))
            return rounded
        n = len(x)
        x_BW = _whole_blocks(x)
        # Greatest and least take one pass each and no memory, unlike the greatest absolute value.
        # Both let NaN through.
        most_B = torch.maximum(x_BW.amax(1), -x_BW.amin(1)).float()
        # Rounding to bf16 makes a scale at most 1/256 too small: 127 steps become 127.496, and no
        # code is beyond 127.
        scale_B = (most_B / GREATEST[self.bits]).clamp_(min=SMALLEST_SCALE).bfloat16()
        scale_B1 = scale_B.float().unsqueeze(1)
        steps_BW = (x_BW * scale_B1.reciprocal()).round_()
        scales, codes = data.tensor_split([self._scale_bytes(n)])
        scales.copy_(scale_B.view(torch.uint8))
        if self.bits == 8:
            codes.view(torch.int8).copy_(steps_BW.flatten()[:n])
        else:
            # code + 8 of two neighbours in a byte, the first in the low half.
            pairs = steps_BW[:, ::2].add(steps_BW[:, 1::2], alpha=16)
            pairs.add_(8 + 8 * 16)
            codes.copy_(pairs.to(torch.uint8).flatten()[: len(codes)])
        return steps_BW.mul_(scale_B1).flatten()[:n]

    def _dequantize_chunk(self, data: Tensor, n: int) -> Tensor:
        """Decode the bytes of one chunk -> (n,) numbers."""
        if self.bits >= 16:
            return _view_as(data, self._dtype)
        scales, codes = data.tensor_split([self._scale_bytes(n)])
        if self.bits == 8:
            steps = codes.view(torch.int8).float()
        else:
            nibbles = torch.stack([codes & 15, codes >> 4], dim=1)
            steps = nibbles.flatten().float().sub_(8)
        scale_B = _view_as(scales, torch.bfloat16).float()
        return _whole_blocks(steps).mul_(scale_B.unsqueeze(1)).flatten()[:n]

    def _scale_bytes(self, n: int) -> int:
        return -(-n // SCALE_ELEMENTS) * SCALE_BYTES if self.bits < 16 else 0

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.bits == 32 else torch.bfloat16


class ErrorFeedback:
    """Adds to each tensor what earlier encodings of its like rounded away, so that errors cancel
    over the steps instead of adding up (arXiv 1901.09847)."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        #: fp32, by key: the sum of what was to be sent less the sum of what was.
        self.residuals: dict[Hashable, Tensor] = {}

    def quantize_(self, key: Hashable, x: Tensor) -> Tensor:
        """x (n,) fp32 plus the residual of `key` -> (encoded_size(n),) uint8. x becomes what these
        stand for."""
        codec = self.codec
        if codec.bits == 32:
            return codec.quantize(x)
        if key not in self.residuals:
            self.residuals[key] = torch.zeros_like(x)
        residuals = self.residuals[key].split(ENCODE_ELEMENTS)
        data = torch.empty(codec.encoded_size(len(x)), dtype=torch.uint8, device=x.device)
        chunks = codec.chunks(x, data)
        for (part, encoded), rest in zip(chunks, residuals, strict=True):
            part.copy_(codec.quantize_chunk(rest.add_(part), encoded))
            # What is not finite was sent as such: kept, it would make every later step NaN.
            rest.sub_(part).nan_to_num_(0.0, 0.0, 0.0)
        return data

    def flush_residual_(self, key: Hashable, x: Tensor) -> Tensor:
        """Encode in 32 bits with the residual of earlier encodings, so that none remains."""
        if (rest := self.residuals.pop(key, None)) is not None:
            x.add_(rest)
        return FP32_CODEC.quantize(x)


#: Rounds nothing.
FP32_CODEC = Codec(32)


def _whole_blocks(x: Tensor) -> Tensor:
    """Reshape (n,) to (B, W), the last block filled up with zeros."""
    if missing := -len(x) % SCALE_ELEMENTS:
        x = pad(x, (0, missing))
    return x.reshape(-1, SCALE_ELEMENTS)


def _view_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as numbers of `dtype`. A copy: a part of a longer message may begin where such
    numbers must not."""
    return data.clone().view(dtype)
