"""Start workers on this machine, one process a device, pass on what they say, and leave none behind."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from farspan.domain.codec import load
from farspan.domain.plan import Plan
from farspan.domain.problems import EXIT_CODES, Problem, Refusal
from farspan.domain.results import Event
from farspan.domain.run import RunFolder

#: How often the event file and the processes are looked at.
POLL_S = 0.1
#: After one worker has failed the others get this long to end by themselves (they may be writing a message).
GRACE_S = 5.0
#: After an interrupt workers get this long to finish their step and save.
SAVE_S = 120.0


def worker_environment(threads: int) -> dict[str, str]:
    """What every worker process starts with, beside the user's own environment.

    glibc gives large freed blocks back to the kernel and faults them in again, zeroed, on every step; kept instead, a
    small model's bf16 step takes 0.76 of the time (2 cores, 6 layers x 384).
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1),
        "MALLOC_TRIM_THRESHOLD_": str(2**33),
        "MALLOC_TOP_PAD_": str(2**26),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


class LocalWorkers:
    """The workers of one plan on this machine. Iterating yields their events until all have ended.

    Leaving the `with` block lets what still runs save, then ends it. Raises the Refusal of the first worker that
    failed, and refuses a run whose workers still run.
    """

    def __init__(self, plan: Plan, run: RunFolder) -> None:
        self._plan, self._run = plan, run
        run.logs.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(run)
        for stale in run.logs.glob("rank-*.problem.json"):
            stale.unlink()
        self._events_from = run.events.stat().st_size if run.events.exists() else 0
        self._interrupted_at: float | None = None
        self._logs: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LocalWorkers:
        port = _free_port()
        for rank, device in enumerate(self._plan.devices):
            log = open(self._run.logs / f"rank-{rank}.log", "ab")
            self._logs.append(log)
            environment = {
                **worker_environment(device.threads),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self._plan.devices)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "FARSPAN_LAUNCHER": str(os.getpid()),
            }
            command = [sys.executable, "-m", "farspan.runtime.worker", str(self._run.plan), str(self._run.path)]
            # A session of its own: Ctrl-C reaches only the launcher, which passes it on once.
            # It inherits the lock, which holds as long as any worker lives, even without its launcher.
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=[self._lock.fileno()],
            )  # fmt: skip
            self._processes.append(process)
        return self

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def interrupt(self) -> None:
        """Ask the workers to save and end; a second call ends them at once."""
        if self._interrupted_at is not None:
            self._end()
            return
        self._interrupted_at = time.monotonic()
        self._signal(signal.SIGTERM)

    def __iter__(self) -> Iterator[Event]:
        decoder, position, failed_at = msgspec.json.Decoder(Event), self._events_from, None
        while True:
            running = [process for process in self._processes if process.poll() is None]
            position, lines = _new_lines(self._run.events, position)
            yield from (decoder.decode(line) for line in lines)
            if not running:
                break
            if failed_at is None and any(process.returncode for process in self._processes):
                failed_at = time.monotonic()
            waited = time.monotonic() - failed_at if failed_at is not None else 0.0
            saving = time.monotonic() - self._interrupted_at if self._interrupted_at is not None else 0.0
            if waited > GRACE_S or saving > SAVE_S:
                self._end()
            time.sleep(POLL_S)
        self._refuse_if_failed()

    def _refuse_if_failed(self) -> None:
        codes = [process.returncode for process in self._processes]
        if not any(codes):
            return
        problems = {rank: self._problem(rank, code) for rank, code in enumerate(codes) if code}
        # Workers that lost a peer fail too. The cause is a problem that is about something else, or a worker that was
        # killed before it could say anything.
        cause = min(problems, key=lambda rank: (problems[rank].code == "worker-lost", self._words(rank).exists()))
        if self._interrupted_at is not None and codes[cause] < 0:
            raise Refusal(
                "interrupted", what="stopped at once, as asked", where=self._run.path,
                fact="steps since the last save are not kept", remedy=f"farspan resume {self._run.path}",
            )  # fmt: skip
        raise Refusal.of(problems[cause])

    def _words(self, rank: int) -> Path:
        """Where a worker writes the problem that ends it."""
        return self._run.logs / f"rank-{rank}.problem.json"

    def _problem(self, rank: int, code: int) -> Problem:
        if self._words(rank).exists():
            return load(self._words(rank), Problem)
        host, log = self._plan.devices[rank].host, self._run.logs / f"rank-{rank}.log"
        cause = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            cause += ", as the kernel does when memory runs out"
        name = next((name for name, number in EXIT_CODES.items() if number == code), "worker-lost")
        return Problem(
            code=name, what=f"rank {rank} on {host} was lost", where=str(log),
            fact=f"{cause}; last words: {_last_line(log)}", remedy=f"farspan resume {self._run.path}",
        )  # fmt: skip

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _end(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait(timeout=10)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._interrupted_at is None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + SAVE_S
            while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
                time.sleep(POLL_S)
        self._end()
        for file in (*self._logs, self._lock):
            file.close()


def _locked(run: RunFolder) -> IO[bytes]:
    """The run's lock, held; it goes with the last process that has it open, however that ends."""
    lock = open(run.lock, "wb")  # noqa: SIM115 - closed by __exit__
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise Refusal(
            "run-busy", what="this run is being trained already", where=run.path,
            fact="another process holds its lock", remedy=f"fuser {run.lock}",
        ) from None  # fmt: skip
    return lock


def _new_lines(path: Path, position: int) -> tuple[int, list[bytes]]:
    """Whole lines written after `position`, and where they end."""
    if not path.exists():
        return position, []
    with open(path, "rb") as file:
        file.seek(position)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    return position + len(whole), whole.splitlines()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "none"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
