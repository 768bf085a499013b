"""Runs a plan for a few steps by its launcher's own workers, watched, and never longer than a
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

import msgspec

from farspan import models
from farspan.domain.cluster import Cluster, Host
from farspan.domain.corpus import TOKEN_FILES
from farspan.domain.engine import load_engine
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import (
    COMPUTE_SPANS,
    IN_STEP,
    Event,
    Started,
    Step,
    Traced,
    read_events,
)
from farspan.domain.struct_files import save
from farspan.domain.trial import Trial
from farspan.domain.units import counted
from farspan.estimate.estimate_plan import estimate
from farspan.launch.hosts import ask_shell, quote_path
from farspan.launch.launchers import launch_workers
from farspan.launch.processes import run_folder
from farspan.launch.workers import Workers
from farspan.semantics.compile_choice import runs_compiled
from farspan.semantics.identity import plan_key

#: Steps before those that count: memory is taken, connections are opened, windows of TCP grow.
NUM_WARMUP_STEPS = 2
#: Steps between the outer syncs of replicas in a trial, and how many such rounds are timed after a
#: first.
EVERY = 4
TRIAL_ROUNDS = 2
#: Seconds for processes to start and meet; steps get LATE times their predicted time, and FIRST_S
#: for what the first of them open and load.
TRIAL_START_S = 120.0
MAX_TIME_FACTOR = 4.0
FIRST_S = 30.0
#: Workers compile before they train: 30 to 60 s on GPUs, unless the cache has it, and a few times
#: that on a host that is busy.
COMPILE_S = 240.0
#: What a host lacks of the corpus is sent to it at least at this rate, bytes a second. A choice: 10
#: Mbit/s, shared by few.
SEND_RATE = 1e6
#: Bytes of a parameter's weights, gradient and optimizer state, and the least rate at which they
#: are made and moved, bytes a second.
BYTES_PER_PARAMETER = 16
STATE_RATE = 2e8


class TrialLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that count, seconds from when training begins until all that runs is ended, and steps
    before those that count: one at least."""

    steps: int
    deadline_s: float
    warmup: int = NUM_WARMUP_STEPS


def steps_for(step_s: float, seconds: float = 5.0) -> int:
    """Return how many steps take about `seconds`: 3 at least, 20 at most."""
    return max(3, min(20, round(seconds / step_s)))


def trial_limits(plan: Plan, cluster: Cluster, step_s: float, steps: int) -> TrialLimits:
    """Return the limits of a trial, from the predicted step of its plan."""
    seconds = predicted_s(plan, cluster, step_s, steps)
    return TrialLimits(steps=steps, deadline_s=FIRST_S + MAX_TIME_FACTOR * seconds)


def predicted_s(
    plan: Plan, cluster: Cluster, step_s: float, steps: int, warmup: int = NUM_WARMUP_STEPS
) -> float:
    """Return the seconds that the steps of a trial are predicted to take: in one, replicas
    synchronize far more often than in the run."""
    if plan.sync is None:
        return (warmup + steps) * step_s
    short = shorten_plan(plan, steps, warmup)
    graph = models.graph(plan.model)
    predicted = estimate(short, graph, cluster, load_engine(plan.engine))
    return short.train.steps * max(step_s, predicted.step_s)


def start_s(plan: Plan, cluster: Cluster, corpus: Path) -> float:
    """Return the seconds that workers may take until they train: they start and meet, hosts that
    share no disk are sent the corpus, and state is made."""
    state_bytes = BYTES_PER_PARAMETER * count_parameters(plan.model)
    files = [corpus / name for name in TOKEN_FILES]
    corpus_bytes = sum(path.stat().st_size for path in files if path.exists())
    sent_bytes = len(_far_hosts(plan, cluster)) * corpus_bytes
    compiles = any(runs_compiled(plan, rank) for rank in range(len(plan.devices)))
    compile_s = COMPILE_S if compiles else 0.0
    return TRIAL_START_S + compile_s + state_bytes / STATE_RATE + sent_bytes / SEND_RATE


