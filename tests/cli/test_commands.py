"""Each command on a tiny run: what it answers, in text and as one JSON object."""

from __future__ import annotations

import argparse
import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from farspan.app import configs, preflight_checks
from farspan.cli import arguments, main
from farspan.domain.config import DataConfig, RunConfig
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import load_yaml
from tests.cli.conftest import Farspan


@pytest.mark.parametrize("name", main.command_names())
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: farspan {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", main.command_names())
def test_each_option_has_a_help_text_with_its_default(name: str):
    def lacking(parser: argparse.ArgumentParser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from lacking(inner)
                continue
            nothing = action.default in (None, argparse.SUPPRESS, []) or action.default is False
            if not action.help or not (
                nothing or "default" in action.help or str(action.default) in action.help
            ):
                yield action.dest

    assert set(lacking(main.build_command_parser(name))) == set()


def test_the_overview_lists_every_command(farspan: Farspan):
    listed = farspan("--help").stdout
    assert all(re.search(rf"\n    {name}\s", listed) for name in main.command_names())
    assert farspan().stdout == listed
    assert farspan("--version").stdout.startswith("farspan ")


JSON = [
    (["prepare"], {"folder", "manifest"}),
    (["report"], {"run", "page", "measurement"}),
    (["resume"], {"run", "measurement"}),
    (["generate", "time", "--tokens", "5"], {"prompt", "text", "step"}),
    (["generate", "", "--tokens", "5", "--temperature", "0"], {"prompt", "text", "step"}),
    (["generate", "time " * 500, "--tokens", "5"], {"prompt", "text", "step"}),
    (["export", "--out", "exported"], {"run", "folder", "step"}),
    (
        ["doctor"],
        {"versions", "devices", "reports", "disk_free_bytes", "findings", "notes"},
    ),
]


@pytest.mark.parametrize(("words", "keys"), JSON, ids=[" ".join(row[0])[:30] for row in JSON])
def test_with_json_a_command_answers_one_object_and_nothing_else(
    run: Path, farspan: Farspan, words, keys
):
    done = farspan(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == keys and done.stdout.count("\n") == 1


def test_json_is_taken_at_every_level():
    parser = main.Parser(prog="farspan lab")
    parser.add_subparsers().add_parser("up")
    assert parser.parse_args(["up", "--json"]).json


def test_resuming_a_finished_run_reports_it_and_changes_no_file(run: Path, farspan: Farspan):
    before = {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}
    done = farspan("resume", str(run))
    assert done.returncode == 0 and "nothing is left to train" in done.stdout
    assert "resumed" not in done.stdout and "completed all 4 steps" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))} == before


def test_overrides_of_parts_keep_the_rest(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "data: {source: docs, dedup: false}\ntrain: {batch: {global: 4}}\n"
    )
    parser = main.Parser(prog="farspan plan")
    arguments.takes_config(parser)
    words = ["--set", "data.val=2%", "--set", "train.optimizer.lr=6e-4", "--set", "size=30M"]
    config = arguments.load_config(parser.parse_args([str(tmp_path / "run.yaml"), *words]))
    assert config.data == DataConfig(source="docs", val="2%", dedup=False) and config.size == "30M"
    assert (config.train.optimizer.lr, config.train.batch.global_) == (6e-4, 4)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("..", "papers"),
        ("../", "papers"),
        (".", "new"),
        ("../new/.", "new"),
        ("~", "papers"),
        ("~/notes.md", "notes"),
        ("/", "run"),
        ("pydocs", "pydocs"),
        ("hf:someone/texts:en", "texts"),
    ],
)
def test_a_run_is_called_like_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str
):
    here = tmp_path / "papers" / "new"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here.parent))
    assert configs.default_name(RunConfig(data=source)) == name


def test_a_run_is_not_made_over_the_folder_that_it_leads_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`runs/..` does not exist before `runs` does, and is full as soon as it does."""
    (tmp_path / "run.yaml").write_text("data: docs\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal) as refusal:
        preflight_checks.refuse_existing(Path("runs/.."), "another folder")
    assert refusal.value.problem.code == "run-exists"


def test_plan_command_estimates_the_run_and_reports_the_origin_of_each_value(
    run: Path, farspan: Farspan, tmp_path: Path
):
    done = farspan("plan", "--resolved", "--out", str(tmp_path / "plan.json"), "--json")
    answer = json.loads(done.stdout)
    chosen = answer["candidates"][answer["chosen"]]
    assert chosen["technique"] == "data" and chosen["fits"] and chosen["estimate"]["memory_bytes"]
    assert answer["resolved"]["train.steps"] == {"value": 4, "origin": "run.yaml: train.steps"}
    assert json.loads((tmp_path / "plan.json").read_text()) == chosen["plan"]


def test_embed_then_search_answers_any_query(run: Path, farspan: Farspan):
    assert farspan("embed", str(run)).returncode == 0
    for query in ("time year", "?!* \u00e9\u4e2d\U0001f600 \"'", "zzzzqqq"):
        done = farspan("search", query, "--run", str(run), "-k", "3", "--json")
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["answer"]["results"]) <= 3


def test_init_writes_a_file_that_loads(desk: Path, farspan: Farspan, tmp_path: Path):
    out = tmp_path / "new.yaml"
    assert farspan("init", "docs", "--out", str(out)).returncode == 0
    assert farspan("prepare", str(out)).returncode == 0


@pytest.mark.parametrize("name", ["a: b", "true", " ".join(["my papers"] * 12)])
def test_init_quotes_any_name_of_a_folder(farspan: Farspan, tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.txt").write_text("text")
    assert farspan("init", name, cwd=tmp_path).returncode == 0
    assert load_yaml(tmp_path / "run.yaml", RunConfig).data == name


def test_a_reader_that_leaves_early_is_no_error(run: Path, environment: dict[str, str], desk: Path):
    command = f"{sys.executable} -m farspan report | true"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=desk,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""


def test_a_run_is_its_users_alone_and_an_export_readable_like_its_siblings(
    run: Path, farspan: Farspan, tmp_path: Path
):
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    done = farspan("export", str(run), "--out", str(tmp_path / "export"))
    assert done.returncode == 0, done.stderr
    (tmp_path / "sibling").write_text("")
    files = [tmp_path / "sibling", *(tmp_path / "export").iterdir()]
    assert len(files) > 4
    assert len({stat.S_IMODE(file.stat().st_mode) for file in files}) == 1
    card = (tmp_path / "export" / "README.md").read_text()
    assert (
        card.startswith("---\nlibrary_name: transformers\n") and f"# {run.resolve().name}\n" in card
    )
    assert "| validation loss |" in card and str(run.resolve().parent) not in card
