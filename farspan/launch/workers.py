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
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.clusterfile import FAR_FOLDER
from farspan.domain.codec import cut_unfinished_line, load, parse_json, write_atomically
from farspan.domain.epoch import EPOCH, Epoch
from farspan.domain.memory_kills import WorkerGroup, machine_kills
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.preemption import preempted
from farspan.domain.problems import EXIT_CODES, LESS_MEMORY, Problem, Refusal
from farspan.domain.problems import command as farspan
from farspan.domain.results import (
    STOPPED,
    Estimate,
    Event,
    Finished,
    Saved,
    Started,
    Step,
    Validated,
    Warned,
    decoded,
)
from farspan.domain.run import HOME, RunFolder
from farspan.domain.units import format_bytes
from farspan.launch.checkpoint_mirror import FlawOf
from farspan.launch.hosts import ask, by_client, quoted
from farspan.launch.kill_cause import KillCause, kill_cause
from farspan.launch.lease import Lease
from farspan.launch.processes import Process, run_folder
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
        self.plan, self.run, self.cluster, self.argument = plan, run, cluster, argument
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
        first, self._away = self.hosts[0], None
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
        self._ends_lease, lease = held is None, Lease(run) if held is None else held.lease
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
        #: Processes that this machine's kernel had ended for memory before these were started.
        self._killed_before = machine_kills()

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
        close = f"chmod -f 700 {quoted(Path(FAR_FOLDER))}; " if host.folder == FAR_FOLDER else ""
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
        self._signal(signal.SIGTERM)

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
            yield from self._warnings()
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
                self._end_lost()
            waited = time.monotonic() - self.failed_at if self.failed_at is not None else 0.0
            saving = (
                time.monotonic() - self._interrupted_at if self._interrupted_at is not None else 0.0
            )
            plain = self._held.again and -signal.SIGKILL in codes
            if waited > (PLAIN_S if plain else GRACE_S) or saving > SAVE_S:
                self._end()
            time.sleep(POLL_S)
        self._gather()
        unfetched = self._fetch(waits=not any(codes))
        self._refuse_if_failed()
        if unfetched is not None:
            raise unfetched

    def _mirror(self, event: Event) -> None:
        """Have what rank 0 saves on a disk of its own copied here."""
        if isinstance(event, Validated) and event.best:
            self._new_best = True
        if isinstance(event, Saved) and self._away is not None and self.fetches:
            self._away.mirror.request(event.step, best=self._new_best)
            self._new_best = False

    def _fetch(self, *, waits: bool) -> Refusal | None:
        """Copy what was saved and not copied; why that cannot be done. With `waits` the copy that
        is being made comes to its end, else it is made again: its host may be gone."""
        if self._away is None or not self.fetches:
            return None
        if waits:
            self._away.mirror.finish()
        else:
            self._away.mirror.close()
        try:
            self._away.fetch()
        except Refusal as refusal:
            return refusal
        return None

    def _warnings(self) -> Iterator[Event]:
        """What went wrong here and is in no worker's events."""
        if self._away is not None:
            for message in self._away.mirror.warnings():
                yield Warned(at=time.time(), message=message)

    def _require_folder(self) -> None:
        """End all at once where the run's folder is gone: they have nowhere to save to."""
        try:
            self.run.require_there()
            self._held.lease.require_held()
        except Refusal:
            self._interrupted_at = time.monotonic()
            self._end()
            raise

    def _end_lost(self) -> None:
        """End at once whom the others have lost: it stands still, or a link to it is cut, and it
        will not end by itself."""
        for process in self.processes:
            if process in self._heard or not process.ranks or not process.poll():
                continue
            self._heard.append(process)
            for closeness, problem in self._problems(process):
                # Who was preempted has saved, and ends by itself.
                lost = closeness == 2 and problem.code == "worker-lost"
                for other in self.processes if lost else ():
                    if other.ranks == (problem.rank,) and other.poll() is None:
                        self._culled.append(other)
                        other.signal(signal.SIGKILL)

    def _gather(self) -> None:
        """Fetch what workers on hosts of their own disk have recorded, for the report."""
        for process in self.processes:
            folder = run_folder(process.host, self.plan, self.run)
            for rank in process.ranks if process.host.folder is not None else ():
                name = f"rank-{rank}.events.jsonl"
                if content := process.read(folder.logs / name):
                    write_atomically(self.run.logs / name, content)

    def _refuse_if_failed(self) -> None:
        failed = [process for process in self.processes if process.ranks and process.poll()]
        failed = [process for process in failed if process not in self._culled] or failed
        # Workers also save where what had started some of them is gone, and where some of them were
        # preempted: nobody has asked for that.
        asked = self._interrupted_at is not None
        if not failed or (self.stopped and asked):
            return
        if self.stopped and self._finished is not None and self._finished.problem is not None:
            raise Refusal.of(self._finished.problem)
        ended = [process.poll() for process in self.processes if process.ranks]
        if not asked and all(code == -signal.SIGTERM for code in ended):
            raise Refusal(
                "interrupted",
                what="stopped before the first step: all workers were asked to end",
                where=self.run.path,
                fact="each got SIGTERM, from outside the run",
                remedy=farspan("resume", self.run.path),
            )
        # Workers that lost a peer fail too. The cause is a problem that is about something else, or
        # a worker that was killed before it could say anything.
        problems = [entry for process in failed for entry in self._problems(process)]
        said, cause = min(
            problems,
            key=lambda entry: (
                entry[1].code == "worker-lost",
                entry[1].code == "preempted",
                entry[0],
            ),
        )
        killed = any((process.poll() or 0) < 0 for process in failed)
        if asked and ((killed and not said) or cause.code == "preempted"):
            raise Refusal(
                "interrupted",
                what="stopped at once, as asked",
                where=self.run.path,
                fact="steps since the last save are not kept",
                remedy=farspan("resume", self.run.path),
            )
        raise Refusal.of(cause)

    @property
    def stopped(self) -> bool:
        """Whether workers have saved and ended between two steps."""
        return self._finished is not None and self._finished.reason in STOPPED

    def lost(self, process: Process) -> dict[int, Problem]:
        """Workers of a failed process that ended without a word, by rank, as far as it knows
        them."""
        rank = process.ranks[0]
        return {rank: self.wordless(process, rank, process.poll() or 0)}

    def _problems(self, process: Process) -> Iterator[tuple[int, Problem]]:
        """What ended each worker of a process, and how near its cause that is: 0 where it could say
        nothing, 1 what it said of itself, 2 of another."""
        logs, said = run_folder(process.host, self.plan, self.run).logs, set()
        for rank in process.ranks:
            where = logs / f"rank-{rank}.problem.json"
            if content := process.read(where):
                said.add(rank)
                problem = parse_json(content, Problem, where)
                yield 1 if problem.cause == "own" else 2, problem
        yield from (
            (0, problem) for rank, problem in self.lost(process).items() if rank not in said
        )

    def wordless(self, process: Process, rank: int, code: int) -> Problem:
        """What an exit code (negative: a signal) says of a worker that said nothing."""
        log = self.run.logs / f"rank-{process.ranks[0]}.log"
        killed = signal.Signals(-code).name if code < 0 else None
        fact = f"ended by {killed}" if killed else f"ended with exit code {code}"
        name = next((name for name, number in EXIT_CODES.items() if number == code), "worker-lost")
        remedy = farspan("resume", self.run.path)
        cause = self._kill_cause(process, rank) if code == -signal.SIGKILL else "other"
        if cause != "other":
            fact += f", as the kernel does when memory runs out{self._memory(process, rank)}"
        if cause == "memory":
            name, remedy = "out-of-memory", LESS_MEMORY
        last_words = _last_line(self.words(log))
        if code == -signal.SIGTERM:
            return preempted(
                {rank: process.host.name},
                where=log,
                fact=f"{fact} before its first step; last words: {last_words}",
                remedy=remedy,
                signal=killed,
                last_words=last_words,
            )
        return Problem(
            code=name,
            what=f"rank {rank} on {process.host.name} was lost",
            where=str(log),
            fact=f"{fact}; last words: {last_words}",
            remedy=remedy,
            signal=killed,
            rank=rank,
            host=process.host.name,
            last_words=last_words,
            suspected="memory" if cause == "open" else None,
        )

    def _kill_cause(self, process: Process, rank: int) -> KillCause:
        """Why a worker was killed; of another machine's kernel nobody here can tell."""
        if by_client(process.host):
            return "open"
        where = run_folder(process.host, self.plan, self.run).logs / f"rank-{rank}.group.json"
        group = None
        with suppress(Refusal):  # Damaged: the group is not known.
            if content := process.read(where):
                group = parse_json(content, WorkerGroup, where)
        # The memory of a GPU is none of the machine's.
        on_cpu = self.plan.devices[rank].backend == "cpu"
        held = self._held_bytes(process, rank) if on_cpu else 0
        return kill_cause(self._killed_before, machine_kills(), group, held)

    def _memory(self, process: Process, rank: int) -> str:
        """What a worker was predicted to need, and what it held when it was last heard."""
        fact = ""
        if self.run.estimate.exists() and rank < len(
            memory := load(self.run.estimate, Estimate).memory
        ):
            fact += f"; it was predicted to need {format_bytes(memory[rank].total)}"
        held = self._held_bytes(process, rank)
        return fact + (f"; held {format_bytes(held)}" if held else "")

    def _held_bytes(self, process: Process, rank: int) -> int:
        """What a worker of this start held at its last step; 0 where it made none."""
        folder = run_folder(process.host, self.plan, self.run)
        log = folder.events if rank == 0 else folder.logs / f"rank-{rank}.events.jsonl"
        held = 0
        for event in decoded((process.read(log) or b"").split(b"\n")[:-1], log):
            if isinstance(event, Started):  # Before it may have been another plan.
                held = 0
            elif isinstance(event, Step):
                held = event.memory_bytes
        return held

    def _signal(self, number: signal.Signals, services: bool = False) -> None:
        for process in self.processes:
            if process.poll() is None and bool(process.ranks) is not services:
                process.signal(number)

    def _end(self) -> None:
        self._culled += [process for process in self.processes if process.poll() is None]
        self._signal(signal.SIGKILL)
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
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + SAVE_S
            while time.monotonic() < deadline and any(
                p.ranks and p.poll() is None for p in self.processes
            ):
                time.sleep(POLL_S)
        self._end()
        # Services take what they have started with them, if they are asked.
        self._signal(signal.SIGTERM, services=True)
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


def _new_lines(path: Path, position: int) -> tuple[int, list[bytes]]:
    """Whole lines written after `position`, and where they end."""
    if not path.exists():
        return position, []
    with open(path, "rb") as file:
        file.seek(position)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    return position + len(whole), whole.splitlines()


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if any(map(str.isalpha, line))]
    return lines[-1][:200] if lines else "none"