def _far_hosts(plan: Plan, cluster: Cluster) -> list[Host]:
    """List the plan's hosts that have a disk of their own."""
    used = {device.host for device in plan.devices}
    return [host for host in cluster.hosts if host.name in used and host.folder is not None]


def shorten_plan(plan: Plan, steps: int, warmup: int = NUM_WARMUP_STEPS) -> Plan:
    """Shorten the plan to `steps` timed steps: nothing is validated or saved before its end, and
    replicas synchronize often."""
    sync = plan.sync
    total = warmup + steps
    if sync is not None:
        every = min(sync.every, EVERY)
        sync = msgspec.structs.replace(sync, every=every)
        total = every * (1 + TRIAL_ROUNDS)
    train = msgspec.structs.replace(
        plan.train,
        steps=total + 1,
        validate_every=10**9,
        checkpoint_every_s=1e9,
        patience=0,
        deadline_s=None,
    )
    return msgspec.structs.replace(plan, train=train, sync=sync)


def run_trial(
    plan: Plan, corpus: Path, cluster: Cluster, launcher: str, within: TrialLimits
) -> Trial:
    """Run a plan on a prepared corpus; what it dies of is in the Trial. Raises Refusal
    (interrupted) alone."""
    short = shorten_plan(plan, within.steps, within.warmup)
    began = time.monotonic()
    key = plan_key(plan)
    with tempfile.TemporaryDirectory(prefix="farspan-trial-") as folder:
        run = _make_run_folder(Path(folder, "run"), short, corpus)
        starting_s = start_s(plan, cluster, corpus)
        problem = None
        try:
            ends = _run_steps(short, run, cluster, launcher, within, starting_s)
        except Refusal as refusal:
            problem = refusal.problem
            if problem.code == "interrupted":
                raise
        finally:
            for host in _far_hosts(plan, cluster):
                ask_shell(host, f"rm -rf {quote_path(run_folder(host, short, run).path)}")
        records = _read_records(run, len(plan.devices))
    environment = None
    for event in records.get(0, ()):
        if isinstance(event, Started):
            environment = event.environment
            break
    if problem is not None:
        # A killed worker counts as out of memory unless the system knows that it was not.
        is_memory = problem.code == "out-of-memory" or problem.suspected
        return Trial(
            plan=key,
            status="oom" if is_memory else "failed",
            problem=problem,
            environment=environment,
            took_s=time.monotonic() - began,
        )
    step_s, seconds = step_times(plan, short, ends, within.warmup)
    return Trial(
        plan=key,
        status="ok",
        step_s=step_s,
        steps=seconds,
        compute_s=compute_seconds(records, plan),
        memory_bytes=peak_memory(records),
        environment=environment,
        took_s=time.monotonic() - began,
    )


def step_times(
    plan: Plan, short: Plan, ends: Sequence[float], warmup: int = NUM_WARMUP_STEPS
) -> tuple[float, tuple[float, ...]]:
    """Return the seconds of a step of the plan, and all that were timed, from when each step of the
    short one ended."""
    warm = warmup if short.sync is None else short.sync.every
    steps = [after - before for before, after in itertools.pairwise(ends[warm - 1 :])]
    if short.sync is None or plan.sync is None:
        return statistics.median(steps), tuple(steps)
    # An outer sync comes after its round's last step was reported: it is in the next one's seconds.
    every = short.sync.every
    with_sync = steps[::every]
    without_sync = [step for i, step in enumerate(steps) if i % every] or with_sync
    usual = statistics.fmean(without_sync)
    extra = max(0.0, statistics.fmean(with_sync) - usual)
    if plan.sync.overlap:  # The run has more steps to hide an exchange behind than the trial had.
        more_steps = plan.sync.every - every
        extra = max(0.0, extra - more_steps * usual)
    return usual + extra / plan.sync.every, tuple(steps)


