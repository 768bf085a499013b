"""A job that is asked to end at any moment saves its step and leaves no process behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farspan.domain.results import Event, Finished, Saved, Step, Validated, read_events
from tests.app.test_api import papers  # noqa: F401 - a fixture
from tests.launch.test_killed import processes
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

CONFIG = """\
data: papers
tokenizer: {vocab: 300}
model: {layers: 2, d_model: 32, heads: 2, context: 32}
train: {steps: 1000000, precision: fp32, batch: {global: 6}, validate_every: 30}
parallel: {workers: 2, technique: zero2}
checkpoint: {every: 200ms}
"""


def recorded_events(folder: Path) -> list[Event]:
    """Events of the job so far."""
    file = folder / "job" / "events.jsonl"
    return list(read_events(file)) if file.exists() else []


def has_event(kind: type, count: int = 1) -> Callable[[Path], bool]:
    return lambda folder: sum(isinstance(event, kind) for event in recorded_events(folder)) >= count


#: Something to wait for before the signal.
MOMENTS = {
    "text is prepared": lambda folder: (folder / "cache").exists(),
    "workers start": lambda folder: bool(processes(str(folder), "farspan.runtime.worker")),
    "a first step": has_event(Step),
    "a validation": has_event(Validated),
    "a third save": has_event(Saved, 3),
}


@pytest.mark.usefixtures("papers")
@pytest.mark.parametrize(
    ("moment", "number"), zip(MOMENTS, itertools.cycle((signal.SIGTERM, signal.SIGINT)))
)
def test_a_signal_at_any_moment_saves_first(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    Path("run.yaml").write_text(CONFIG)
    words = [sys.executable, "-m", "farspan", "train", "--run", "job"]
    job = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    wait_for(lambda: MOMENTS[moment](tmp_path), moment, job)
    # Anywhere in what comes next.
    time.sleep(random.random())
    assert job.poll() is None, job.communicate()
    os.kill(job.pid, number)
    output, _ = job.communicate(timeout=LIMIT_S)
    events = recorded_events(tmp_path)
    steps = [event.step for event in events if isinstance(event, Step)]
    assert job.returncode in ((130,) if steps else (130, -number)), output
    if steps:
        assert isinstance(events[-1], Finished) and events[-1].reason == "interrupted", output
        assert max(event.step for event in events if isinstance(event, Saved)) == max(steps)
    assert not processes(str(tmp_path), "farspan.runtime")
