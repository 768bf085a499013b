"""A run that loses a worker starts again in place, with every launcher."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.domain.results import Finished, Recovered, Saved, Step
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_killed import needs, workers_of
from tests.launch.test_launchers import TRAIN

pytestmark = pytest.mark.slow

STEPS = replace(TRAIN, steps=300, validate_every=300, checkpoint_every_s=0.3)


def watched(path: Path, launcher: str, *, kill: bool) -> tuple[Watched, list[float]]:
    """A run, of which a worker is killed once there is a checkpoint; and when that was."""
    killed = list[float]()

    def at_step(run: Watched, step: int) -> None:
        if (
            kill
            and not killed
            and step >= 60
            and any(isinstance(event, Saved) for event in run.events)
        ):
            os.kill(max(workers_of(run.run)), signal.SIGKILL)
            killed.append(time.time())

    plan = tiny.plan(STEPS, rows=(4, 4), micro_rows=4)
    return Watched(made(path, plan, launcher=launcher), at_step), killed


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_a_killed_worker_costs_time_and_no_losses(tmp_path, launcher, capsys):
    needs(launcher)
    calm, _ = watched(tmp_path / "calm" / "run", "local", kill=False)
    assert isinstance(calm.train(), Finished)
    run, killed = watched(tmp_path / "hurt" / "run", launcher, kill=True)
    ending = run.train()
    assert isinstance(ending, Finished) and ending.reason == "done" and len(run.faulted) == 1
    assert run.losses == calm.losses
    again = next(event for event in run.events if isinstance(event, Recovered))
    back = next(event for event in run.events if isinstance(event, Step) and event.at >= again.at)
    with capsys.disabled():
        print(f"\n{launcher}: the next step {back.at - killed[0]:.1f} s after a worker was killed")
