"""The supervisor of a run, one a job: it starts the workers, and after a fault starts them again.

It is the process that trains the run, so it ends with it. A host that stays away is waited for as
long as a plan without it would lose; then that plan is followed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from farspan.app import clusters
from farspan.app.checkpoints import copy_checkpoints, flaw_of
from farspan.app.copying import copying_checkpoints
from farspan.app.lost_hosts import LostHosts, Pace, median_or_none
from farspan.app.microbatches import describe_halving, halve_after_oom
from farspan.app.plans import Planned
from farspan.app.replanning import adopt_plan
from farspan.app.restart_policy import Faults, Seen, restart_message
from farspan.app.take_claims import (
    claims_of_run,
    take_claims,
    wait_for_claims,
)
from farspan.app.updates import Ended, Faulted, Note, Progress, Training
from farspan.domain.config import RunConfig
from farspan.domain.epoch_fence import Epoch, Fault
from farspan.domain.preemption_problem import preemption_problem
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import Event, Finished, Saved, Started, Step
from farspan.domain.struct_files import load, load_yaml
from farspan.launch.agent_pool import AgentPool
from farspan.launch.host_claims import ClaimRenewal
from farspan.launch.launchers import launch_workers
from farspan.launch.run_lock import Lease
from farspan.launch.spares import Spares
from farspan.launch.workers import SupervisorState, Workers
from farspan.report.history import COMPLETE

#: How often the user's wish to stop is looked for.
STOP_POLL_S = 0.1
#: Spares are started when workers have trained this long: they import for seconds, which short runs
#: do not get back.
SPARES_AFTER_S = 10.0
#: Steps whose median says what a step takes.
NUM_RECENT_STEPS = 20


class Supervisor:
    """Trains a run to its end through all faults that can be cured; `on_event` takes its events.

    With `until_done` hosts that are away at the first start are waited for, too. Those of the sites
    in `without` are given up.
    """

    def __init__(
        self,
        run: RunFolder,
        progress: Progress,
        on_event: Callable[[Event], None],
        *,
        until_done: bool = False,
        without: tuple[str, ...] = (),
    ) -> None:
        self._run = run
        self._progress = progress
        self._on_event = on_event
        self._until_done = until_done
        self._without = without
        self._agents = AgentPool()
        self._renewal = ClaimRenewal()
        #: Whether hosts keep a claim of the newest start.
        self._claimed = False
        self._on_fault = load_yaml(run.config, RunConfig).on_fault
        self._faults = Faults()
        self._lost = LostHosts(
            run,
            self._agents,
            self._faults,
            progress,
            self._sleep,
            on_fault=self._on_fault,
            without=without,
        )
        #: The plan with hosts that are back, while workers save and end for it.
        self._returning: Planned | None = None
        self._fault: Fault | None = None
        self._workers: Workers | None = None
        #: Times that the user has asked to stop.
        self._asked = 0
        #: Whether all workers of any start were started.
        self.has_started_workers = False
        #: Whether microbatches were halved, as a device lacked memory for them.
        self._halved = False
        #: The plan whose training is shown.
        self._shown: str | None = None
        #: The last step that was reported, and what recent ones took.
        self._step = 0
        self._steps_s = deque[float](maxlen=NUM_RECENT_STEPS)
        #: The furthest that any start has come: a fault before it is at the same place.
        self._furthest = 0
        #: The first start of this job that trained, and when it did by the monotonic clock.
        self._first: Started | None = None
        self._first_at = self._started_at = 0.0
        #: When workers of the last start were seen to fail, if they were, and when its fault was
        #: seen.
        self._failed_at: float | None = None
        self._seen_at = 0.0

    def train_run(self) -> Finished | None:
        """Train until the run's last event, and return it. Raises Refusal with the cause where it
        cannot continue, or was asked to stop."""
        with (
            Lease(self._run) as lease,
            closing(Spares()) as spares,
            closing(self._agents),
            closing(self._renewal),
            self._passing_signals(),
            self._copying_checkpoints(),
            self._explaining_missing_files(),
        ):
            if self._until_done or self._without:
                self._lost.wait(self._pace)
            while True:
                try:
                    finished = self._train_once(lease, spares)
                except Refusal as refusal:
                    # A shutdown reaches workers and this process in any order.
                    if self._asked and refusal.problem.code == "preempted":
                        self._require_not_asked()
                    if self._on_fault == "stop" or self._asked:
                        raise
                    self._recover_from_fault(refusal.problem)
                    continue
                interrupted = finished is not None and finished.reason == "interrupted"
                if interrupted and self._returning is not None:
                    # Workers have saved and ended for a plan with hosts that are back.
                    self._adopt_returning(self._returning)
                    continue
                if interrupted and self._until_done and not self._asked:
                    self._recover_from_fault(self._preemption_of_all())
                    continue
                if finished is not None and finished.reason in COMPLETE:
                    self._renewal.last_state = "finished"
                return finished

    @contextmanager
    def _copying_checkpoints(self) -> Iterator[None]:
        with copying_checkpoints(self._run, self._progress, lambda: self._asked) as copies:
            self._copies = copies
            yield

    @contextmanager
    def _explaining_missing_files(self) -> Iterator[None]:
        """Report a run's folder that is deleted as that, not as the first file that is missed: they
        vanish one by one. Raises Refusal (path-missing)."""
        try:
            yield
        except Refusal as refusal:
            if refusal.problem.code == "path-missing":
                self._run.require_there(self._run.cluster, self._run.record, self._run.config)
            raise

    # -- one start
    #   --------------------------------------------------------------------------------------------

    def _train_once(self, lease: Lease, spares: Spares) -> Finished | None:
        """Start the workers and take their events until they end: the last one, if the run did."""
        self._run.require_there()
        plan = self._run.load_plan()
        record = load(self._run.record, RunRecord)
        finished = None
        self._failed_at = None
        cluster = clusters.cluster_of_run(self._run)
        if record.launcher == "local" and self._run.epochs.exists():
            # An earlier start may have left newer checkpoints on rank 0's own disk, and the lease
            # counts those that are here.
            copy_checkpoints(self._run, cluster)
        epoch = self._begin_epoch(lease)
        self._copies.request_copy()
        restarts = self._on_fault != "stop"
        context = SupervisorState(
            lease,
            epoch,
            spares,
            self._agents,
            again=restarts,
            flaw_of=flaw_of,
            claimed=self._claimed,
        )
        workers = launch_workers(record.launcher, plan, self._run, cluster, context)
        has_spares = False
        try:
            with workers:
                self._workers = workers
                self.has_started_workers = True
                for _ in range(self._asked):  # While they were started.
                    workers.interrupt()
                # A new plan's training is shown once, however often it is started.
                if self._shown != plan.hash:
                    if self._shown is not None:
                        self._progress(Ended())
                    self._progress(Training(plan, record.forecast))
                    self._shown = plan.hash
                self._lost.watch()
                for event in workers:
                    self._progress(event)
                    self._track_step(event)
                    self._on_event(event)
                    self._copies.report()
                    finished = event if isinstance(event, Finished) else None
                    if isinstance(event, Saved):
                        self._take_returned_in(workers)
                    if isinstance(event, Step) and not has_spares:
                        trained_s = time.monotonic() - self._started_at
                        if trained_s > SPARES_AFTER_S:
                            self._run.require_there()  # Their log lies in it.
                            spares.start_spares(
                                plan, workers.hosts, self._run.logs, lease.keep_open
                            )
                            has_spares = True
        finally:
            self._lost.end_watch()
            self._workers = None
            self._failed_at = workers.failed_at
        return finished

    def _take_returned_in(self, workers: Workers) -> None:
        """After a save: end the workers for a plan with hosts that are back, where it pays."""
        if self._returning is None and not self._asked:
            self._returning = self._lost.plan_with_returned(self._pace)
            if self._returning is not None:
                workers.interrupt()

    def _adopt_returning(self, planned: Planned) -> None:
        """Follow a plan with hosts that are back. Raises Refusal (interrupted) where the user has
        asked to stop meanwhile."""
        self._returning = None
        self._require_not_asked()
        adopt_plan(self._run, planned, self._progress)
        self._fault = None

    def _begin_epoch(self, lease: Lease) -> Epoch:
        """Begin an epoch, and claim it on the run's hosts."""
        claims = claims_of_run(self._run, self._agents, self._without)
        self._claimed = claims is not None
        after = 0
        if claims is not None:
            newest = wait_for_claims(
                claims, self._progress, self._sleep, until_done=self._until_done
            )
            # A run folder that was copied here begins later than all that its hosts have seen.
            if not self._run.epochs.exists() or self._run.restored.exists():
                after = newest
        epoch = lease.begin_epoch(
            used_s=self._used_s(),
            skip=self._faults.skipped_steps,
            fault=self._fault,
            after=after,
        )
        self._run.restored.unlink(missing_ok=True)
        if lease.mended is not None:
            self._progress(Note(lease.mended))
        if claims is not None:
            take_claims(claims, epoch.number, self._progress, self._sleep)
            self._renewal.keep(claims, epoch.number)
        return epoch

    def _track_step(self, event: Event) -> None:
        if isinstance(event, Started):
            now = time.monotonic()
            self._started_at = now
            if self._first is None:
                self._first = event
                self._first_at = now
            self._step = event.step
        elif isinstance(event, Step):
            self._step = event.step
            self._furthest = max(self._furthest, event.step)
            self._steps_s.append(event.step_s)

    def _used_s(self) -> float:
        """Return the seconds that the run has used up, those between starts among them."""
        if self._first is None:
            return 0.0
        return self._first.used_s + time.monotonic() - self._first_at

    # -- after a fault
    #   --------------------------------------------------------------------------------------------

    def _recover_from_fault(self, problem: Problem) -> None:
        """Wait until the run can be started again. Raises Refusal where it ends: with the cause,
        or as asked."""
        now = time.monotonic()
        # Workers get some seconds to report what it was; while they were started nothing was seen
        # before it failed.
        self._seen_at = now if self._failed_at is None else self._failed_at
        fault = Seen(problem=problem, step=self._furthest, at=self._seen_at)
        began = self._first is not None or self._until_done
        fatal = self._faults.decide_restart(fault, trained=began)
        self._returning = None
        if problem.code == "host-unreachable":
            # A host may be entered no more, and still answer an agent that has been there before.
            self._agents.drop()
        halved = None
        around = None
        if fatal is not None:
            halved = self._halve_once(fatal)
        if fatal is not None and halved is None:
            around = self._lost.plan_around_device(fatal)
        if fatal is not None and halved is None and around is None:
            raise Refusal.of(fatal)
        plan = self._run.load_plan()
        self._faults.mark_preempted(fault, plan, clusters.cluster_of_run(self._run))
        at = time.time() - (now - self._seen_at)
        message = restart_message(fault, len(self._faults.seen))
        if halved is not None:
            message = f"{message}, with {describe_halving(plan, halved.plan)}"
        self._progress(Faulted(problem, at, self._step, message))
        adopted = halved or around
        if adopted is not None:
            adopt_plan(self._run, adopted, self._progress)
        replanned = self._lost.wait(self._pace) or adopted is not None
        self._fault = Fault(problem=problem, at=at, step=self._step, replanned=replanned)

    def _preemption_of_all(self) -> Problem:
        """Return the problem of workers that all got a signal, which nobody asked for here: that of
        hosts which are taken away."""
        devices = self._run.load_plan().devices
        hosts = {rank: device.host for rank, device in enumerate(devices)}
        fact = f"each got a signal from outside the run; step {self._step} is saved"
        return preemption_problem(
            hosts,
            where=self._run.path,
            fact=fact,
            remedy=self._run.resume_command(),
            leaving=tuple(dict.fromkeys(hosts.values())),
        )

    def _halve_once(self, fatal: Problem) -> Planned | None:
        """Return the plan with half the microbatch, the first time that memory lacks in this job;
        None of any other end."""
        if self._halved:
            return None
        halved = None
        # A file of the run that is damaged too: it ends with what it lacked.
        with suppress(Refusal):
            halved = halve_after_oom(self._run, fatal)
        self._halved = halved is not None
        return halved

    @property
    def _pace(self) -> Pace:
        train = self._run.load_plan().train
        budget_s = None
        if train.deadline_s is not None:
            budget_s = max(0.0, train.deadline_s - self._used_s())
        return Pace(self._step, median_or_none(self._steps_s), budget_s)

    def _sleep(self, seconds: float) -> None:
        """Sleep, but raise Refusal (interrupted) when the user has asked to stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._asked:
            time.sleep(STOP_POLL_S)
        self._require_not_asked()

    def _require_not_asked(self) -> None:
        """Raise Refusal (interrupted) where the user has asked to stop."""
        if self._asked:
            raise Refusal(
                "interrupted",
                what="stopped as asked, before workers were started again",
                where=self._run.path,
                fact="what the last checkpoint has is kept",
                remedy=self._run.resume_command(),
            )

    @property
    def workers(self) -> Workers | None:
        """Those that run now."""
        return self._workers

    # -- signals
    #   --------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Have workers save and end; a second call ends them at once."""
        self._asked += 1
        if self._workers is not None:
            self._workers.interrupt()

    @contextmanager
    def _passing_signals(self) -> Iterator[None]:
        """Take Ctrl-C and SIGTERM as requests to save and end; a second one to end at once.

        Only the main thread can take signals: on another they keep their handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: object) -> None:
            self._progress(Note("saving; once more to stop at once"))
            self.request_stop()

        before = {
            number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
