"""A run that is disturbed on purpose: faults at chosen moments, and what became of them.

The run's workers are real processes on this machine, and its links those of a lab. The same run
without faults says what its losses should be.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from farspan.app.configs import as_yaml
from farspan.app.jobs import register_job
from farspan.app.supervisor import Supervisor
from farspan.app.updates import Faulted, Progress, ignore_update
from farspan.domain.config import OnFault, RunConfig
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event, Recovered, Started, Step, read_events
from farspan.domain.struct_files import load_yaml, write_atomically
from farspan.launch import trust
from farspan.report.history import follow_events
from farspan_lab import state
from farspan_lab.faults import RECOVERY_S, Injection

#: How often the moment of the next fault is looked for: a save takes some milliseconds.
LOOK_S = 0.002
#: What is seen so much later has another cause.
SEEN_S = 15.0


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """A fault and what followed. Times are in seconds; None where the run did not start again for
    it."""

    fault: str
    #: The step that had been made.
    step: int
    #: Since the epoch.
    at: float
    #: Until workers were seen to fail, and until the next training step ended.
    seen_s: float | None = None
    back_s: float | None = None
    #: Steps that were made again.
    lost: int = 0
    replanned: bool = False
    cause: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of a disturbed run beside those of the same run undisturbed."""

    steps: int
    #: Whether the last training loss is the same, bit by bit.
    equal: bool
    #: Of all steps: the largest relative difference.
    worst: float


