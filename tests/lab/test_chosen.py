"""Which lab a command takes: that of its option, of its folder, or the only one; never another."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from farspan.domain.problems import Refusal
from farspan_lab import command


@pytest.fixture
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of a user's own, and an empty folder to stand in."""
    runtime = tmp_path / "runtime"
    here = tmp_path / "here"
    runtime.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime


def up(labs: Path, *names: str) -> None:
    for name in names:
        (labs / f"farspan-lab-{name}").mkdir()


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(words)


def refused(*words: str) -> Refusal:
    with pytest.raises(Refusal) as caught:
        command.chosen(given(*words))
    return caught.value


def test_only_lab_is_taken(labs: Path) -> None:
    up(labs, "a")
    assert command.chosen(given("status")) == "a"


def test_several_labs_are_listed_and_none_is_taken(labs: Path) -> None:
    up(labs, "a", "b")
    problem = refused("exec", "gat", "--", "ping", "the other").problem
    assert problem.code == "path-missing" and problem.fact == "labs here: a, b"
    assert problem.remedy == (
        "farspan lab exec --lab a gat -- ping 'the other' or "
        "farspan lab exec --lab b gat -- ping 'the other'"
    )
    assert command.chosen(given("exec", "--lab", "b", "gat", "--", "ping")) == "b"


def test_no_lab_is_refused_with_the_command_that_makes_one(labs: Path) -> None:
    assert refused("status").problem.remedy == "farspan lab up fabric/gat-amst"
    Path("lab.yaml").write_text("name: mine\nsites: {a: {}}\n")
    assert refused("status").problem.remedy == "farspan lab up lab.yaml"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("run.yaml", "data: docs\nparallel: {cluster: 'lab:b'}\n"),
        ("lab.yaml", "name: b\nsites: {a: {}}\n"),
    ],
)
def test_lab_that_the_folder_names_is_taken(labs: Path, file: str, text: str) -> None:
    Path(file).write_text(text)
    up(labs, "a", "b")
    assert command.chosen(given("exec", "gat", "--", "ping")) == "b"
    assert command.chosen(given("exec", "--lab", "a", "gat", "--", "ping")) == "a"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("run.yaml", "data: docs\nparallel: {cluster: 'lab:b'}\n"),
        ("lab.yaml", "name: b\nsites: {a: {}}\n"),
    ],
)
def test_only_lab_is_not_taken_where_the_folder_names_another(
    labs: Path, file: str, text: str
) -> None:
    Path(file).write_text(text)
    up(labs, "a")
    problem = refused("exec", "gat", "--", "ping").problem
    assert problem.what == "the lab 'b' is not up" and problem.where == file
    assert problem.remedy == "farspan lab exec --lab a gat -- ping"


def test_run_on_other_machines_names_no_lab(labs: Path) -> None:
    Path("run.yaml").write_text("data: docs\nparallel: {cluster: fabric/gat-amst}\n")
    up(labs, "a")
    assert command.chosen(given("status")) == "a"
