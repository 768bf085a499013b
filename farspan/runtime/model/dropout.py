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
FIRST_FACTOR = 0x7FEB352D
SECOND_FACTOR = 0x846CA68B - (1 << 32)


#: An odd constant of the golden ratio: keeps places and positions of neighbours apart.
PLACE_FACTOR = 0x61C88647


class Dropout(NamedTuple):
    """A share of the residual stream's summands that is set to 0, the rest scaled up; `seeds` (B,)
    are int32."""

    share: float
    seeds: Tensor

    def at_places(self, places: int) -> tuple[PlacedDropout, ...]:
        """Return the dropout of each of the model's first `places` places.

        A block that is compiled gets its own as tensors: a number would make it another graph.
        """
        place_P = torch.arange(places, dtype=torch.int32, device=self.seeds.device)
        offset_P1 = (place_P * PLACE_FACTOR & 0x7FFFFFFF).unsqueeze(1)
        seeds_PB = mix_bits(self.seeds + offset_P1)
        return tuple(PlacedDropout(self.share, seeds) for seeds in seeds_PB)


class PlacedDropout(NamedTuple):
    """The dropout of one place of a model; `seeds` (B,) are the place's own."""

    share: float
    seeds: Tensor

    def __call__(self, x_BSD: Tensor) -> Tensor:
        """Return `x_BSD` with the place's choice."""
        threshold = round(self.share * 2**32) - 2**31
        kept_BSD = self._draw_numbers(x_BSD.shape) >= threshold
        return x_BSD * (kept_BSD.to(x_BSD.dtype) / (1 - self.share))

    def _draw_numbers(self, shape: torch.Size) -> Tensor:
        """Draw evenly distributed int32 of this shape."""
        length = shape[1:].numel()
        index = torch.arange(length, dtype=torch.int32, device=self.seeds.device)
        return mix_bits(self.seeds.view(-1, 1, 1) + index.view(1, *shape[1:]))


def mix_bits(x: Tensor) -> Tensor:
    """Return int32 that are as good as drawn at random, one for each of other int32."""
    x = (x ^ (x >> 16 & 0xFFFF)) * FIRST_FACTOR
    x = (x ^ (x >> 15 & 0x1FFFF)) * SECOND_FACTOR
    return x ^ (x >> 16 & 0xFFFF)
