"""How far a worker may send ahead of what it has received, against every place in a random order."""

from __future__ import annotations

import random

import pytest

from farspan.domain.layout import Send
from farspan.runtime.outer import _ahead


def ranges(rng: random.Random, size: int) -> list[Send]:
    """Some of a range of elements, in pieces, ascending."""
    bounds = sorted(rng.sample(range(size + 1), k=rng.randint(0, 8) // 2 * 2))
    return [Send(0, 1, start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]


@pytest.mark.parametrize("seed", range(50))
def test_it_is_the_most_of_sent_less_received_before_any_element(seed):
    rng = random.Random(seed)
    sends, receives = ranges(rng, 60), ranges(rng, 60)

    def before(parts, place):
        return sum(max(0, min(one.stop, place) - one.start) for one in parts)

    assert _ahead(sends, receives) == max(before(sends, p) - before(receives, p) for p in range(61))


def test_who_receives_what_it_sends_is_never_ahead():
    parts = [Send(0, 1, 0, 10), Send(0, 1, 20, 50)]
    assert _ahead(parts, parts) == 0
