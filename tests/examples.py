"""How many examples a costly property gets; all others take the number of the profile."""

from __future__ import annotations

import hypothesis

#: Examples of the profile `fast` (tests/conftest.py).
FAST = 30


def few(count: int) -> hypothesis.settings:
    """`count` examples in `make test`, and as many times more in `make test-slow` as others get."""
    scale = hypothesis.settings().max_examples / FAST
    return hypothesis.settings(max_examples=max(1, round(count * scale)))
