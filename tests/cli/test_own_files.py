"""A run's own run.yaml and plan.json: what was changed in one is said, the other is a plan like
any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import TINY, Farspan

BOX = (
    "sites: {{here: {{hosts: {{{name}: {{devices: [{{kind: {kind}, memory: {memory}}}], enter: "
    "[]}}}}}}}}\n"
)


def cluster(path: Path, *, name: str = "box", kind: str = "cpu-avx2", memory: str = "4GB") -> str:
    path.write_text(BOX.format(name=name, kind=kind, memory=memory))
    return str(path)


@pytest.fixture(scope="module")
def own(farspan: Farspan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a cluster of one device."""
    folder = tmp_path_factory.mktemp("own")
    done = farspan(
        "train", "run.yaml", "--cluster", cluster(folder / "box.yaml"), "--run", str(folder / "own")
    )
    assert done.returncode == 0, done.stderr
    return folder / "own"


@pytest.fixture
def config(own: Path):
    """The run's run.yaml, put back afterwards."""
    path = own / "run.yaml"
    before = path.read_bytes()
    yield path
    path.write_bytes(before)


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        ("parallel: {workers: 2}", ['parallel.workers is 2, was "auto" at the start']),
        (
            "parallel: {technique: zero2, launcher: torchrun}",
            [
                'parallel.technique is "zero2", was "auto"',
                'parallel.launcher is "torchrun", was "local"',
            ],
        ),
        ("size: 1M", ['size is "1M", was "auto"']),
        ("budget: {time: 1h}", ['budget.time is "1h", was left out']),
    ],
)
def test_resume_is_refused_naming_keys_changed_in_the_run_yaml_of_the_run(
    here: Farspan, config: Path, lines: str, facts: list[str]
) -> None:
    kept = "".join(line + "\n" for line in TINY.splitlines())
    box = next(line for line in config.read_text().splitlines() if "cluster:" in line).split()[1]
    own = (
        f"{{cluster: {box}}}"
        if "parallel" not in lines
        else lines.replace("parallel: {", f"{{cluster: {box}, ")
    )
    rest = "" if "parallel" in lines else f"{lines}\n"
    config.write_text(f"{kept}parallel: {own}\n{rest}")
    done = here("resume", str(config.parent), "--json")
    problem = json.loads(done.stdout)["problem"]
    assert problem["code"] == "plan-mismatch" and all(fact in problem["fact"] for fact in facts)
    assert problem["fact"].count("at the start") == len(facts)
    assert f"farspan train {config} --run {config.parent}-2" in problem["remedy"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("index:", "# a remark\nindex:"),
        ("store: auto", "store: flat"),
        ("index:", "checkpoint: {keep: 3}\nindex:"),
    ],
)
def test_resume_accepts_changes_of_run_yaml_that_do_not_affect_training(
    here: Farspan, config: Path, before: str, after: str
) -> None:
    changed = config.read_text().replace(before, after)
    assert changed.count(after) == 1
    config.write_text(changed)
    assert here("resume", str(config.parent)).returncode == 0


def test_resume_refuses_another_cluster_in_run_yaml_but_accepts_a_lab(
    here: Farspan, config: Path
) -> None:
    before = config.read_text()
    line = next(line for line in before.splitlines() if "cluster:" in line)
    config.write_text(before.replace(line, "  cluster: fabric/gat-amst"))
    assert "parallel.cluster" in here("resume", str(config.parent)).stderr
    config.write_text(before.replace(line, "  cluster: lab:mine"))
    assert here("resume", str(config.parent)).returncode == 0, "it is finished: no lab is asked for"


def test_run_of_an_earlier_version_resumes_without_recorded_settings(
    here: Farspan, own: Path, config: Path
) -> None:
    record = own / "run.json"
    before = record.read_bytes()
    content = json.loads(before)
    del content["asked"]
    record.write_text(json.dumps(content))
    config.write_text(config.read_text() + "size: 1M\n")
    try:
        assert here("resume", str(own)).returncode == 0
    finally:
        record.write_bytes(before)


def test_a_runs_own_plan_is_trained_again_on_the_same_cluster(
    farspan: Farspan, own: Path, tmp_path: Path
) -> None:
    box = cluster(tmp_path / "box.yaml")
    again = ("train", "run.yaml", "--plan", str(own / "plan.json"), "--cluster")
    done = farspan(*again, box, "--run", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "plan.json").read_bytes() == (own / "plan.json").read_bytes()


@pytest.mark.slow
def test_a_runs_own_plan_is_trained_again_on_this_machine(
    farspan: Farspan, desk: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    again = tmp_path / "again"
    assert farspan("train", "run.yaml", "--run", str(first)).returncode == 0
    done = farspan(
        "train", str(first / "run.yaml"), "--plan", str(first / "plan.json"), "--run", str(again)
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("other", [{"name": "crate"}, {"kind": "cpu-amx"}])
def test_a_plan_of_other_devices_is_refused(
    here: Farspan, own: Path, tmp_path: Path, other: dict[str, str]
) -> None:
    words = (
        "train",
        "run.yaml",
        "--plan",
        str(own / "plan.json"),
        "--run",
        str(tmp_path / "run"),
        "--json",
    )
    done = here(*words, "--cluster", cluster(tmp_path / "other.yaml", **other))
    problem = json.loads(done.stdout)["problem"]
    assert (problem["code"], problem["what"]) == (
        "plan-mismatch",
        "the plan is for another cluster",
    )


def test_plan_for_devices_that_now_have_less_memory_is_refused(
    here: Farspan, own: Path, tmp_path: Path
) -> None:
    words = (
        "train",
        "run.yaml",
        "--plan",
        str(own / "plan.json"),
        "--run",
        str(tmp_path / "run"),
        "--json",
    )
    done = here(*words, "--cluster", cluster(tmp_path / "less.yaml", memory="50MB"))
    assert json.loads(done.stdout)["problem"]["code"] == "out-of-memory"
