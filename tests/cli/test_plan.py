"""`farspan plan` and `farspan train --plan` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Farspan

ASKED = (
    "plan",
    "--model",
    "gpt2",
    "--cluster",
    "fabric/gat-amst",
    "--tokens",
    "16M",
    "--technique",
    "data",
    "--technique",
    "zero2",
    "--technique",
    "diloco",
)


def said(farspan: Farspan, *words: str, **more: str) -> str:
    done = farspan(*ASKED, *words, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(farspan: Farspan, *words: str) -> dict[str, str]:
    done = farspan(*words, "--json")
    assert done.returncode not in (0, 1), done.stdout
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)["problem"]


@pytest.mark.parametrize("columns", [80, 100])
def test_the_table_fits_its_terminal_and_names_every_technique(
    farspan: Farspan, columns: int
) -> None:
    text = said(farspan, COLUMNS=str(columns))
    assert max(map(len, text.splitlines())) <= columns
    assert all(
        re.search(rf"^ *\d+ {name} ", text, re.MULTILINE) for name in ("data", "zero2", "diloco")
    )
    assert "chosen" in text and "is fastest: " in text and "Assumes: " in text
    assert "\033[" not in text


def test_plan_table_counts_hidden_rows_and_names_the_all_option(farspan: Farspan) -> None:
    short = said(farspan)
    whole = said(farspan, "--all")
    rows = [
        len(re.findall(r"^ *\d+ (?:data|zero2|diloco) ", text, re.MULTILINE))
        for text in (short, whole)
    ]
    hidden = re.search(r"(\d+) more, each behind its technique's best: .*--all", short)
    assert rows[1] - rows[0] == (int(hidden[1]) if hidden else 0)


def test_reasons_pictures_difference_page_and_plan_come_at_once(
    farspan: Farspan, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    plan = tmp_path / "plan.json"
    text = said(
        farspan, "--why", "--show", "--diff", "data", "1", "--html", str(page), "-o", str(plan)
    )
    for heading in (
        "Against the others",
        "What is not known",
        "What runs where",
        "One step, as simulated",
        "Memory at its peak",
        "B / A",
    ):
        assert heading in text
    html = page.read_text()
    assert html.startswith("<!doctype html>")
    assert html.count("<svg") >= 3
    assert not re.search(r"""(?:src|href)=["']https?:""", html)
    assert json.loads(plan.read_text())["inputs"]["corpus"] == ""


def test_json_keeps_its_shape(farspan: Farspan) -> None:
    found = json.loads(said(farspan, "--json", "--why", "--diff", "data", "zero2"))
    assert {"candidates", "chosen", "why", "diff"} <= set(found)
    chosen = found["candidates"][found["chosen"]]
    assert {"technique", "devices", "fits", "problem", "estimate"} <= set(chosen)
    estimate = chosen["estimate"]
    assert {"step_s", "minutes", "tokens_per_s", "tflops_per_device", "memory_bytes", "usd"} <= set(
        estimate
    )
    assert set(estimate["memory_bytes"]) == set(chosen["devices"])
    steps = next(row for row in found["diff"]["figures"] if row["what"] == "step")
    a, b = (
        next(c for c in found["candidates"] if c["technique"] == name and c["fits"])
        for name in ("data", "zero2")
    )
    assert steps["ratio"] == pytest.approx(b["estimate"]["step_s"] / a["estimate"]["step_s"])


def test_a_plan_file_compares_with_the_ranking_it_came_from(
    farspan: Farspan, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    said(farspan, "-o", str(plan))
    assert "the two plans are configured alike" in said(farspan, "--diff", str(plan), "chosen")


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda plan: plan["devices"][1].update(index=5), "5"),
        (lambda plan: plan["devices"][1].update(host="vm9"), "vm9"),
        (lambda plan: plan["replicas"][0]["stages"][0]["mesh"]["ranks"].__setitem__(0, 9), "ranks"),
        (lambda plan: plan["replicas"][0]["stages"][0].update(units=[0, 3]), "units"),
        (lambda plan: plan["train"].update(batch=plan["train"]["batch"] + 1), "sequences"),
    ],
)
def test_a_plan_file_that_cannot_be_is_refused(
    here: Farspan, tmp_path: Path, change, fact: str
) -> None:
    plan = tmp_path / "plan.json"
    said(here, "-o", str(plan), "--pick", "data")
    content = json.loads(plan.read_text())
    change(content)
    plan.write_text(json.dumps(content))
    problem = refused(here, *ASKED, "--diff", str(plan), "data")
    assert problem["code"] == "plan-mismatch" and fact in problem["fact"], problem


