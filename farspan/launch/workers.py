"""Watching the workers of a run, wherever a launcher started them: pass on what they say, and leave
none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.clusterfile import REMOTE_FOLDER
from farspan.domain.codec import cut_unfinished_line, write_atomically
from farspan.domain.epoch import EPOCH, Epoch
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.problems import Refusal
from farspan.domain.results import (
    STOPPED,
    Event,
    Finished,
    Saved,
    Validated,
    Warned,
    decoded,
)
from farspan.domain.run import HOME, RunFolder
from farspan.domain.worker_exit import WorkerExit
from farspan.launch.checkpoint_mirror import FlawOf
from farspan.launch.exits import ExitReader, cause_of
from farspan.launch.hosts import ask, quoted
from farspan.launch.lease import Lease
from farspan.launch.processes import Process, read_file, run_folder
from farspan.launch.remote_run import RemoteRun
from farspan.launch.spares import SpareProcess, Spares

#: How often the event file and the processes are looked at.
POLL_S = 0.1
#: After one worker has failed the others get this long to end by themselves: they may be writing a
#: message, and of a link that is cut one side may notice later. Rank 0 notices silence after 4.25 s
#: and stays 1 s more to say who is lost (`runtime.comm.heartbeat`); the rest is for a machine that
#: is busy.
GRACE_S = 8.0
#: As long where a worker was killed, and they are started again.
PLAIN_S = 0.2
#: After an interrupt workers get this long to finish their step and save.
SAVE_S = 600.0
#: Who was killed is gone within this: a worker of a slow device has memory to give back.
KILL_S = 60.0
#: A service, such as a Ray node, ends within this.
SERVICE_S = 30.0
#: What each worker of a start may leave in its logs, as `rank-N.KIND.json`.
RECORDS = ("problem", "group")


class Held(NamedTuple):
    """What a start of a run needs of who supervises it."""

    lease: Lease
    epoch: Epoch
    spares: Spares
    #: Whether they start again after a fault: then nobody waits for last words where it is plain
    #: what happened.
    again: bool = False
    #: Reads checkpoints that come from rank 0's own disk: why one is not whole.
    flaw_of: FlawOf | None = None


class Workers(ABC):
    """The workers of one plan. A launcher fills in `start`. Iterating yields their events until all
    have ended.

    They are of the epoch that is `held`, without it of one of their own. Leaving the `with` block
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
        held: Held | None = None,
    ) -> None:
        self.plan = plan
        self.run = run
        self.cluster = cluster
        self.argument = argument
        planned = {device.host for device in plan.devices}
        #: Those that the plan uses, rank 0's first.
        self.hosts = tuple(host for host in cluster.hosts if host.name in planned)
        for name in planned - {host.name for host in self.hosts}:
            raise Refusal(
                "plan-mismatch",
                what=f"the cluster has no host {name}",
                where=run.path,
                fact=f"it has {', '.join(host.name for host in cluster.hosts)}",
                remedy="farspan train run.yaml",
            )
        first = self.hosts[0]
        self._away = None
        if first.folder is not None and self.sends:
            flaw_of = None if held is None else held.flaw_of
            self._away = RemoteRun(first, plan, run, run_folder(first, plan, run), flaw_of)
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
        #: Whether the lease ends with these workers: one that is held goes on.
        self._ends_lease = held is None
        lease = Lease(run) if held is None else held.lease
        self._held = held or Held(lease, lease.begin(), Spares())
        for kind in RECORDS:
            for stale in run.logs.glob(f"rank-*.{kind}.json"):
                stale.unlink()
        if run.events.exists():
            # Rank 0 cuts it off too, and writes its first event where it began.
            cut_unfinished_line(run.events)
        self._events_from = run.events.stat().st_size if run.events.exists() else 0
        self._interrupted_at: float | None = None
        self._finished: Finished | None = None
        #: Whether the best weights have changed since they were copied here.
        self._new_best = False
        self._logs: list[IO[bytes]] = []
        self._log_from: dict[Path, int] = {}
        self.processes: list[Process] = []
        #: Those that were ended from here, because others had failed or the user said so.
        self._culled: list[Process] = []
        #: Those whose words were looked at for who is lost.
        self._heard: list[Process] = []
        #: When the first of them was seen to have failed, by the monotonic clock.
        self.failed_at: float | None = None
        self._reader = ExitReader(plan, run, self.hosts)

    @abstractmethod
    def start(self) -> Iterator[Process]:
        """Start every process, one after another."""

    def __enter__(self) -> Workers:
        try:
            if self._away is not None:
                self._away.send()
            self._clear()
            for process in self.start():
                self.processes.append(process)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _clear(self) -> None:
        """Remove what workers of an earlier start said, on hosts with their own disk: this one's
        may say nothing."""
        # Nodes of a Ray cluster that runs already may be entered by nobody: its actors clear there.
        far = [host for host in self.hosts if host.folder is not None and not self.argument]
        with ThreadPoolExecutor(max(1, len(far))) as pool:
            list(pool.map(self._clear_on, far))

    def _clear_on(self, host: Host) -> None:
        logs = quoted(run_folder(host, self.plan, self.run).logs)
        stale = " ".join(f"{logs}/rank-*.{kind}.json" for kind in RECORDS)
        # Earlier versions left the text there readable for all.
        close = (
            f"chmod -f 700 {quoted(Path(REMOTE_FOLDER))}; " if host.folder == REMOTE_FOLDER else ""
        )
        # Of a host that cannot be entered more is said when workers are started there.
        ask(host, f"{close}rm -f {stale}")

    @property
    def keep_open(self) -> int:
        """The descriptor of the run's lock, for processes to inherit."""
        return self._held.lease.keep_open

    @property
    def environment(self) -> dict[str, str]:
        """What all workers are told: where farspan was asked to train, and the epoch that they are
        of."""
        return {
            HOME: str(self.run.path.absolute()),
            EPOCH: msgspec.json.encode(self._held.epoch).decode(),
        }

    def ranks_on(self, host: Host) -> tuple[int, ...]:
        return tuple(
            rank for rank, device in enumerate(self.plan.devices) if device.host == host.name
        )

    def spare(self, device: PlannedDevice) -> SpareProcess | None:
        """A warm process that waits for this device, if one does."""
        return self._held.spares.take(device.host, device.index, device.threads)

    def log(self, name: str) -> IO[bytes]:
        """A log on this machine, to be closed with the others."""
        path = self.run.logs / f"{name}.log"
        log = open_own(path, "ab")
        self._logs.append(log)
        self._log_from[path] = log.seek(0, os.SEEK_END)
        return log

    def words(self, log: Path) -> str:
        """What a log has taken since it was opened: it goes on from those of earlier starts."""
        content = log.read_bytes() if log.exists() else b""
        return content[self._log_from.get(log, 0) :].decode(errors="replace")

    def interrupt(self) -> None:
        """Ask the workers to save and end; a second call ends them at once."""
        if self._interrupted_at is not None:
            self._end()
            return
        self._interrupted_at = time.monotonic()
        self._ask_to_end()

    def end(self) -> None:
        """End the workers at once, with what they have recorded by now."""
        self._gather()
        self._interrupted_at = time.monotonic()
        self._end()

    def __iter__(self) -> Iterator[Event]:
        position = self._events_from
        while True:
            self._require_folder()
            codes = [process.poll() for process in self.processes if process.ranks]
            if self._away is not None:
                self._away.pull(now=None not in codes)
            position, lines = _new_lines(self.run.events, position)
            # Before the last event of the run, which a warning is not.
            for message in [] if self._away is None else self._away.mirror.warnings():
                yield Warned(at=time.time(), message=message)
            for event in decoded(lines, self.run.events):
                self._finished = event if isinstance(event, Finished) else None
                self._mirror(event)
                yield event
            if None not in codes:
                break
            # Of those that were asked to end some may say that they failed; the others are saving.
            if self.failed_at is None and self._interrupted_at is None and any(codes):
                self.failed_at = time.monotonic()
            if self.failed_at is not None:
                self.kill_unresponsive()
            plain = self._held.again and -signal.SIGKILL in codes
            if _passed(self.failed_at, PLAIN_S if plain else GRACE_S) or _passed(
                self._interrupted_at, SAVE_S
            ):
                self._end()
            time.sleep(POLL_S)
        self._gather()
        try:
            self._fetch(waits=not any(codes))
        finally:  # What the workers ended with says more.
            self._refuse_if_failed()

    def _mirror(self, event: Event) -> None:
        """Have what rank 0 saves on a disk of its own copied here."""
        if isinstance(event, Validated) and event.best:
            self._new_best = True
        if isinstance(event, Saved) and self._away is not None and self.fetches:
            self._away.mirror.request(event.step, best=self._new_best)
            self._new_best = False

    def _fetch(self, *, waits: bool) -> None:
        """Copy what was saved and not copied. With `waits` the copy that is being made comes to its
        end, else it is made again: its host may be gone. Raises Refusal (host-unreachable)."""
        if self._away is not None and self.fetches:
            if waits:
                self._away.mirror.finish()
            else:
                self._away.mirror.close()
            self._away.fetch()

    def _require_folder(self) -> None:
        """End all at once where the run's folder is gone: they have nowhere to save to."""
        try:
            self.run.require_there()
            self._held.lease.require_held()
        except Refusal:
            self._interrupted_at = time.monotonic()
            self._end()
            raise

    def kill_unresponsive(self) -> None:
        """Kill workers that others report lost: they stand still, or a link to them is cut, and
        they will not end by themselves."""
        for process in self.processes:
            if process in self._heard or not process.ranks or not process.poll():
                continue
            self._heard.append(process)
            problems = [end.problem for end in self._exits_of(process) if end.problem]
            lost = {(each.rank,) for each in problems if each.code == "worker-lost"}
            self._kill([each for each in self._running() if each.ranks in lost])

    def _gather(self) -> None:
        """Fetch what workers on hosts of their own disk have recorded, for the report."""
        for process in self.processes:
            folder = run_folder(process.host, self.plan, self.run)
            for rank in process.ranks if process.host.folder is not None else ():
                name = f"rank-{rank}.events.jsonl"
                if content := read_file(process.host, folder.logs / name):
                    write_atomically(self.run.logs / name, content)

    def _refuse_if_failed(self) -> None:
        failed = [process for process in self.processes if process.ranks and process.poll()]
        # Workers also save where what had started some of them is gone, and where some of them were
        # preempted: nobody has asked for that.
        asked = self._interrupted_at is not None
        if not failed or (self.stopped and asked):
            return
        if self.stopped and self._finished is not None and self._finished.problem is not None:
            raise Refusal.of(self._finished.problem)
        ended = [process.poll() for process in self.processes if process.ranks]
        if not asked and all(code == -signal.SIGTERM for code in ended):
            what = "stopped before the first step: all workers were asked to end"
            raise self._interrupted(what, "each got SIGTERM, from outside the run")
        failed = [process for process in failed if process not in self._culled] or failed
        exits = [end for process in failed for end in self._exits_of(process)]
        cause = cause_of(exits, self.run, saved=self.stopped)
        if asked and (cause.signal is not None or cause.code == "preempted"):
            fact = "steps since the last save are not kept"
            raise self._interrupted("stopped at once, as asked", fact)
        raise Refusal.of(cause)

    def _interrupted(self, what: str, fact: str) -> Refusal:
        where = self.run.path
        remedy = self.run.resume()
        return Refusal("interrupted", what=what, where=where, fact=fact, remedy=remedy)

    @property
    def stopped(self) -> bool:
        """Whether workers have saved and ended between two steps."""
        return self._finished is not None and self._finished.reason in STOPPED

    def failures(self, process: Process) -> list[WorkerExit]:
        """Return what is seen from outside of the workers of a failed process that failed."""
        return [self.exit_of(process.ranks[0], process.poll() or 0)]

    def exit_of(self, rank: int, code: int) -> WorkerExit:
        return WorkerExit(rank=rank, host=self.plan.devices[rank].host, code=code)

    def _exits_of(self, process: Process) -> Iterator[WorkerExit]:
        log = self.run.logs / f"rank-{process.ranks[0]}.log"
        lines = [line for line in self.words(log).splitlines() if any(map(str.isalpha, line))]
        return self._reader.read(process, self.failures(process), log, lines[-1:])

    def _running(self, services: bool = False) -> list[Process]:
        """Return the workers' processes that run, or the services."""
        running = [process for process in self.processes if process.poll() is None]
        return [process for process in running if bool(process.ranks) is not services]

    def _kill(self, processes: list[Process]) -> None:
        self._culled += processes
        for process in processes:
            process.signal(signal.SIGKILL)

    def _ask_to_end(self, services: bool = False) -> None:
        for process in self._running(services):
            process.signal(signal.SIGTERM)

    def _end(self) -> None:
        self._kill(self._running())
        for process in self.processes:
            if process.ranks:
                try:
                    process.wait(timeout=KILL_S)
                except subprocess.TimeoutExpired:
                    raise Refusal(
                        "worker-lost",
                        what=f"a worker on {process.host.name} does not end",
                        where=str(self.run.path),
                        fact=(
                            f"it was killed {KILL_S:.0f} s ago and is still there: it may wait "
                            "for a disk or a driver"
                        ),
                        remedy="farspan doctor --cluster, with the same cluster",
                    ) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._interrupted_at is None:
            self._ask_to_end()
            deadline = time.monotonic() + SAVE_S
            while time.monotonic() < deadline and self._running():
                time.sleep(POLL_S)
        self._end()
        # Services take what they have started with them, if they are asked.
        self._ask_to_end(services=True)
        for process in self.processes:
            try:
                process.wait(timeout=SERVICE_S)
            except (
                subprocess.TimeoutExpired
            ):  # As where a link is cut: the request does not arrive.
                process.signal(signal.SIGKILL)
        if self._away is not None:
            self._away.mirror.close()
        for file in self._logs:
            file.close()
        if self._ends_lease:
            self._held.lease.close()


def _passed(since: float | None, seconds: float) -> bool:
    return since is not None and time.monotonic() - since > seconds


def _new_lines(path: Path, position: int) -> tuple[int, list[bytes]]:
    """Whole lines written after `position`, and where they end."""
    if not path.exists():
        return position, []
    with open(path, "rb") as file:
        file.seek(position)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    return position + len(whole), whole.splitlines()
