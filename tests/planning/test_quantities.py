"""Quantities of run.yaml as numbers."""

from __future__ import annotations

import pytest

from farspan.planning.quantities import asked_rows


@pytest.mark.parametrize(
    ("value", "rows"),
    [("8k tokens", 8), ("8k Tokens", 8), ("8K TOKENS ", 8), ("32 sequences", 32), (32, 32)],
)
def test_a_batch_in_tokens_is_one_in_any_letters(value: str | int, rows: int) -> None:
    assert asked_rows(value, 1000) == rows
