"""What a ranking is made of: a technique's plan on a part of the cluster, or why it has none."""

from __future__ import annotations

import math

import msgspec

from farspan.domain.cost import Estimate
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.domain.trial import Trial
from farspan.domain.units import format_seconds
from farspan.estimate.interruptions import Interruptions


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A technique's plan on a part of the cluster, priced."""

    technique: str
    where: str
    #: Places of its devices in the cluster.
    places: tuple[int, ...]
    plan: Plan
    estimate: Estimate
    #: Expected seconds until the run's loss is that of synchronous training, queues and
    #: interruptions included, without a deadline that cuts it short.
    time_s: float
    #: Seconds of them that the job waits in a queue.
    queue_s: float = 0.0
    #: Seconds after which the first of its machines is taken back.
    lease_s: float = math.inf
    #: How its machines are taken away without notice; None where the cluster gives no rate.
    interruptions: Interruptions | None = None
    #: Why a plan that fits is listed but not chosen, however long it takes.
    barred: str | None = None
    #: What its few steps took, where it was tried: its estimate keeps that pace then.
    trial: Trial | None = None

    @property
    def unchosen(self) -> str | None:
        """Why a plan that fits is listed but not chosen."""
        if self.barred or not self.outlasts_lease:
            return self.barred
        return f"a lease ends after {format_seconds(self.lease_s)}, before the run does"

    @property
    def outlasts_lease(self) -> bool:
        """Return whether a lease is expected to end before the run does."""
        run_s = self.expected_s(self.estimate.whole_s)
        deadline_s = self.estimate.workload.deadline_s
        end_s = self.queue_s + (run_s if deadline_s is None else min(run_s, deadline_s))
        return end_s > self.lease_s

    def expected_s(self, work_s: float) -> float:
        """Return the expected seconds of `work_s` of undisturbed training."""
        return work_s if self.interruptions is None else self.interruptions.expected_s(work_s)

    @property
    def eligible(self) -> bool:
        return self.unchosen is None

    @property
    def usd(self) -> float | None:
        """Dollars of the seconds of `time_s`: of the whole run, also where a deadline cuts it
        short."""
        return self._scale_to_whole_run(self.estimate.usd)

    @property
    def kwh(self) -> float | None:
        """Energy over the same seconds, at most."""
        return self._scale_to_whole_run(self.estimate.kwh)

    def _scale_to_whole_run(self, amount: float | None) -> float | None:
        if amount is None:
            return None
        running_s = self.time_s - self.queue_s
        return amount * running_s / self.estimate.run_s


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A technique that has no plan on a part of the cluster, and why."""

    technique: str
    where: str
    #: Places of the part's devices in the cluster.
    places: tuple[int, ...]
    problem: Problem
