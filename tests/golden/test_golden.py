"""What farspan says is what it said: estimates, plans, choices, answers and exit codes are equal to
a committed dump.

A change that is meant to change them makes a new one: `python -m tests.golden.freeze --no-prose
--out GOLDEN`, and says why in the CHANGELOG.
"""

from __future__ import annotations

import argparse
import json

import pytest

from farspan.cli.main import build_command_parser, command_names
from tests.golden.behaviour import LEFT_OUT, keys_of
from tests.golden.compare import differences
from tests.golden.freeze import GOLDEN, PARTS, part_of, plain, read, without_prose

#: Rounding differs between machines' kernels of linear algebra; a formula that changed differs by
#: more.
REL = 1e-9


#: A large model's search and the studies: half a minute.
SLOW = {"slow farspan"}


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part in SLOW)) for part in PARTS]
)
def test_estimates_plans_answers_and_losses_are_as_before(part: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    old = read(GOLDEN)
    new = {key: without_prose(plain(value)) for key, value in PARTS[part](tmp_path)}
    assert new and set(new) <= set(old)
    assert {key for key in old if part_of(key) == part} <= set(new)
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


def commands() -> set[str]:
    """Every command, and every action of those that have actions."""
    found = set[str]()
    for name in command_names():
        actions = [
            action
            for action in build_command_parser(name)._actions
            if isinstance(action, argparse._SubParsersAction)
        ]
        found |= {f"{name} {one}" for action in actions for one in action.choices} or {name}
    return found


def test_an_answer_of_every_command_is_in_the_dump_or_left_out_for_a_reason():
    answered = set[str]()
    for key, entry in read(GOLDEN).items():
        part, _, command = key.partition("farspan ")
        keys = entry.get("all_keys", entry) if part in ("", "slow ", "small keys ") else {}
        fields = json.loads(keys.get("keys", "{}")).get("object", {})
        if (fields and "problem" not in fields) or "state" in fields:
            answered |= {" ".join(command.split()[:count]) for count in (1, 2)}
    assert commands() - answered == commands() & set(LEFT_OUT)


NUMBER = {"bits": (1.0).hex(), "rel": 1e-4}
NEAR = (1.0 + 1e-15).hex()
FAR = (1.0 + 1e-3).hex()


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


def keys(value: object) -> dict[str, str]:
    return {"keys": json.dumps(keys_of(value))}


def test_a_key_that_is_gone_or_new_or_of_another_type_is_a_difference():
    old = keys({"a": [{"b": 1}, {"c": "x"}], "d": None})
    assert not list(differences(old, keys({"a": [{"b": 2.5, "c": ""}], "d": None}), 1e-9))
    for other in (
        {"a": [{"b": 1}], "d": None},
        {"a": [{"b": 1, "c": "x", "e": 1}], "d": None},
        {"a": [{"b": 1, "c": 2}], "d": None},
        {"a": {"b": 1, "c": "x"}, "d": None},
        {"a": [{"b": 1, "c": "x"}], "d": None, "e": 1},
        {"a": [{"b": 1, "c": "x"}]},
    ):
        for loose in (False, True):
            assert list(differences(old, keys(other), 1e-9, loose=loose))


def test_null_or_an_empty_list_stands_for_any_value_only_between_machines():
    old = keys({"a": [{"b": 1}], "d": None})
    for same in ({"a": [], "d": None}, {"a": [{"b": None}], "d": 3.5}, {"a": None, "d": None}):
        assert list(differences(old, keys(same), 1e-9))
        assert not list(differences(old, keys(same), 1e-9, loose=True))


def test_names_of_devices_and_packages_are_no_keys():
    assert keys_of({"versions": {"torch": "2"}}) == keys_of({"versions": {"numpy": "1"}})
    assert keys_of({"sites": {"h-0": 1}}) == keys_of({"sites": {"h-1": 1}})
    assert keys_of({"a": 1}) != keys_of({"b": 1})
