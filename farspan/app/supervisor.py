"""The supervisor of a run, one a job: it starts the workers, and after a fault starts them again.

It is the process that trains the run, so it ends with it. A host that stays away is waited for as
long as a plan without it would lose; then that plan is followed.
"""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager

from farspan.app import clusters
from farspan.app.checkpoints import copy_checkpoints, flaw_of, unmirrored_steps
from farspan.app.faults import Faults, Seen, told
from farspan.app.plans import Planned
from farspan.app.replanning import adopt, planned_without
from farspan.app.updates import Ended, Faulted, Note, Progress, Training
from farspan.domain.codec import load, load_yaml
from farspan.domain.config import RunConfig
from farspan.domain.epoch import Fault
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem, Refusal, command
from farspan.domain.results import Estimate, Event, Finished, Started, Step
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.units import format_seconds
from farspan.launch.away import away
from farspan.launch.launchers import launch
from farspan.launch.lease import Lease
from farspan.launch.spares import Spares
from farspan.launch.workers import Held, Workers

#: How often hosts that are away are looked for, and the user's wish to stop.
POLL_S = 1.0
LOOK_S = 0.1
#: Spares are started when workers have trained so long: they import for seconds, which short runs
#: do not get back.
SPARES_AFTER_S = 10.0
#: Steps whose median says what a step takes.
RECENT = 20