def test_planning_loads_no_torch_and_nothing_heavy(environment: dict[str, str]) -> None:
    code = (
        f"import sys, farspan.cli.main as m; m.main({list(ASKED)!r}); print(*(n for n in "
        "sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()).isdisjoint({"torch", "matplotlib", "scipy", "jinja2"})


@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        (["plan", "--model", "gpt2mm", "--cluster", "fabric/gat-amst"], "out-of-range", "gpt2m"),
        (
            ["plan", "--model", "gpt2", "--cluster", "fabric/gat-amsd"],
            "path-missing",
            "fabric/gat-amst",
        ),
        ([*ASKED, "--technique", "pipeshart"], "out-of-range", "pipeshard"),
        ([*ASKED, "--tolerance", "-1"], "out-of-range", "--tolerance"),
        ([*ASKED, "--diff", "data"], "usage", "--help"),
        ([*ASKED, "--diff", "data", "zerro2"], "out-of-range", "zero2"),
        ([*ASKED, "--diff", "data", "99"], "out-of-range", ""),
        ([*ASKED, "--diff", "data", "no-such-plan.json"], "path-missing", ""),
        ([*ASKED, "--pick", "date"], "out-of-range", "data"),
        (["train", "--run", "runs/never", "--plan", "no-such-plan.json"], "path-missing", ""),
        (["train", "--run", "runs/never", "--plan", "run.yaml"], "file-unreadable", ""),
    ],
)
def test_bad_input_is_refused_with_the_nearest_name(
    here: Farspan, words: list[str], code: str, remedy: str
) -> None:
    problem = refused(here, *words)
    assert problem["code"] == code
    assert remedy in problem["remedy"]


def test_a_device_that_no_catalogue_knows_is_refused(farspan: Farspan, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("sites: {here: {hosts: {box: {devices: [a31]}}}}\n")
    assert "a30" in refused(farspan, "plan", "--model", "gpt2", "--cluster", str(cluster))["remedy"]


def test_a_plan_without_text_is_not_trained(farspan: Farspan, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    said(farspan, "-o", str(plan))
    problem = refused(farspan, "train", "--run", "runs/never", "--plan", str(plan))
    assert (problem["code"], problem["remedy"]) == (
        "plan-mismatch",
        f"farspan plan run.yaml -o {plan}",
    )


@pytest.fixture(scope="module")
def planned(farspan: Farspan, desk: Path) -> Path:
    """The plan of the desk's run.yaml."""
    done = farspan("plan", "run.yaml", "-o", "planned.json")
    assert done.returncode == 0, done.stderr
    return desk / "planned.json"


def test_train_follows_the_given_plan_file_unchanged(
    farspan: Farspan, desk: Path, planned: Path
) -> None:
    done = farspan("train", "run.yaml", "--plan", "planned.json", "--run", "runs/planned", "--json")
    assert done.returncode == 0, done.stderr
    assert (
        json.loads(done.stdout)["measurement"]["steps"]
        == json.loads(planned.read_text())["train"]["steps"]
    )
    assert (desk / "runs/planned/plan.json").read_bytes() == planned.read_bytes()


@pytest.mark.parametrize(
    ("change", "words", "code", "what"),
    [
        (("version", 1), (), "version-mismatch", "another version"),
        (("inputs.cluster", "0" * 16), (), "plan-mismatch", "another cluster"),
        (("inputs.corpus", "0" * 16), (), "plan-mismatch", "another text"),
        (None, ("--set", "model.layers=2"), "plan-mismatch", "another model"),
    ],
)
def test_a_plan_of_something_else_is_refused_with_both_hashes(
    farspan: Farspan,
    tmp_path: Path,
    planned: Path,
    change: tuple[str, object] | None,
    words: tuple[str, ...],
    code: str,
    what: str,
) -> None:
    content = json.loads(planned.read_text())
    if change is not None:
        *folders, last = change[0].split(".")
        inner = content
        for folder in folders:
            inner = inner[folder]
        inner[last] = change[1]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    problem = refused(
        farspan, "train", "run.yaml", "--plan", str(other), "--run", str(tmp_path / "run"), *words
    )
    assert problem["code"] == code
    assert what in problem["what"]
    if code == "plan-mismatch":
        assert len(set(re.findall(r"\b[0-9a-f]{16}\b", problem["fact"]))) == 2


def test_techniques_that_workers_cannot_run_are_refused_by_name(farspan: Farspan) -> None:
    problem = refused(
        farspan, "train", "run.yaml", "--set", "parallel.technique=datta", "--run", "runs/never"
    )
    assert "data" in problem["remedy"]
    problem = refused(
        farspan, "train", "run.yaml", "--set", "parallel.allow=[zero2]", "--run", "runs/never"
    )
    assert problem["code"] == "cannot-plan"
