"""Gives the command of a run, makes faults while it trains, and gives the command again after a
kill, as a unit of systemd does. Nothing else is done for the run."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from farspan.app.job_units import RETRIED
from farspan.domain.problems import EXIT_CODES
from farspan.domain.run_events import Event, Finished, Recovered, Started, Step
from farspan.report.history import COMPLETE
from tests.faults.judging import Ending, Struck, read_trained
from tests.faults.places import Place
from tests.faults.scenarios import Fault

#: How often events, processes and the command are looked at: a save takes some milliseconds.
LOOK_S = 0.003
#: A run that brings no event and no exit for so long hangs. Silence is noticed after 4 s, hosts are
#: waited for 15 s, a worker that stands still before it joins the others for `WORKER_START_S`, and
#: a start takes less than half a minute on a busy machine.
HANG_S = 420.0
#: The command is given again this often at most, and kills of `kill-again` are as many.
MAX_STARTS = 8
MAX_KILLS = 12
#: How often `kill-again` looks for the worker of the next start.
KILL_AGAIN_POLL_S = 0.05
#: A save that does not come within this of its step: the fault strikes anyway.
SAVE_S = 20.0
NUMBERS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


class Tail:
    """The events of a run as they come. A file that was replaced is read anew, without what it had
    before."""

    def __init__(self, place: Place) -> None:
        self._path = place.run.events
        self._read = 0
        self.events = list[Event]()

    def read(self) -> bool:
        """Take new events; return whether there are any."""
        try:
            size = self._path.stat().st_size
        except OSError:
            self._read = 0
            return False
        if size == self._read:
            return False
        if size < self._read:
            self._read = 0
        with suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._read)
            content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read += len(whole)
            last = self.events[-1].at if self.events else 0.0
            decoded = [msgspec.json.decode(line, type=Event) for line in whole.splitlines()]
            new = [event for event in decoded if event.at > last]
            self.events += new
            return bool(new)
        return False

    @property
    def step(self) -> int:
        """The last step that was made, after a start the one that it resumed from."""
        steps = (event.step for event in reversed(self.events) if isinstance(event, Step | Started))
        return next(steps, 0)


class Disturber:
    """One run and its faults, in their order."""

    def __init__(self, place: Place, faults: Sequence[Fault]) -> None:
        self._place = place
        self._tail = Tail(place)
        self._waiting = list(faults)
        self._made = list[tuple[Fault, float, int]]()
        self._made_at = 0.0
        #: Faults that pass, with the time when and the worker's process.
        self._passing = list[tuple[float, Fault, int | None]]()
        self._due_at: float | None = None
        self._down_until = 0.0
        self._stopping = False
        self._killed = set[int]()
        self._kill_again: Fault | None = None
        self._kill_again_at = 0.0
        self._exits = list[int]()
        #: When the command was given again, seconds since the epoch.
        self._given_again_at = list[float]()

    def train(self) -> Ending:
        """Train the run to its end, or to that which it does not survive."""
        began = time.monotonic()
        try:
            code, hung = self._train_until_ended()
            code_after = None
            if code is not None and not hung:
                # The cause is gone: whoever saw to that gives the command again.
                self._lift(now=True)
                self._kill_again = None
                self._waiting.clear()
                code_after, hung = self._train_until_ended()
        finally:
            self._lift(now=True)
        self._tail.read()
        trained = None
        with suppress(Exception):
            trained = read_trained(self._place.run)
        return Ending(
            struck=tuple(self._followed(number) for number in range(len(self._made))),
            exits=tuple(self._exits),
            code=code,
            code_after=code_after,
            hung=hung,
            trained=trained,
            seconds=time.monotonic() - began,
        )

    def _train_until_ended(self) -> tuple[str | None, str]:
        """Give the command until it ends for good: the code of its refusal, None of a complete run;
        and why it was given up."""
        place = self._place
        starts = 1
        place.start()
        self._started_at = heard_at = time.monotonic()
        down = False
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            if self._tail.read():
                heard_at = now
            self._lift()
            if not down:
                self._strike_due()
                self._strike_again()
            if now - heard_at > HANG_S:
                return "hangs", f"nothing has happened for {HANG_S:.0f} s"
            if down:
                if now >= self._down_until:
                    place.start()
                    self._given_again_at.append(time.time())
                    down = False
                    self._stopping = False
                    self._started_at = heard_at = time.monotonic()
                continue
            exit_code = place.poll()
            if exit_code is None:
                continue
            self._exits.append(exit_code)
            heard_at = now
            self._tail.read()
            if exit_code == 0 and self._is_complete():
                return None, ""
            if not self._is_given_again(exit_code) or starts >= MAX_STARTS:
                return self._last_refusal(exit_code), ""
            starts += 1
            down = True

    def _is_complete(self) -> bool:
        ends = [event for event in self._tail.events if isinstance(event, Finished)]
        return bool(ends) and ends[-1].reason in COMPLETE

    def _is_given_again(self, exit_code: int) -> bool:
        """Return whether a unit of systemd would start the command again, or a host that boots."""
        if not self._place.has_unit:
            return False
        abnormal = exit_code < 0
        retried = exit_code in {EXIT_CODES[code] for code in RETRIED}
        return abnormal or retried or self._stopping

    def _last_refusal(self, exit_code: int) -> str:
        log = self._place.log.read_text(errors="replace")
        codes = re.findall(r"error\[([a-z-]+)\]", log)
        if codes:
            return codes[-1]
        # A log on a full disk has no message: the exit code is that of one problem.
        known = {number: code for code, number in EXIT_CODES.items()}
        return known.get(exit_code, f"exit code {exit_code}")

    # -- making faults
    #   --------------------------------------------------------------------------------------------

    def _strike_due(self) -> None:
        if self._waiting and self._is_time(self._waiting[0]) and self._strike(self._waiting[0]):
            self._waiting.pop(0)
            self._due_at = None

    def _is_time(self, fault: Fault) -> bool:
        now = time.monotonic()
        if fault.phase == "planning":
            return now >= self._started_at + fault.delay_s or self._tail.step > 0
        if fault.phase == "recovery":
            return now >= self._made_at + fault.delay_s
        if fault.phase == "time":
            is_training = self._tail.step < self._place.scenario.steps
            return is_training and self._seconds_trained() >= fault.delay_s
        if self._tail.step < fault.step:
            return False
        if fault.phase != "save":
            return True
        if self._due_at is None:
            self._due_at = now + SAVE_S
        return now >= self._due_at or self._is_saving()

    def _is_saving(self) -> bool:
        """Return whether a checkpoint is being written in the run's folder, or on the disk of rank
        0's host."""
        for pattern in ("disk/run/checkpoints", "ssh/s0/.cache/farspan/runs/*/checkpoints"):
            if any(self._place.folder.glob(f"{pattern}/.step-*.tmp")):
                return True
        return False

    def _seconds_trained(self) -> float:
        steps = (event for event in self._tail.events if isinstance(event, Step))
        first = next(steps, None)
        return 0.0 if first is None else time.time() - first.at

    def _strike(self, fault: Fault) -> bool:
        """Make a fault now; False where its worker does not run."""
        place = self._place
        pid = None
        if fault.kind in ("kill", "stop", "term", "kill-again"):
            found = self._find_target(fault)
            if found is None:
                return False
            pid = found
            self._signal(pid, NUMBERS.get(fault.kind, signal.SIGKILL))
            if fault.kind == "kill-again":
                self._kill_again = fault
                self._killed.add(pid)
        elif fault.kind == "supervisor":
            self._stopping = True
            place.signal_command(signal.SIGKILL)
        elif fault.kind == "shutdown":
            self._stopping = True
            place.signal_command(signal.SIGTERM)
        elif fault.kind == "disk":
            self._stopping = True
            self._down_until = time.monotonic() + (fault.lasts_s or 0.0)
            place.lose_disk()
        elif fault.kind == "site":
            place.lose_site(fault.target)
        elif fault.kind == "disk-full":
            place.fill_disk()
        else:
            place.cut(fault.target, one_way=fault.kind == "cut-one-way", up=False)
        self._made.append((fault, time.time(), self._tail.step))
        self._made_at = time.monotonic()
        if fault.lasts_s is not None:
            self._passing.append((self._made_at + fault.lasts_s, fault, pid))
        return True

    def _find_target(self, fault: Fault) -> int | None:
        workers = self._place.workers()
        return workers.get(fault.target % max(1, len(self._place.sites)))

    def _strike_again(self) -> None:
        """Kill the worker of the same rank in each further start."""
        now = time.monotonic()
        if self._kill_again is None or now < self._kill_again_at:
            return
        self._kill_again_at = now + KILL_AGAIN_POLL_S
        pid = self._find_target(self._kill_again)
        if pid is not None and pid not in self._killed and len(self._killed) < MAX_KILLS:
            self._killed.add(pid)
            self._signal(pid, signal.SIGKILL)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def _lift(self, *, now: bool = False) -> None:
        """End the faults that have passed by this time; at the end all."""
        for entry in list(self._passing):
            until, fault, pid = entry
            if not now and time.monotonic() < until:
                continue
            self._passing.remove(entry)
            if pid is not None:
                self._signal(pid, signal.SIGCONT)
            elif fault.kind == "disk":
                self._place.return_disk()
            elif fault.kind == "site":
                self._place.return_site(fault.target)
            elif fault.kind == "disk-full":
                self._place.free_disk()
            else:
                self._place.cut(fault.target, one_way=fault.kind == "cut-one-way", up=True)

    # -- what followed
    #   --------------------------------------------------------------------------------------------

    def _followed(self, number: int) -> Struck:
        """Return what came of a fault, until the next one."""
        fault, at, step = self._made[number]
        until = self._made[number + 1][1] if number + 1 < len(self._made) else float("inf")
        struck = Struck(fault=str(fault), at=at, step=step)
        before = [event for event in self._tail.events if event.at <= at]
        after = [event for event in self._tail.events if at < event.at < until]
        # Workers that have lost their supervisor train on until they notice.
        resumed_at = at
        if fault.kind in ("supervisor", "shutdown", "disk"):
            resumed_at = next((given for given in self._given_again_at if given > at), at)
        starts = [
            event
            for event in after
            if isinstance(event, Started | Recovered) and event.at > resumed_at
        ]
        if not starts or not any(isinstance(event, Step) for event in before):
            return struck
        began_at = starts[0].at
        recovered = next((event for event in starts if isinstance(event, Recovered)), None)
        steps = [event for event in after if isinstance(event, Step)]
        following = next((event for event in steps if event.at >= began_at), None)
        furthest = max((event.step for event in before if isinstance(event, Step)), default=0)
        return msgspec.structs.replace(
            struck,
            seen_s=None if recovered is None else max(0.0, recovered.at - recovered.down_s - at),
            next_step_s=None if following is None else following.at - at,
            steps_again=sum(event.step <= furthest for event in steps),
        )
