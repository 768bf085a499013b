"""Whatever is killed with SIGKILL, launcher, actor or what lies between: nobody trains on, what was
done is saved, and who was lost is named."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.problems import Problem
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Step, read_events
from farspan.runtime.checkpoint import checkpoint_folder
from tests import tiny
from tests.launch.test_launchers import LONG
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

#: Launches a run; prints the problem that it ends with, or null. SIGUSR1 is as Ctrl-C twice.
DRIVE = """
import signal, sys, msgspec
from pathlib import Path
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.launch.launchers import launch_workers
run, problem = RunFolder(Path(sys.argv[1])), None
try:
    with launch_workers(sys.argv[2], run.load_plan(), run, load_cluster_json(run.cluster)) as workers:
        signal.signal(signal.SIGUSR1, lambda number, frame: (workers.interrupt(), workers.interrupt()))
        list(workers)
except Refusal as refusal:
    problem = refusal.problem
print(msgspec.json.encode(problem).decode())
"""  # noqa: E501


def started(
    tmp_path: Path, launcher: str, trained: bool = True
) -> tuple[RunFolder, subprocess.Popen[bytes]]:
    """A run of two workers that would go on for hours, and the process that launched it, once it
    trains, or has started its workers."""
    plan = tiny.plan(LONG, rows=(4, 4), micro_rows=4)
    run = tiny.run_folder(tmp_path / "run", plan)
    here = tiny.this_machine(plan).with_hosts(lambda host: replace(host, address="127.0.0.1"))
    save_cluster_json(here, run.cluster)
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVE, str(run.path), launcher], stdout=subprocess.PIPE
    )

    def trains() -> bool:
        assert process.poll() is None, process.communicate()
        return run.events.exists() and any(isinstance(one, Step) for one in read_events(run.events))

    wait_for(trains if trained else lambda: len(workers_of(run)) == 2, "the run's workers")
    return run, process


def processes(*words: str) -> dict[int, int]:
    """Processes whose command line has all these words, and their parents."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().decode().split("\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if all(any(word in part for part in line) for word in words):
            found[int(process.name)] = parent
    return found


def workers_of(run: RunFolder) -> dict[int, int]:
    return {
        pid: parent
        for pid, parent in processes(str(run.path), "farspan.runtime.worker").items()
        if not processes("torch.distributed.run", str(run.path)).keys() & {pid}
        and pid not in holders(run)
    }


def holders(run: RunFolder) -> dict[int, int]:
    return processes(str(run.path), "farspan.launch.stop_on_stdin")


def ends_and_has_saved(run: RunFolder) -> None:
    """All processes of the run end, its lock is free, and the step that it stood at is saved."""
    wait_for(lambda: not processes(str(run.path)), "no process of the run is left")
    *_, last = read_events(run.events)
    assert isinstance(last, Finished) and last.reason == "interrupted" and last.step < LONG.steps
    assert any(
        checkpoint_folder.verify(path) for path in checkpoint_folder.newest_first(run.checkpoints)
    )
    with open(run.lock, "ab") as lock:
        wait_for(lambda: free(lock.fileno()), "the lock is free")


def free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def said(process: subprocess.Popen[bytes]) -> Problem:
    out, _ = process.communicate(timeout=LIMIT_S)
    problem = msgspec.json.decode(out, type=Problem | None)
    assert problem is not None, "it says that all went well"
    return problem


@pytest.fixture(autouse=True)
def _none_left(tmp_path):
    yield
    for pid in processes(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


def needs(launcher: str) -> None:
    if launcher == "ray":
        pytest.importorskip("ray", reason="waits for farspan[ray]")


@pytest.mark.parametrize("launcher", ["local", "torchrun", "ray"])
def test_the_end_of_a_killed_launcher_asks_its_workers_to_save_and_end(tmp_path, launcher):
    needs(launcher)
    run, process = started(tmp_path, launcher)
    process.kill()
    process.communicate()
    ends_and_has_saved(run)


def test_workers_whose_launcher_is_killed_while_they_start_do_not_train_on(tmp_path):
    """They know their parent only once Python has started."""
    run, process = started(tmp_path, "local", trained=False)
    process.kill()
    process.communicate()
    ends_and_has_saved(run)


@pytest.mark.parametrize("killed", ["held", "torchrun"])
def test_workers_save_and_end_when_torchrun_or_its_holder_is_killed(tmp_path, killed):
    run, process = started(tmp_path, "torchrun")
    (holder,) = holders(run)
    agent = next(
        pid for pid, parent in processes("torch.distributed.run").items() if parent == holder
    )
    os.kill(holder if killed == "held" else agent, signal.SIGKILL)
    problem = said(process)
    assert (problem.code, problem.what) == ("worker-lost", "rank 0 on here was lost")
    assert "SIGKILL" in problem.fact and problem.remedy == f"farspan resume {run.path}"
    ends_and_has_saved(run)


def test_second_stop_request_ends_workers_at_once_without_a_checkpoint(tmp_path):
    run, process = started(tmp_path, "torchrun")
    process.send_signal(signal.SIGUSR1)
    problem = said(process)
    wait_for(lambda: not processes(str(run.path)), "no process of the run is left")
    assert problem.code in ("interrupted", "worker-lost") and not list(
        run.checkpoints.glob("step-*")
    )


@pytest.mark.parametrize("killed", ["actor", "worker", "raylet"])
def test_killed_ray_worker_actor_or_raylet_ends_the_run_as_worker_lost(tmp_path, killed):
    needs("ray")
    run, process = started(tmp_path, "ray")
    (worker, actor), *_ = sorted(workers_of(run).items())
    family = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    (raylet,) = processes("/raylet/raylet").keys() & family
    pid = {"actor": actor, "worker": worker, "raylet": raylet}[killed]
    os.kill(pid, signal.SIGKILL)
    problem = said(process)
    assert (problem.code, problem.exit_code) == ("worker-lost", 24)
    assert problem.remedy == f"farspan resume {run.path}"
    if killed != "raylet":
        assert re.fullmatch(r"rank [01] on here was lost", problem.what)
    wait_for(lambda: not processes(str(run.path)), "no process of the run is left")
