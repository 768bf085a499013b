"""Warm spare processes beside the workers of a run: after a fault they take the places of those
that are gone.

A worker imports PyTorch for seconds, several of them on few cores for many. A spare has done so
before it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import NamedTuple

import msgspec
import psutil

from farspan.domain.cluster import SPARE, Host
from farspan.domain.interpreter import module_command
from farspan.domain.own_files import open_own
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder, SpareTask
from farspan.launch.hosts import by_client, interpreter
from farspan.launch.processes import HostProcess, with_environment, worker_environment

#: Memory that a spare takes, by rough measurement; they are started where there are twice as many
#: bytes for all.
SPARE_BYTES = 400 * 10**6
#: A spare that is told to end has ended within this.
END_S = 5.0


class Seat(NamedTuple):
    """What a spare fits: a device of a host, with so many threads."""

    host: str
    device: int
    threads: int


class SpareProcess(HostProcess):
    """Waits on its host, beside the device; then it is the worker of a rank."""

    def __init__(self, host: Host, seat: Seat, log: Path, keep_open: int) -> None:
        words = with_environment(
            worker_environment(seat.threads),
            module_command(interpreter(host), "farspan.runtime.spare"),
        )
        with open_own(log, "ab") as file:
            super().__init__(
                host,
                (),
                words,
                log=file,
                keep_open=keep_open,
                device=seat.device,
                said=b"",
                variables={SPARE: "1"},
            )

    def begin(
        self, rank: int, folder: RunFolder, environment: dict[str, str], log: Path, secret: str
    ) -> None:
        """Let it be the worker of a rank."""
        task = SpareTask(
            plan=str(folder.plan), run=str(folder.path), environment=environment, log=str(log)
        )
        self._ranks, self._stops_with_input, self._leads = (rank,), False, True
        self._say(msgspec.json.encode(task) + f"\n{secret}\n".encode())


class Spares:
    """The spares of a run, over all its starts."""

    def __init__(self) -> None:
        self._waiting = dict[Seat, SpareProcess]()

    def fill(self, plan: Plan, hosts: Sequence[Host], logs: Path, keep_open: int) -> None:
        """Have a spare for each device of a plan with several workers, where it is entered without
        a client and there is memory for it."""
        by_name, seats = {host.name: host for host in hosts}, list[Seat]()
        for device in plan.devices if len(plan.devices) > 1 else ():
            seat = Seat(device.host, device.index, device.threads)
            waiting = self._waiting.get(seat)
            if not by_client(by_name[seat.host], seat.device) and (
                waiting is None or waiting.poll() is not None
            ):
                seats.append(seat)
        if psutil.virtual_memory().available < 2 * SPARE_BYTES * len(seats):
            return
        for seat in seats:
            self._waiting[seat] = SpareProcess(
                by_name[seat.host], seat, logs / "spares.log", keep_open
            )

    def take(self, host: str, index: int, threads: int) -> SpareProcess | None:
        """The spare that waits for this device, if one does."""
        spare = self._waiting.pop(Seat(host, index, threads), None)
        return spare if spare is not None and spare.poll() is None else None

    def close(self) -> None:
        for spare in self._waiting.values():
            spare.kill()
        for spare in self._waiting.values():
            with suppress(TimeoutExpired):
                spare.wait(END_S)
        self._waiting.clear()
