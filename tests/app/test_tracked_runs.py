"""Real trainings in Weights & Biases and in MLflow, read back by their own libraries, which are not
installed beside farspan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farspan.app.track_process import TrackEnd
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import Step, Validated, read_events
from farspan.domain.struct_files import load
from farspan.report.history import follow_events
from tests.app import tracker_readers
from tests.cli.conftest import TINY, WORDS
from tests.environments import install_over
from tests.report.fake_run import resumed_run
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny", "SQLAlchemy", "alembic"),
}
STEPS = 300
CONFIG = (
    TINY.replace("steps: 4", f"steps: {STEPS}").replace(
        "validate_every: 2", "validate_every: 40, patience: 0"
    )
    + "checkpoint: {every: 0.2s}\n"
)
KEY = "local-0123456789abcdef0123456789abcdef01234567"
PASSWORD = "correct-horse"


def pinned(package: str) -> str:
    """A package with the version of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{package}=="))
    return line


@pytest.fixture(scope="session")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Interpreters that have farspan and a tracker's library, by the tracker's name."""
    interpreters = {}
    for name, packages in PACKAGES.items():
        python: Path | None = Path(sys.executable)
        if find_spec(name) is None:
            requirement = " ".join(map(pinned, packages))
            folder = tmp_path_factory.mktemp(name)
            python = install_over(requirement, folder, f"FARSPAN_TEST_{name.upper()}")
        if python is not None:
            interpreters[name] = python
    return interpreters


@pytest.fixture(params=PACKAGES)
def tracker(request: pytest.FixtureRequest, pythons: dict[str, Path]) -> str:
    if request.param not in pythons:
        pytest.skip(f"{request.param} cannot be installed here")
    return str(request.param)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name[:6] not in ("WANDB_", "MLFLOW")
    }
    return {
        **kept,
        "FARSPAN_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
        "WANDB_API_KEY": KEY,
        "WANDB_MODE": "offline",
    }


def read_back(python: Path, tracker: str, runs: Path, run: Path) -> list[dict[str, Any]]:
    """What the tracker has recorded of a run."""
    path = run / "trackers" if tracker == "wandb" else runs / "mlflow.db"
    words = [python, tracker_readers.__file__, tracker, path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    recorded: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return recorded


def curve(recorded: list[dict[str, Any]], tag: str) -> list[tuple[int, float]]:
    """The values of a tag in the order in which they were logged."""
    points = []
    for run in recorded:
        if "metrics" in run:
            points += [(step, value) for step, value, _ in run["metrics"][tag]]
        else:
            points += [(step, values[tag]) for step, values in run["points"] if tag in values]
    return points


def first_losses(run: Path, kind: type[Step | Validated]) -> list[tuple[int, float]]:
    """The loss of each step when it was made first."""
    losses = dict[int, float]()
    for event in read_events(run / "events.jsonl"):
        if isinstance(event, kind):
            losses.setdefault(event.step, event.loss)
    return sorted(losses.items())


def config_of(recorded: list[dict[str, Any]]) -> dict[str, str]:
    config = recorded[0].get("config") or recorded[0]["params"]
    return {key: str(value) for key, value in config.items()}


def files_with(text: str, folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def test_run_and_its_resumption_are_one_run(
    tracker: str, pythons: dict[str, Path], environment: dict[str, str], tmp_path: Path
) -> None:
    python = pythons[tracker]
    (tmp_path / "docs").mkdir()
    for number in range(40):
        words = [WORDS[(number * line + line) % len(WORDS)] for line in range(240)]
        (tmp_path / "docs" / f"{number:02}.txt").write_text(" ".join(words))
    (tmp_path / "run.yaml").write_text(CONFIG)
    run = RunFolder(tmp_path / "runs" / "papers")

    # Stopped on the way, and resumed.
    begin = [python, "-m", "farspan", "train", "--run", run.path]
    begin += ["--set", f"train.trackers=[{tracker}]"]
    job = subprocess.Popen(
        begin, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with job:
        wait_for(lambda: run.newest_checkpoint() > 0, "the first checkpoint", job)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130, output.decode()
    resume = [python, "-m", "farspan", "resume", run.path]
    done = subprocess.run(
        resume, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr

    recorded = read_back(python, tracker, run.path.parent, run.path)
    assert curve(recorded, "train/loss") == first_losses(run.path, Step)
    assert [step for step, _ in curve(recorded, "train/lr")] == list(range(1, STEPS + 1))
    assert curve(recorded, "val/loss") == first_losses(run.path, Validated)
    steps = follow_events(read_events(run.events)).steps
    read_so_far = [(timed.step.step, timed.tokens) for timed in steps]
    assert curve(recorded, "train/tokens") == read_so_far
    config = config_of(recorded)
    plan = run.load_plan()
    assert config["plan.technique"] == plan.technique and config["plan.hash"] == plan.hash
    assert config["model.d_model"] == "16" and config["train.steps"] == str(STEPS)
    identity = load(run.record, RunRecord).identity
    if tracker == "wandb":
        assert [part["id"] for part in recorded] == [identity, identity]
        assert [part["summary"]["state"] for part in recorded] == ["stopped", "finished"]
        summary = recorded[-1]["summary"]
        assert f"{python} -m wandb sync" in done.stdout + done.stderr
    else:
        (part,) = recorded
        assert part["tags"]["farspan.run"] == identity
        assert part["status"] == "FINISHED" and part["tags"]["state"] == "finished"
        assert part["metrics"]["train/loss"][0][2] > 0
        metrics = part["metrics"]
        summary = {
            tag.removeprefix("summary/"): points[-1][1]
            for tag, points in metrics.items()
            if tag.startswith("summary/")
        }
    assert summary["steps"] == STEPS and summary["run_s"] > 0
    assert 0 < summary["best_val_loss"] <= summary["val_loss"]
    assert {part["name"] for part in recorded} == {"papers"}
    assert files_with(KEY, run.path) == []


def track(
    python: Path, tracker: str, run: Path, end: TrackEnd, environment: dict[str, str]
) -> list[str]:
    """Send a run that has ended; the lines for people."""
    done = subprocess.run(
        [python, "-m", "farspan.app.track_process", run, tracker],
        input=msgspec.json.encode(end) + b"\n",
        capture_output=True,
        env=environment,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0
    return [json.loads(line)["text"] for line in done.stdout.splitlines()]


def test_curves_of_a_run_that_made_steps_again_do_not_go_back(
    tracker: str, pythons: dict[str, Path], environment: dict[str, str], tmp_path: Path
) -> None:
    run = resumed_run(tmp_path / "runs" / "recovered", steps=140)
    end = TrackEnd(problem="host-unreachable")
    track(pythons[tracker], tracker, run, end, environment)
    # A second time there is nothing to send.
    track(pythons[tracker], tracker, run, end, environment)
    recorded = read_back(pythons[tracker], tracker, run.parent, run)
    losses = first_losses(run, Step)
    assert curve(recorded, "train/loss") == losses
    assert [step for step, _ in losses] == list(range(1, 141))
    last = recorded[-1]
    if tracker == "wandb":
        assert last["summary"]["state"] == "failed" and last["exit_code"] == 1
        assert last["summary"]["problem"] == "host-unreachable"
    else:
        assert last["status"] == "FAILED" and last["tags"]["problem"] == "host-unreachable"


def test_wandb_without_a_key_or_a_server_writes_to_files(
    pythons: dict[str, Path], environment: dict[str, str], tmp_path: Path
) -> None:
    if "wandb" not in pythons:
        pytest.skip("wandb cannot be installed here")
    del environment["WANDB_MODE"]
    away = {**environment, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    keyless = {name: value for name, value in environment.items() if name != "WANDB_API_KEY"}
    for name, variables in (("away", away), ("keyless", keyless)):
        run = resumed_run(tmp_path / "runs" / name, steps=42)
        (note,) = track(pythons["wandb"], "wandb", run, TrackEnd(), variables)
        assert "wandb sync" in note and str(run) in note
        recorded = read_back(pythons["wandb"], "wandb", run.parent, run)
        assert curve(recorded, "train/loss") == first_losses(run, Step)
        assert KEY not in note and files_with(KEY, run) == []


def test_server_of_mlflow_that_is_away_is_reported_without_its_password(
    pythons: dict[str, Path], environment: dict[str, str], tmp_path: Path
) -> None:
    if "mlflow" not in pythons:
        pytest.skip("MLflow cannot be installed here")
    run = resumed_run(tmp_path / "runs" / "away", steps=42)
    environment["MLFLOW_TRACKING_URI"] = f"http://ada:{PASSWORD}@127.0.0.1:9"
    # Before the end comes it may be reported that the tracker fails.
    notes = track(pythons["mlflow"], "mlflow", run, TrackEnd(), environment)
    assert "the tracker mlflow lacks the end of this run" in notes[-1]
    assert PASSWORD not in " ".join(notes) and files_with(PASSWORD, run) == []
    # The same run once there is one.
    del environment["MLFLOW_TRACKING_URI"]
    assert track(pythons["mlflow"], "mlflow", run, TrackEnd(), environment) == []
    recorded = read_back(pythons["mlflow"], "mlflow", run.parent, run)
    assert curve(recorded, "train/loss") == first_losses(run, Step)
