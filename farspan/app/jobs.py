"""The job of a run: the process that trains it, how far it is, its log, and how it is asked to
end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from farspan.domain.cluster import HostName
from farspan.domain.escapes import shell_line
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.run import RunFolder
from farspan.domain.run_events import STOP_REASONS, Event, Recovered, decode_events, read_events
from farspan.domain.struct_files import load, parse_json, save, write_atomically
from farspan.domain.units import format_seconds
from farspan.launch.folder_lock import is_locked, lock_holders
from farspan.launch.process_began import process_began
from farspan.report.history import COMPLETE
from farspan.report.run_progress import SoFar

#: A job that was asked to save and end gets this long.
STOP_TIMEOUT_S = 600.0
#: The second of two signals comes this much later: two at once are one.
SECOND_SIGNAL_AFTER_S = 1.0
#: How often a job and its files are looked at.
JOB_POLL_S = 0.2

#: How a run stands. "lost": its job is gone without a report; "new": no worker has started yet.
State = Literal["running", "finished", "stopped", "failed", "lost", "new"]


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`job.json`: the process that trains a run. `started` is in seconds since the epoch."""

    pid: int
    host: HostName
    started: float
    #: When its process began, by a clock that nobody sets: another process may get the same pid
    #: later.
    began: float | None

    @property
    def here(self) -> bool:
        """Whether it runs on this host."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether its process is there. Of another host's only the record is known, which goes when
        the job ends."""
        if not self.here:
            return True
        began = process_began(self.pid)
        return began is not None and began == self.began


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands. What is not known is None; times are in seconds, `saved_s` and `heard_s`
    before now."""

    run: str
    state: State
    #: `Finished.reason` of its last end.
    reason: str | None
    #: The living job, or the one that was lost.
    job: Job | None
    #: What a job that failed, or was preempted, ended with.
    problem: Problem | None
    #: Whether workers of a lost job are still there: they save and end.
    saving: bool
    step: int
    #: Of the whole run, as its time budget has them now; and how far it is, 0 to 1.
    steps: int
    share: float
    #: None where the run's time alone decides how many steps it makes.
    total: int | None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_s: float | None = None
    #: Of the newest checkpoint.
    saved_step: int | None = None
    saved_s: float | None = None
    #: The last fault after which the run resumed by itself: what it was, and the steps lost.
    recovered: Recovered | None
    #: Of the last event.
    heard_s: float | None = None
    left_s: float | None = None


class RegisteredJob:
    """What `register_job` receives from the job that it names."""

    def __init__(self) -> None:
        self.has_started_workers = False


@contextmanager
def register_job(run: RunFolder) -> Iterator[RegisteredJob]:
    """Name this process in the run's folder while it trains the run, and afterwards what the job
    was refused, if it was.

    A run that is being trained already stays another's: its launch is refused. One that had begun
    keeps its state where the job is refused before it has started workers.
    """
    registered = RegisteredJob()
    if is_locked(run.lock):
        yield registered
        return
    pid = os.getpid()
    job = Job(pid=pid, host=socket.gethostname(), started=time.time(), began=process_began(pid))
    problem = problem_file(run)
    ended_before = problem.read_bytes() if problem.exists() else None
    had_begun = run.events.exists()
    run.logs.mkdir(exist_ok=True)
    # This process's own log has begun next to the run's folder, if at all.
    log = planning_log(run)
    with suppress(OSError):  # There is none.
        if os.path.samestat(os.fstat(2), log.stat()):
            log.rename(log_file(run))
    problem.unlink(missing_ok=True)
    save(job, run.job)
    try:
        yield registered
    except Refusal as refusal:
        with suppress(OSError):  # The disk may be full, which is what it reports.
            # A run that had begun stays as it was, where this job has started no worker.
            if registered.has_started_workers or not had_begun:
                save(refusal.problem, problem)
            elif ended_before is not None:
                write_atomically(problem, ended_before)
        raise
    finally:
        if _read_job(run) == job:
            run.job.unlink()


def problem_file(run: RunFolder) -> Path:
    """Return the file of what the run's last job was refused, next to its workers' own."""
    return run.logs / "job.problem.json"


def log_file(run: RunFolder) -> Path:
    """Return the log of a detached job."""
    return run.logs / "job.log" if run.plan.exists() else planning_log(run)


def planning_log(run: RunFolder) -> Path:
    """Return the same until the run has a folder: a run is made only where nothing lies."""
    path = run.path.absolute()
    return path.parent / f".{path.name}.job.log"


def remove_unbegun(run: RunFolder) -> None:
    """Remove the folder of a run that was made and has not begun, but for what others have put
    there. The log of a detached job goes back to where it was until the folder was made."""
    with suppress(OSError):  # There is none, or the disk is full.
        (run.logs / "job.log").rename(planning_log(run))
    for file in run.files:
        with suppress(OSError):
            file.unlink()
    for folder in (run.logs, run.tensorboard, run.trackers, run.checkpoints, run.base):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        run.path.rmdir()


def job_of(run: RunFolder) -> Job | None:
    """Return the living job of a run."""
    job = _read_job(run)
    return job if job is not None and job.lives else None


def is_active(run: RunFolder) -> bool:
    """Return whether the run's job lives, or workers of a killed one, which save and end."""
    return job_of(run) is not None or is_locked(run.lock)


def wait_for_orphans(
    run: RunFolder, report: Callable[[str], None], *, timeout_s: float = STOP_TIMEOUT_S
) -> None:
    """Wait until workers that a killed job has left have saved and ended, or the time is over."""
    began = time.monotonic()
    reported = False
    while _has_orphans(run) and time.monotonic() - began < timeout_s:
        if not reported:
            pids = ", ".join(map(str, lock_holders(run.lock))) or "unknown"
            report(f"the job was killed; waiting until its workers have saved (process {pids})")
            reported = True
        time.sleep(JOB_POLL_S)


