"""A plan run for a few steps by its launcher's own workers, watched, and never longer than a
deadline."""

from __future__ import annotations

import itertools
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.codec import save
from farspan.domain.corpus import TOKEN_FILES
from farspan.domain.engine import engine
from farspan.domain.model import parameters
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.results import (
    COMPUTE,
    IN_STEP,
    Environment,
    Event,
    Started,
    Step,
    Traced,
    read_events,
)
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.trial import Trial
from farspan.domain.units import counted
from farspan.estimate.price import estimate
from farspan.launch.hosts import ask, quoted
from farspan.launch.launchers import launch
from farspan.launch.processes import run_folder
from farspan.launch.workers import Workers
from farspan.semantics.identity import plan_key

#: Steps before those that count: memory is taken, connections are opened, windows of TCP grow.
WARMUP = 2
#: Steps between the meetings of replicas in a trial, and how many such rounds are timed after a
#: first.
EVERY = 4
ROUNDS = 2
#: Processes have so long to start and meet; steps so many times their predicted time, and a while
#: for what the first of them open and load.
START_S = 120.0
LATE = 4.0
FIRST_S = 30.0
#: What a host lacks of the corpus is sent to it at least so fast, bytes a second. A choice: 10
#: Mbit/s, shared by few.
SEND_RATE = 1e6
#: Bytes of a parameter's weights, gradient and optimizer state, made and moved at least so fast,
#: bytes a second.
STATE_BYTES = 16
STATE_RATE = 2e8


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that count, seconds from when training begins until all that runs is ended, and steps
    before those that count: one at least."""

    steps: int
    deadline_s: float
    warmup: int = WARMUP


def steps_for(step_s: float, seconds: float = 5.0) -> int:
    """So many steps that they take about `seconds`: 3 at least, 20 at most."""
    return max(3, min(20, round(seconds / step_s)))


def limits(plan: Plan, cluster: Cluster, step_s: float, steps: int) -> Limits:
    """What a trial of a plan whose step is predicted may take."""
    return Limits(
        steps=steps, deadline_s=FIRST_S + LATE * predicted_s(plan, cluster, step_s, steps)
    )


def predicted_s(
    plan: Plan, cluster: Cluster, step_s: float, steps: int, warmup: int = WARMUP
) -> float:
    """Seconds that the steps of a trial are predicted to take: in one, replicas meet far more often
    than in the run."""
    if plan.sync is None:
        return (warmup + steps) * step_s
    short = shortened(plan, steps, warmup)
    predicted = estimate(short, models.graph(plan.model), cluster, engine(plan.engine))
    return short.train.steps * max(step_s, predicted.step_s)


def start_s(plan: Plan, cluster: Cluster, corpus: Path) -> float:
    """Seconds that workers may take until they train: they start and meet, hosts that share no disk
    are sent the corpus, and state is made."""
    used = {device.host for device in plan.devices}
    far = sum(host.name in used and host.folder is not None for host in cluster.hosts)
    size = sum((corpus / name).stat().st_size for name in TOKEN_FILES if (corpus / name).exists())
    return START_S + STATE_BYTES * parameters(plan.model) / STATE_RATE + far * size / SEND_RATE


def shortened(plan: Plan, steps: int, warmup: int = WARMUP) -> Plan:
    """The plan with so many steps to time: nothing is validated or saved before its end, and
    replicas meet often."""
    sync = plan.sync and msgspec.structs.replace(plan.sync, every=min(plan.sync.every, EVERY))
    total = warmup + steps if sync is None else sync.every * (1 + ROUNDS)
    train = msgspec.structs.replace(
        plan.train,
        steps=total + 1,
        validate_every=10**9,
        checkpoint_every_s=1e9,
        patience=0,
        deadline_s=None,
    )
    return msgspec.structs.replace(plan, train=train, sync=sync)


def trial(plan: Plan, corpus: Path, cluster: Cluster, launcher: str, within: Limits) -> Trial:
    """Run a plan on a prepared corpus; what it dies of is in the Trial. Raises Refusal
    (interrupted) alone."""
    short = shortened(plan, within.steps, within.warmup)
    began = time.monotonic()
    key = plan_key(plan)
    with tempfile.TemporaryDirectory(prefix="farspan-trial-") as folder:
        run = _run_folder(RunFolder(Path(folder, "run")), short, corpus)
        try:
            ends = _run(short, run, cluster, launcher, within, start_s(plan, cluster, corpus))
        except Refusal as refusal:
            if refusal.problem.code == "interrupted":
                raise
            # A killed worker counts as out of memory unless the system says that it was not.
            memory = refusal.problem.code == "out-of-memory" or bool(refusal.problem.suspected)
            return Trial(
                plan=key,
                status="oom" if memory else "failed",
                problem=refusal.problem,
                environment=_environment(_records(run, len(plan.devices))),
                took_s=time.monotonic() - began,
            )
        finally:
            _forget(short, run, cluster)
        records = _records(run, len(plan.devices))
    step_s, seconds = timed(plan, short, ends, within.warmup)
    return Trial(
        plan=key,
        status="ok",
        step_s=step_s,
        steps=seconds,
        compute_s=computing(records, plan),
        memory_bytes=peaks(records),
        environment=_environment(records),
        took_s=time.monotonic() - began,
    )


def timed(
    plan: Plan, short: Plan, ends: Sequence[float], warmup: int = WARMUP
) -> tuple[float, tuple[float, ...]]:
    """Seconds of a step of the plan, and all that were timed, from when each step of the short one
    ended."""
    if short.sync is None or plan.sync is None:
        steps = [after - before for before, after in itertools.pairwise(ends[warmup - 1 :])]
        return statistics.median(steps), tuple(steps)
    every = short.sync.every
    steps = [after - before for before, after in itertools.pairwise(ends[every - 1 :])]
    # A meeting comes after its round's last step was told: it is in the next one's seconds.
    meetings = steps[::every]
    between = [step for i, step in enumerate(steps) if i % every] or meetings
    usual = statistics.fmean(between)
    extra = max(0.0, statistics.fmean(meetings) - usual)
    if plan.sync.overlap:  # The run has more steps to hide an exchange behind than the trial had.
        extra = max(0.0, extra - (plan.sync.every - every) * usual)
    return usual + extra / plan.sync.every, tuple(steps)


def _run(
    plan: Plan, run: RunFolder, cluster: Cluster, launcher: str, within: Limits, starting_s: float
) -> list[float]:
    """When each step but the last ended: after the last one the model would be saved and tried.
    Raises Refusal."""
    wanted = plan.train.steps - 1
    ends = list[float]()
    with launch(launcher, plan, run, cluster) as workers, Deadline(workers, starting_s) as deadline:
        workers.fetches = False
        try:
            for event in workers:
                if isinstance(event, Started):
                    deadline.begin(within.deadline_s)
                ends += [event.at] if isinstance(event, Step) else []
                if len(ends) == wanted:
                    workers.end()
                    return ends
        except Refusal as refusal:
            if not deadline.passed:
                raise
            said = (
                ""
                if refusal.problem.last_words is None
                else f"last words: {refusal.problem.last_words}"
            )
            raise Refusal(
                "worker-lost",
                what=f"the trial did not end within {deadline.seconds:.0f} s",
                where=run.path,
                fact=f"it made {len(ends)} of {counted(wanted, 'step')}; {said}",
                remedy="farspan doctor --cluster",
            ) from None
    raise Refusal(
        "worker-lost",
        what="the workers ended early",
        where=run.path,
        fact=f"they made {len(ends)} of {counted(wanted, 'step')}",
        remedy="farspan doctor --cluster",
    )


class Deadline:
    """Kills the workers of a run when its time is over, or when the `with` is left while they run:
    nothing of them is to be saved."""

    def __init__(self, workers: Workers, seconds: float) -> None:
        self._workers = workers
        self.seconds = seconds
        self.passed = False
        self._timer = threading.Timer(seconds, self._pass)

    def begin(self, seconds: float) -> None:
        """Allow so many seconds from now on."""
        self.seconds = seconds
        self._timer.cancel()
        self._timer = threading.Timer(seconds, self._pass)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Deadline:
        self.begin(self.seconds)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._kill()

    def _pass(self) -> None:
        self.passed = True
        self._kill()

    def _kill(self) -> None:
        for process in self._workers.processes:
            # Services are asked when the workers are left: killed, a Ray node would leave what it
            # has started.
            if process.ranks and process.poll() is None:
                process.signal(signal.SIGKILL)


def _run_folder(run: RunFolder, plan: Plan, corpus: Path) -> RunFolder:
    """A run directory as `farspan train` makes it."""
    run.make()
    save(
        RunRecord(corpus=str(corpus.resolve()), command=("farspan", "select"), created=""),
        run.record,
    )
    for name in ("corpus.json", "tokenizer.json"):
        (run.path / name).write_bytes((corpus / name).read_bytes())
    save(plan, run.plan)
    return run


def _records(run: RunFolder, world: int) -> dict[int, list[Event]]:
    """What each rank has written down, of those whose logs lie here."""
    logs = {0: run.events} | {
        rank: run.logs / f"rank-{rank}.events.jsonl" for rank in range(1, world)
    }
    return {rank: list(read_events(log)) for rank, log in logs.items() if log.exists()}


def peaks(records: Mapping[int, Sequence[Event]]) -> dict[int, int]:
    """The most bytes that each rank said it held."""
    held = {
        rank: [step.memory_bytes for step in events if isinstance(step, Step)]
        for rank, events in records.items()
    }
    return {rank: max(sizes) for rank, sizes in held.items() if sizes}


def computing(records: Mapping[int, Sequence[Event]], plan: Plan) -> dict[int, float]:
    """Seconds of each rank's passes and update in the quickest step that it traced."""
    seconds = {}
    for rank, events in records.items():
        traced = [event for event in events if isinstance(event, Traced)]
        if traced and plan.devices[rank].backend in IN_STEP:
            seconds[rank] = min(
                sum(span.end - span.start for span in step.spans if span.kind in COMPUTE)
                for step in traced
            )
    return seconds


def _environment(records: Mapping[int, Sequence[Event]]) -> Environment | None:
    return next(
        (event.environment for event in records.get(0, ()) if isinstance(event, Started)), None
    )


def _forget(plan: Plan, run: RunFolder, cluster: Cluster) -> None:
    """Remove what the workers left on hosts that have a disk of their own."""
    used = {device.host for device in plan.devices}
    for host in cluster.hosts:
        if host.name in used and host.folder is not None:
            ask(host, f"rm -rf {quoted(run_folder(host, plan, run).path)}")
