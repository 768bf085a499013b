"""A job that is asked to end at any moment saves its step and leaves no process behind. One whose
worker is preempted goes on."""

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

from farspan.domain.run_events import (
    Event,
    Finished,
    Recovered,
    Saved,
    Step,
    Validated,
    read_events,
)
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


@pytest.mark.usefixtures("papers")
def test_a_job_goes_on_without_a_step_lost_when_one_worker_is_signalled_and_stops_when_all_are(
    tmp_path: Path,
) -> None:
    Path("run.yaml").write_text(CONFIG.replace("every: 200ms", "every: 1h"))
    words = [sys.executable, "-m", "farspan", "train", "--run", "job"]
    job = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )

    def signal_workers(count: int) -> None:
        """Send SIGTERM to so many workers, before any of them acts."""
        pids = sorted(processes(str(tmp_path), "farspan.runtime.worker"))[-count:]
        assert len(pids) == count
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)

    wait_for(lambda: MOMENTS["a first step"](tmp_path), "a first step", job)
    signal_workers(1)
    wait_for(lambda: has_event(Recovered)(tmp_path), "the run goes on", job)
    known = len(recorded_events(tmp_path))
    wait_for(lambda: len(recorded_events(tmp_path)) > known + 5, "further steps", job)
    signal_workers(2)
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130, output
    assert "was preempted" in output and "0 steps lost" in output
    events = recorded_events(tmp_path)
    steps = [event.step for event in events if isinstance(event, Step)]
    assert steps == list(range(1, len(steps) + 1)), "no step is lost or made twice"
    assert isinstance(events[-1], Finished) and events[-1].reason == "interrupted"
    for name in ("status", "report"):
        shown = subprocess.run(
            [sys.executable, "-m", "farspan", name, "job"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert "was preempted, 0 steps lost" in shown.stdout, shown.stdout + shown.stderr
    assert "was preempted · 0 steps and" in Path("job", "report.html").read_text()
    assert not processes(str(tmp_path), "farspan.runtime")