def _has_orphans(run: RunFolder) -> bool:
    with suppress(Refusal):  # A damaged record names no job.
        job = _read_job(run)
        return job is not None and not job.lives and is_locked(run.lock)
    return False


def _read_job(run: RunFolder) -> Job | None:
    try:
        return parse_json(run.job.read_bytes(), Job, run.job)
    except FileNotFoundError:
        return None


def read_status(run: RunFolder, clock: Callable[[], float] = time.time) -> Status:
    """Return how a run stands: whether its job runs or how it has ended, and how far it is."""
    # The record first: a job that ends afterwards has written all its events.
    job = _read_job(run)
    progress = SoFar(run.load_plan().train)
    now = clock()
    for event in read_events(run.events) if run.events.exists() else ():
        progress.take(event)
    problem = None
    if problem_file(run).exists():
        problem = load(problem_file(run), Problem)
    locked = is_locked(run.lock)
    state = _find_state(job, progress, problem, locked=locked)
    if state not in ("running", "lost"):
        job = None
    reason = None
    if progress.finished is not None:
        reason = progress.finished.reason
        problem = problem or progress.finished.problem
    has_problem = state == "failed" or (state == "stopped" and reason == "preempted")
    # What is not known stays None.
    known: dict[str, Any] = {}
    if progress.recent:
        known["loss"] = progress.recent[-1].loss
        # Steps before this job has started are no measure of its speed.
        if state != "running" or job is None or progress.at >= job.started:
            known["tokens_per_s"] = progress.tokens_per_s
            if state == "running":
                known["left_s"] = progress.left_s()
    if progress.validated:
        known["val_loss"] = progress.validated.loss
    if progress.saved:
        known["saved_step"] = progress.saved.step
        known["saved_s"] = max(0.0, now - progress.saved.at)
    if progress.at:
        known["heard_s"] = max(0.0, now - progress.at)
    is_saving = state == "lost" and locked
    return Status(
        run=str(run.path),
        state=state,
        reason=reason,
        job=job,
        problem=problem if has_problem else None,
        saving=is_saving,
        step=progress.step,
        steps=progress.steps,
        share=progress.share,
        total=progress.total,
        recovered=progress.recovered,
        **known,
    )


def _find_state(
    job: Job | None, progress: SoFar, problem: Problem | None, *, locked: bool
) -> State:
    if job is not None:
        return "running" if job.lives else "lost"
    if problem is not None:
        return "stopped" if problem.code in STOP_REASONS else "failed"
    if progress.finished is None:
        return "lost" if locked or progress.started is not None else "new"
    reason = progress.finished.reason
    return "finished" if reason in COMPLETE else "failed" if reason == "failed" else "stopped"


def stop_job(
    run: RunFolder,
    report: Callable[[str], None],
    *,
    now: bool = False,
    timeout_s: float = STOP_TIMEOUT_S,
) -> Status:
    """Ask the run's job to save and end, or with `now` to end at once, wait until it has, and
    return how it stands then.

    Workers that a killed job has left are waited for. Raises Refusal where nothing runs here
    (not-running), and where the job is still there after `timeout_s` (run-busy).
    """
    if not is_active(run):
        state = read_status(run).state
        raise Refusal(
            "not-running",
            what="nothing runs that could be stopped",
            where=run.path,
            fact="no worker has started yet" if state == "new" else f"its job has ended ({state})",
            remedy=command("status", run.path),
        )
    began = time.monotonic()
    second = now
    _signal_job(run)
    report("ending its workers at once" if now else "saving")
    while is_active(run):
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise Refusal(
                "run-busy",
                what="the job has not ended yet",
                where=run.path,
                fact=f"it was asked {format_seconds(waited)} ago and is still there",
                remedy=command("status" if now else "stop", run.path, *(() if now else ("--now",))),
            )
        if second and waited > SECOND_SIGNAL_AFTER_S:
            _signal_job(run)
            second = False
        time.sleep(JOB_POLL_S)
    return read_status(run)


def _signal_job(run: RunFolder) -> None:
    """Signal the run's job, if it lives: it passes that on to its workers, wherever they are."""
    job = job_of(run)
    if job is not None and not job.here:
        raise Refusal(
            "not-running",
            what="the run's job is not on this host",
            where=run.path,
            fact=f"it runs on {job.host} as process {job.pid}",
            # The shell there reads the command once more.
            remedy=shell_line("ssh", job.host, command("stop", run.path.absolute())),
        )
    if job is not None:
        with suppress(ProcessLookupError):  # It has ended just now.
            os.kill(job.pid, signal.SIGTERM)


def follow_events(run: RunFolder, *, follow: bool = False) -> Iterator[Event]:
    """Yield the events of a run, oldest first; with `follow` also those to come, until its job has
    ended."""
    yield from decode_events(
        follow_lines(run.events, lambda: follow and is_active(run)), run.events
    )


def follow_lines(
    path: Path, more: Callable[[], bool] = lambda: False, position: int = 0
) -> Iterator[bytes]:
    """Yield the whole lines of a file after `position`, and those that are added as long as
    `more()` is true."""
    last = False
    while not last:
        # Asked first: what was added before it was false is read.
        last = not more()
        if path.exists():
            with open(path, "rb") as file:
                file.seek(position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    yield line
        if not last:
            time.sleep(JOB_POLL_S)
