"""Workers that a killed job has left: who resumes the run waits for them, and says for which."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.app import jobs
from farspan.app.jobs import Job, register_job, wait_for_orphans
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load, save
from farspan.launch.folder_lock import lock_holders
from farspan.launch.run_lock import Lease
from tests import tiny
from tests.launch.test_launchers import TRAIN
from tests.waiting import LIMIT_S, wait_for

#: Holds the lock of a run, as a worker does, until its input ends.
HOLD = """
import sys
from pathlib import Path
from farspan.launch.folder_lock import lock_file
lock = lock_file(Path(sys.argv[1]), "held", Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose job was killed."""
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    with register_job(run):
        job = load(run.job, Job)
    assert job.began is not None
    save(replace(job, began=job.began - 1), run.job)
    assert jobs.job_of(run) is None
    return run


@pytest.fixture
def orphan(run: RunFolder) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_workers_that_a_killed_job_has_left_are_named_and_waited_for(run, orphan):
    said = list[str]()
    waiting = list[bool]()

    def wait() -> None:
        wait_for_orphans(run, said.append)
        waiting.append(False)

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_for(lambda: said, "it says for which it waits")
    assert lock_holders(run.lock) == [orphan.pid] and f"(process {orphan.pid})" in said[0]
    assert not waiting
    orphan.communicate(timeout=LIMIT_S)
    waiter.join(LIMIT_S)
    assert len(said) == 1 and waiting
    Lease(run).close()


def test_after_the_limit_the_run_is_busy_as_before(run, orphan):
    wait_for_orphans(run, lambda text: None, timeout_s=0.0)
    with pytest.raises(Refusal) as refused:
        Lease(run)
    assert refused.value.problem.code == "run-busy"


@pytest.mark.parametrize("record", ["living", "none", "damaged"])
def test_a_run_that_is_busy_otherwise_is_not_waited_for(run, orphan, record):
    """Its job lives, or is another than the commands'."""
    if record == "living":
        with register_job(replaced := RunFolder(run.path)):
            pass
        assert replaced.job.exists()
        job = load(run.job, Job)
        save(replace(job, began=jobs.process_began(os.getpid())), run.job)
        assert jobs.job_of(run) is not None
    elif record == "none":
        run.job.unlink()
    else:
        run.job.write_bytes(b"{")
    said = list[str]()
    wait_for_orphans(run, said.append)
    assert not said