def _run_steps(
    plan: Plan,
    run: RunFolder,
    cluster: Cluster,
    launcher: str,
    within: TrialLimits,
    starting_s: float,
) -> list[float]:
    """Return when each step but the last ended: after the last one the model would be saved and
    tried. Raises Refusal."""
    wanted = plan.train.steps - 1
    ends = list[float]()
    with (
        launch_workers(launcher, plan, run, cluster) as workers,
        Deadline(workers, starting_s) as deadline,
    ):
        workers.fetches = False
        try:
            for event in workers:
                if isinstance(event, Started):
                    deadline.begin(within.deadline_s)
                elif isinstance(event, Step):
                    ends.append(event.at)
                if len(ends) == wanted:
                    workers.end()
                    return ends
            what = "the workers ended early"
            fact = f"they made {len(ends)} of {counted(wanted, 'step')}"
        except Refusal as refusal:
            if not deadline.passed:
                raise
            what = f"the trial did not end within {deadline.seconds:.0f} s"
            fact = f"it made {len(ends)} of {counted(wanted, 'step')}; "
            if refusal.problem.last_words is not None:
                fact += f"last words: {refusal.problem.last_words}"
    raise Refusal(
        "worker-lost", what=what, where=run.path, fact=fact, remedy="farspan doctor --cluster"
    )


class Deadline:
    """Kills the workers of a run when its time is over, or when the `with` is left while they run:
    nothing of them is to be saved."""

    def __init__(self, workers: Workers, seconds: float) -> None:
        self._workers = workers
        self.seconds = seconds
        self.passed = False
        self._timer = threading.Timer(seconds, self._on_timeout)

    def begin(self, seconds: float) -> None:
        """Allow this many seconds from now on."""
        self.seconds = seconds
        self._timer.cancel()
        self._timer = threading.Timer(seconds, self._on_timeout)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Deadline:
        self.begin(self.seconds)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()
        self._kill_workers()

    def _on_timeout(self) -> None:
        self.passed = True
        self._kill_workers()

    def _kill_workers(self) -> None:
        for process in self._workers.processes:
            # Services are asked when the workers are left: killed, a Ray node would leave what it
            # has started.
            if process.ranks and process.poll() is None:
                process.signal(signal.SIGKILL)


def _make_run_folder(path: Path, plan: Plan, corpus: Path) -> RunFolder:
    """Make a run directory as `farspan train` does."""
    run = RunFolder(path)
    run.make()
    record = RunRecord(corpus=str(corpus.resolve()), command=("farspan", "select"), created="")
    save(record, run.record)
    for name in ("corpus.json", "tokenizer.json"):
        (run.path / name).write_bytes((corpus / name).read_bytes())
    save(plan, run.plan)
    return run


def _read_records(run: RunFolder, world: int) -> dict[int, list[Event]]:
    """Read what each rank has recorded, of those whose logs lie here."""
    records = {}
    for rank in range(world):
        log = run.logs / f"rank-{rank}.events.jsonl" if rank else run.events
        if log.exists():
            records[rank] = list(read_events(log))
    return records


def peak_memory(records: Mapping[int, Sequence[Event]]) -> dict[int, int]:
    """Return the most bytes that each rank reported to hold."""
    peak_bytes = {}
    for rank, events in records.items():
        sizes = [step.memory_bytes for step in events if isinstance(step, Step)]
        if sizes:
            peak_bytes[rank] = max(sizes)
    return peak_bytes


def compute_seconds(records: Mapping[int, Sequence[Event]], plan: Plan) -> dict[int, float]:
    """Return the seconds of each rank's passes and update in the quickest step that it traced."""
    seconds = dict[int, float]()
    for rank, events in records.items():
        traced = [event for event in events if isinstance(event, Traced)]
        if plan.devices[rank].backend in IN_STEP:
            for step in traced:
                spans = [span for span in step.spans if span.kind in COMPUTE_SPANS]
                step_s = sum(span.end - span.start for span in spans)
                seconds[rank] = min(step_s, seconds.get(rank, step_s))
    return seconds
