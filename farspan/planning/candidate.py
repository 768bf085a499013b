"""What a ranking is made of: a technique's plan on a part of the cluster, or why it has none."""

from __future__ import annotations

import math

import msgspec

from farspan.domain.cost import Estimate
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.domain.trial import Trial
from farspan.domain.units import format_seconds


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A technique's plan on a part of the cluster, priced."""

    technique: str
    where: str
    #: Places of its devices in the cluster.
    places: tuple[int, ...]
    plan: Plan
    estimate: Estimate
    #: Seconds until the run's loss is that of synchronous training, queues included, without a
    #: deadline that cuts it short.
    time_s: float
    #: Seconds of them that the job waits in a queue.
    queue_s: float = 0.0
    #: Seconds after which a site of its takes its machines back.
    lease_s: float = math.inf
    #: Why a plan that fits is listed but not chosen, however long it takes.
    barred: str | None = None
    #: What its few steps took, where it was tried: its estimate keeps that pace then.
    trial: Trial | None = None

    @property
    def unchosen(self) -> str | None:
        """Why a plan that fits is listed but not chosen."""
        run_end_s = self.queue_s + self.estimate.run_s
        if self.barred or run_end_s <= self.lease_s:
            return self.barred
        return f"a lease ends after {format_seconds(self.lease_s)}, before the run does"

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
