"""Hosts and devices that a run has lost: waited for as long as a plan without them would lose,
planned around, and taken in again when they are back."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from farspan.app import clusters
from farspan.app.checkpoints import unmirrored_steps
from farspan.app.plans import Planned
from farspan.app.replanning import adopt_plan, plan_without
from farspan.app.restart_policy import Faults
from farspan.app.slurm_site_jobs import site_jobs_of_run
from farspan.app.take_claims import HOST_POLL_S, claims_of_run, hosts_without
from farspan.app.updates import Note, Progress, Waiting
from farspan.domain.config import OnFault
from farspan.domain.cost import Estimate
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load
from farspan.domain.units import format_seconds
from farspan.estimate.interruptions import RESTART_S
from farspan.launch.absent_hosts import find_absent_hosts
from farspan.launch.agent_pool import AgentPool
from farspan.launch.slurm_sites import enter_site_jobs, record_site_jobs, waiting_hosts

#: How often hosts that the run has lost are looked for while it trains.
RETURN_POLL_S = 15.0
#: Faults that a device itself may cause. Where they come back the run goes on without it.
DEVICE_FAULTS = ("worker-lost", "device-missing", "device-busy", "device-unusable")


class Pace(NamedTuple):
    """How far a run is: its last step, the median seconds of recent ones (None before there are
    any), and the seconds that its time budget leaves (None without one)."""

    step: int
    step_s: float | None
    budget_s: float | None


class LostHosts:
    """The hosts and devices that a job's run has lost, by what faults and agents show."""

    def __init__(
        self,
        run: RunFolder,
        agents: AgentPool,
        faults: Faults,
        progress: Progress,
        sleep: Callable[[float], None],
        *,
        on_fault: OnFault,
        without: tuple[str, ...],
    ) -> None:
        self._run = run
        self._agents = agents
        self._faults = faults
        self._progress = progress
        self._sleep = sleep
        self._on_fault = on_fault
        self._without = without
        #: Jobs at other Slurm sites: their nodes may be others each time.
        self._site_jobs = site_jobs_of_run(run, progress, without)
        #: Devices that failed for good, as (host, index).
        self._devices = set[tuple[str, int]]()
        self._watch: threading.Thread | None = None
        self._watch_ends = threading.Event()
        #: Lost hosts that can be entered again, as the watch has seen last.
        self._returned = frozenset[str]()

    # -- after a fault

    def wait(self, pace: Pace) -> bool:
        """Wait for hosts that are away, or continue without them: whether the plan is another one
        then."""
        began = time.monotonic()
        gone = set[str]()
        reduced = None
        loss_s = 0.0
        while now := self._find_absent():
            if now != gone:
                gone = now
                reduced, loss_s = self._plan_without(gone, pace)
                self._progress(Waiting(_describe_wait(gone, reduced, loss_s)))
            # A plan that loses nothing is followed at once.
            is_due = reduced is not None and time.monotonic() - began >= loss_s
            if reduced is not None and is_due and self._may_continue(gone):
                adopt_plan(self._run, reduced, self._progress)
                return True
            self._sleep(HOST_POLL_S)
        self._sleep(0)
        return False

    def plan_around_device(self, problem: Problem) -> Planned | None:
        """Plan without the device of a fault that ends the run, where it may be the cause and
        others are left; None where that is no way out."""
        if problem.code not in DEVICE_FAULTS or problem.cause == "own":
            return None
        if problem.rank is None or self._on_fault == "wait":
            return None
        device = self._run.load_plan().devices[problem.rank]
        self._devices.add((device.host, device.index))
        try:
            planned = plan_without(self._run, set(), self._devices)
        except Refusal:
            return None
        where = f"device {device.index} of {device.host}"
        self._progress(Note(f"{where} is given up: {problem.what} repeatedly"))
        return planned

    def _find_absent(self) -> set[str]:
        """Return the hosts of the plan that cannot be worked with now."""
        self._run.require_there()
        jobs = self._site_jobs.ask()
        record_site_jobs(self._run, jobs)
        if ":" in load(self._run.record, RunRecord).launcher:
            # Nodes of a Ray cluster that runs already may be entered by nobody: Ray reports which
            # are there.
            return set()
        planned = {device.host for device in self._run.load_plan().devices}
        leaving = planned & self._faults.leaving_hosts(time.monotonic())
        leaving |= planned - self._kept()
        cluster = clusters.cluster_of_run(self._run)
        leaving |= planned & waiting_hosts(cluster, jobs)
        expected = planned - leaving
        hosts = [host for host in cluster.hosts if host.name in expected]
        return leaving | find_absent_hosts(hosts, self._agents)

    def _kept(self) -> set[str]:
        """Return the hosts that were not given up."""
        whole = clusters.whole_cluster_of_run(self._run)
        return {host.name for host in hosts_without(whole, self._without)}

    def _may_continue(self, gone: Collection[str]) -> bool:
        """Return whether the run may continue without hosts: the others, with those that no plan
        uses, must be more than half of them."""
        claims = claims_of_run(self._run, self._agents, self._without)
        if claims is None:
            return True
        present = set(claims.reach()) - set(gone)
        return claims.has_majority(present)

    def _plan_without(self, gone: Collection[str], pace: Pace) -> tuple[Planned | None, float]:
        """Plan without these hosts, if that is allowed and fits; and the seconds that would be
        lost by it."""
        given_up = self._kept().isdisjoint(gone)
        if self._on_fault == "wait" and not given_up:
            return None, 0.0
        try:
            reduced = plan_without(self._run, gone, self._devices)
            before = load(self._run.estimate, Estimate)
        except Refusal:
            return None, 0.0
        if given_up:
            return reduced, 0.0
        slowdown = _effective_step_s(reduced.estimate) / _effective_step_s(before)
        # Without the host the run resumes from the newest checkpoint here.
        repeated_s = unmirrored_steps(self._run) * _effective_step_s(reduced.estimate)
        loss_s = self._rest_s(before, pace) * (slowdown - 1) + repeated_s
        if pace.budget_s is not None:
            loss_s = min(loss_s, pace.budget_s * (1 - 1 / slowdown))
        return reduced, max(0.0, loss_s)

    def _rest_s(self, estimate: Estimate, pace: Pace) -> float:
        """Return the seconds that the rest of the run takes by its plan of now."""
        step_s = estimate.step_s if pace.step_s is None else pace.step_s
        rest_s = (self._run.load_plan().train.step_limit - pace.step) * step_s
        return rest_s if pace.budget_s is None else min(rest_s, pace.budget_s)

    # -- while the run trains

    def watch(self) -> None:
        """Look for lost hosts from now on, in a thread, until `end_watch`."""
        if not self._run.whole_cluster.exists() or self._on_fault != "recover":
            return
        whole = clusters.whole_cluster_of_run(self._run)
        used = {host.name for host in clusters.cluster_of_run(self._run).machines}
        lost = [host for host in hosts_without(whole, self._without) if host.name not in used]
        if not lost:
            return
        sites = {host.name: whole.site_of(host.name).name for host in lost}
        self._returned = frozenset()
        self._watch_ends = threading.Event()
        ends = self._watch_ends

        def look() -> None:
            while not ends.wait(RETURN_POLL_S):
                jobs = self._site_jobs.ask()
                hosts = [enter_site_jobs(host, sites[host.name], jobs) for host in lost]
                reached, _ = self._agents.reach(hosts)
                leaving = self._faults.leaving_hosts(time.monotonic())
                self._returned = frozenset(set(reached) - leaving)

        self._watch = threading.Thread(target=look, daemon=True)
        self._watch.start()

    def end_watch(self) -> None:
        self._watch_ends.set()
        self._returned = frozenset()

    def plan_with_returned(self, pace: Pace) -> Planned | None:
        """Plan with hosts that are back, where that saves more than a start costs; None where
        none is, or it does not."""
        returned = self._returned
        if not returned:
            return None
        self._returned = frozenset()
        record_site_jobs(self._run, self._site_jobs.ask())
        used = {host.name for host in clusters.cluster_of_run(self._run).machines}
        present = used | returned
        whole = clusters.whole_cluster_of_run(self._run)
        hosts = [host for host in whole.machines if host.name in present]
        present -= find_absent_hosts(hosts, self._agents)
        if present <= used:
            return None
        gone = {host.name for host in whole.machines} - present
        try:
            planned = plan_without(self._run, gone, self._devices)
            before = load(self._run.estimate, Estimate)
        except Refusal:
            return None
        speedup = _effective_step_s(before) / _effective_step_s(planned.estimate)
        saved_s = self._rest_s(before, pace) * (1 - 1 / speedup)
        if saved_s <= RESTART_S:
            return None
        hosts_back = ", ".join(sorted(returned & present))
        note = f"{hosts_back} back: the rest takes {format_seconds(saved_s)} less with it"
        self._progress(Note(note))
        return planned


def median_or_none(values: Collection[float]) -> float | None:
    return statistics.median(values) if values else None


def _effective_step_s(estimate: Estimate) -> float:
    """Return the seconds of a step, as one of a plan whose tokens all count."""
    return estimate.step_s / estimate.token_efficiency


def _describe_wait(gone: Collection[str], reduced: Planned | None, loss_s: float) -> str:
    hosts = ", ".join(sorted(gone))
    if reduced is None:
        return f"waiting for {hosts}"
    if loss_s == 0:
        return f"going on without {hosts}: that takes no longer"
    limit = format_seconds(loss_s)
    return f"waiting for {hosts} up to {limit}, which a plan without would lose"
