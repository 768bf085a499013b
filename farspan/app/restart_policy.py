"""What follows a fault of a run: whether it starts again, and which faults end it.

A fault that another start cannot cure ends the run with its cause, and so does one that comes back
at the same step.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.problems import LESS_MEMORY, Problem
from farspan.domain.units import counted

#: What may be gone at the next start: a lost worker, host or link, a device that its driver has to
#: reset, or that a worker which was killed has not left yet.
CURABLE = (
    "worker-lost",
    "preempted",
    "host-unreachable",
    "device-missing",
    "device-busy",
    "launcher-unusable",
)
#: Of these a first start is refused at once: something that never ran is to be mended by who asked
#: for it.
AT_FIRST = ("host-unreachable", "device-missing", "device-busy", "launcher-unusable")
#: A host that is being taken away is not tried again for so many seconds: the longest notice that
#: is usual, that of AWS (Azure, Google Cloud and Slurm's KillWait: 30 s).
NOTICE_S = 120.0
#: The same fault this often at the same step ends the run.
MAX_SAME_FAULT = 3
#: This many kills at the same place that may be for memory are. A choice: one may be another
#: program's doing.
MAX_SAME_MEMORY_KILLS = 2
#: Starts in a row that bring no new step, at most: beyond that machines are paid for nothing. A
#: choice.
MAX_FRUITLESS_STARTS = 6


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: what it was, the furthest step that the run had made, and when."""

    problem: Problem
    step: int
    at: float

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for faults that are the same."""
        problem = self.problem
        return self.step, problem.code, problem.rank, problem.host, problem.signal

    @property
    def memory_place(self) -> tuple[object, ...] | None:
        """Where a worker was killed that may have run out of memory, which those of a host share;
        None of other faults."""
        if self.problem.suspected != "memory":
            return None
        return self.step, self.problem.host


class Faults:
    """The faults of one job so far. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        #: Steps whose batch is left out from now on.
        self.skipped_steps: tuple[int, ...] = ()
        #: Until when hosts that are being taken away are not tried again.
        self._leaving = dict[str, float]()

    def mark_preempted(self, fault: Seen, plan: Plan, cluster: Cluster) -> None:
        """Take a fault: hosts that show that they are being taken away, with all their workers, are
        leaving. This machine is not: its own shutdown would have ended this process."""
        lost_ranks = set(fault.problem.ranks)
        for host in cluster.hosts:
            ranks = {rank for rank, at in enumerate(plan.devices) if at.host == host.name}
            leaves = host.name in fault.problem.leaving
            if leaves and ranks <= lost_ranks and host.enter != ():
                self._leaving[host.name] = fault.at + NOTICE_S

    def leaving_hosts(self, now: float) -> set[str]:
        """Return the hosts that are not tried again yet."""
        return {name for name, until in self._leaving.items() if now < until}

    def decide_restart(self, fault: Seen, *, trained: bool) -> Problem | None:
        """Take a fault: None where the run starts again, else what it ends with. `trained` is
        whether workers of this job have trained before."""
        self.seen.append(fault)
        problem = fault.problem
        if problem.code == "non-finite" and problem.step is not None:
            # The first batch whose gradient is not finite is left out; a second one ends the run.
            if not self.skipped_steps:
                self.skipped_steps = (problem.step,)
                return None
            before = self.skipped_steps[0] + 1
            why = f"the batch of step {before} was left out for the same reason"
            return _add_reason(problem, why)
        if problem.code not in CURABLE or problem.cause == "own":
            return problem
        if problem.code in AT_FIRST and not trained:
            return problem
        # A worker killed repeatedly at one place has run out of memory.
        place = fault.memory_place
        kills = [other for other in self.seen if other.memory_place == place]
        if place is not None and len(kills) >= MAX_SAME_MEMORY_KILLS:
            short = replace(problem, code="out-of-memory", remedy=LESS_MEMORY, suspected=None)
            return _add_reason(
                short, f"this came {MAX_SAME_MEMORY_KILLS} times at step {fault.step}"
            )
        same_kind = [other.kind for other in self.seen].count(fault.kind)
        if same_kind >= MAX_SAME_FAULT:
            return _add_reason(
                problem, f"the same fault came {MAX_SAME_FAULT} times at step {fault.step}"
            )
        # Starts that bring no new steps. The first fault at a step has ended one that did.
        fruitless = [other.step for other in self.seen].count(fault.step) - 1
        if fruitless >= MAX_FRUITLESS_STARTS:
            return _add_reason(problem, f"{fruitless} starts have brought no new step")
        return None


def _add_reason(problem: Problem, why: str) -> Problem:
    return replace(
        problem, fact=f"{problem.fact}; {why}, so the run does not start again by itself"
    )


def restart_message(fault: Seen, number: int) -> str:
    """Return the message that a run starts again."""
    problem = fault.problem
    if problem.code == "non-finite":
        return f"{problem.what}; going back to the last checkpoint, and past that batch"
    return (
        f"step {fault.step:,} · {problem.what}: {problem.fact}; starting again "
        f"({counted(number, 'restart')} so far)"
    )
