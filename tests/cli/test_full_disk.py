"""`farspan train` where the disk is full before the first step: it says so, leaves nothing behind,
and the same command trains when there is space."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from farspan.app.jobs import remove_unbegun
from tests import tiny
from tests.launch.test_launchers import TRAIN
from tests.runtime.test_unsaved import mountable
from tests.waiting import LIMIT_S

#: Gives the same command twice, on a disk of its own that is too small first, and prints what it
#: says as JSON, and what is in the run's folder then.
TWICE = """
disk=$1 size=$2; shift 2
mount -t tmpfs -o size=$size none "$disk" || exit 99
"$@" --json; echo; echo "$?" >&2
find "$disk" -mindepth 1
echo ---
mount -o remount,size=64m "$disk" || exit 99
"$@" --json
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    # Too little for the run's own files; for its first events; for its checkpoints.
    [("16k", ()), ("72k", ()), ("3m", ()), ("3m", ("--detach",))],
)
def test_command_that_found_a_full_disk_works_again_when_there_is_space(
    desk: Path, environment: dict[str, str], tmp_path: Path, size: str, options: tuple[str, ...]
):
    if not mountable():
        pytest.skip("waits for a system that lets this user have mounts of its own (unshare -rm)")
    train = [sys.executable, "-m", "farspan", "train", "--run", str(tmp_path / "run"), *options]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", TWICE, "sh", str(tmp_path), size, *train],
        cwd=desk,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    first, second = done.stdout.split("---\n")
    answer, *left = first.splitlines()
    problem = json.loads(answer)["problem"]
    assert problem["code"] == "disk-full", (done.stdout, done.stderr)
    assert not any(left), left
    assert done.returncode == 0 and "problem" not in json.loads(second), done.stdout + done.stderr


def test_only_files_of_the_run_itself_are_removed(tmp_path: Path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    (run.path / "notes.txt").write_text("mine")
    (run.logs / "job.log").write_text("said")
    remove_unbegun(run)
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]
    assert (tmp_path / ".run.job.log").read_text() == "said"
    (run.path / "notes.txt").unlink()
    remove_unbegun(run)
    assert not run.path.exists()
