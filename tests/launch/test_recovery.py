"""A run that loses a worker starts again in place, with every launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.domain.run_events import Finished, Recovered, Saved
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_killed import needs, workers_of
from tests.launch.test_launchers import TRAIN

pytestmark = pytest.mark.slow

#: Longer than the test waits.
ENDLESS = replace(TRAIN, steps=100_000, validate_every=100_000, checkpoint_every_s=0.3)
#: Steps after the last one before the fault.
MORE = 20


def train(path: Path, launcher: str, at_step: Callable[[Watched, int], None]) -> Watched:
    """A run of two workers, until `at_step` stops it."""
    plan = tiny.plan(ENDLESS, rows=(4, 4), micro_rows=4)
    run = Watched(made(path, plan, launcher=launcher), at_step)
    ending = run.train()
    assert isinstance(ending, Finished) and ending.reason == "interrupted"
    return run


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_run_that_recovers_from_a_killed_worker_has_the_same_losses(tmp_path, launcher):
    needs(launcher)
    killed = list[int]()

    def kill_then_stop(run: Watched, step: int) -> None:
        if not killed and any(isinstance(event, Saved) for event in run.events):
            killed.append(max(workers_of(run.run)))
            os.kill(killed[0], signal.SIGKILL)
        elif run.faulted and step == run.faulted[0].step + MORE:
            run.supervisor.request_stop()

    hurt = train(tmp_path / "hurt" / "run", launcher, kill_then_stop)
    assert len(hurt.faulted) == 1
    assert any(isinstance(event, Recovered) for event in hurt.events)
    last = max(hurt.losses)

    def stop_at_last(run: Watched, step: int) -> None:
        if step == last:
            run.supervisor.request_stop()

    calm = train(tmp_path / "calm" / "run", "local", stop_at_last)
    assert hurt.losses == {step: calm.losses[step] for step in range(1, last + 1)}
