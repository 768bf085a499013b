"""Dropout whose choice is a function of seed, sample and place alone: any plan drops the same
numbers, and so does a run that is resumed.

Shapes: B rows, S positions, D d_model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Two rounds of multiplying and shifting 32 bits, found by search for the least bias (Wellons 2018,
#: "Prospecting for hash functions", lowbias32).
FIRST = 0x7FEB352D
SECOND = 0x846CA68B - (1 << 32)


class Dropout(NamedTuple):
    """A share of the residual stream's summands that is set to 0, the rest scaled up; `seeds` (B,)
    are int32."""

    share: float
    seeds: Tensor

    def __call__(self, x_BSD: Tensor, place: int) -> Tensor:
        """`x_BSD` with the choice of one place of the model."""
        rest = 1 - self.share
        kept_BSD = self._random(x_BSD.shape, place) >= round(self.share * 2**32) - 2**31
        return x_BSD * (kept_BSD.to(x_BSD.dtype) / rest)

    def _random(self, shape: torch.Size, place: int) -> Tensor:
        """Evenly distributed int32 of this shape."""
        index = torch.arange(shape[1:].numel(), dtype=torch.int32, device=self.seeds.device).view(
            1, *shape[1:]
        )
        # An odd constant of the golden ratio keeps places and positions of neighbours apart.
        x = mixed(self.seeds + (place * 0x61C88647 & 0x7FFFFFFF)).view(-1, 1, 1) + index
        return mixed(x)


def mixed(x: Tensor) -> Tensor:
    """int32 that are as good as drawn at random, one for each of other int32."""
    x = (x ^ (x >> 16 & 0xFFFF)) * FIRST
    x = (x ^ (x >> 15 & 0x1FFFF)) * SECOND
    return x ^ (x >> 16 & 0xFFFF)
