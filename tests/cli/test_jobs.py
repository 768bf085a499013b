"""Jobs that outlive their terminal: started, looked at, stopped, killed, and taken up again, as
real processes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import farspan as api
from farspan.app import jobs
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load, save
from farspan.launch.process_began import process_began
from tests.cli.conftest import TINY, Farspan
from tests.waiting import LIMIT_S, wait_for

pytestmark = pytest.mark.slow

#: More steps than anybody waits for.
LONG = TINY.replace("steps: 4", "steps: 10_000_000").replace(
    "validate_every: 2", "validate_every: 1_000_000"
)
#: A sitecustomize that holds a job before it plans: its process writes `held` into `folder`, and
#: goes on once `free` is there.
HOLD = """
import sys, time
from pathlib import Path
folder = Path({folder!r})
class Hold:
    def find_spec(self, name, path=None, target=None):
        if name == "farspan.app.training":
            (folder / "held").touch()
            while not (folder / "free").exists():
                time.sleep(0.02)
sys.meta_path.insert(0, Hold())
"""


def workers(run: RunFolder) -> list[int]:
    """The processes that have a run's folder as a word of their command, the job's own left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"farspan.runtime.worker" in words and str(run.path).encode() in words:
            found.append(int(entry.parent.name))
    return found


@pytest.fixture(scope="module")
def office(desk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder whose run.yaml asks for a run without end. No job there is left behind."""
    folder = tmp_path_factory.mktemp("office")
    (folder / "run.yaml").write_text(LONG.replace("data: docs", f"data: {desk / 'docs'}"))
    yield folder
    for record in folder.glob("runs/*/job.json"):
        end(RunFolder(record.parent))


def take_terminal() -> None:
    """Make standard input the controlling terminal of a process that ends when it hangs up."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # It is ignored under nohup.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def end(run: RunFolder) -> None:
    """End the run's job at once."""
    while (job := jobs.job_of(run)) is not None:
        os.kill(job.pid, signal.SIGTERM)
        wait_for(lambda job=job: jobs.job_of(run) != job, "the job's end")
    wait_for(lambda: not jobs.is_active(run), "the job's end")


@pytest.fixture
def held(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Variables with which a job waits before it plans, until `free` is in `tmp_path`."""
    (tmp_path / "sitecustomize.py").write_text(HOLD.format(folder=str(tmp_path)))
    return {**environment, "PYTHONPATH": str(tmp_path)}


@pytest.fixture(scope="module")
def call(farspan: Farspan, office: Path) -> Farspan:
    """Runs farspan in the office, at 80 columns."""
    return lambda *words, **more: farspan(*words, cwd=office, COLUMNS="80", **more)


@pytest.fixture(scope="module")
def stopped(call: Farspan, office: Path) -> RunFolder:
    """A run that was started detached, and stopped."""
    run = RunFolder(office / "runs" / "long")
    done = call("train", "--detach", "--run", str(run.path))
    assert done.returncode == 0, done.stderr
    assert f"farspan logs -f {run.path}" in done.stdout and "predicted" in done.stdout
    done = call("stop", str(run.path))
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def going(stopped: RunFolder, call: Farspan) -> Iterator[RunFolder]:
    """The same, as it goes on; ended afterwards."""
    done = call("resume", str(stopped.path), "--detach")
    assert done.returncode == 0, done.stderr
    yield stopped
    end(stopped)


def state(call: Farspan, run: RunFolder) -> dict[str, Any]:
    done = call("status", str(run.path), "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["runs"]
    return dict(found)


def test_detached_job_saves_when_stopped_and_resumes_from_that_step(
    call: Farspan, going: RunFolder
):
    begun = state(call, going)
    assert (begun["state"], begun["job"]["host"]) == ("running", socket.gethostname())
    pid = begun["job"]["pid"]
    assert os.getsid(pid) == pid != os.getsid(0), "a session of its own"
    assert (Path("/proc") / str(pid) / "fd/0").readlink() == Path("/dev/null")
    wait_for(lambda: state(call, going)["step"] > begun["step"], "further steps")
    text = call("status", str(going.path)).stdout
    assert f"process {pid} on" in text and "tokens/s" in text and "time left" in text
    done = call("stop", str(going.path), "--json")
    ended = json.loads(done.stdout)
    assert (done.returncode, ended["state"], ended["reason"]) == (0, "stopped", "interrupted")
    assert ended["saved_step"] == ended["step"] > begun["saved_step"]
    assert not workers(going) and not going.job.exists()
    assert call("resume", str(going.path), "--detach", "--json").returncode == 0
    again = state(call, going)
    assert again["state"] == "running" and again["step"] > ended["step"]
    assert f"resumed after step {ended['step']:,}" in (going.logs / "job.log").read_text()


def test_logs_follow_a_job_to_its_end_and_have_the_words_of_train(
    going: RunFolder, environment: dict[str, str], call: Farspan
):
    words = [sys.executable, "-m", "farspan", "logs", "-f", str(going.path)]
    with (
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as events,
        subprocess.Popen(
            [*words, "--rank", "0"], env=environment, stdout=subprocess.PIPE
        ) as worker,
    ):
        assert events.stdout is not None and events.stdout.readline().startswith(
            "step 1/10,000,000 · loss"
        )
        assert api.Run(going.path).stop().state == "stopped"
        assert events.stdout.read().splitlines()[-1].startswith("step ")
        assert events.wait(LIMIT_S) == worker.wait(LIMIT_S) == 0
    said = call("logs", str(going.path)).stdout.splitlines()
    assert " · interrupted after " in said[-1] and " · saved " in said[-2]
    assert (going.logs / "job.log").read_text().count(said[-1]) == 1
    assert call("logs", str(going.path), "--rank", "7").returncode == 10


def test_a_killed_job_is_lost_and_its_workers_save(call: Farspan, going: RunFolder):
    job = jobs.job_of(going)
    assert job is not None
    os.kill(job.pid, signal.SIGKILL)
    wait_for(lambda: not jobs.is_active(going), "the job's end")
    found = state(call, going)
    assert (found["state"], found["job"]["pid"]) == ("lost", job.pid)
    assert found["saved_step"] == found["step"] and not workers(going)
    assert f"process {job.pid} on {job.host} is gone" in call("status", str(going.path)).stdout
    assert call("stop", str(going.path)).returncode == 44


def test_resume_waits_for_the_workers_of_a_killed_job(
    call: Farspan, going: RunFolder, environment: dict[str, str]
):
    job = jobs.job_of(going)
    (worker,) = workers(going)
    assert job is not None
    os.kill(worker, signal.SIGSTOP)
    os.kill(job.pid, signal.SIGKILL)
    wait_for(lambda: jobs.job_of(going) is None, "the job's end")
    resumed = subprocess.Popen(
        [sys.executable, "-m", "farspan", "resume", str(going.path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert resumed.stdout is not None
        said = next((line for line in resumed.stdout if "its workers have saved" in line), "")
        assert f"process {worker}" in said
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: jobs.job_of(going), "the job that goes on", resumed)
        begun = state(call, going)["step"]
        wait_for(lambda: state(call, going)["step"] > begun, "further steps", resumed)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)
        resumed.send_signal(signal.SIGTERM)
        resumed.communicate(timeout=LIMIT_S)
    assert resumed.returncode == 130


def test_a_worker_that_is_killed_is_followed_by_another(call: Farspan, going: RunFolder):
    (worker,) = workers(going)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: workers(going) and workers(going) != [worker], "another worker")
    begun = state(call, going)["step"]
    wait_for(lambda: state(call, going)["step"] > begun, "further steps")
    assert re.search(
        r"recovered after [\d.]+ \w+: rank 0 on .* was lost", call("logs", str(going.path)).stdout
    )


def test_the_problem_of_a_job_is_kept(call: Farspan, stopped: RunFolder):
    stopped.config.write_text(stopped.config.read_text() + "on_fault: stop\n")
    assert call("resume", str(stopped.path), "--detach").returncode == 0
    (worker,) = workers(stopped)
    going = stopped
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not jobs.is_active(going), "the job's end")
    found = state(call, going)
    assert (found["state"], found["problem"]["code"], found["problem"]["signal"]) == (
        "failed",
        "worker-lost",
        "SIGKILL",
    )
    for command in ("status", "logs"):
        assert "error[worker-lost]: rank 0" in call(command, str(going.path)).stdout


def test_now_is_now_and_another_job_is_refused_meanwhile(call: Farspan, going: RunFolder):
    job = jobs.job_of(going)
    refused = call("resume", str(going.path), "--detach")
    assert (
        refused.returncode == 33
        and refused.stderr.count("error[run-busy]") == 1
        and jobs.job_of(going) == job
    )
    (worker,) = workers(going)
    os.kill(worker, signal.SIGSTOP)  # It will not save.
    done = call("stop", str(going.path), "--now", "--json")
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    assert (ended["state"], ended["problem"]) == ("stopped", None) and ended["saved_step"] < ended[
        "step"
    ]
    assert not workers(going)


def test_stop_reports_a_job_that_does_not_end_in_time_as_busy(call: Farspan, going: RunFolder):
    job = jobs.job_of(going)
    assert job is not None
    os.kill(job.pid, signal.SIGSTOP)
    try:
        refused = call("stop", str(going.path), "--timeout", "1s")
        assert refused.returncode == 33 and f"farspan stop {going.path} --now" in refused.stderr
    finally:
        os.kill(job.pid, signal.SIGCONT)
    wait_for(lambda: not jobs.is_active(going), "the job's end")
    assert state(call, going)["state"] == "stopped"


def test_a_terminal_that_goes_while_it_waits_takes_nothing_along(
    office: Path, held: dict[str, str], tmp_path: Path, call: Farspan
):
    run = RunFolder(office / "runs" / "left")
    (ours, theirs) = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "farspan", "train", "--detach", "--run", str(run.path)],
        cwd=office,
        env=held,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    ) as waiting:
        os.close(theirs)
        wait_for((tmp_path / "held").exists, "the job begins", waiting)
        os.close(ours)
        assert waiting.wait(LIMIT_S) == -signal.SIGHUP
    assert not run.plan.exists()
    (tmp_path / "free").touch()
    wait_for(lambda: run.events.exists() and state(call, run)["step"], "a step")
    log = jobs.log_file(run)
    assert (
        log.parent == run.logs
        and "predicted" in log.read_text()
        and not jobs.planning_log(run).exists()
    )
    assert api.Run(run.path).stop(timeout_s=LIMIT_S).state == "stopped"


def test_ctrl_c_while_it_waits_stops_what_was_started(
    office: Path, held: dict[str, str], tmp_path: Path
):
    words = [sys.executable, "-m", "farspan", "train", "--detach", "--run", "runs/unwanted"]
    with subprocess.Popen(
        words,
        cwd=office,
        env=held,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        wait_for((tmp_path / "held").exists, "the job begins", waiting)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(LIMIT_S) == 130
        assert waiting.stderr is not None and waiting.stderr.read().count("error[interrupted]") == 1
    assert not jobs.is_active(RunFolder(office / "runs/unwanted")) and not list(
        office.glob("runs/.*.job.log")
    )


def test_detached_train_is_refused_with_the_same_message_as_attached(call: Farspan, office: Path):
    words = ("train", "--set", "data=nothing", "--run", "runs/refused")
    plain = call(*words)
    detached = call(*words, "--detach")
    assert (detached.returncode, detached.stderr) == (
        plain.returncode,
        plain.stderr,
    ) and plain.returncode == 10
    problem = json.loads(call(*words, "--detach", "--json").stdout)["problem"]
    assert problem["code"] == "path-missing"
    assert not (office / "runs/refused").exists() and not list(office.glob("runs/.*.job.log"))


def test_a_job_that_has_ended_already_answers_as_always(call: Farspan, office: Path):
    done = call("train", "--detach", "--run", "runs/short", "--set", "train.steps=2", "--json")
    assert done.returncode == 0, done.stderr
    run = RunFolder(office / "runs/short")
    wait_for(lambda: not jobs.is_active(run), "the job's end")
    assert json.loads(done.stdout)["run"] == "runs/short"
    assert "predicted" in (run.logs / "job.log").read_text(), (
        "what was said before there was a folder"
    )
    assert (state(call, run)["state"], state(call, run)["reason"]) == ("finished", "done")
    again = call("resume", "--detach", "runs/short", "--json")
    assert (
        set(json.loads(again.stdout)) == {"run", "measurement"}
        and "nothing is left to train" in again.stderr
    )
    assert (
        call("logs", "-f", "runs/short")
        .stdout.splitlines()[-1]
        .startswith("step 2 · completed all 2 steps")
    )
    damaged = office / "runs" / "damaged" / "plan.json"
    damaged.parent.mkdir()
    damaged.write_text("{")
    listed = call("status").stdout.splitlines()
    assert (
        listed[-1].startswith("runs/damaged: this cannot be read")
        and len(call("status", "runs/short").stdout) > 0
    )
    damaged.unlink()
    assert [line.split()[:2] for line in listed if "short" in line] == [["runs/short", "finished"]]
    assert all(len(line) <= 80 for line in listed[:-1])


def test_a_pid_that_another_process_has_by_now_is_not_the_job(call: Farspan, stopped: RunFolder):
    pid = os.getpid()
    mine = jobs.Job(
        pid=pid, host=socket.gethostname(), started=time.time(), began=process_began(pid)
    )
    try:
        save(mine, stopped.job)
        assert jobs.job_of(stopped) == mine
        assert mine.began is not None
        save(replace(mine, began=mine.began - 1), stopped.job)
        assert jobs.job_of(stopped) is None and state(call, stopped)["state"] == "lost"
        assert call("stop", str(stopped.path)).returncode == 44
        save(replace(mine, host="elsewhere"), stopped.job)
        refused = call("stop", str(stopped.path))
        assert (
            refused.returncode == 44
            and f"ssh elsewhere 'farspan stop {stopped.path}'" in refused.stderr
        )
        assert "running on elsewhere" in call("status").stdout
    finally:
        stopped.job.unlink()


def test_a_job_registers_itself_while_it_works(tmp_path: Path):
    run = RunFolder(tmp_path)
    with jobs.register_job(run):
        assert jobs.job_of(run) == load(run.job, jobs.Job)
    assert jobs.job_of(run) is None
