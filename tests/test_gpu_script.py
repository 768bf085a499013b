"""benchmarks/gpu.py: its stages on a CPU at a tiny size, and what it does with those that fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S, wait_for

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
#: What the stages of these tests start with: a function that writes a row to the stage's file.
ROW = """
import json, os, subprocess, sys, time
def row(**found):
    with open(os.environ["ROWS"], "a") as file:
        file.write(json.dumps(found) + "\\n")
"""


@pytest.fixture(scope="module")
def gpu() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules["gpu"] = module
    spec.loader.exec_module(module)
    return module


class Stages:
    """Stages that each run a few lines of Python."""

    def __init__(self, gpu: types.ModuleType, folder: Path, **code: str) -> None:
        self.gpu = gpu
        self.folder = folder
        self.code = code
        self.path = folder / "out" / "gpu.json"

    def run(self, limit_s: float = LIMIT_S, **kwargs) -> bool:
        stages = [self.gpu.Stage(name, "", limit_s, (), "") for name in self.code]
        return self.gpu.run_stages(
            stages,
            lambda stage, rows, limit_s: [sys.executable, "-c", ROW + self.code[stage.name]],
            lambda stage: os.environ | {"ROWS": str(self.rows(stage.name)), "OUT": str(self.path)},
            {"device": "a card", "commit": "abc"},
            self.gpu.Results(self.path),
            self.folder,
            **kwargs,
        )

    def rows(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def found(self) -> dict:
        return json.loads(self.path.read_text())["stages"]


def test_stage_that_hangs_is_ended_at_its_limit_with_all_that_it_started(gpu, tmp_path):
    stages = Stages(
        gpu,
        tmp_path,
        hangs="row(a=1)\nchild = subprocess.Popen(['sleep', '100000'])\nrow(pid=child.pid)\n"
        "time.sleep(100000)",
        after="row(b=2)",
    )

    def clock() -> float:
        """Stand still until the stage has written its rows; then its limit is over."""
        rows = stages.rows("hangs")
        written = rows.exists() and rows.read_bytes().count(b"\n") == 2
        return 100.0 if written else 0.0

    assert not stages.run(limit_s=50.0, total_s=10_000.0, clock=clock)
    hangs = stages.found()["hangs"]
    after = stages.found()["after"]
    assert (hangs["outcome"], hangs["rc"], len(hangs["rows"])) == ("limit", None, 2)
    assert (after["outcome"], after["rc"], after["rows"]) == ("done", 0, [{"b": 2}])
    wait_for(lambda: not alive(hangs["rows"][1]["pid"]), "the end of what the stage started")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stage_that_crashes_is_recorded_with_its_rows_and_its_log(gpu, tmp_path, capsys):
    stages = Stages(
        gpu,
        tmp_path,
        crashes="row(a=1, text='one')\nprint('what it printed')\nraise ValueError('of this kind')",
        after="row(b=2)",
    )
    assert not stages.run()
    crashes = stages.found()["crashes"]
    assert (crashes["outcome"], crashes["rc"]) == ("failed", 1)
    assert crashes["rows"] == [{"a": 1, "text": "one"}]
    assert "what it printed" in crashes["tail"] and "of this kind" in crashes["tail"]
    assert stages.found()["after"]["outcome"] == "done"
    assert "crashes: FAILED with 1" in (printed := capsys.readouterr().out)
    assert "  crashes: one\n" in printed


def test_gpu_results_are_written_after_every_stage_with_device_and_commit(gpu, tmp_path):
    stages = Stages(
        gpu,
        tmp_path,
        first="row(a=1)",
        second="row(seen=json.load(open(os.environ['OUT']))['stages'])",
    )
    assert stages.run()
    first = stages.found()["first"]
    seen = stages.found()["second"]["rows"][0]["seen"]["first"]
    assert seen == first and first["outcome"] == "done"
    assert (first["device"], first["commit"]) == ("a card", "abc")
    # What is not run again stays.
    Stages(gpu, tmp_path, second="row(b=2)").run()
    assert stages.found()["first"] == first
    assert stages.found()["second"]["rows"] == [{"b": 2}]
    assert not list(stages.path.parent.glob("*.tmp"))


def test_stages_get_what_is_left_of_the_whole_time_and_none_starts_without(gpu, tmp_path):
    stages = Stages(gpu, tmp_path, first="row()", second="row()", third="row()")
    readings = {"first": 0.0, "second": 70.0, "third": 98.0}

    def clock() -> float:
        """Go on only when a stage has been recorded as done."""
        recorded = stages.found() if stages.path.exists() else {}
        done = [name for name in recorded if recorded[name]["outcome"] == "done"]
        return readings[list(readings)[len(done)]]

    assert not stages.run(limit_s=60.0, total_s=100.0, clock=clock)
    found = stages.found()
    assert [found[name]["outcome"] for name in readings] == ["done", "done", "skipped"]
    assert (found["first"]["limit_s"], found["second"]["limit_s"]) == (60.0, 30.0)
    assert "2 s were left" in found["third"]["why"]


def test_stage_whose_package_is_missing_is_skipped_and_names_it(gpu, tmp_path):
    stage = gpu.Stage("needy", "", 60.0, ("json", "no_such_package"), "")
    results = gpu.Results(tmp_path / "gpu.json")
    never = pytest.fail
    assert not gpu.run_stages([stage], never, never, {}, results, tmp_path)
    assert "no_such_package" in results.stages["needy"]["why"]


def test_limits_of_all_stages_fit_in_seven_minutes(gpu):
    assert sum(stage.limit_s for stage in gpu.STAGES) <= gpu.TOTAL_S <= 7 * 60


def test_wheel_is_unpacked_only_for_a_package_that_is_missing(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WHEELS", tmp_path)
    for name in ("json", "no_such_package"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    (folder,) = gpu.unpacked(("json", "no_such_package"), tmp_path / "runs")
    assert (folder / "no_such_package" / "__init__.py").exists()
    assert gpu.unpacked(("no_such_package",), tmp_path / "runs") == [folder]


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu_at_a_tiny_size(tmp_path):
    command = [sys.executable, str(SCRIPT), "--dry", "--total", str(7 * LIMIT_S)]
    command += ["--limit", str(LIMIT_S), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path / "folder")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((tmp_path / "out" / "gpu.json").read_text())["stages"]
    rows = {name: found["rows"] for name, found in stages.items()}
    assert {found["device"] for found in stages.values()} == {"cpu"}
    assert {row["variant"] for row in rows["head"] if "variant" in row} >= {"farspan", "pytorch"}
    contests = [row for row in rows["contest"] if "ratio" in row]
    assert [contest["preset"] for contest in contests] == ["gpt2-medium", "gpt2"]
    assert all(row["contestants"].keys() == {"farspan", "pytorch"} for row in contests)
    assert all(row["passed"] for row in rows["tests"]) and len(rows["tests"]) == 9
    assert all(row["passed"] for row in rows["workers"]) and len(rows["workers"]) == 6
    assert len(rows["attention"]) == 2
    assert rows["saving"][0]["step_ms"] > 0
    assert all(found["predicted"] for found in stages.values())
    assert all(row["reading_ms"] > 0 for row in rows["small"] if "case" in row)
    assert {row["case"] for row in rows["predicted"] if "measured_s" in row} == {0, 1}
    assert rows["run"][0]["stopped"] < rows["run"][0]["steps"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"gpu.json", "gpu.log"}
