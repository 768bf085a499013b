"""Warm spare processes of a run: after a fault they take the places of the workers that are gone.

A worker imports PyTorch for seconds, several of them on few cores for many. A spare has done so
before it is needed.
"""

from __future__ import annotations

import os
import select
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from subprocess import TimeoutExpired
from typing import IO, NamedTuple

import msgspec

from farspan.domain.cluster import SPARE, Host
from farspan.domain.interpreter import module_command
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan
from farspan.domain.run import SPARE_ASKED, SPARE_READY, RunFolder, SpareTask
from farspan.launch.hosts import by_client, host_python
from farspan.launch.processes import HostProcess, with_environment, worker_environment

#: Memory that a spare takes, by rough measurement; they are started where there are twice as many
#: bytes for all.
SPARE_BYTES = 400 * 10**6
#: A spare that is killed has ended within this.
SPARE_KILL_TIMEOUT_S = 5.0
#: A spare that does not answer and has not computed for this long stands still. One that still
#: imports computes; after the second limit a fresh worker is quicker.
SPARE_SILENCE_S = 3.0
IMPORT_TIMEOUT_S = 60.0
#: How often a spare that is asked is looked at.
SPARE_POLL_S = 0.1


class Seat(NamedTuple):
    """What a spare fits: a device of a host, with a number of threads."""

    host: str
    device: int
    threads: int


class SpareProcess(HostProcess):
    """Waits on its host for a device; then it is the worker of a rank."""

    def __init__(self, host: Host, seat: Seat, log: Path, keep_open: int) -> None:
        words = module_command(host_python(host), "farspan.runtime.spare")
        words = with_environment(worker_environment(seat.threads), words)
        with open_own(log, "ab") as file:
            super().__init__(
                host,
                (),
                words,
                log=file,
                keep_open=keep_open,
                device=seat.device,
                first_input=b"",
                answers=True,
                variables={SPARE: "1"},
            )

    def is_ready(self) -> bool:
        """Ask it, once, and wait for the answer. False where it has ended or stands still."""
        self.write_input(SPARE_ASKED)
        answer = b""
        computed_s = -1.0
        began = time.monotonic()
        last_active = began
        while not answer.endswith(SPARE_READY):
            if select.select([self._answers], [], [], SPARE_POLL_S)[0]:
                piece = os.read(self._answers.fileno(), 2**12)
                if not piece:
                    return False
                answer += piece
            now = time.monotonic()
            seconds = self._computed_s()
            if seconds != computed_s:
                computed_s = seconds
                last_active = now
            if now - last_active > SPARE_SILENCE_S or now - began > IMPORT_TIMEOUT_S:
                return False
        return True

    @property
    def _answers(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _computed_s(self) -> float:
        """Return the seconds of processor time that it has had, with what entered its host."""
        import psutil

        seconds = 0.0
        with suppress(psutil.Error):
            own = psutil.Process(self.pid)
            for process in (own, *own.children(recursive=True)):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds

    def become_worker(
        self, rank: int, folder: RunFolder, environment: dict[str, str], log: Path, secret: str
    ) -> None:
        """Let it be the worker of a rank, which writes to its own log from then on."""
        task = SpareTask(
            plan=str(folder.plan), run=str(folder.path), environment=environment, log=str(log)
        )
        self.ranks = (rank,)
        self._stops_by_input = False
        self._answers.close()
        content = msgspec.json.encode(task)
        self.write_input(content + f"\n{secret}\n".encode())


class Spares:
    """The spares of a run, over all its starts."""

    def __init__(self) -> None:
        self._waiting = dict[Seat, list[SpareProcess]]()

    def start_spares(self, plan: Plan, hosts: Sequence[Host], logs: Path, keep_open: int) -> None:
        """Have a spare for each device of a plan with several workers, where it is entered without
        a client and there is memory for it."""
        import psutil

        by_name = {host.name: host for host in hosts}
        lacking = Counter[Seat]()
        for device in plan.devices if len(plan.devices) > 1 else ():
            if not by_client(by_name[device.host], device.index):
                lacking[Seat(device.host, device.index, device.threads)] += 1
        for seat, spares in self._waiting.items():
            spares[:] = [spare for spare in spares if spare.poll() is None]
            lacking[seat] -= len(spares)
        seats = list(lacking.elements())
        if psutil.virtual_memory().available < 2 * SPARE_BYTES * len(seats):
            return
        for seat in seats:
            spare = SpareProcess(by_name[seat.host], seat, logs / "spares.log", keep_open)
            self._waiting.setdefault(seat, []).append(spare)

    def take_spare(self, host: str, index: int, threads: int) -> SpareProcess | None:
        """Take a spare that waits for this device and answers, if one does. One that stands still
        is ended: its place would stay empty."""
        waiting = self._waiting.get(Seat(host, index, threads), [])
        while waiting:
            spare = waiting.pop(0)
            if spare.is_ready():
                return spare
            _kill_spares([spare])
        return None

    def close(self) -> None:
        _kill_spares(list(chain.from_iterable(self._waiting.values())))
        self._waiting.clear()


def _kill_spares(spares: Sequence[SpareProcess]) -> None:
    for spare in spares:
        spare.kill()
    for spare in spares:
        with suppress(TimeoutExpired):
            spare.wait(SPARE_KILL_TIMEOUT_S)
