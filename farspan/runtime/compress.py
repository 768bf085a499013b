"""What crosses a slow link in fewer bits, and the feedback that sends later what rounding kept back."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Elements W that share a scale, so that an outlier coarsens few others (arXiv 2110.02861). A bf16 scale for 256 adds
#: 0.8% to 8 bits and 1.6% to 4; blocks of 64 would add four times that to make the steps of Gaussian numbers 15% finer.
BLOCK = 256
SCALE_BYTES = 2
#: Elements encoded at a time, so that what lies between the passes takes little memory, mostly that of the caches.
CHUNK = 2**20
#: The greatest code: codes are symmetric, so that zero is one of them.
GREATEST = {4: 7, 8: 127}
#: Smaller steps have no finite inverse, and blocks of zeros none at all.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Codec(NamedTuple):
    """Numbers as bytes: fp32, bf16, or by block a bf16 scale and one small integer each, rounded to the nearest.

    Encoded chunks follow one another, each as if it were alone: the scales of its blocks, 2 B each, then its codes: a
    byte each, or a byte for two, code + 8, the first in the low half. A block that holds an infinity or NaN decodes to
    none but these. Decoding is one exact product: equal bytes give equal bits on every device.
    """

    bits: Literal[4, 8, 16, 32]

    def encoded_size(self, n: int) -> int:
        """Bytes of n encoded numbers."""
        return self._scale_bytes(n) + -(-n * self.bits // 8)

    def encode(self, x: Tensor) -> Tensor:
        """x (n,) fp32 or bf16 -> (encoded_size(n),) uint8, in memory of its own."""
        if self.bits >= 16:
            return x.to(self._dtype, copy=True).view(torch.uint8)
        return torch.cat([self._quantised(part) for part in x.split(CHUNK)])

    def decode(self, data: Tensor, n: int) -> Tensor:
        """(encoded_size(n),) uint8 -> (n,) fp32, in memory of its own."""
        if len(data) != self.encoded_size(n):
            raise ValueError(f"{len(data)} bytes for {n} numbers, which take {self.encoded_size(n)}")
        x = torch.empty(n, dtype=torch.float32, device=data.device)
        for part, encoded in zip(x.split(CHUNK), data.split(self.encoded_size(CHUNK)), strict=True):
            part.copy_(_numbers(encoded, self._dtype) if self.bits >= 16 else self._restored(encoded, len(part)))
        return x

    def _quantised(self, x: Tensor) -> Tensor:
        """One chunk (n,) -> bytes."""
        x_BW = _whole_blocks(x)
        # Greatest and least take one pass each and no memory, unlike the greatest absolute value. Both let NaN through.
        most_B = torch.maximum(x_BW.amax(1), -x_BW.amin(1)).float()
        # Rounding to bf16 makes a scale at most 1/256 too small: 127 steps become 127.496, and no code is beyond 127.
        scale_B = (most_B / GREATEST[self.bits]).clamp_(min=SMALLEST_SCALE).bfloat16()
        steps_BW = (x_BW * scale_B.float().reciprocal_().unsqueeze(1)).round_()
        if self.bits == 8:
            codes_BW = steps_BW.to(torch.int8).view(torch.uint8)
        else:
            codes_BW = steps_BW[:, ::2].add(steps_BW[:, 1::2], alpha=16).add_(8 + 8 * 16).to(torch.uint8)
        return torch.cat([scale_B.view(torch.uint8), codes_BW.flatten()[: -(-len(x) * self.bits // 8)]])

    def _restored(self, data: Tensor, n: int) -> Tensor:
        """The bytes of one chunk -> (n,) fp32."""
        scales, codes = data.tensor_split([self._scale_bytes(n)])
        if self.bits == 8:
            steps = codes.view(torch.int8).float()
        else:
            steps = torch.stack([codes & 15, codes >> 4], dim=1).flatten().float().sub_(8)
        return _whole_blocks(steps).mul_(_numbers(scales, torch.bfloat16).float().unsqueeze(1)).flatten()[:n]

    def _scale_bytes(self, n: int) -> int:
        return -(-n // BLOCK) * SCALE_BYTES if self.bits < 16 else 0

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.bits == 32 else torch.bfloat16


class ErrorFeedback:
    """Adds to each tensor what earlier encodings of its like rounded away, so that errors cancel over the steps instead
    of adding up (arXiv 1901.09847)."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        #: fp32, by key: the sum of what was to be sent less the sum of what was.
        self.residuals: dict[Hashable, Tensor] = {}

    def encode(self, key: Hashable, x: Tensor) -> Tensor:
        """x (n,) fp32 or bf16 plus the residual of `key` -> (encoded_size(n),) uint8."""
        if self.codec.bits == 32:
            return self.codec.encode(x)
        before = self.residuals.get(key)
        total = x.to(torch.float32, copy=True) if before is None else before.add_(x)
        data = self.codec.encode(total)
        for part, encoded in zip(total.split(CHUNK), data.split(self.codec.encoded_size(CHUNK)), strict=True):
            # What is not finite was sent as such: kept, it would make every later step NaN.
            part.sub_(self.codec.decode(encoded, len(part))).nan_to_num_(0.0, 0.0, 0.0)
        self.residuals[key] = total
        return data


def _whole_blocks(x: Tensor) -> Tensor:
    """(n,) -> (B, W), the last block filled up with zeros."""
    missing = -len(x) % BLOCK
    return (pad(x, (0, missing)) if missing else x).reshape(-1, BLOCK)


def _numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of `dtype`. A copy: a part of a longer message may begin where such numbers must not."""
    return data.clone().view(dtype)
