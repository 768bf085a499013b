"""A job that is asked to end, whenever that is, saves the step that it stands at and leaves nothing
behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farspan.domain.results import Finished, Saved, Step, read_events
from tests.app.test_api import papers  # noqa: F401 - a fixture
from tests.launch.test_killed import processes

pytestmark = pytest.mark.slow

CONFIG = """\
data: papers
tokenizer: {vocab: 300}
model: {layers: 2, d_model: 32, heads: 2, context: 32}
train: {steps: 1000000, precision: fp32, batch: {global: 6}, validate_every: 30}
parallel: {workers: 2, technique: zero2}
checkpoint: {every: 200ms}
"""


@pytest.mark.usefixtures("papers")
@pytest.mark.parametrize("seed", range(5))
def test_a_signal_at_any_moment_saves_first(tmp_path: Path, seed: int) -> None:
    """Before there are workers, while they start, in steps, in validations and in saves."""
    rng = random.Random(seed)
    number, after_s = (
        rng.choice((signal.SIGTERM, signal.SIGINT)),
        (1.0, 4.0, 7.0, 9.0, 12.0)[seed] + rng.random(),
    )
    Path("run.yaml").write_text(CONFIG)
    words = [sys.executable, "-m", "farspan", "train", "--run", "job"]
    job = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    time.sleep(after_s)
    assert job.poll() is None, job.communicate()
    os.kill(job.pid, number)
    said, _ = job.communicate(timeout=60)
    events = (
        list(read_events(tmp_path / "job" / "events.jsonl"))
        if (tmp_path / "job" / "events.jsonl").exists()
        else []
    )
    steps = [event.step for event in events if isinstance(event, Step)]
    assert job.returncode in ((130,) if steps else (130, -number)), said
    if steps:
        assert isinstance(events[-1], Finished) and events[-1].reason == "interrupted", said
        assert max(event.step for event in events if isinstance(event, Saved)) == max(steps)
    assert not processes(str(tmp_path), "farspan.runtime")