class Supervisor:
    """Trains a run to its end, through all faults that can be cured. `hear` takes its events."""

    def __init__(self, run: RunFolder, progress: Progress, hear: Callable[[Event], None]) -> None:
        self._run = run
        self._progress = progress
        self._hear = hear
        self._on_fault = load_yaml(run.config, RunConfig).on_fault
        self._faults = Faults()
        self._fault: Fault | None = None
        self._workers: Workers | None = None
        #: Times that the user has asked to stop.
        self._asked = 0
        #: The plan whose training is shown.
        self._shown: str | None = None
        #: The last step that was heard of, and what recent ones took.
        self._step = 0
        self._steps_s = deque[float](maxlen=RECENT)
        #: The furthest that any start has come: a fault before it is at the same place.
        self._furthest = 0
        #: The first start of this job that trained, and when it did by the monotonic clock.
        self._first: Started | None = None
        self._first_at = self._started_at = 0.0
        #: When workers of the last start were seen to fail, if they were, and when its fault was
        #: seen.
        self._failed_at: float | None = None
        self._seen_at = 0.0

    def train(self) -> Finished | None:
        """The last event of the run. Raises Refusal with the cause where it cannot go on, or was
        asked to stop."""
        with Lease(self._run) as lease, closing(Spares()) as spares, self._passing_signals():
            while True:
                try:
                    return self._start(lease, spares)
                except Refusal as refusal:
                    # A shutdown reaches workers and this process in any order.
                    if self._asked and refusal.problem.code == "preempted":
                        self._require_not_asked()
                    if self._on_fault == "stop" or self._asked:
                        raise
                    self._go_on(refusal.problem)

    # -- one start
    #   --------------------------------------------------------------------------------------------

    def _start(self, lease: Lease, spares: Spares) -> Finished | None:
        self._run.require_there()
        plan = self._run.load_plan()
        record = load(self._run.record, RunRecord)
        finished = None
        self._failed_at = None
        cluster = clusters.of_run(self._run)
        if record.launcher == "local" and self._run.epochs.exists():
            # An earlier start may have left newer checkpoints on rank 0's own disk, and the lease
            # counts those that are here.
            copy_checkpoints(self._run, cluster)
        epoch = lease.begin(used_s=self._used_s(), skip=self._faults.left_out, fault=self._fault)
        if lease.mended is not None:
            self._progress(Note(lease.mended))
        held = Held(lease, epoch, spares, again=self._on_fault != "stop", flaw_of=flaw_of)
        spared = False
        workers = launch(record.launcher, plan, self._run, cluster, held)
        try:
            with workers:
                self._workers = workers
                for _ in range(self._asked):  # While they were started.
                    workers.interrupt()
                self._show(plan)
                for event in workers:
                    self._progress(event)
                    self._take(event)
                    self._hear(event)
                    finished = event if isinstance(event, Finished) else None
                    if (
                        not spared
                        and isinstance(event, Step)
                        and self._trained_s() > SPARES_AFTER_S
                    ):
                        spares.fill(plan, workers.hosts, self._run.logs, lease.keep_open)
                        spared = True
        finally:
            self._workers = None
            self._failed_at = workers.failed_at
        return finished

    def _show(self, plan: Plan) -> None:
        if self._shown != plan.hash:
            if self._shown is not None:
                self._progress(Ended())
            self._progress(Training(plan, load(self._run.record, RunRecord).forecast))
            self._shown = plan.hash

    def _take(self, event: Event) -> None:
        if isinstance(event, Started):
            now = time.monotonic()
            self._started_at = now
            if self._first is None:
                self._first = event
                self._first_at = now
            if self._fault is not None:
                again_s = max(0, self._step - event.step) * statistics.median(
                    self._steps_s or [0.0]
                )
                self._faults.cost(now, now - self._seen_at + again_s)
            self._step = event.step
        elif isinstance(event, Step):
            self._step, self._furthest = event.step, max(self._furthest, event.step)
            self._steps_s.append(event.step_s)

    def _trained_s(self) -> float:
        """Seconds since workers of this start have begun to train."""
        return time.monotonic() - self._started_at

    def _used_s(self) -> float:
        """The seconds that the run has used up, those between starts among them."""
        return (
            0.0 if self._first is None else self._first.used_s + time.monotonic() - self._first_at
        )

    # -- after a fault
    #   --------------------------------------------------------------------------------------------

    def _go_on(self, problem: Problem) -> None:
        """Returns when the run can be started again. Raises Refusal where it ends: with the cause,
        or as asked."""
        now = time.monotonic()
        # Workers get some seconds to say what it was; while they were started nothing was seen
        # before it failed.
        self._seen_at = now if self._failed_at is None else self._failed_at
        fault = Seen(problem=problem, step=self._furthest, at=self._seen_at)
        if (end := self._faults.end(fault, trained=self._first is not None)) is not None:
            raise Refusal.of(end)
        self._faults.preempt(fault, self._run.load_plan(), clusters.of_run(self._run))
        at = time.time() - (now - self._seen_at)
        self._progress(Faulted(problem, at, self._step, told(fault, len(self._faults.seen))))
        replanned = self._until_all_are_there()
        self._fault = Fault(problem=problem, at=at, step=self._step, replanned=replanned)

    def _until_all_are_there(self) -> bool:
        """Wait for hosts that are away, or go on without them: whether the plan is another one
        then."""
        began = time.monotonic()
        gone = set[str]()
        left = None
        price_s = 0.0
        while now := self._away():
            if now != gone:
                gone = now
                (left, price_s) = self._left(now)
                self._progress(Note(_waiting(gone, left, price_s)))
            # A plan that loses nothing is followed at once.
            if left is not None and time.monotonic() - began >= price_s:
                adopt(self._run, left, self._progress)
                return True
            self._sleep(POLL_S)
        self._sleep(0.0)
        return False

    def _away(self) -> set[str]:
        """Hosts of the plan that cannot be worked with now."""
        self._run.require_there()
        if ":" in load(self._run.record, RunRecord).launcher:
            # Nodes of a Ray cluster that runs already may be entered by nobody: Ray says which are
            # there.
            return set()
        planned = {device.host for device in self._run.load_plan().devices}
        leaving = planned & self._faults.leaving(time.monotonic())
        left = [host for host in clusters.of_run(self._run).hosts if host.name in planned - leaving]
        return leaving | away(left)

    def _left(self, gone: Collection[str]) -> tuple[Planned | None, float]:
        """A plan without these hosts, if one may be followed and fits, and the seconds that it
        would lose."""
        if self._on_fault == "wait":
            return None, 0.0
        try:
            left = planned_without(self._run, gone)
            before = load(self._run.estimate, Estimate)
        except Refusal:
            return None, 0.0
        plan = self._run.load_plan()
        slower = left.estimate.step_s / left.estimate.token_efficiency
        ratio = slower / (before.step_s / before.token_efficiency)
        rest_s = (plan.train.step_limit - self._step) * statistics.median(
            self._steps_s or [before.step_s]
        )
        # Without the host the run goes on from the newest checkpoint here.
        again = unmirrored_steps(self._run) * slower
        lost_s = rest_s * (ratio - 1) + again
        if (deadline_s := plan.train.deadline_s) is not None:
            lost_s = min(lost_s, max(0.0, deadline_s - self._used_s()) * (1 - 1 / ratio))
        return left, max(0.0, lost_s)

    def _sleep(self, seconds: float) -> None:
        """Raises Refusal (interrupted) where the user has asked to stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._asked:
            time.sleep(LOOK_S)
        self._require_not_asked()

    def _require_not_asked(self) -> None:
        """Raises Refusal (interrupted) where the user has asked to stop."""
        if self._asked:
            raise Refusal(
                "interrupted",
                what="stopped as asked, before workers were started again",
                where=self._run.path,
                fact="what the last checkpoint has is kept",
                remedy=command("resume", self._run.path),
            )

    @property
    def workers(self) -> Workers | None:
        """Those that run now."""
        return self._workers

    # -- signals
    #   --------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Have workers save and end; a second call ends them at once."""
        self._asked += 1
        if self._workers is not None:
            self._workers.interrupt()

    @contextmanager
    def _passing_signals(self) -> Iterator[None]:
        """Meanwhile Ctrl-C and SIGTERM ask to save and end; a second one to end at once. Only the
        main thread can take signals: elsewhere they stay with whom they belong to."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: object) -> None:
            self._progress(Note("saving; once more to stop at once"))
            self.stop()

        before = {
            number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _waiting(gone: Collection[str], left: Planned | None, price_s: float) -> str:
    names = ", ".join(sorted(gone))
    if left is None:
        return f"waiting for {names}"
    if price_s == 0:
        return f"going on without {names}: that takes no longer"
    return f"waiting for {names} up to {format_seconds(price_s)}, which a plan without would lose"
