"""Which cases of costly tests `make test` runs, and which wait for `make test-slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import hypothesis
import pytest

#: Examples of the profile `fast` (tests/conftest.py).
FAST = 30


def few(count: int) -> hypothesis.settings:
    """Settings of a costly property: `count` examples in `make test`, seven times as many later."""
    scale = hypothesis.settings().max_examples / FAST
    return hypothesis.settings(max_examples=max(1, round(count * scale)))


def slow_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which all but the first `count` are slow."""
    return [case if at < count else _slow(case) for at, case in enumerate(cases)]


def slow_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which all but those in `kept` are slow."""
    cases = list(cases)
    assert set(kept) <= set(cases), set(kept) - set(cases)
    return [case if case in kept else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
