"""`farspan price`: a plan that is given, as a user prices it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from farspan.semantics.communications import PURPOSE_NAMES, Purpose
from tests.cli.conftest import Farspan

SHORT = """\
model: gpt2m
train: {batch: 8, seq_len: 1024, precision: fp16}
stages:
  - {layers: 0-14, on: [vm1:0-1], tp: 2}
  - {layers: 14-24, on: vm2, dp: 2, zero: 1}
microbatches: 4
"""
CLUSTER = ("--cluster", "fabric/gat-amst")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    (folder / "short.yaml").write_text(SHORT)
    return folder


def answer(farspan: Farspan, *words: object) -> dict[str, Any]:
    done = farspan(*map(str, words), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("technique", ["data", "fsdp", "pipeshard", "diloco", "shard"])
def test_a_plan_that_farspan_wrote_prices_as_when_it_was_planned(
    here: Farspan, plans: Path, technique: str
) -> None:
    path = plans / f"{technique}.json"
    asked = (
        "plan",
        "--model",
        "gpt2m",
        *CLUSTER,
        "--tokens",
        "16M",
        "--technique",
        technique,
        "-o",
        path,
    )
    planned = answer(here, *asked)
    candidate = next(
        one
        for one in planned["candidates"]
        if one["plan"]["devices"] == json.loads(path.read_text())["devices"]
    )
    found = answer(here, "price", path, *CLUSTER)
    assert found["plan"]["replicas"] == candidate["plan"]["replicas"]
    for figure in (
        "step_s",
        "compute_s",
        "communication_s",
        "bubble_s",
        "memory_bytes",
        "interval",
        "tokens_per_s",
    ):
        assert found["estimate"][figure] == candidate["estimate"][figure], figure
    assert found["fits"] and found["engine"] == "farspan"


def test_a_short_form_prices_as_the_whole_plan_that_it_becomes(here: Farspan, plans: Path) -> None:
    whole = plans / "whole.json"
    short = answer(here, "price", plans / "short.yaml", *CLUSTER, "-o", whole)
    assert set(short) == {"engine", "devices", "fits", "estimate", "plan"}
    assert short["devices"] == ["vm1/cuda:0", "vm1/cuda:1", "vm2/cuda:0", "vm2/cuda:1"]
    assert set(short["estimate"]["memory_bytes"]) == set(short["devices"])
    again = answer(here, "price", whole, *CLUSTER)
    assert again["estimate"] == short["estimate"]
    assert again["plan"] == {**short["plan"], "inputs": again["plan"]["inputs"]}
    content = json.loads(whole.read_text())
    content["inputs"] = {"cluster": "a" * 16, "corpus": "b" * 16}
    (plans / "elsewhere.json").write_text(json.dumps(content))
    assert (
        answer(here, "price", plans / "elsewhere.json", *CLUSTER)["estimate"] == short["estimate"]
    )


def test_another_engine_takes_another_time(here: Farspan, plans: Path) -> None:
    steps = {
        name: answer(here, "price", plans / "short.yaml", *CLUSTER, "--engine", name)["estimate"][
            "step_s"
        ]
        for name in ("farspan", "alpa2022", "torch2024")
    }
    assert len(set(steps.values())) == 3


@pytest.mark.parametrize("columns", [80, 100])
def test_people_read_the_step_its_parts_memory_and_what_is_assumed(
    here: Farspan, plans: Path, columns: int
) -> None:
    done = here("price", str(plans / "short.yaml"), *CLUSTER, "--show", COLUMNS=str(columns))
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert max(map(len, text.splitlines())) <= columns
    for words in (
        "gpt2 of 355 M parameters",
        "stage 1: embedding, blocks 1-14",
        "stage 2: blocks 15-24",
        "4, in flight 2/1",
        "exposed communication",
        "tokens/s",
        "Memory at its peak",
        "It fits",
        "What it sends",
        "activations between stages",
        "Assumed",
        "What runs where",
    ):
        assert words in text, words


TENSOR_AXIS = """\
model: gpt2m
train: {batch: 8, seq_len: 1024, precision: fp16}
stages:
  - {on: [vm1:0-1, vm2:0-1], tp: 4}
