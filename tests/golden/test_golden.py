"""What farspan says is what it said: estimates, plans, choices, answers and exit codes are equal to
a committed dump.

A change that is meant to change them makes a new one: `python -m tests.golden.freeze --no-prose
--out GOLDEN`, and says why in the CHANGELOG.
"""

from __future__ import annotations

import json

import pytest

from farspan.cli.main import names
from tests.golden.behaviour import LEFT_OUT, RUN_COMMANDS
from tests.golden.commands import COMMANDS
from tests.golden.compare import differences
from tests.golden.freeze import GOLDEN, PARTS, plain, read, without_prose

#: Rounding differs between machines' kernels of linear algebra; a formula that changed differs by
#: more.
REL = 1e-9


@pytest.mark.parametrize("part", PARTS)
def test_estimates_plans_answers_and_losses_are_as_before(part: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    old = read(GOLDEN)
    new = {key: without_prose(plain(value)) for key, value in PARTS[part](tmp_path)}
    assert new and set(new) <= set(old)
    assert {key for key in old if key.split()[0] == part.split()[0]} <= set(new)
    found = [line for key in new for line in differences(old[key], new[key], REL, key, loose=True)]
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


def test_every_command_with_json_is_asked_or_left_out_for_a_reason():
    asked = {words[0] for words in (*COMMANDS, *RUN_COMMANDS)}
    assert set(names()) <= asked | set(LEFT_OUT)


NUMBER = {"bits": (1.0).hex(), "rel": 1e-4}
NEAR, FAR = (1.0 + 1e-15).hex(), (1.0 + 1e-3).hex()


def test_a_last_bit_is_a_difference_on_one_machine_and_none_between_processors():
    assert not list(differences(NUMBER, NUMBER, 1e-9))
    assert list(differences(NUMBER, NUMBER | {"bits": NEAR}, 1e-9))
    assert not list(differences(NUMBER, NUMBER | {"bits": NEAR}, 1e-9, loose=True))
    assert list(differences(NUMBER, NUMBER | {"bits": FAR}, 1e-9, loose=True))


def answers(*found: tuple[str, float]) -> dict[str, object]:
    results = [{"id": id_, "score": {"bits": score.hex(), "abs": 1e-4}} for id_, score in found]
    return {"answers": results}


def test_answers_change_places_only_where_their_scores_are_equal():
    old = answers(("a", 1.0), ("b", 0.5), ("c", 0.49999))
    for same in (old, answers(("a", 1.0), ("c", 0.5), ("b", 0.49999))):
        assert not list(differences(old, same, 1e-9, loose=True))
    for other in (
        answers(("b", 1.0), ("a", 0.5), ("c", 0.49999)),
        answers(("a", 1.0), ("b", 0.5)),
        answers(("a", 1.0), ("b", 0.6), ("c", 0.49999)),
    ):
        assert list(differences(old, other, 1e-9, loose=True))
    assert list(differences(old, answers(("a", 1.0), ("c", 0.5), ("b", 0.49999)), 1e-9))


def keys(nested: dict[str, object]) -> dict[str, str]:
    return {"keys": json.dumps(nested)}


def test_a_key_that_is_gone_is_found_and_one_without_a_value_here_is_not():
    old = keys({"a": {"b": {}, "c": {}}, "d": {}})
    for same in ({"a": {"b": {}, "c": {}, "new": {}}, "d": {}}, {"a": {}, "d": {}}):
        assert not list(differences(old, keys(same), 1e-9))
    for gone in ({"a": {"b": {}}, "d": {}}, {"a": {"b": {}, "c": {}}}):
        assert list(differences(old, keys(gone), 1e-9))
