"""`farspan train --until-done`, as real processes: it is killed, given again, and told of."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farspan.app.job_units import cron_lines, systemd_unit
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Step, read_events
from tests.cli.conftest import TINY, Farspan
from tests.waiting import LIMIT_S, wait_for

STEPS = 300
CONFIG = (
    TINY.replace("steps: 4", f"steps: {STEPS}").replace("validate_every: 2", "validate_every: 1000")
    + "checkpoint: {every: 0.2s}\nnotify: 'echo \"$FARSPAN_EVENT $FARSPAN_RUN\" >> told.txt'\n"
)


@pytest.fixture
def place(desk: Path, tmp_path: Path) -> Path:
    config = CONFIG.replace("data: docs", f"data: {desk / 'docs'}")
    (tmp_path / "run.yaml").write_text(config)
    return tmp_path


def losses(run: RunFolder) -> dict[int, float]:
    """By step; of one that was made twice the later."""
    return {event.step: event.loss for event in read_events(run.events) if isinstance(event, Step)}


def test_same_command_begins_a_run_goes_on_after_a_kill_and_reports_it(
    place: Path, farspan: Farspan, environment: dict[str, str]
) -> None:
    words = ["train", "run.yaml", "--run", "runs/killed", "--until-done"]
    run = RunFolder(place / "runs" / "killed")
    job = subprocess.Popen(
        [sys.executable, "-m", "farspan", *words],
        cwd=place,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: run.newest_checkpoint() > 0, "the first checkpoint", job)
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.wait(LIMIT_S)
    assert not (place / "told.txt").exists()
    done = farspan(*words, cwd=place)
    assert done.returncode == 0, done.stderr
    again = farspan(*words, cwd=place)
    assert again.returncode == 0 and "this run is finished" in again.stdout
    assert (place / "told.txt").read_text().split() == ["finished", str(run.path)]

    # The steps of a run that nobody has killed.
    calm = farspan("train", "run.yaml", "--run", "runs/calm", "--until-done", cwd=place)
    assert calm.returncode == 0, calm.stderr
    assert losses(run) == losses(RunFolder(place / "runs" / "calm"))


def test_folder_of_another_run_yaml_is_refused(place: Path, farspan: Farspan) -> None:
    few = ["--set", "train.steps=2", "--run", "runs/few", "--until-done"]
    assert farspan("train", *few, cwd=place).returncode == 0
    few[1] = "train.steps=3"
    other = farspan("train", *few, cwd=place)
    assert other.returncode == 18
    assert "train.steps is 3, was 2" in other.stderr


@pytest.mark.slow
def test_start_that_was_killed_while_it_made_the_folder_is_no_hindrance(
    place: Path, farspan: Farspan
) -> None:
    words = ["train", "--set", "train.steps=2", "--run", "runs/half", "--until-done"]
    assert farspan(*words, cwd=place).returncode == 0
    run = RunFolder(place / "runs" / "half")
    for path in (run.plan, run.events, run.epochs, run.report):
        path.unlink()
    for path in (run.checkpoints, run.tensorboard):
        shutil.rmtree(path)
    assert farspan(*words, cwd=place).returncode == 0
    assert len(losses(run)) == 2


def test_a_failure_is_notified_with_its_cause(place: Path, here: Farspan) -> None:
    (place / "run.yaml").write_text(
        (place / "run.yaml").read_text().replace("$FARSPAN_RUN", "$FARSPAN_MESSAGE")
    )
    failed = here("train", "--set", "data=missing", "--until-done", cwd=place)
    assert failed.returncode == 10
    told = (place / "told.txt").read_text()
    assert told.startswith("failed error[path-missing]: ") and "missing" in told


def test_sites_are_given_up_by_name_and_in_a_run_alone(place: Path, here: Farspan) -> None:
    new = here("train", "--without", "utah", cwd=place)
    assert new.returncode == 2 and "--until-done --without utah" in new.stderr


@pytest.mark.parametrize("name", ["papers", "50% of $HOME", "a 'quoted' \"name\" \\ too"])
def test_printed_units_start_the_same_words(name: str) -> None:
    words = ["train", f"/data/{name}/run.yaml", "--run", f"/runs/{name}", "--until-done"]
    (start,) = re.findall(r"^ExecStart=(.*)$", systemd_unit(name, words), re.MULTILINE)
    # As systemd reads it: C's escapes, % and $ doubled.
    assert shlex.split(start.replace("%%", "%").replace("$$", "$"))[-len(words) :] == words
    *_, line = cron_lines(name, words).splitlines()
    minute = line.removeprefix("*/10 * * * * ").replace(r"\%", "%")
    assert minute != line
    assert shlex.split(minute.partition(" && ")[2].partition(" >>")[0])[-len(words) :] == words


def test_print_unit_starts_nothing(place: Path, here: Farspan) -> None:
    for kind, sign in {"systemd": "[Service]", "cron": "@reboot", "slurm": "#SBATCH"}.items():
        printed = here("train", "--print-unit", kind, cwd=place)
        assert printed.returncode == 0 and sign in printed.stdout, printed
    assert not (place / "runs").exists()