microbatches: 4
"""


def test_show_names_every_purpose_of_a_plan_with_muon_and_a_tensor_axis_over_two_hosts(
    here: Farspan, plans: Path
) -> None:
    (plans / "tensor.yaml").write_text(TENSOR_AXIS)
    plan = answer(here, "price", plans / "tensor.yaml", *CLUSTER)["plan"]
    plan["train"]["optimizer"]["muon"] = {}
    (plans / "muon.json").write_text(json.dumps(plan))
    done = here("price", str(plans / "muon.json"), *CLUSTER, "--show")
    assert done.returncode == 0, done.stderr
    for purpose in ("operators", "matrices"):
        # A picture may break it over two lines.
        assert PURPOSE_NAMES[purpose] in " ".join(done.stdout.split())


def test_every_purpose_of_communication_has_a_name() -> None:
    assert set(PURPOSE_NAMES) == set(get_args(Purpose))


def test_price_reports_devices_short_of_memory(here: Farspan, plans: Path) -> None:
    path = plans / "large.yaml"
    path.write_text(
        "model: opt-6.7b\ntrain: {batch: 4, precision: fp16}\nstages: [{on: [vm1, vm2]}]\n"
    )
    done = here("price", str(path), *CLUSTER)
    assert done.returncode == 0 and "It does not fit: 4 devices short of memory" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        (("price", "short.yaml", *CLUSTER, "--model", "gpt2"), "usage", "--set"),
        (("price", "short.yaml", *CLUSTER, "--technique", "data"), "usage", "--set"),
        (("price", "short.yaml", *CLUSTER, "--engine", "alpa202"), "out-of-range", "alpa2022"),
        (("price", "short.yml", *CLUSTER), "path-missing", "short.yaml"),
        (
            ("price", "short.yaml", "--cluster", "fabric/gat-ams"),
            "path-missing",
            "fabric/gat-amst",
        ),
        (("price", "short.yaml", "none.yaml"), "path-missing", ""),
        (("plan", "--price", "short.yaml", *CLUSTER), "usage", "farspan price --help"),
    ],
)
def test_price_refuses_bad_or_conflicting_options_with_a_fix(
    here: Farspan, plans: Path, words: tuple[str, ...], code: str, remedy: str
) -> None:
    done = here(*words, "--json", cwd=plans)
    problem = json.loads(done.stdout)["problem"]
    assert problem["code"] == code and remedy in problem["remedy"], problem


def test_a_file_that_is_no_plan_is_refused_with_its_line(here: Farspan, plans: Path) -> None:
    (plans / "bad.yaml").write_text(SHORT.replace("zero: 1", "zerro: 1"))
    problem = json.loads(here("price", "bad.yaml", *CLUSTER, "--json", cwd=plans).stdout)["problem"]
    assert problem["code"] == "unknown-key" and problem["where"].endswith("bad.yaml:5")
    assert "stages[1].zero" in problem["remedy"]


def test_the_cluster_of_run_yaml_is_the_one_without_a_flag(here: Farspan, plans: Path) -> None:
    (plans / "run.yaml").write_text("data: pydocs\nparallel: {cluster: fabric/gat-amst}\n")
    named = here("price", "short.yaml", *CLUSTER, "--json", cwd=plans)
    found = here("price", "short.yaml", "--json", cwd=plans)
    (plans / "run.yaml").unlink()
    assert json.loads(found.stdout)["estimate"] == json.loads(named.stdout)["estimate"]


def test_without_a_cluster_it_is_this_machine_after_a_trial(here: Farspan, plans: Path) -> None:
    mine = plans / "mine.yaml"
    mine.write_text(
        "model: {family: llama, layers: 1, d_model: 32, heads: 2, kv_heads: 2, d_ff: 128,\n"
        "  vocab_size: 300, context: 32, norm: rmsnorm, activation: swiglu, positions: rope,\n"
        "  bias: false, tied: true}\n"
        "train: {batch: 4, seq_len: 32, precision: fp32}\nstages: [{on: localhost:0}]\n"
    )
    done = here("price", "mine.yaml", "--json", cwd=plans)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["estimate"]["step_s"] > 0 and len(found["devices"]) == 1
    assert any("a short trial of this model" in said for said in found["estimate"]["assumptions"])


def test_pricing_loads_no_torch(environment: dict[str, str], plans: Path) -> None:
    words = ["price", str(plans / "short.yaml"), *CLUSTER]
    code = f"import sys, farspan.cli.main as m; m.main({words!r}); print(*(n for n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()).isdisjoint({"torch", "matplotlib", "scipy", "jinja2"})


def test_an_assumed_network_is_shown_with_its_number_wherever_a_cluster_is(
    here: Farspan, tmp_path: Path
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "sites:\n  lab: {hosts: {a: {devices: [a30, a30]}, b: {devices: [a30, a30]}}}\n"
    )
    shown = here("cluster", "show", str(file))
    assert "link a - b: 0.1 ms, 10 Gbit/s assumed [derived]" in shown.stdout
    checked = here("cluster", "check", str(file))
    assert "unknown: the bandwidth between hosts of lab: 10 Gbit/s is assumed" in checked.stdout
    assert "farspan probe --cluster" in checked.stdout
    (tmp_path / "plan.yaml").write_text(
        "model: gpt2\ntrain: {batch: 8, seq_len: 256, precision: fp16}\n"
        "stages:\n  - {on: [a:0-1, b:0-1], dp: 4}\n"
    )
    priced = here("price", str(tmp_path / "plan.yaml"), "--cluster", str(file))
    words = " ".join(priced.stdout.split())
    assert "10 Gbit/s is assumed between hosts" in words
    assert "measure it: farspan probe --cluster CLUSTER -o measured.yaml" in words
