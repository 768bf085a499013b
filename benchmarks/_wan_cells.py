"""One cell of `benchmarks/wan.py`: fresh processes in the lab's sites, watched, and never longer
than its deadline."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from _wan_plans import CORPUS, Work

from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import Event, Step
from farspan.domain.struct_files import save
from farspan.launch.agent_pool import AgentPool
from farspan.launch.hosts import host_command
from farspan.launch.launchers import launch_workers
from farspan.launch.processes import rendezvous_environment, with_environment, worker_environment
from farspan.launch.rendezvous import arrange_rendezvous
from farspan.launch.trial import Deadline
from farspan_lab import state
from farspan_lab.lab import Status
from farspan_studies.bench.made_corpus import make

CHILD = Path(__file__).parent / "wan_contestants.py"
#: How often processes and the relay are looked at.
POLL_S = 0.2
SAMPLE_S = 1.0
TRIES = 5
#: After one rank has failed the others' own words are not waited for longer.
GRACE_S = 5.0


class Failed(Exception):
    """Why a cell has no figures."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    step_s: tuple[float, ...]
    #: Seconds since the epoch.
    began: float
    ended: float
    raw: tuple[dict[str, Any], ...]


def status(lab: str) -> Status:
    """Return a lab as it is; asked again where it had no patience with a process that waited for a
    core."""
    for _ in range(TRIES):
        with contextlib.suppress(Refusal):
            return state.status(lab)
        time.sleep(POLL_S)
    return state.status(lab)