class Disturbed(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was disturbed. `problem` is what it ended with, where it did not train to its end,
    and `ended_s` the seconds from the last fault until then."""

    run: str
    injected: tuple[Injected, ...]
    #: Faults whose moment did not come.
    left: tuple[str, ...]
    reason: str | None
    problem: Problem | None
    ended_s: float | None
    comparison: Comparison | None = None


class Chaos:
    """Makes faults in a run while it trains, one after another."""

    def __init__(
        self, run: RunFolder, injections: Sequence[Injection], lab: str | None, seed: int = 0
    ) -> None:
        self._run = run
        self._lab = lab
        self._rng = random.Random(seed)
        self._waiting = list(injections)
        self._made = list[tuple[Injection, int, float]]()
        self._lift = list[tuple[float, Injection, int | None]]()
        self._step = 0
        self._recovering_at = 0.0
        self._made_at = 0.0
        self._faulted = list[Faulted]()
        self._ended = threading.Event()
        self._supervisor: Supervisor | None = None

    def train(self, progress: Progress = ignore_update) -> Disturbed:
        """Train the run to its end, or to that which it does not survive."""

        def watch(update: object) -> None:
            if isinstance(update, Faulted):
                self._faulted.append(update)
                self._recovering_at = time.monotonic()
            progress(update)

        thread = threading.Thread(target=self._work, daemon=True)
        problem = None
        finished = None
        with register_job(self._run):
            self._supervisor = Supervisor(self._run, watch, self._hear)
            thread.start()
            try:
                finished = self._supervisor.train_run()
            except Refusal as refusal:
                problem = refusal.problem
            finally:
                self._ended.set()
                thread.join()
                self._lift_all(time.monotonic(), now=True)
        ended = time.time()
        last = max((at for _, _, at in self._made), default=None)
        return Disturbed(
            run=str(self._run.path),
            injected=self._injected(),
            left=tuple(map(str, self._waiting)),
            reason=finished.reason if finished else None,
            problem=problem,
            ended_s=None if last is None or problem is None else ended - last,
        )

    # -- making faults
    #   --------------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        if isinstance(event, Started):
            self._recovering_at = 0.0
        if isinstance(event, Step | Started):
            self._step = event.step

    def _work(self) -> None:
        delay_s = 0.0
        while not self._ended.wait(LOOK_S):
            self._lift_all(time.monotonic())
            if (
                self._waiting
                and self._is_time(self._waiting[0], delay_s)
                and self._make(self._waiting[0])
            ):
                self._waiting.pop(0)
                delay_s = self._rng.uniform(0.0, RECOVERY_S)

    def _is_time(self, injection: Injection, delay_s: float) -> bool:
        if injection.phase == "recovery" and self._recovering_at:
            # From the fault before: that one has to be seen first.
            return (
                self._recovering_at > self._made_at
                and time.monotonic() - self._recovering_at >= delay_s
            )
        if self._recovering_at or self._step < injection.step:
            return False
        # Where the fault before has had no consequence, what would have come in the recovery comes
        # some time later.
        if (
            injection.phase == "recovery"
            and self._made
            and time.time() < self._made[-1][2] + SEEN_S
        ):
            return False
        return injection.phase != "save" or any(self._run.checkpoints.glob(".step-*.tmp"))

    def _make(self, injection: Injection) -> bool:
        """Make a fault now; False where its worker does not run."""
        pid = None
        if injection.sites is not None:
            self._cut(injection, up=False)
        else:
            if (pid := self._pid(injection.rank or 0)) is None:
                return False
            os.kill(pid, signal.SIGKILL if injection.kind == "kill" else signal.SIGSTOP)
        self._made.append((injection, self._step, time.time()))
        self._made_at = time.monotonic()
        if injection.lasts_s is not None:
            self._lift.append((time.monotonic() + injection.lasts_s, injection, pid))
        return True

    def _pid(self, rank: int) -> int | None:
        """Return the process of a rank; where the run goes on with fewer workers, of another
        one."""
        workers = self._supervisor.workers if self._supervisor is not None else None
        for process in workers.processes if workers is not None else ():
            if rank % len(workers.plan.devices) in process.ranks and process.poll() is None:  # type: ignore[union-attr]
                return int(process.pid)  # type: ignore[attr-defined]
        return None

    def _cut(self, injection: Injection, *, up: bool) -> None:
        assert injection.sites is not None and self._lab is not None
        state.change(
            self._lab, injection.sites, {"up": up}, one_way=injection.kind == "cut-one-way"
        )

    def _lift_all(self, at: float, *, now: bool = False) -> None:
        """Lift the faults that pass by then; at the end every one."""
        for entry in list(self._lift):
            until, injection, pid = entry
            if now or until <= at:
                self._lift.remove(entry)
                if pid is None:
                    self._cut(injection, up=True)
                else:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
        for injection, _, _ in self._made if now else ():
            if injection.sites is not None:
                self._cut(injection, up=True)

    # -- what followed
    #   --------------------------------------------------------------------------------------------

    def _injected(self) -> tuple[Injected, ...]:
        events = list(read_events(self._run.events)) if self._run.events.exists() else []
        own = self._assigned()
        return tuple(
            self._followed(*made, own.get(number), events) for number, made in enumerate(self._made)
        )

    def _assigned(self) -> dict[int, Faulted]:
        """Return what was seen of each fault that was made, by its number: of several that can be
        it, of the last one."""
        own = dict[int, Faulted]()
        for fault in self._faulted:
            able = [
                number
                for number, (injection, _, at) in enumerate(self._made)
                if number not in own
                and at <= fault.at < at + SEEN_S
                and _can_be_of(injection, fault.problem)
            ]
            if able:
                own[able[-1]] = fault
        return own

    def _followed(
        self,
        injection: Injection,
        step: int,
        at: float,
        seen: Faulted | None,
        events: Sequence[Event],
    ) -> Injected:
        """Return what came of a fault."""
        made = Injected(fault=str(injection), step=step, at=at)
        if seen is None:
            return made
        again = next(
            (event for event in events if isinstance(event, Recovered) and event.at >= seen.at),
            None,
        )
        back = next(
            (
                event
                for event in events
                if isinstance(event, Step) and again and event.at >= again.at
            ),
            None,
        )
        return msgspec.structs.replace(
            made,
            seen_s=seen.at - at,
            back_s=back.at - at if back else None,
            cause=seen.problem.what,
            lost=again.lost if again else 0,
            replanned=bool(again and again.replanned),
        )


def _can_be_of(injection: Injection, problem: Problem) -> bool:
    """Whether a fault that was seen can be what was done."""
    if injection.sites is None:
        killed = problem.signal == "SIGKILL"
        return killed == (injection.kind == "kill") and problem.code == "worker-lost"
    away = problem.code == "host-unreachable" or problem.host in injection.sites
    return away and problem.signal is None


def lab_of(run: RunFolder) -> str | None:
    """Return the lab that a run's cluster is."""
    kind, _, name = (load_yaml(run.config, RunConfig).parallel.cluster or "").partition(":")
    return name if kind == "lab" else None


def links_of(run: RunFolder) -> tuple[tuple[str, str], ...]:
    """Return the links of a run's lab, each once."""
    if (lab := lab_of(run)) is None:
        return ()
    used = {device.site for device in run.load_plan().devices}
    links = dict.fromkeys(
        tuple(sorted((link.source, link.target))) for link in state.status(lab).lab.links
    )
    return tuple((a, b) for a, b in links if {a, b} <= used)


def twin(run: RunFolder, path: Path) -> RunFolder:
    """Another run by the same plan on the same cluster, not begun."""
    trust.require_trusted(run)
    other = RunFolder(path)
    other.make()
    for name in (
        "corpus.json",
        "tokenizer.json",
        "run.json",
        "run.yaml",
        "cluster.json",
        "estimate.json",
        "plan.json",
    ):
        if (run.path / name).exists():
            shutil.copyfile(run.path / name, path / name)
    trust.seal_run(other)
    return other


def disturb(
    calm: RunFolder,
    path: Path,
    injections: Sequence[Injection],
    progress: Progress = ignore_update,
    *,
    seed: int = 0,
    on_fault: OnFault | None = None,
) -> Disturbed:
    """Train a run once more, at `path`, with these faults, and compare its losses with the calm
    one's. `on_fault` is for this time; None leaves it as run.yaml has it."""
    run = twin(calm, path)
    if on_fault is not None:
        config = msgspec.structs.replace(load_yaml(run.config, RunConfig), on_fault=on_fault)
        write_atomically(run.config, as_yaml(config))
    disturbed = Chaos(run, injections, lab_of(calm), seed).train(progress)
    if disturbed.problem is not None:
        return disturbed
    return msgspec.structs.replace(disturbed, comparison=compare(run, calm))


def compare(run: RunFolder, undisturbed: RunFolder) -> Comparison:
    """Losses of each step that both runs made, of each run those that its last model came from."""
    ours, theirs = (
        {
            timed.step.step: timed.step.loss
            for timed in follow_events(read_events(folder.events)).steps
        }
        for folder in (run, undisturbed)
    )
    both = sorted(ours.keys() & theirs.keys())
    last = both[-1] if both else 0
    worst = max((abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in both), default=0.0)
    equal = bool(both) and ours[last] == theirs[last] and ours.keys() == theirs.keys()
    return Comparison(steps=len(both), equal=equal, worst=worst)
