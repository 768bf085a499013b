"""Watches the workers of a run, wherever a launcher started them: passes on their events, and
leaves none behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.clusterfile import REMOTE_FOLDER
from farspan.domain.epoch_fence import CLAIM_VARIABLE, EPOCH_VARIABLE, Epoch
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.preemption_problem import NOTICE_VARIABLE
from farspan.domain.problems import Refusal, command
from farspan.domain.run import (
    HOME_VARIABLE,
    SURVIVOR_WRITE_S,
    SURVIVORS_FOLDER,
    RunFolder,
    RunRecord,
)
from farspan.domain.run_events import (
    STOP_REASONS,
    Event,
    Finished,
    Saved,
    Validated,
    Warned,
    decode_events,
)
from farspan.domain.struct_files import cut_unfinished_line, load, write_atomically
from farspan.domain.worker_exit import WorkerExit
from farspan.launch.agent_pool import AgentPool
from farspan.launch.checkpoint_mirror import FlawOf
from farspan.launch.host_claims import claim_path
from farspan.launch.hosts import ask_shell, quote_path
from farspan.launch.processes import Process, read_file, run_folder
from farspan.launch.run_folder_transfer import RemoteRun
from farspan.launch.run_lock import Lease
from farspan.launch.spares import SpareProcess, Spares
from farspan.launch.worker_exits import ExitReader, cause_of
from farspan.semantics.state_copies import has_copies

#: How often the event file and the processes are looked at.
WORKER_POLL_S = 0.1
#: After one worker has failed the others get this long to end by themselves: they may be writing a
#: message, and of a link that is cut one side may notice later. Rank 0 notices silence after 4.25 s
#: and stays 1 s more to report which rank is lost (`runtime.comm.heartbeat`); the rest is for a
#: machine that is busy.
FAILURE_GRACE_S = 8.0
#: The same where a worker was killed, they are started again, and have nothing to write.
KILLED_WORKER_GRACE_S = 0.2
#: After an interrupt workers get this long to finish their step and save.
SAVE_TIMEOUT_S = 600.0
#: A killed worker is gone within this: one of a slow device has memory to give back.
KILL_TIMEOUT_S = 60.0
#: A service, such as a Ray node, ends within this.
SERVICE_TIMEOUT_S = 30.0
#: What each worker of a start may leave in its logs, as `rank-N.KIND.json`.
RECORDS = ("problem", "group")


class SupervisorState(NamedTuple):
    """What a start of a run needs of its supervisor."""

    lease: Lease
    epoch: Epoch
    spares: Spares
    agents: AgentPool
    #: Whether workers start again after a fault: then nobody waits for last words where it is plain
    #: what happened.
    again: bool = False
    #: Returns why a checkpoint from rank 0's own disk is not whole.
    flaw_of: FlawOf | None = None
    #: Whether the run's hosts keep a claim of this epoch.
    claimed: bool = False


class Workers(ABC):
    """The workers of one plan. A launcher fills in `start`. Iterating yields their events until all
    have ended.

    They are of the epoch of `supervisor`, without it of one of their own. Leaving the `with` block
    lets what still runs save, then ends it. Raises the Refusal of the first worker that failed, and
    refuses a run whose workers still run.
    """

    #: Whether the launcher can start rank 0 on a host that does not see the run directory.
    sends = False
    #: Whether checkpoints of such a host are brought back.
    fetches = True

    def __init__(
        self,
        plan: Plan,
        run: RunFolder,
        cluster: Cluster,
        argument: str = "",
        supervisor: SupervisorState | None = None,
    ) -> None:
        self.plan = plan
        self.run = run
        self.cluster = cluster
        self.argument = argument
        planned = {device.host for device in plan.devices}
        #: Those that the plan uses, rank 0's first.
        self.hosts = tuple(host for host in cluster.hosts if host.name in planned)
        for name in planned.difference(host.name for host in self.hosts):
            raise Refusal(
                "plan-mismatch",
                what=f"the cluster has no host {name}",
                where=run.path,
                fact=f"it has {', '.join(host.name for host in cluster.hosts)}",
                remedy="farspan train run.yaml",
            )
        first = self.hosts[0]
        self._remote: RemoteRun | None = None
        if first.folder is not None and self.sends:
            flaw_of = None if supervisor is None else supervisor.flaw_of
            there = run_folder(first, plan, run)
            self._remote = RemoteRun(first, plan, run, there, flaw_of)
        elif first.folder is not None:
            raise Refusal(
                "launcher-unusable",
                what=f"rank 0 would run on {first.name}, which does not see this run",
                where=run.path,
                fact="rank 0 writes the run directory",
                remedy="--launcher local, which sends it there",
            )
        run.require_there()
        run.logs.mkdir(exist_ok=True)
        #: Whether the lease ends with these workers: a supervisor's stays.
        self._ends_lease = supervisor is None
        if supervisor is None:
            lease = Lease(run)
            supervisor = SupervisorState(lease, lease.begin_epoch(), Spares(), AgentPool())
        self._state = supervisor
        for kind in RECORDS:
            for stale in run.logs.glob(f"rank-*.{kind}.json"):
                stale.unlink()
        shutil.rmtree(run.checkpoints / SURVIVORS_FOLDER, ignore_errors=True)
        self._events_from = 0
        if run.events.exists():
            # Rank 0 cuts it off too, and writes its first event where it began.
            cut_unfinished_line(run.events)
            self._events_from = run.events.stat().st_size
        self._interrupted_at: float | None = None
        self._finished: Finished | None = None
        #: Whether the best weights have changed since they were copied here.
        self._new_best = False
        self._logs: list[IO[bytes]] = []
        self._log_from: dict[Path, int] = {}
        self.processes: list[Process] = []
        #: Those that were ended from here, because others had failed or the user asked for it.
        self._killed_by_us: list[Process] = []
        #: Failed processes whose reports of lost workers were read.
        self._examined: list[Process] = []
        #: When the first of them was seen to have failed, by the monotonic clock.
        self.failed_at: float | None = None
        self._reader = ExitReader(plan, run, self.hosts)

    @abstractmethod
    def start(self) -> Iterator[Process]:
        """Start every process, one after another."""

    def __enter__(self) -> Workers:
        try:
            if self._remote is not None:
                self._remote.send_run()
            # Nodes of a Ray cluster that runs already may be entered by nobody: its actors clear
            # there.
            far = [host for host in self.hosts if host.folder is not None and not self.argument]
            with ThreadPoolExecutor(max(1, len(far))) as pool:
                list(pool.map(self._remove_stale_records, far))
            for process in self.start():
                self.processes.append(process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _remove_stale_records(self, host: Host) -> None:
        """Remove what workers of an earlier start wrote on a host with a disk of its own: this
        start's may write nothing."""
        logs = quote_path(run_folder(host, self.plan, self.run).logs)
        stale = " ".join(f"{logs}/rank-*.{kind}.json" for kind in RECORDS)
        script = f"rm -f {stale}"
        # Earlier versions left the text there readable for all.
        if host.folder == REMOTE_FOLDER:
            script = f"chmod -f 700 {quote_path(Path(REMOTE_FOLDER))}; {script}"
        # A host that cannot be entered is refused when workers are started there.
        ask_shell(host, script)

    @property
    def keep_open(self) -> int:
        """The descriptor of the run's lock, for processes to inherit."""
        return self._state.lease.keep_open

    @property
    def environment(self) -> dict[str, str]:
        """The variables of all workers: where farspan was asked to train, and the epoch that they
        are of."""
        home = str(self.run.path.absolute())
        epoch = msgspec.json.encode(self._state.epoch)
        return {HOME_VARIABLE: home, EPOCH_VARIABLE: epoch.decode()}

    def environment_on(self, host: Host) -> dict[str, str]:
        """Return the variables of a host's workers: those of all, where the host keeps its claim of
        the run, and the command that has notice of its end, if it does."""
        variables = self.environment
        record = load(self.run.record, RunRecord)
        if self._state.claimed:
            variables[CLAIM_VARIABLE] = claim_path(host, record.identity)
        if host.notice is not None:
            variables[NOTICE_VARIABLE] = host.notice
        return variables

    @property
    def agents(self) -> AgentPool:
        return self._state.agents

    def ranks_on(self, host: Host) -> tuple[int, ...]:
        devices = enumerate(self.plan.devices)
        return tuple(rank for rank, device in devices if device.host == host.name)

    def spare(self, device: PlannedDevice) -> SpareProcess | None:
        """Take a warm process that waits for this device, if one does."""
        return self._state.spares.take_spare(device.host, device.index, device.threads)

    def log(self, name: str) -> IO[bytes]:
        """Open a log on this machine, to be closed with the others."""
        path = self.run.logs / f"{name}.log"
        log = open_own(path, "ab")
        self._logs.append(log)
        self._log_from[path] = log.seek(0, os.SEEK_END)
        return log

    def words(self, log: Path) -> str:
        """Return a log's text since it was opened, without that of earlier starts."""
        content = log.read_bytes() if log.exists() else b""
        return content[self._log_from.get(log, 0) :].decode(errors="replace")

    def interrupt(self) -> None:
        """Ask the workers to save and end; a second call ends them at once."""
        if self._interrupted_at is not None:
            self._kill_workers()
            return
        self._interrupted_at = time.monotonic()
        self._ask_to_end()

    def end(self) -> None:
        """End the workers at once, with what they have recorded so far."""
        self._fetch_records()
        self._interrupted_at = time.monotonic()
        self._kill_workers()

    def __iter__(self) -> Iterator[Event]:
        position = self._events_from
        while True:
            self._require_folder()
            codes = [process.poll() for process in self.processes if process.ranks]
            if self._remote is not None:
                self._remote.pull_events(now=None not in codes)
            position, lines = _new_lines(self.run.events, position)
            if self._remote is not None:
                # Before the last event of the run, which a warning is not.
                for message in self._remote.mirror.take_warnings():
                    yield Warned(at=time.time(), message=message)
            for event in decode_events(lines, self.run.events):
                self._finished = event if isinstance(event, Finished) else None
                if isinstance(event, Validated) and event.best:
                    self._new_best = True
                # Have what rank 0 saves on a disk of its own copied here.
                if isinstance(event, Saved) and self._remote is not None and self.fetches:
                    self._remote.mirror.request_copy(
                        event.step, best=self._new_best, size=event.size_bytes
                    )
                    self._new_best = False
                yield event
            if None not in codes:
                break
            # Of those that were asked to end some may report a failure; the others are saving.
            if self.failed_at is None and self._interrupted_at is None and any(codes):
                self.failed_at = time.monotonic()
            if self.failed_at is not None:
                self.kill_unresponsive()
            grace_s = FAILURE_GRACE_S
            is_killed = self._state.again and -signal.SIGKILL in codes
            if is_killed and not has_copies(self.plan):
                grace_s = KILLED_WORKER_GRACE_S
            if _has_passed(self.failed_at, grace_s) and self._survivors_write():
                grace_s = SURVIVOR_WRITE_S
            too_late = _has_passed(self._interrupted_at, SAVE_TIMEOUT_S)
            if too_late or _has_passed(self.failed_at, grace_s):
                self._kill_workers()
            time.sleep(WORKER_POLL_S)
        self._fetch_records()
        try:
            if self._remote is not None and self.fetches:
                # After a failure the copy that is being made is made again: its host may be gone.
                if any(codes):
                    self._remote.mirror.close()
                else:
                    self._remote.mirror.finish_copy()
                self._remote.fetch_checkpoints()
        finally:  # What the workers ended with explains more.
            self._refuse_if_failed()

    def _survivors_write(self) -> bool:
        """Return whether workers write the last whole step (`runtime.checkpoint.last_step`)."""
        if self._remote is not None:
            return self._remote.has_survivors()
        return (self.run.checkpoints / SURVIVORS_FOLDER).exists()

    def _require_folder(self) -> None:
        """End all at once where the run's folder is gone: they have nowhere to save to."""
        try:
            self.run.require_there()
            self._state.lease.require_held()
        except Refusal:
            self._interrupted_at = time.monotonic()
            self._kill_workers()
            raise

    def kill_unresponsive(self) -> None:
        """Kill workers that others report lost: they stand still, or a link to them is cut, and
        they will not end by themselves."""
        for process in self.processes:
            if process in self._examined or not process.ranks or not process.poll():
                continue
            self._examined.append(process)
            problems = [end.problem for end in self._exits_of(process) if end.problem]
            lost = {(each.rank,) for each in problems if each.code == "worker-lost"}
            self._kill_processes([each for each in self._running() if each.ranks in lost])

    def _fetch_records(self) -> None:
        """Fetch what workers on hosts of their own disk have recorded, for the report."""
        for process in self.processes:
            logs = run_folder(process.host, self.plan, self.run).logs
            for rank in process.ranks if process.host.folder is not None else ():
                name = f"rank-{rank}.events.jsonl"
                if content := read_file(process.host, logs / name):
                    write_atomically(self.run.logs / name, content)

    def _refuse_if_failed(self) -> None:
        workers = [process for process in self.processes if process.ranks]
        failed = [process for process in workers if process.poll()]
        # Workers also save where what had started some of them is gone, and where some of them were
        # preempted: nobody has asked for that.
        asked = self._interrupted_at is not None
        if not failed or (self.stopped and asked):
            return
        if self.stopped and self._finished is not None and self._finished.problem is not None:
            raise Refusal.of(self._finished.problem)
        if not asked and all(process.poll() == -signal.SIGTERM for process in workers):
            what = "stopped before the first step: all workers were asked to end"
            raise self._interrupted_refusal(what, "each got SIGTERM, from outside the run")
        failed = [process for process in failed if process not in self._killed_by_us] or failed
        exits = list(chain.from_iterable(map(self._exits_of, failed)))
        cause = cause_of(exits, self.run, saved=self.stopped)
        if asked and (cause.signal is not None or cause.code == "preempted"):
            fact = "steps since the last save are not kept"
            raise self._interrupted_refusal("stopped at once, as asked", fact)
        raise Refusal.of(cause)

    def _interrupted_refusal(self, what: str, fact: str) -> Refusal:
        remedy = self.run.resume_command()
        return Refusal("interrupted", what=what, where=self.run.path, fact=fact, remedy=remedy)

    @property
    def stopped(self) -> bool:
        """Whether workers have saved and ended between two steps."""
        return self._finished is not None and self._finished.reason in STOP_REASONS

    def failures(self, process: Process) -> list[WorkerExit]:
        """Return the exits of a failed process's workers that failed, as seen from outside."""
        return [self.exit_of(process.ranks[0], process.poll() or 0)]

    def exit_of(self, rank: int, code: int) -> WorkerExit:
        return WorkerExit(rank=rank, host=self.plan.devices[rank].host, code=code)

    def _exits_of(self, process: Process) -> Iterator[WorkerExit]:
        log = self.run.logs / f"rank-{process.ranks[0]}.log"
        printed = self.words(log).splitlines()
        lines = [line for line in printed if any(map(str.isalpha, line))]
        last_words = lines[-1][:200] if lines else "none"
        return self._reader.read_exits(process, self.failures(process), log, last_words)

    def _running(self, services: bool = False) -> list[Process]:
        """Return the workers' processes that run, or the services."""
        running = [process for process in self.processes if process.poll() is None]
        return [process for process in running if bool(process.ranks) is not services]

    def _kill_processes(self, processes: list[Process]) -> None:
        self._killed_by_us += processes
        for process in processes:
            process.signal(signal.SIGKILL)

    def _ask_to_end(self, services: bool = False) -> None:
        for process in self._running(services):
            process.signal(signal.SIGTERM)

    def _kill_workers(self) -> None:
        self._kill_processes(self._running())
        for process in self.processes:
            if process.ranks:
                try:
                    process.wait(timeout=KILL_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    raise Refusal(
                        "worker-lost",
                        what=f"a worker on {process.host.name} does not end",
                        where=str(self.run.path),
                        fact=(
                            f"it was killed {KILL_TIMEOUT_S:.0f} s ago and is still there: it may "
                            "wait for a disk or a driver"
                        ),
                        remedy=command("doctor", "--cluster", process.host.cluster_name),
                    ) from None

    def __exit__(self, *exc_info: object) -> None:
        if self._interrupted_at is None:
            self._ask_to_end()
            deadline = time.monotonic() + SAVE_TIMEOUT_S
            while time.monotonic() < deadline and self._running():
                time.sleep(WORKER_POLL_S)
        self._kill_workers()
        # Services take what they have started with them, if they are asked.
        self._ask_to_end(services=True)
        for process in self.processes:
            try:
                process.wait(timeout=SERVICE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # As where a link is cut: the request does not arrive.
                process.signal(signal.SIGKILL)
        if self._remote is not None:
            self._remote.mirror.close()
        for file in self._logs:
            file.close()
        if self._ends_lease:
            self.agents.close()
            self._state.lease.close()


def _has_passed(since: float | None, seconds: float) -> bool:
    return since is not None and time.monotonic() - since > seconds


def _new_lines(path: Path, position: int) -> tuple[int, list[bytes]]:
    """Return the whole lines written after `position`, and where they end."""
    if not path.exists():
        return position, []
    with open(path, "rb") as file:
        file.seek(position)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    return position + len(whole), whole.splitlines()
