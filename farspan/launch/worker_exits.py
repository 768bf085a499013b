"""Collects the evidence of how each worker of a start ended, and finds the cause of all."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from farspan.domain.cluster import Host
from farspan.domain.cost import Estimate
from farspan.domain.memory_kills import WorkerCgroup, machine_oom_kills
from farspan.domain.plan import Plan
from farspan.domain.preemption_problem import preemption_problem
from farspan.domain.problems import EXIT_CODES, LESS_MEMORY, Problem, Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Started, Step, decode_events
from farspan.domain.struct_files import load, parse_json
from farspan.domain.units import format_bytes
from farspan.domain.worker_exit import WorkerExit
from farspan.launch.hosts import by_client
from farspan.launch.kill_cause import kill_cause
from farspan.launch.processes import Process, read_file, run_folder


class ExitReader:
    """Collects the evidence of how workers of one start ended, from all hosts."""

    def __init__(self, plan: Plan, run: RunFolder, hosts: Sequence[Host]) -> None:
        self._plan = plan
        self._run = run
        self._hosts = {host.name: host for host in hosts}
        #: Processes that this machine's kernel had killed for memory before the start.
        self._killed_before = machine_oom_kills()

    def read_exits(
        self, process: Process, reported: Iterable[WorkerExit], log: Path, last_words: str
    ) -> Iterator[WorkerExit]:
        """Yield how workers of a process failed: what each wrote on its host, else what its
        launcher has `reported`, with the last words of their log."""
        host = process.host
        wrote = set()
        logs = run_folder(host, self._plan, self._run).logs
        for rank in process.ranks:
            path = logs / f"rank-{rank}.problem.json"
            if content := read_file(host, path):
                wrote.add(rank)
                problem = parse_json(content, Problem, path)
                yield WorkerExit(rank=rank, host=host.name, problem=problem)
        for end in reported:
            if end.rank not in wrote:
                end = replace(end, log=str(log), last_words=last_words)
                yield self._with_memory(end) if end.code == -signal.SIGKILL else end

    def _with_memory(self, end: WorkerExit) -> WorkerExit:
        """Return the exit of a killed worker with the memory that it held, and what the kernel
        counted."""
        host = self._hosts[end.host]
        folder = run_folder(host, self._plan, self._run)

        # What it held at its last step.
        log = folder.logs / f"rank-{end.rank}.events.jsonl" if end.rank else folder.events
        lines = (read_file(host, log) or b"").split(b"\n")
        held_bytes = 0
        for event in decode_events(lines[:-1], log):
            if isinstance(event, Started):  # Before it may have been another plan.
                held_bytes = 0
            elif isinstance(event, Step):
                held_bytes = event.memory_bytes
        memory = f"; held {format_bytes(held_bytes)}" if held_bytes else ""
        if self._run.estimate.exists():
            predicted = load(self._run.estimate, Estimate).memory
            if end.rank < len(predicted):
                needed = format_bytes(predicted[end.rank].total)
                memory = f"; it was predicted to need {needed}{memory}"

        # Of another machine's kernel nobody here can tell, and the memory of a GPU is none of its.
        if by_client(host):
            return replace(end, killed_for="open", memory=memory)
        path = folder.logs / f"rank-{end.rank}.group.json"
        group = None
        with suppress(Refusal):  # Damaged: the group is not known.
            if content := read_file(host, path):
                group = parse_json(content, WorkerCgroup, path)
        if self._plan.devices[end.rank].backend != "cpu":
            held_bytes = 0
        cause = kill_cause(self._killed_before, machine_oom_kills(), group, held_bytes)
        return replace(end, killed_for=cause, memory=memory)


def cause_of(exits: Sequence[WorkerExit], run: RunFolder, *, saved: bool) -> Problem:
    """Return the problem that caused the others; with `saved` all have stopped between two steps.

    Workers that lost a peer fail too. The cause is a problem of another kind, or else a worker that
    was killed before it could write anything, or one that wrote of itself.
    """
    # A launcher may have passed one signal on to several workers.
    signalled = {end.rank: end.host for end in exits if end.code == -signal.SIGTERM}
    ranked = []
    for end in exits:
        problem = end.problem or _problem_from_outside(end, signalled, run, saved)
        is_consequence = (
            problem.code == "worker-lost",
            problem.code == "preempted",
            end.problem is not None,
            problem.cause != "own",
        )
        ranked.append((is_consequence, problem))
    return min(ranked, key=lambda pair: pair[0])[1]


def _problem_from_outside(
    end: WorkerExit, signalled: Mapping[int, str], run: RunFolder, saved: bool
) -> Problem:
    """Return the problem of a worker that ended and wrote no problem file."""
    remedy = run.resume_command()
    words = f"last words: {end.last_words}"
    code = "worker-lost"
    fact = end.fact
    killed = None
    if end.code is not None and end.code < 0:
        killed = signal.Signals(-end.code).name
        fact = f"ended by {killed}"
    elif end.code is not None:
        fact = f"ended with exit code {end.code}"
        for name, number in EXIT_CODES.items():
            if number == end.code:
                code = name

    # A machine that goes away sends SIGTERM.
    if end.rank in signalled:
        when = "all is saved" if saved else "before its first step"
        return preemption_problem(
            signalled,
            where=end.log,
            fact=f"{fact} from outside the run, {when}; {words}",
            remedy=remedy,
            signal=killed,
            last_words=end.last_words,
        )

    # The kernel kills where memory runs out.
    if end.killed_for != "other":
        fact += f", as the kernel does when memory runs out{end.memory}"
    if end.killed_for == "memory":
        code = "out-of-memory"
        remedy = LESS_MEMORY
    return Problem(
        code=code,
        what=f"rank {end.rank} on {end.host} was lost",
        where=end.log,
        fact=f"{fact}; {words}",
        remedy=remedy,
        signal=killed,
        rank=end.rank,
        host=end.host,
        last_words=end.last_words,
        suspected="memory" if end.killed_for == "open" else None,
    )
