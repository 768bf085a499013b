"""What follows a fault of a run: whether it starts again, and which faults end it.

A fault that another start cannot cure ends the run with its cause, and so does one that comes back
at the same step.
"""

from __future__ import annotations

import msgspec

from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.problems import LESS_MEMORY, Problem
from farspan.domain.units import counted, format_seconds

#: What may be gone at the next start: a lost worker, host or link, or a device that its driver has
#: to reset.
CURABLE = ("worker-lost", "preempted", "host-unreachable", "device-missing", "launcher-unusable")
#: Of these a first start is refused at once: something that never ran is to be mended by who asked
#: for it.
AT_FIRST = ("host-unreachable", "device-missing", "launcher-unusable")
#: A host whose workers were all preempted goes away, and is not tried again for so many seconds:
#: the longest notice that is usual, that of AWS (Azure, Google Cloud and Slurm's KillWait: 30 s).
NOTICE_S = 120.0
#: The same fault so often at the same step ends the run.
SAME = 3
#: Of kills that may be for memory so many at the same place are. A choice: one may be
#: another program's doing.
SAME_MEMORY = 2
#: In an hour there are so many restarts at most, and they may cost so many seconds: a choice.
#: Beyond that machines are paid for nothing.
HOUR_S = 3600.0
RESTARTS = 20
COST_S = 1800.0


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
        return (self.step, self.problem.host) if self.problem.suspected == "memory" else None


class Faults:
    """The faults of one job so far, and what their restarts have cost. Times are seconds of one
    clock."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._costs: list[tuple[float, float]] = []
        #: Steps whose batch is left out from now on.
        self.left_out: tuple[int, ...] = ()
        #: Until when hosts that were preempted are not tried again.
        self._leaving = dict[str, float]()

    def cost(self, at: float, seconds: float) -> None:
        """A restart that was done at a time has cost so many seconds of training."""
        self._costs.append((at, seconds))

    def preempt(self, fault: Seen, plan: Plan, cluster: Cluster) -> None:
        """Take a fault: hosts that it has taken away whole are leaving. This machine is not: its
        own shutdown would have ended who asks."""
        for host in cluster.hosts:
            ranks = {rank for rank, at in enumerate(plan.devices) if at.host == host.name}
            if ranks and ranks <= set(fault.problem.ranks) and host.enter != ():
                self._leaving[host.name] = fault.at + NOTICE_S

    def leaving(self, now: float) -> set[str]:
        """The hosts that are not tried again yet."""
        return {name for name, until in self._leaving.items() if now < until}

    def end(self, fault: Seen, *, trained: bool) -> Problem | None:
        """Take a fault: None where the run starts again, else what it ends with. `trained` says
        whether workers of this job have trained before."""
        self.seen.append(fault)
        problem = fault.problem
        if problem.code == "non-finite" and problem.step is not None:
            return self._leave_out(problem, problem.step)
        if (
            problem.code not in CURABLE
            or problem.cause == "own"
            or (problem.code in AT_FIRST and not trained)
        ):
            return problem
        kills = [other for other in self.seen if other.memory_place == fault.memory_place]
        if fault.memory_place is not None and len(kills) >= SAME_MEMORY:
            short = msgspec.structs.replace(
                problem, code="out-of-memory", remedy=LESS_MEMORY, suspected=None
            )
            return _because(short, f"this came {SAME_MEMORY} times at step {fault.step}")
        if sum(other.kind == fault.kind for other in self.seen) >= SAME:
            return _because(problem, f"the same fault came {SAME} times at step {fault.step}")
        recent = [other for other in self.seen if fault.at - other.at < HOUR_S]
        if len(recent) > RESTARTS:
            return _because(problem, f"it is fault {len(recent)} within an hour")
        cost_s = sum(seconds for at, seconds in self._costs if fault.at - at < HOUR_S)
        if cost_s > COST_S:
            return _because(
                problem, f"restarts of the last hour have cost {format_seconds(cost_s)}"
            )
        return None

    def _leave_out(self, problem: Problem, step: int) -> Problem | None:
        """The first batch whose gradient is not finite is left out; a second one ends the run."""
        if self.left_out:
            before = ", ".join(str(left + 1) for left in self.left_out)
            return _because(problem, f"the batch of step {before} was left out for the same reason")
        self.left_out = (step,)
        return None


def _because(problem: Problem, why: str) -> Problem:
    return msgspec.structs.replace(
        problem, fact=f"{problem.fact}; {why}, so the run does not start again by itself"
    )


def told(fault: Seen, number: int) -> str:
    """What a person is told when a run starts again."""
    problem = fault.problem
    if problem.code == "non-finite":
        return f"{problem.what}; going back to the last checkpoint, and past that batch"
    return (
        f"step {fault.step:,} · {problem.what}: {problem.fact}; starting again "
        f"({counted(number, 'restart')} so far)"
    )