class Relay:
    """What a lab's relay has used and carried, looked at all along."""

    def __init__(self, lab: str) -> None:
        self._lab = lab
        self._ended = threading.Event()
        self._seen: list[tuple[float, ...]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        last = False
        while not last:
            last = self._ended.wait(SAMPLE_S)
            seen = status(self._lab)
            at = time.time()
            carried, dropped = (
                sum(getattr(link, key) for link in seen.traffic) for key in ("bytes", "dropped")
            )
            self._seen.append((at, seen.relay_cpu_s, carried, dropped))

    def between(self, began: float, ended: float) -> tuple[float, ...]:
        """Processor seconds, bytes, and packets dropped, between two times."""
        at, *columns = zip(*self._seen, strict=True)
        return tuple(float(np.diff(np.interp([began, ended], at, column))[0]) for column in columns)


# -- stock PyTorch
#   ------------------------------------------------------------------------------------------------


def stock(
    options: Sequence[str], work: Work, cluster: Cluster, warmup: int, steps: int, deadline_s: float
) -> Measured:
    """Return a rank a device, in the environment that farspan's launcher gives its workers. Raises
    Failed."""
    size = work.size
    with contextlib.closing(AgentPool()) as agents:
        meeting = arrange_rendezvous(cluster.hosts, agents)
    numbers = {
        "layers": size.layers,
        "width": size.width,
        "vocab": size.vocab,
        "context": size.context,
        "sequences": work.sequences,
        "seq-len": work.seq_len,
        "seed": work.seed,
        "warmup": warmup,
        "steps": steps,
        "timeout": deadline_s,
    }
    words = [
        sys.executable,
        str(CHILD),
        *options,
        *(f"--{name}={value}" for name, value in numbers.items()),
    ]
    words += [] if work.tied else ["--untied"]
    words += ["--bf16"] if work.precision == "bf16" else []
    places = [(host, device) for host in cluster.hosts for device in range(len(host.devices))]
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(_kill, processes)
        for rank, (host, device) in enumerate(places):
            out, errors = (
                stack.enter_context(open(Path(folder, f"{rank}.{kind}"), "wb"))
                for kind in ("out", "err")
            )
            values = {
                **worker_environment(1),
                **rendezvous_environment(host, meeting),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
            }
            processes.append(
                subprocess.Popen(
                    host_command(host, with_environment(values, words), device=device),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    start_new_session=True,
                )
            )
        _wait(processes, Path(folder), deadline_s)
        # What libraries print comes before.
        raw = tuple(
            json.loads(Path(folder, f"{rank}.out").read_bytes().splitlines()[-1])
            for rank in range(len(places))
        )
    return Measured(
        step_s=tuple(raw[0]["step_s"]), began=raw[0]["began"], ended=raw[0]["ended"], raw=raw
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, deadline_s: float) -> None:
    """Until all have ended well. Raises Failed with the first one's last words."""
    until = time.monotonic() + deadline_s
    while None in (codes := [one.poll() for one in processes]) and time.monotonic() < until:
        if any(codes):
            until = min(until, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)
    bad = next((rank for rank, code in enumerate(codes) if code), None)
    if bad is not None:
        raise Failed(
            f"rank {bad} ended with exit code {codes[bad]}: {_last_line(folder / f'{bad}.err')}"
        )
    if None in codes:
        raise Failed(f"not done after {deadline_s:g} s")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["none"]
    return lines[-1][:300]


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for one in processes:
        if one.poll() is None:
            one.kill()
        one.wait()


# -- farspan
#   ------------------------------------------------------------------------------------------------


def ours(plan: Plan, work: Work, cluster: Cluster, warmup: int, deadline_s: float) -> Measured:
    """Return a plan run by the product's own workers. Raises Failed, or the Refusal of the worker
    that made one."""
    with tempfile.TemporaryDirectory(prefix="farspan-wan-") as folder:
        corpus = Path(folder, "corpus")
        write_corpus(corpus, work)
        events = [
            event for event in run(plan, corpus, cluster, deadline_s) if isinstance(event, Step)
        ]
    # Events are written at the end of each step: from the end of the last warm-up step on.
    ends = [event.at for event in events][warmup - 1 :]
    raw = tuple(msgspec.to_builtins(event) for event in events)
    return Measured(step_s=tuple(np.diff(ends).tolist()), began=ends[0], ended=ends[-1], raw=raw)


def run(plan: Plan, corpus: Path, cluster: Cluster, deadline_s: float) -> list[Event]:
    """All events of a plan run to its end on this corpus. Raises as `ours` does."""
    events: list[Event] = []
    with (
        run_folder(plan, corpus, cluster) as folder,
        launch_workers("local", plan, folder, cluster) as workers,
        Deadline(workers, deadline_s) as deadline,
    ):
        try:
            events.extend(workers)
        except Refusal:
            if not deadline.passed:
                raise
            said = {path.stem: _last_line(path) for path in sorted(folder.logs.glob("rank-*.log"))}
            steps = _steps(events)
            raise Failed(
                f"not done after {deadline_s:g} s, {steps} steps made; last words: {said}"
            ) from None
    if _steps(events) < plan.train.steps:
        raise Failed(f"{_steps(events)} of {plan.train.steps} steps made")
    return events


def _steps(events: Sequence[Event]) -> int:
    return sum(isinstance(event, Step) for event in events)


@contextlib.contextmanager
def run_folder(plan: Plan, corpus: Path, cluster: Cluster) -> Iterator[RunFolder]:
    """Return a run directory as `farspan train` makes it; it goes with what the workers left on far
    hosts."""
    with tempfile.TemporaryDirectory(prefix="farspan-wan-") as folder:
        run = RunFolder(Path(folder, "run"))
        run.logs.mkdir(parents=True)
        save(plan, run.plan)
        save(
            RunRecord(
                corpus=str(corpus), command=("farspan", "train"), created=time.strftime("%Y-%m-%d")
            ),
            run.record,
        )
        for name in ("corpus.json", "tokenizer.json"):
            (run.path / name).write_bytes((corpus / name).read_bytes())
        try:
            yield run
        finally:
            for host in cluster.hosts:
                if host.folder is not None:
                    shutil.rmtree(Path(host.folder, "runs"), ignore_errors=True)


def write_corpus(folder: Path, work: Work) -> None:
    """Token files in which the next token mostly follows from the last."""
    manifest = make(folder, work.size.vocab, 100 * work.size.tokens, work.seed)
    save(msgspec.structs.replace(manifest, hash=CORPUS), folder / "corpus.json")
