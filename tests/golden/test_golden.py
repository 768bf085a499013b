"""What farspan says is what it said: estimates, plans, choices, answers and exit codes are equal to
a committed dump.

A change that is meant to change them makes a new one: `python -m tests.golden.freeze --no-prose
--out GOLDEN`, and says why in the CHANGELOG.
"""

from __future__ import annotations

import pytest

from tests.golden.freeze import GOLDEN, PARTS, differences, plain, read, without_prose

#: Rounding differs between machines' kernels of linear algebra; a formula that changed differs by
#: more.
REL = 1e-9


@pytest.mark.parametrize("part", PARTS)
def test_all_is_said_as_before(part: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    old, new = (
        read(GOLDEN),
        {key: without_prose(plain(value)) for key, value in PARTS[part](tmp_path)},
    )
    assert new and set(new) <= set(old)
    assert {key for key in old if key.startswith(part)} <= set(new)
    found = [line for key in new for line in differences(old[key], new[key], REL, key)]
    assert not found, "\n".join(found[:40])


def test_a_difference_is_found():
    old = {"a": [1.0, {"b": "x"}], "c": None}
    assert not list(differences(old, {"a": [1.0 + 1e-13, {"b": "x", "new": 1}], "c": None}, 1e-12))
    for new in (
        {"a": [1.0 + 1e-11, {"b": "x"}], "c": None},
        {"a": [1.0], "c": None},
        {"a": [1.0, {"b": "y"}], "c": None},
        {"a": [1.0, {"b": "x"}]},
        {"a": [1.0, {"b": "x"}], "c": False},
    ):
        assert list(differences(old, new, 1e-12))
