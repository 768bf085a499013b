"""A run goes on by another technique and on another cluster: the same losses, and its weights can
be used meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import farspan
from farspan.domain.config import RunConfig
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Step, read_events
from farspan.domain.struct_files import load_yaml
from tests.app.test_api import papers  # noqa: F401 - a fixture
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

CONFIG = """\
data: papers
tokenizer: {vocab: 300}
model: {layers: 2, d_model: 32, heads: 2, context: 32}
train: {steps: 400, precision: fp32, batch: {global: 6}, patience: 0}
parallel: {workers: 2, technique: zero2}
checkpoint: {every: 500ms}
"""
#: Three workers on this machine.
OTHER = "sites: {a: {hosts: {localhost: {devices: [{kind: cpu-avx2, memory: 4GB, count: 3}]}}}}\n"


def losses(path: Path) -> dict[int, float]:
    """By step; of one that was made twice the later."""
    return {
        event.step: event.loss
        for event in read_events(path / "events.jsonl")
        if isinstance(event, Step)
    }


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farspan", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def stopped_early(path: str) -> None:
    """Train until a checkpoint is there, then ask it to save and end."""
    job = subprocess.Popen(
        [sys.executable, "-m", "farspan", "train", "--run", path], stdout=subprocess.DEVNULL
    )
    wait_for(lambda: list(Path(path).glob("checkpoints/step-*")), "a checkpoint", job)
    job.send_signal(signal.SIGINT)
    assert job.wait(LIMIT_S) == 130


@pytest.mark.usefixtures("papers")
def test_run_resumed_with_another_technique_reaches_the_same_losses(tmp_path: Path) -> None:
    Path("run.yaml").write_text(CONFIG)
    Path("other.yaml").write_text(OTHER)
    done = call("train", "--run", "whole")
    assert done.returncode == 0, done.stderr
    stopped_early("moved")
    saved = max(losses(Path("moved")))
    refused = call("resume", "moved", "--technique", "pipshard")
    assert refused.returncode == 15 and "use pipeshard" in refused.stderr
    moved = call("resume", "moved", "--cluster", "other.yaml", "--technique", "pipeshard")
    assert moved.returncode == 0, moved.stderr
    assert f"{400 - saved} steps to go by pipeshard on 3 devices" in moved.stdout
    assert "; before: zero2 on 2 devices, " in moved.stdout
    ours = losses(Path("moved"))
    wanted = losses(Path("whole"))
    assert ours.keys() == wanted.keys()
    assert all(ours[step] == pytest.approx(wanted[step], rel=1e-5) for step in range(1, saved + 51))
    assert ours[400] == pytest.approx(wanted[400], rel=1e-3)
    run = RunFolder(Path("moved"))
    first = farspan.Run("whole").folder.load_plan()
    assert [file.stem for file in run.plans.iterdir()] == [first.hash]
    assert run.load_plan().technique == "pipeshard" and run.load_plan().train == first.train
    parallel = load_yaml(run.config, RunConfig).parallel
    assert (parallel.cluster, parallel.technique, parallel.allow) == ("other.yaml", "pipeshard", ())
    measured = json.loads(call("report", "moved", "--json").stdout)["measurement"]
    assert measured["steps"] == 400
    assert call("resume", "moved", "--technique", "data").stdout.startswith("this run is finished")


@pytest.mark.usefixtures("papers")
def test_the_newest_weights_of_a_running_job_can_be_used(tmp_path: Path) -> None:
    Path("run.yaml").write_text(
        CONFIG.replace("steps: 400", "steps: 1000000").replace("500ms", "100ms")
    )
    words = [sys.executable, "-m", "farspan", "train", "--run", "job"]
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: list(Path("job").glob("checkpoints/step-*")), "a checkpoint", job)
        run = farspan.Run("job")
        for _ in range(5):
            assert run.generate("w", tokens=3)
        assert (run.export("model") / "model.safetensors").exists()
        assert run.embed(evaluate=False).embedded > 0
        before = run.folder.plan.read_bytes()
        busy = call("resume", "job", "--technique", "data")
        assert busy.returncode == 33 and run.folder.plan.read_bytes() == before, busy.stderr
        assert job.poll() is None
    finally:
        os.kill(job.pid, signal.SIGINT)
        assert job.wait(LIMIT_S) == 130
